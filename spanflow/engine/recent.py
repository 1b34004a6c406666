"""A dictionary that keeps what was put into it last."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(OrderedDict[K, V]):
    """At most `capacity` entries, in the order in which they were kept last."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity

    def keep(self, key: K, value: V) -> None:
        """Put an entry in, or make it the last again; the one that was kept longest ago may go for it."""
        self[key] = value
        self.move_to_end(key)
        if len(self) > self.capacity:
            self.popitem(last=False)
