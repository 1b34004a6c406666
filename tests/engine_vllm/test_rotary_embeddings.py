"""Keys that we rotate are those that vLLM's own rotary embeddings compute, for each type that is served.

The probe at start-up compares them on the engine's cache: what it would not see is wrong silently, so it is shown here
that it sees wrong frequencies, in 16 bits too.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace as Namespace
from typing import Any

import pytest
from vllm_configuration import configuration

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.vllm

WINDOW = 16_384
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 4096}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "original_max_position_embeddings": 4096,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn with its own bounds": YARN
    | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.3},
    "partial": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
    "partial llama3": LLAMA3 | {"partial_rotary_factor": 0.25},
    "partial yarn": YARN | {"partial_rotary_factor": 0.5},
    "by its dimensions": {"rope_type": "default", "rope_theta": 1e5, "rope_dim": 48},
}
STYLES = {"LlamaForCausalLM": True, "Glm4ForCausalLM": False}


def ours(rope: dict[str, Any], architecture: str) -> Any:
    """The rotation that we read from a configuration of vLLM, or why there is none."""
    from spanflow.engine.vllm.support import rotation

    config = configuration()
    text = vars(config.model_config.hf_text_config) | {"rope_parameters": rope, "architectures": [architecture]}
    text |= {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "max_position_embeddings": WINDOW}
    text |= {"layer_rope_theta": None, "standardize_rope_params": lambda: None}
    config.model_config.hf_text_config = Namespace(**text)
    return rotation(config)


def keys_at(rope: dict[str, Any], is_neox: bool, keys: Any, *positions: int) -> list[Any]:
    """What vLLM makes of `keys` `[token, head, 64]`, all at one position, for each position."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    with set_current_vllm_config(VllmConfig()):
        module = get_rope(64, WINDOW, is_neox, rope, keys.dtype)
        flat = keys.flatten(1)
        out = [module.forward_native(torch.full((len(keys),), at), flat.clone(), flat.clone())[1] for at in positions]
    return [key.view(keys.shape) for key in out]


def error(rotation: Any, here: Any, there: Any, distance: int) -> float:
    """The largest relative error of a rotated key, as the probe has it."""
    from spanflow.kernels.reference import KVView

    view = KVView(torch.stack((here, there)).transpose(1, 2), torch.empty(0), rotation)
    size = len(here)
    return max(view.key_error(at, size + at, distance) for at in range(size))


@pytest.mark.parametrize("architecture", STYLES)
@pytest.mark.parametrize("name", ROPES)
def test_a_rotated_key_is_the_one_that_vllm_computes_there(name: str, architecture: str) -> None:
    """By as many positions as the window has, back and forth; vLLM rounds angles of so many radians to 24 bits."""
    rotation, is_neox = ours(ROPES[name], architecture), STYLES[architecture]
    assert rotation.neox == is_neox
    keys = torch.randn(8, 2, 64, generator=torch.Generator().manual_seed(0))
    for start, end in ((0, 1), (5, 40), (40, 5), (900, 3000), (0, 9000), (15_000, 100), (WINDOW - 1, 0)):
        here, there = keys_at(ROPES[name], is_neox, keys, start, end)
        assert error(rotation, here, there, end - start) < 1e-5 + 1e-7 * max(start, end), (start, end)


@pytest.mark.parametrize("name", ["linear", "llama3", "yarn", "partial yarn"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_probe_sees_frequencies_that_are_not_scaled(name: str, dtype: str) -> None:
    from spanflow.engine.vllm import probe

    rotation = ours(ROPES[name], "LlamaForCausalLM")
    plain = ours(ROPES["default"] | {"rope_theta": ROPES[name]["rope_theta"]}, "LlamaForCausalLM")
    wrong = replace(rotation, inv_freq=plain.inv_freq[: len(rotation.inv_freq)])
    kind = getattr(torch, dtype)
    prompt = probe.probe_tokens(kind.itemsize, WINDOW, 50_000)
    distance = len(prompt) - probe.num_twice(len(prompt))
    keys = torch.randn(24, 2, 64, generator=torch.Generator().manual_seed(0)).to(kind)
    here, there = keys_at(ROPES[name], True, keys, 0, distance)
    limit = probe._TOLERANCE[kind.itemsize]
    assert error(rotation, here, there, distance) < limit / 3
    assert error(wrong, here, there, distance) > limit * 3


@pytest.mark.parametrize(
    ("itemsize", "most", "vocabulary"), [(4, 8000, 50_000), (2, 8000, 50_000), (2, 300, 120), (4, 20, 30), (2, 3, 2)]
)
def test_a_probe_begins_and_ends_with_the_same_tokens(itemsize: int, most: int, vocabulary: int) -> None:
    from spanflow.engine.vllm.probe import NUM_TOKENS, num_twice, probe_tokens

    tokens = probe_tokens(itemsize, most, vocabulary)
    assert len(tokens) == min(most, NUM_TOKENS[itemsize])
    assert all(0 <= token < vocabulary for token in tokens)
    twice = num_twice(len(tokens))
    assert 1 <= twice <= 24
    assert tokens[:twice] == tokens[-twice:]


@pytest.mark.parametrize(
    ("rope", "reason"),
    [
        ({"use_fope": True}, "its rotary embedding has use_fope"),
        ({"mrope_section": [8, 12, 12]}, "its rotary embedding has mrope_section"),
        (LLAMA3 | {"rope_dim": 48}, "its config tells of 64 and of 48 rotated dimensions"),
    ],
)
def test_what_is_not_what_its_type_says_is_not_rotated(rope: dict[str, Any], reason: str) -> None:
    assert ours(ROPES["default"] | rope, "LlamaForCausalLM") == reason
