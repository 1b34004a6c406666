"""Which blocks go first when some are about to be handed out, on vLLM's block pool alone."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.vllm


class Pool:
    """Six free blocks, named by their numbers in the order in which they would go; those of `full` have hashes, and
    those of `tails` are unfilled blocks that somebody may ask for."""

    def __init__(self, full: str, tails: str = "") -> None:
        from vllm.v1.core.block_pool import BlockPool

        from spanflow.engine.vllm.copies import Copies

        self.pool = BlockPool(7, enable_caching=True, hash_block_size=16)
        self.copies = Copies(self.pool, {int(number) for number in tails})
        for number in full:
            self.write(number, number)

    def write(self, number: str, content: str) -> None:
        """Give a block another hash, as when it was handed out and filled."""
        block: Any = self.pool.blocks[int(number)]
        block.reset_hash()
        block.set_block_hash(content.encode())

    def add(self, numbers: str) -> None:
        """Blocks of an assembled prompt were freed."""
        self.copies.add([self.pool.blocks[int(number)] for number in numbers])

    def order(self) -> str:
        """The free blocks in the order in which they go."""
        return "".join(str(block.block_id) for block in self.pool.free_block_queue.get_all_free_blocks())

    def after(self, num_blocks: int) -> str:
        """The same once way was made for some."""
        self.copies.make_way(num_blocks)
        return self.order()


def test_copies_go_before_sources() -> None:
    """As many as are wanted, and no more; what would go in any case stays in its place."""
    pool = Pool("123456")
    pool.add("3456")
    assert pool.after(2) == "341256"
    assert pool.after(2) == "341256"
    assert pool.after(3) == "345126"


def test_where_there_are_no_copies_the_order_stays() -> None:
    pool = Pool("123456")
    assert pool.after(3) == "123456"


def test_a_block_that_holds_nothing_is_as_good_as_a_copy() -> None:
    """Better: somebody may still find the copy."""
    pool = Pool("23456")
    pool.add("56")
    assert pool.after(1) == "123456"
    assert pool.after(2) == "152346"


def test_an_unfilled_block_that_is_remembered_is_worth_as_much_as_a_full_one() -> None:
    pool = Pool("23456", tails="1")
    pool.add("56")
    assert pool.after(1) == "512346"


def test_copies_that_go_next_anyway_are_not_replaced_by_older_ones() -> None:
    pool = Pool("123456")
    pool.add("41")
    assert pool.after(1) == "123456"


def test_copies_go_in_the_order_of_their_last_use() -> None:
    pool = Pool("123456")
    pool.add("456")
    pool.add("4")
    assert pool.after(2) == "561234"


def test_a_block_that_was_written_again_is_no_copy() -> None:
    """Neither where it would go next, nor where one is looked for."""
    pool = Pool("123456")
    pool.add("156")
    pool.write("1", "a")
    pool.write("5", "b")
    assert pool.after(1) == "612345"
    assert list(pool.copies._hashes) == [6]


def test_a_copy_that_somebody_uses_is_not_free() -> None:
    pool = Pool("123456")
    pool.add("56")
    pool.pool.touch([pool.pool.blocks[5]])
    assert pool.after(1) == "61234"


def test_where_copies_do_not_suffice_the_last_used_source_goes_last() -> None:
    pool = Pool("123456")
    pool.add("6")
    assert pool.after(3) == "612345"


def test_what_has_no_hash_is_no_copy_to_be_found() -> None:
    pool = Pool("12346")
    pool.add("5")
    assert not pool.copies._hashes


def test_after_a_reset_there_are_neither_copies_nor_places_of_sources() -> None:
    """Both are known by the hashes of blocks, of which a reset leaves none."""
    from spanflow.engine.vllm.copies import Relocated

    pool = Pool("123456")
    pool.add("56")
    moved = Relocated(0, 1, (pool.pool.blocks[5],), (pool.pool.blocks[5].block_hash,), 0, 0, 0)
    assert moved.find(0, 1, 16)
    assert pool.pool.reset_prefix_cache()
    assert moved.find(0, 1, 16) is None
    for number in "123456":
        pool.write(number, f"new {number}")
    assert pool.after(1) == "123456"


def test_the_source_that_was_taken_over_last_is_forgotten_last() -> None:
    from spanflow.engine.vllm.copies import Relocated

    pool = Pool("")
    where = Relocated(0, 1, (), (), 0, 0, 0)
    for source in (*range(7), 0, 7):
        pool.copies.relocated.keep(source, where)
    assert list(pool.copies.relocated) == [2, 3, 4, 5, 6, 0, 7]
