"""Environment variables around vLLM: those it reads as long as it is here, and those that only its start needs."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: Read by torch and Python when they are loaded, also in the processes of an engine. Those of the caller would take
#: them over too, and another torch may not know the name in TORCH_LOGS: it then fails where it is imported.
_WHILE_STARTING = {
    "PYTHONWARNINGS": "ignore::FutureWarning",  # of torch, in the engine's own process
    "TORCH_LOGS": "-torch._library.triton",  # that there is no Triton on a CPU
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # which NUMA node memory comes from
}

_lock = threading.Lock()
_starts = 0
_set_here: set[str] = set()


def prepare_environment() -> None:
    """Settings that vLLM reads when it is imported; what the user set stays. Called at the edge, once."""
    for name, value in {
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout belongs to the caller
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }.items():
        os.environ.setdefault(name, value)


@contextmanager
def quiet_start() -> Iterator[None]:
    """What is loaded inside, and in processes that are started inside, is quiet; what the user set stays.

    To be entered on the thread that starts: the caller may give up waiting for it, and start another one meanwhile.
    """
    global _starts
    with _lock:
        if not _starts:
            _set_here.update(name for name in _WHILE_STARTING if name not in os.environ)
            os.environ.update({name: _WHILE_STARTING[name] for name in _set_here})
        _starts += 1
    try:
        yield
    finally:
        with _lock:
            _starts -= 1
            if not _starts:
                for name in _set_here:
                    if os.environ.get(name) == _WHILE_STARTING[name]:  # not set by the user meanwhile
                        del os.environ[name]
                _set_here.clear()
