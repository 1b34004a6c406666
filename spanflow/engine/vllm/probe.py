"""The self-test at start-up: a key rotated to a position must equal the key that the model computed there.

In the first layer a key depends on its token and position alone. A probe's prompt begins and ends
with the same tokens, so the keys of its beginning, rotated by the distance, must be those of its end.
That tests layout, rotary style, frequencies and partial rotation on the real cache. Slow angles show
only far apart: what is not seen in 16 bits over 24 positions is a fifth of a key over a thousand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spanflow.kernels.reference import KVView

if TYPE_CHECKING:
    from spanflow.engine.vllm.resolver import Resolver

#: The largest relative error of a rotated key, by the bytes of a stored number: float32, and the 16-bit types.
_TOLERANCE = {4: 1e-4, 2: 2e-2}

#: Tokens that a probe's prompt begins and ends with, and tokens in all, by the same bytes.
NUM_TWICE = 24
NUM_TOKENS = {4: 2 * NUM_TWICE, 2: 1024}


def probe_tokens(itemsize: int, most: int, vocabulary: int) -> tuple[int, ...]:
    """A probe's prompt for numbers of `itemsize` bytes, of at most so many tokens (2 and more) and token ids."""
    length = min(NUM_TOKENS[itemsize], most)
    twice = num_twice(length)
    return tuple((100 + 7 * (at % (length - twice)) % 89) % vocabulary for at in range(length))


def num_twice(length: int) -> int:
    """How many tokens a probe's prompt of so many begins and ends with."""
    return min(NUM_TWICE, length // 2)


class Probe:
    """Watches for probe requests that have prefilled, and sends the worker pairs of slots to compare.

    What it has against them turns spans off: full attention from then on, with the reason.
    """

    def __init__(self, spans: Resolver) -> None:
        self.spans = spans
        self.sent: set[str] = set()

    def step(self) -> None:
        """Queue the comparison of each probe once, in the step after its prefill was scheduled."""
        spans = self.spans
        spans.unsupported = spans.unsupported or spans.connector.unsupported
        if spans.unsupported:
            return
        for name, state in spans.known.items():
            request = state.request
            if not state.ask.probe or name in self.sent or request.num_computed_tokens < request.num_prompt_tokens:
                continue
            self.sent.add(name)
            table = spans.manager.get_blocks(name).get_block_ids()[0]
            length, size = request.num_prompt_tokens, spans.block_size
            twice = num_twice(length)
            far = length - twice
            slots = [table[at // size] * size + at % size for at in range(length)]
            spans.connector.pending.probes += [(slots[at], slots[at + far], far) for at in range(twice)]
            spans.connector.pending.probes += [(slots[at + far], slots[at], -far) for at in range(twice)]


def judge(layer: KVView, probes: Sequence[tuple[int, int, int]]) -> str:
    """Why keys that are rotated from slot to slot are not those computed there, or ''."""
    errors, tolerance = [layer.key_error(*probe) for probe in probes], _TOLERANCE.get(layer.keys.element_size(), 0.0)
    if all(error <= tolerance for error in errors):
        return ""
    return (
        f"a key rotated on its own cache differs by {max(errors):.1e} from the one computed in its place, so layout or "
        "rotary embedding are not what they are taken for"
    )
