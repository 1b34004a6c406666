"""How large numbers may be, and how those beyond are shown."""

from __future__ import annotations

import math

#: Seeds and counts are carried as signed 64-bit numbers.
MAX_INT = 2**63 - 1
#: Tokens of a span that are repaired.
MAX_REPAIR = 2**31 - 1
#: Digits of a number that is read or written. Python itself reads and writes 4,300.
MAX_DIGITS = 4_000

#: The least number with more digits than these.
TOO_LONG = 10**MAX_DIGITS

_MAX_SHOWN = 10**20


def shown_number(value: float) -> str:
    """A number in a message; of a whole one that nobody would read, how many digits it has."""
    if isinstance(value, int) and abs(value) >= _MAX_SHOWN:
        # Off by one at most; to count them it would have to be written out, which has a limit.
        return f"a number of about {int(value.bit_length() * math.log10(2)) + 1:,} digits"
    return str(value)
