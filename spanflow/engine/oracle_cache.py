"""KV of one sequence in slots by position: a pass writes its tokens to any positions and reads all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

#: Per layer (keys, values), each [kv_heads, num_tokens, head_dim].
LayerKV = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Preset:
    """KV that stands at `[start, start + num_tokens)` before the pass."""

    start: int
    layers: LayerKV


class _SlotLayer(DynamicLayer):
    """One layer's slots; the owner says where the tokens of a pass go."""

    def __init__(self, owner: SlotCache, index: int) -> None:
        super().__init__()
        self._owner = owner
        self._index = index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        capacity = self._owner.capacity
        self.keys = key_states.new_zeros(*key_states.shape[:2], capacity, key_states.shape[3])
        self.values = value_states.new_zeros(*value_states.shape[:2], capacity, value_states.shape[3])
        for preset in self._owner.presets:
            keys, values = preset.layers[self._index]
            self.keys[0, :, preset.start : preset.start + keys.shape[1]] = keys
            self.values[0, :, preset.start : preset.start + values.shape[1]] = values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys[:, :, self._owner.positions] = key_states
        self.values[:, :, self._owner.positions] = value_states
        return self.keys[:, :, : self._owner.length], self.values[:, :, : self._owner.length]


class SlotCache(Cache):
    """`capacity` slots a layer, the presets in them.

    Set `positions` ([num_tokens], int64) and `length` (slots to read) before each pass.
    """

    def __init__(self, num_layers: int, capacity: int, presets: list[Preset]) -> None:
        self.capacity = capacity
        self.presets = presets
        self.positions = torch.empty(0, dtype=torch.int64)
        self.length = 0
        super().__init__(layers=[_SlotLayer(self, index) for index in range(num_layers)])

    def read(self, start: int, end: int) -> LayerKV:
        """A copy of the KV at `[start, end)`."""
        return [(layer.keys[0, :, start:end].clone(), layer.values[0, :, start:end].clone()) for layer in self.layers]
