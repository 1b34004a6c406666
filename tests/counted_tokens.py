"""Token ids that count how often they are looked at: what is bounded is work, not time."""

from __future__ import annotations


class Token(int):
    """A token id that counts how often one is compared or computed with."""

    num_steps = 0

    def __eq__(self, other: object) -> bool:
        Token.num_steps += 1
        return isinstance(other, int) and int(self) == int(other)

    def __mod__(self, other: int) -> int:
        Token.num_steps += 1
        return int(self) % other

    __hash__ = int.__hash__


def steps_since() -> int:
    """How many steps were made with tokens since the last question."""
    count, Token.num_steps = Token.num_steps, 0
    return count
