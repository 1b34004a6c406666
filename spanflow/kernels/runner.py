"""What runs moves on the layers of an engine, whatever it runs them with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from spanflow.kernels.launch import scratch_for
from spanflow.kernels.reference import KVView, run_slots
from spanflow.kernels.slots import Move, SlotMoves, Slots


class Runner(ABC):
    """Moves on `views`, layers whose blocks are of one size and as many, with `scratch_blocks` more of its own.

    A wave of a plan is one launch on all layers of a kind: `plan_moves(moves, runner.scratch_start,
    runner.scratch_tokens)` plans for it, and `run_waves(plan.waves)` runs it. `name` says what moves.
    """

    name: str

    def __init__(self, views: Sequence[KVView], scratch_blocks: int = 0) -> None:
        if not views:
            raise ValueError("a runner needs at least one layer")
        shapes = {(view.keys.shape[0], view.keys.shape[2]) for view in views}
        if len(shapes) > 1:
            raise ValueError(f"layers of {sorted(shapes)} (blocks, tokens in each) have no slots in common")
        self.num_blocks: int
        self.block_size: int
        ((self.num_blocks, self.block_size),) = shapes
        self.views = tuple(views)
        self.scratch_blocks = scratch_blocks
        self.scratch = scratch_for(views, scratch_blocks)

    @property
    def scratch_start(self) -> int:
        """The first slot of scratch."""
        return self.num_blocks * self.block_size

    @property
    def scratch_tokens(self) -> int:
        """How many slots scratch has."""
        return self.scratch_blocks * self.block_size

    def __call__(self, moves: Sequence[Move]) -> None:
        """Run moves between rows of blocks, none of which reads or writes what another one writes.

        One that has a block on both sides may overlap itself; it is run by torch. Raises IndexError, before anything
        is written, where a move names a block that there is not, or has more tokens than its blocks hold.
        """
        apart: list[Move] = []
        overlapping: list[Move] = []
        for move in moves:
            meets_itself = not set(move.source_blocks).isdisjoint(move.target_blocks)
            (overlapping if meets_itself else apart).append(move)
        waves = [Slots.of(apart, self.block_size), Slots.of(overlapping, self.block_size)]
        self.run_waves(waves[:1])
        if overlapping:
            run_slots(self.views, self.scratch, waves[1])

    def run_waves(self, waves: Iterable[SlotMoves]) -> None:
        """Run wave after wave, each as a whole. Raises IndexError, before anything of a wave is written, where it
        names a slot that there is not."""
        for wave in waves:
            if len(wave.count):
                self.run(wave)

    @abstractmethod
    def run(self, wave: SlotMoves) -> None:
        """Run one wave on all layers."""


class TorchRunner(Runner):
    """By torch, on any device and layout."""

    name = "torch"

    def run(self, wave: SlotMoves) -> None:
        """What `reference.run_slots` does."""
        run_slots(self.views, self.scratch, wave)
