"""Environment variables around vLLM: those it reads as long as it is here, and those that only its start needs."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

#: Read by torch and Python when they are loaded, also in the processes of an engine. Those of the caller would take
#: them over too, and another torch may not know the name in TORCH_LOGS: it then fails where it is imported.
_WHILE_STARTING = {
    "PYTHONWARNINGS": "ignore::FutureWarning",  # of torch, in the engine's own process
    "TORCH_LOGS": "-torch._library.triton",  # that there is no Triton on a CPU
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # which NUMA node memory comes from
}

_RESERVED = "VLLM_CPU_NUM_OF_RESERVED_CPU"

_lock = threading.Lock()
_starts = 0
_set_here: dict[str, str] = {}


def prepare_environment() -> None:
    """Settings that vLLM reads when it is imported; what the user set stays. Called at the edge, once."""
    for name, value in {
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout belongs to the caller
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }.items():
        os.environ.setdefault(name, value)


def stay_offline() -> None:
    """Let nobody ask a hub for what comes in a package; what the user set stays. Called at the edge, by programs of one
    model: it is read when the hub's client is imported, and holds for all of the process."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


@contextmanager
def quiet_start(also: Mapping[str, str] | None = None) -> Iterator[None]:
    """What is loaded inside, and in processes that are started inside, is quiet; what the user set stays.

    To be entered on the thread that starts: the caller may give up waiting for it, and start another one meanwhile.
    `also`: further variables for this start; one that runs beside it sees them.
    """
    global _starts
    with _lock:
        for name, value in {**_WHILE_STARTING, **(also or {})}.items():
            if name not in os.environ:
                os.environ[name] = _set_here[name] = value
        _starts += 1
    try:
        yield
    finally:
        with _lock:
            _starts -= 1
            if not _starts:
                for name, value in _set_here.items():
                    if os.environ.get(name) == value:  # not set by the user meanwhile
                        del os.environ[name]
                _set_here.clear()


@contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """A variable that is set inside, and afterwards what it was before."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def cores_left_free(num_workers: int) -> dict[str, str]:
    """The variable that lets an engine with spans compute on as many cores as stock vLLM does.

    vLLM leaves a core free for each worker on a CPU, and a second one where a KV connector is given: ours needs none,
    it moves KV in the worker's own thread. Where that would leave no core, vLLM leaves none free, which is
    better than to compute on one of two.
    """
    return {_RESERVED: str(num_workers)} if _num_cores() > 2 * num_workers else {}


def _num_cores() -> int:
    """How many cores this process may run on; hyperthreads of one core count once."""
    usable = os.sched_getaffinity(0)
    topology = "/sys/devices/system/cpu/cpu{}/topology/core_cpus_list"
    try:
        return len({Path(topology.format(number)).read_text() for number in usable})
    except OSError:
        return len(usable)
