"""The device kernel on a CPU: its own source, compiled for the host, run block by block and thread by thread."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path

from spanflow.kernels import build
from spanflow.kernels.cuda import GpuLaunch, gpu_launch, num_blocks
from spanflow.kernels.launch import group_layers, tables_of
from spanflow.kernels.reference import KVView
from spanflow.kernels.runner import Runner
from spanflow.kernels.slots import SlotMoves, cut

#: A vector at an address that is no multiple of its size ends the process, as it would end a kernel.
_FLAGS = (*build._FLAGS, "-Wno-unknown-pragmas", "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error")


def compile_for_host(compiler: str, directory: Path) -> ctypes.CDLL:
    out = directory / "gpu_on_cpu.so"
    source = Path(__file__).with_suffix(".cpp")
    command = [compiler, *_FLAGS, "-fvisibility=default", f"-I{build._CORE}", str(source), "-o", str(out)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(out))


class HostRunner(Runner):
    """What the device does with a wave, on the host."""

    def __init__(self, library: ctypes.CDLL, views: Sequence[KVView], scratch_blocks: int = 0) -> None:
        super().__init__(views, scratch_blocks)
        self._run = library.run_on_cpu
        self._run.argtypes = [ctypes.POINTER(GpuLaunch), ctypes.c_int64]
        self.launches: list[GpuLaunch] = []

    def run(self, wave: SlotMoves) -> None:
        pieces = cut(wave, self.block_size, self.num_blocks + self.scratch_blocks)
        for group in group_layers(self.views, self.scratch):
            tables = tables_of(group.views[0].rope, pieces.deltas)
            addresses = (group.addresses.ctypes.data, pieces.pieces.ctypes.data, tables.ctypes.data)
            launch = gpu_launch(group, *addresses, len(pieces))
            self._run(ctypes.byref(launch), num_blocks(group, len(pieces)))
            self.launches.append(launch)
