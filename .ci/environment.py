"""The project's virtual environment, made or brought up to date from the lock files. Standard library only.

`python3 examples/rag` and `python3 tests` call this first; `python3 .ci/environment.py [--dev]` does nothing else.
It must be readable by the oldest Python that may meet it, so that it can say which one is wanted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
#: First and last minor version of Python 3 that the locked packages are made for.
PYTHONS = (11, 12)
MAIN_LOCK = "requirements.lock"
DEV_LOCK = "requirements-dev.lock"
#: Where PyTorch publishes builds without CUDA; asked only if pip's own index has none.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

_STAMP = "spanflow-environment.json"
_NO_MATCH = re.compile(r"No matching distribution|Could not find a version|ResolutionImpossible")
_ADVICE = (
    (re.compile(r"No space left on device"), "the disk is full: free about 4 GB"),
    (_NO_MATCH, "pip's index has no build of this package for this Python and machine (Linux on x86-64 is tested)"),
    (
        re.compile(r"Connection|timed out|Temporary failure|Max retries|ProxyError|SSLError|name resolution"),
        "the package index does not answer: check the network, or pip's settings with `pip config list`",
    ),
    (re.compile(r"Permission denied|Read-only file system"), "this folder must be writable"),
)
#: Compiled when they are first imported, if ever: test suites, and hundreds of models of which one is used.
_NOT_COMPILED = r"/(tests?|transformers/models)/"


_UNPACK_MODEL = "from spanflow.engine.models import resolve_model; resolve_model('smollm2')"


class SetupError(Exception):
    """The environment cannot be made; the message says what failed and what to do."""


def prepare(dev: bool = False) -> Path:
    """Make or update `.venv` from the lock files; the path of its Python. Raises SetupError.

    Nothing is done where a stamp in the environment says that it was made from these very files. Two calls at once
    wait for each other.
    """
    _check_platform()
    wanted = _fingerprint([MAIN_LOCK, DEV_LOCK] if dev else [MAIN_LOCK])
    with _alone():
        python = _interpreter()
        stamp = VENV / _STAMP
        if _is_current(stamp, wanted):
            return python
        started = time.monotonic()
        _say(f"spanflow: setting up {VENV.name}/ (the first time takes about two minutes and 2.5 GB)")
        with contextlib.suppress(FileNotFoundError):
            stamp.unlink()
        _install(python, list(wanted["locks"]))
        stamp.write_text(json.dumps(wanted, indent=1) + "\n")
        _say(f"spanflow: {VENV.name}/ is ready after {time.monotonic() - started:.0f} s")
        return python


def run(command: list[str], dev: bool = False) -> None:
    """Prepare the environment, then become its Python with these arguments, in the project's root."""
    try:
        python = prepare(dev)
    except SetupError as error:
        sys.exit(f"spanflow: {error}")
    except KeyboardInterrupt:
        _say("\nspanflow: interrupted; the same command carries on from here")
        sys.exit(130)
    sys.stdout.flush()
    os.chdir(str(ROOT))
    os.execv(str(python), [str(python), *command])


def _check_platform() -> None:
    low, high = PYTHONS
    if sys.version_info[0] == 3 and low <= sys.version_info[1] <= high:
        if sys.platform != "linux":
            raise SetupError("the embedded engine is built for Linux only; use a Linux machine, a container or WSL")
        return
    names = [f"python3.{minor}" for minor in range(low, high + 1)]
    found = [name for name in names if _version_of(name)]
    hint = f"run the same command with {found[0]}" if found else f"install Python 3.{low}"
    this = f"{sys.version_info[0]}.{sys.version_info[1]}"
    raise SetupError(f"this is Python {this}, and Python 3.{low} to 3.{high} is needed: {hint}")


