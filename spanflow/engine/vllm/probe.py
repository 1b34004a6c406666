"""The self-test at start-up: a key rotated to a position must equal the key that the model computed there.

In the first layer a key depends on its token and position alone. A probe's prompt holds the same
tokens twice, so the keys of the first half, rotated by the distance, must be those of the second.
That tests layout, rotary style, frequencies and partial rotation on the real cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spanflow.kernels.reference import KVView

if TYPE_CHECKING:
    from spanflow.engine.vllm.resolver import Resolver

#: The largest relative error of a rotated key, by the bytes of a stored number: float32, and the 16-bit types.
_TOLERANCE = {4: 1e-4, 2: 2e-2}


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
            half, size = request.num_prompt_tokens // 2, spans.block_size
            slots = [table[at // size] * size + at % size for at in range(2 * half)]
            spans.connector.pending.probes += [(slots[at], slots[at + half], half) for at in range(half)]
            spans.connector.pending.probes += [(slots[at + half], slots[at], -half) for at in range(half)]


def judge(layer: KVView, probes: Sequence[tuple[int, int, int]]) -> str:
    """Why keys that are rotated from slot to slot are not those computed there, or ''."""
    errors, tolerance = [layer.key_error(*probe) for probe in probes], _TOLERANCE.get(layer.keys.element_size(), 0.0)
    if all(error <= tolerance for error in errors):
        return ""
    return (
        f"a key rotated on its own cache differs by {max(errors):.1e} from the one computed in its place, so layout or "
        "rotary embedding are not what they are taken for"
    )
