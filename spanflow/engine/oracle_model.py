"""The meaning of spans in numbers, with transformers: slow and simple, what every fast path is compared with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spanflow.engine.context import Flags, in_context, source_in_context, source_key, source_prompt, taken_range
from spanflow.engine.memory import GIB, available_memory
from spanflow.engine.oracle_cache import LayerKV, Preset, SlotCache
from spanflow.errors import EngineUnavailable, QueryError, SpansUnsupported
from spanflow.lowering.prompt import Span, SpanPrompt

#: Sources are kept up to this many tokens; dropping one costs time, never another value.
_KEPT_TOKENS = 32_768


class Sequence:
    """A prompt's KV after its pass, to be continued token by token.

    `logits`: of the last positions, [num, vocab], float32.
    """

    def __init__(self, model: OracleModel, cache: SlotCache, length: int, logits: Tensor) -> None:
        self._model = model
        self.cache = cache
        self.length = length
        self.logits = logits

    def step(self, token_id: int) -> Tensor:
        """Append one token, attending to everything before it; returns the new logits [1, vocab]."""
        position = np.asarray([self.length])
        self.logits = self._model.run((token_id,), position, self.cache, self.length + 1, 1)
        self.length += 1
        return self.logits


class OracleModel:
    """A causal language model of transformers that reads prompts with spans.

    The KV of a span is that of its tokens behind its anchor (computed with the anchor's own spans),
    its keys rotated by one angle: that of the new position minus the position behind the anchor. What is in
    context overwrites it in a single causal pass. Not safe for use from two threads at once.
    """

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        self.vocab_size: int = model.config.vocab_size
        self.num_layers: int = model.config.num_hidden_layers
        self.spans_unsupported = why_unsupported(model)
        self._sources: OrderedDict[bytes, LayerKV] = OrderedDict()

    @classmethod
    def load(cls, path: str | Path, device: str = "cpu") -> OracleModel:
        """Read a model directory or hub name, in float32. Raises EngineUnavailable where memory is too short for that,
        and what transformers raises."""
        from transformers import AutoModelForCausalLM

        _check_memory(str(path))
        model = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32, attn_implementation="sdpa")
        return cls(model.to(device))

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.model.device
        return device

    def forget(self) -> None:
        """Drop all kept sources."""
        self._sources.clear()

    def prompt_logits(self, prompt: SpanPrompt, last: int = 1) -> Tensor:
        """Log-probabilities behind each of the last `last` tokens: [last, vocab], float32.

        Raises QueryError where one of these tokens is not computed in context, SpansUnsupported by the model.
        """
        return torch.log_softmax(self.prefill(prompt, last=last).logits, -1)

    def kv(self, prompt: SpanPrompt) -> LayerKV:
        """The KV that the prompt leaves when it is run: per layer (keys, values), [kv_heads, len(prompt), head_dim]."""
        return self.prefill(prompt).cache.read(0, len(prompt))

    def prefill(
        self, prompt: SpanPrompt, *, room: int = 0, last: int = 1, check: Callable[[], None] = lambda: None
    ) -> Sequence:
        """Run a prompt, leaving `room` slots for more tokens. `check` is called between passes and may raise."""
        self._refuse(prompt, last)
        found = self._find_sources(prompt, check)
        check()
        cache, logits = self._pass(prompt, in_context(prompt), found, room, last)
        return Sequence(self, cache, len(prompt), logits)

    def rotate(self, keys: Tensor, delta: int) -> Tensor:
        """Keys [..., head_dim] moved on by `delta` positions (negative: back)."""
        return keys if delta == 0 else _rotated(self.model, keys, delta)

    @torch.no_grad()
    def run(self, token_ids: tuple[int, ...], positions: Any, cache: SlotCache, length: int, last: int) -> Tensor:
        """One pass over tokens at ascending positions, each seeing the slots up to its own; logits [last, vocab]."""
        device = self.device
        where = torch.as_tensor(positions, dtype=torch.int64, device=device)
        cache.positions, cache.length = where, length
        mask = torch.arange(length, device=device)[None, :] <= where[:, None]
        out = self.model(
            torch.tensor([token_ids], device=device),
            past_key_values=cache,
            position_ids=where[None],
            attention_mask=mask[None, None],
            use_cache=True,
            logits_to_keep=last,
        )
        logits: Tensor = out.logits[0].float()
        return logits

    def _pass(
        self, prompt: SpanPrompt, flags: Flags, found: dict[bytes, LayerKV], room: int, last: int
    ) -> tuple[SlotCache, Tensor]:
        presets = []
        for span in prompt.spans:
            first, end = taken_range(span)
            if first == end:
                continue
            delta = span.start - len(span.anchor)
            skip = first - span.start
            layers = [
                (self.rotate(keys[:, skip : end - span.start], delta), values[:, skip : end - span.start])
                for keys, values in found[source_key(prompt, span)]
            ]
            presets.append(Preset(first, layers))
        cache = SlotCache(self.num_layers, len(prompt) + room, presets)
        positions = np.flatnonzero(flags)
        ids = tuple(prompt.token_ids[i] for i in positions)
        return cache, self.run(ids, positions, cache, len(prompt), last)

    def _find_sources(self, prompt: SpanPrompt, check: Callable[[], None]) -> dict[bytes, LayerKV]:
        """The KV of every span that the prompt takes from elsewhere, anchors first, without recursion."""
        found: dict[bytes, LayerKV] = {}
        stack = [(prompt, span, False) for span in reversed(prompt.spans)]
        while stack:
            owner, span, ready = stack.pop()
            key = source_key(owner, span)
            first, end = taken_range(span)
            if key in found or first == end:
                continue
            if key in self._sources:
                self._sources.move_to_end(key)
                found[key] = self._sources[key]
            elif ready:
                check()
                found[key] = self._compute_source(owner, span, found)
                self._keep(key, found[key])
            else:
                stack.append((owner, span, True))
                source = source_prompt(owner, span)
                stack.extend((source, inner, False) for inner in reversed(source.spans))
        return found

    def _compute_source(self, owner: SpanPrompt, span: Span, found: dict[bytes, LayerKV]) -> LayerKV:
        source = source_prompt(owner, span)
        cache, _ = self._pass(source, source_in_context(owner, span), found, 0, 1)
        return cache.read(len(span.anchor), len(source))

    def _keep(self, key: bytes, layers: LayerKV) -> None:
        self._sources[key] = layers
        total = sum(kept[0][0].shape[1] for kept in self._sources.values())
        while total > _KEPT_TOKENS and len(self._sources) > 1:
            _, dropped = self._sources.popitem(last=False)
            total -= dropped[0][0].shape[1]

    def _refuse(self, prompt: SpanPrompt, last: int) -> None:
        if prompt.spans and self.spans_unsupported:
            raise SpansUnsupported(
                f"{self.spans_unsupported}; run the prompt without spans (rung 'exact') or choose another model"
            )
        if not 1 <= last <= len(prompt):
            raise QueryError(f"the last {last} tokens of a prompt of {len(prompt)} were asked for")
        missing = int((~in_context(prompt)[-last:]).sum())
        if missing:
            raise QueryError(
                f"of the last {last} tokens {missing} are taken from elsewhere and have no logits; "
                "ask for fewer, or repair more of the last span"
            )
        outside = next((t for t in prompt.token_ids if not 0 <= t < self.vocab_size), None)
        if outside is not None:
            raise QueryError(f"token id {outside} is outside of the model's vocabulary of {self.vocab_size}")


def _rotated(model: Any, keys: Tensor, delta: int) -> Tensor:
    angle = delta * model.model.rotary_emb.inv_freq.to(dtype=torch.float64)  # exact enough for any offset
    cos, sin = angle.cos().to(keys.dtype), angle.sin().to(keys.dtype)
    low, high = keys.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def _check_memory(path: str) -> None:
    """Refuse now what would be killed for its memory while it is read; what has no shapes to be had is let through."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            shapes = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    except Exception:  # noqa: BLE001 - some models look at numbers while they are made; reading them says what is wrong
        return
    needed = 4 * sum(parameter.numel() for parameter in shapes.parameters())
    available = available_memory()
    if available is not None and needed > available:
        raise EngineUnavailable(
            f"engine 'oracle' needs {needed / GIB:.1f} GiB for the weights of {path} in float32, and "
            f"{available / GIB:.1f} GiB of memory are free; free some, or take a smaller model"
        )


def why_unsupported(model: Any) -> str:
    """Why this model cannot move KV exactly, or ''. Looks at its configuration, then at its numbers."""
    config = model.config
    name: str = getattr(config, "model_type", type(model).__name__)
    rope = getattr(config, "rope_parameters", None)
    rotary = getattr(getattr(model, "model", None), "rotary_emb", None)
    if not isinstance(rope, dict) or rotary is None or not hasattr(rotary, "inv_freq"):
        return f"model type {name!r} has no rotary position embedding that spans could be moved by"
    if rope.get("rope_type", "default") != "default":
        return f"rope type {rope.get('rope_type')!r} is not plain RoPE: moved keys would not be those computed there"
    if getattr(rotary, "attention_scaling", 1.0) != 1.0:
        return f"RoPE with attention scaling {rotary.attention_scaling} is not plain RoPE"
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        return f"layers of kind {', '.join(sorted(kinds))} do not attend to the whole prompt"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return f"a sliding window of {config.sliding_window} tokens does not attend to the whole prompt"
    found: str = _probe(model)
    return found


@torch.no_grad()
def _probe(model: Any) -> str:
    """A token alone has the same keys at every place but for the angle: compare places 0 and 7 in every layer."""
    half = model.model.rotary_emb.inv_freq.shape[0]
    caches = []
    for position in (0, 7):
        cache = SlotCache(model.config.num_hidden_layers, 1, [])
        cache.positions, cache.length = torch.zeros(1, dtype=torch.int64, device=model.device), 1
        token = torch.ones(1, 1, dtype=torch.int64, device=model.device)
        where = torch.full((1, 1), position, device=model.device)
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device)
        model(token, past_key_values=cache, position_ids=where, attention_mask=mask, use_cache=True)
        caches.append(cache.read(0, 1))
    for layer, ((keys, values), (moved_keys, moved_values)) in enumerate(zip(*caches, strict=True)):
        if keys.shape[-1] != 2 * half:
            return f"layer {layer} rotates {2 * half} of {keys.shape[-1]} dimensions: partial RoPE is not served"
        scale = max(1.0, float(moved_keys.abs().max()))
        error = float((_rotated(model, keys.double(), 7) - moved_keys).abs().max()) / scale
        if error > 1e-3 or float((values - moved_values).abs().max()) > 1e-3 * scale:
            return f"layer {layer}: keys rotated to another place differ from keys computed there (by {error:.1g})"
    return ""