@contextlib.contextmanager
def _alone():
    """One set-up of this checkout at a time; the lock ends with the process, however that ends."""
    import fcntl

    folder = os.open(str(ROOT), os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("spanflow: another command is setting up the environment; waiting for it")
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _interpreter() -> Path:
    """The Python of the environment, which is made, or mended where an interrupted run left it half made."""
    python = VENV / "bin" / "python"
    version = _version_of(python)
    if version is None:
        if Path(sys.prefix).resolve() == VENV.resolve():
            raise SetupError(f"{VENV} is broken: remove it, and run this with the system's Python")
        clear = ["--clear"] if VENV.exists() else []
        _do([sys.executable, "-m", "venv", *clear, str(VENV)], _venv_advice())
        version = _version_of(python)
    if version is None or version[0] != 3 or not PYTHONS[0] <= version[1] <= PYTHONS[1]:
        shown = "unknown" if version is None else f"{version[0]}.{version[1]}"
        raise SetupError(f"{VENV} holds Python {shown}, which does not fit: move it away and run this again")
    if subprocess.run([str(python), "-c", "import pip"], capture_output=True).returncode:
        _do([str(python), "-m", "ensurepip"], _venv_advice())
    return python


def _version_of(python):
    """(major, minor) of a Python by its path or name; None where it does not run."""
    code = "import sys; print(*sys.version_info[:2])"
    try:
        major, minor = subprocess.run([str(python), "-c", code], capture_output=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None
    return int(major), int(minor)


def _venv_advice() -> str:
    this = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return f"on Debian and Ubuntu, `apt install python{this}-venv` brings what is missing"


def _do(command: list[str], advice: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SetupError(f"{' '.join(command)} failed:\n{_tail(done.stdout.splitlines())}\n{advice}")


def _fingerprint(locks: list[str]) -> dict:
    """What the environment is made from: the locks, the package's own metadata, and where the checkout stands."""
    files = {name: hashlib.sha256((ROOT / name).read_bytes()).hexdigest() for name in [*locks, "pyproject.toml"]}
    return {"root": str(ROOT), "locks": {name: files[name] for name in locks}, "pyproject": files["pyproject.toml"]}


def _is_current(stamp: Path, wanted: dict) -> bool:
    """Whether the stamp names these files; an environment with more locks in it than wanted will do."""
    try:
        found = json.loads(stamp.read_text())
        same = (found["root"], found["pyproject"]) == (wanted["root"], wanted["pyproject"])
        return same and all(found["locks"].get(name) == digest for name, digest in wanted["locks"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _install(python: Path, locks: list[str]) -> None:
    pins = [line.strip() for lock in locks for line in (ROOT / lock).read_text().splitlines() if line.strip()]
    torch = [pin for pin in pins if pin.startswith("torch==")]
    rest = [pin for pin in pins if pin not in torch]
    progress = _Progress(len(pins) + 1)
    pip = [str(python), "-m", "pip", "install", "--no-deps", "--no-compile", "--progress-bar", "off"]
    pip += ["--disable-pip-version-check"]
    # torch by itself and first: where pip's index lacks this build, that is known before anything is downloaded.
    try:
        _pip(pip + torch, progress)
    except SetupError as error:
        if not _NO_MATCH.search(str(error)):
            raise
        _say(f"  pip's index has no {torch[0]}; asking PyTorch's own CPU index")
        _pip([*pip, *torch, "--index-url", TORCH_CPU_INDEX], progress)
    _pip([*pip, *rest, "-e", str(ROOT)], progress)
    _say("  compiling to bytecode")
    compile_all = [str(python), "-m", "compileall", "-q", "-j", "0", "-x", _NOT_COMPILED, str(VENV / "lib")]
    # A few packages ship templates that are no Python; they fail here and are never imported.
    subprocess.run(compile_all, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _say("  unpacking the embedded model into the user's cache directory")
    # Where this fails, what wants the model says why.
    subprocess.run([str(python), "-c", _UNPACK_MODEL], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _pip(command: list[str], progress: _Progress) -> None:
    """Run pip and show how far it is. Raises SetupError."""
    # --user, asked for by some machines' settings, cannot work in a virtual environment.
    environment = dict(os.environ, PIP_USER="0", PYTHONUNBUFFERED="1")
    lines: list[str] = []
    pip = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    with pip:
        assert pip.stdout is not None
        try:
            for line in pip.stdout:
                lines.append(line.rstrip())
                progress.see(lines[-1])
        except BaseException:
            pip.terminate()
            raise
    progress.end_line()
    if pip.returncode:
        text = "\n".join(lines)
        advice = next((words for pattern, words in _ADVICE if pattern.search(text)), "the lines above say why")
        raise SetupError(f"pip could not install the locked packages:\n{_tail(lines)}\n{advice}; then run this again")


class _Progress:
    """Counts the packages that pip comes to: one line that is rewritten on a terminal, few lines in a log."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.count = 0
        self.live = sys.stdout.isatty()

    def see(self, line: str) -> None:
        """Take note of one line of pip's output."""
        found = re.match(r"\s*(Collecting|Processing|Requirement already satisfied:|Obtaining) ?(\S+)", line)
        if found:
            self.count = min(self.count + 1, self.total)
            name = re.split(r"[-=]=?", found[2].rstrip("/").rsplit("/", 1)[-1])[0]
            if self.live:
                sys.stdout.write(f"\r\033[K  [{self.count}/{self.total}] {name}")
                sys.stdout.flush()
            elif self.count % 10 == 1 or self.count == self.total:
                _say(f"  [{self.count}/{self.total}] {name}")
        elif line.startswith("Installing collected packages"):
            self.end_line()
            count = len(line.split(", "))
            _say(f"  unpacking {count} package{'s' if count > 1 else ''}")

    def end_line(self) -> None:
        """Leave the rewritten line behind."""
        if self.live:
            sys.stdout.write("\r\033[K")


def _tail(lines: list[str], count: int = 12) -> str:
    return "\n".join("    " + line for line in [line for line in lines if line.strip()][-count:])


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    run(["-c", "pass"], dev="--dev" in sys.argv[1:])
