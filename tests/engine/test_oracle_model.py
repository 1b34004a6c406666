"""The oracle's numbers against plain full attention, on a random model of three layers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from spanflow.errors import QueryError, SpansUnsupported
from spanflow.lowering.prompt import NO_ANCHOR, Span, SpanPrompt

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from engine.tiny_llama import VOCAB, tiny_model  # noqa: E402

from spanflow.engine.oracle_model import OracleModel  # noqa: E402


@pytest.fixture(scope="module")
def oracle() -> Iterator[OracleModel]:
    yield OracleModel(tiny_model())


def ids(num: int, seed: int) -> tuple[int, ...]:
    return tuple(int(t) for t in np.random.default_rng(seed).integers(3, VOCAB, num))


def full_logits(oracle: OracleModel, tokens: tuple[int, ...], last: int = 1) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(oracle.model(torch.tensor([tokens])).logits[0, -last:].float(), -1)


def full_kv(oracle: OracleModel, tokens: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    with torch.no_grad():
        cache = oracle.model(torch.tensor([tokens]), use_cache=True).past_key_values
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def joined(
    head: tuple[int, ...], spans: list[tuple[tuple[int, ...], SpanPrompt]], tail: tuple[int, ...], repair: int = 0
) -> SpanPrompt:
    tokens, placed = head, []
    for span, anchor in spans:
        placed.append(Span(len(tokens), len(tokens) + len(span), anchor, repair))
        tokens += span
    return SpanPrompt(tokens + tail, tuple(placed))


HEAD, D1, D2, TAIL = ids(9, 1), ids(21, 2), ids(34, 3), ids(7, 4)
HEADER = SpanPrompt(ids(3, 5))


def test_without_spans_it_is_the_model(oracle: OracleModel) -> None:
    tokens = HEAD + D1 + TAIL
    assert gap(oracle.prompt_logits(SpanPrompt(tokens), last=5), full_logits(oracle, tokens, 5)) < 1e-4
    for (k, v), (k2, v2) in zip(oracle.kv(SpanPrompt(tokens)), full_kv(oracle, tokens), strict=True):
        assert gap(k, k2) < 1e-5
        assert gap(v, v2) < 1e-5


@pytest.mark.parametrize("anchor", [NO_ANCHOR, HEADER], ids=["none", "header"])
def test_every_token_repaired_is_full_attention(oracle: OracleModel, anchor: SpanPrompt) -> None:
    prompt = joined(HEAD, [(D1, anchor), (D2, anchor)], TAIL, repair=100)
    assert (
        gap(oracle.prompt_logits(prompt, last=len(prompt)), full_logits(oracle, prompt.token_ids, len(prompt))) < 1e-4
    )


@pytest.mark.parametrize("anchor", [NO_ANCHOR, HEADER], ids=["none", "header"])
def test_moved_spans_are_not_full_attention(oracle: OracleModel, anchor: SpanPrompt) -> None:
    prompt = joined(HEAD, [(D1, anchor), (D2, anchor)], TAIL)
    assert gap(oracle.prompt_logits(prompt), full_logits(oracle, prompt.token_ids)) > 1e-2


def test_a_span_behind_the_same_prefix_at_the_same_place_is_full_attention(oracle: OracleModel) -> None:
    behind_head = joined(HEAD, [(D1, SpanPrompt(HEAD))], TAIL)
    assert gap(oracle.prompt_logits(behind_head), full_logits(oracle, behind_head.token_ids)) < 1e-4
    first = joined((), [(D1, NO_ANCHOR)], TAIL)
    assert gap(oracle.prompt_logits(first), full_logits(oracle, first.token_ids)) < 1e-4


@pytest.mark.parametrize("place", [1, 31, 32, 33, 500, 4000])
def test_keys_of_a_moved_span_are_those_computed_there(oracle: OracleModel, place: int) -> None:
    anchored = full_kv(oracle, HEADER.token_ids + D1)
    prompt = joined(ids(place, 6), [(D1, HEADER)], TAIL)
    positions = torch.arange(place - len(HEADER), place + len(D1))[None]
    with torch.no_grad():
        there = oracle.model(
            torch.tensor([HEADER.token_ids + D1]), position_ids=positions, use_cache=True
        ).past_key_values
    for layer, (keys, values) in enumerate(oracle.kv(prompt)):
        scale = float(keys.abs().max())
        assert gap(keys[:, place : place + len(D1)], there.layers[layer].keys[0, :, len(HEADER) :]) < 1e-3 * scale
        assert gap(values[:, place : place + len(D1)], anchored[layer][1][:, len(HEADER) :]) < 1e-5


def test_a_span_has_the_same_kv_whatever_stands_before_it(oracle: OracleModel) -> None:
    one = oracle.kv(joined(HEAD, [(D1, HEADER), (D2, HEADER)], TAIL))
    other = oracle.kv(joined(HEAD, [(D2, HEADER), (D1, HEADER)], TAIL))
    at, other_at = len(HEAD), len(HEAD) + len(D2)
    for (k, v), (k2, v2) in zip(one, other, strict=True):
        assert gap(v[:, at : at + len(D1)], v2[:, other_at : other_at + len(D1)]) < 1e-5
        assert gap(oracle.rotate(k[:, at : at + len(D1)], len(D2)), k2[:, other_at : other_at + len(D1)]) < 1e-4


def by_hand(
    oracle: OracleModel,
    prompt: SpanPrompt,
    flags: list[bool],
    taken: dict[int, tuple[int, list[tuple[torch.Tensor, torch.Tensor]]]],
) -> torch.Tensor:
    """The same meaning by another way: token by token, never a mask, on a cache that grows.

    `taken`: position -> (position behind the anchor, KV of the source).
    """
    from transformers import DynamicCache

    cache = DynamicCache()
    logits = torch.empty(0)
    for position, token in enumerate(prompt.token_ids):
        with torch.no_grad():
            logits = oracle.model(
                torch.tensor([[token]]), past_key_values=cache, position_ids=torch.tensor([[position]]), use_cache=True
            ).logits[0, -1]
        if not flags[position]:
            behind, source = taken[position]
            for layer, (keys, values) in zip(cache.layers, source, strict=True):
                layer.keys[0, :, position] = oracle.rotate(keys[:, behind], position - behind)
                layer.values[0, :, position] = values[:, behind]
    return torch.log_softmax(logits.float(), -1)


@pytest.mark.parametrize("repair", [0, 4, 16])
def test_moved_and_repaired_equal_a_token_by_token_twin(oracle: OracleModel, repair: int) -> None:
    gap_text = ids(5, 8)
    tokens = HEAD + D1 + gap_text + D2 + TAIL
    second = len(HEAD) + len(D1) + len(gap_text)
    spans = (Span(len(HEAD), len(HEAD) + len(D1), HEADER, repair), Span(second, second + len(D2), HEADER, repair))
    prompt = SpanPrompt(tokens, spans)
    flags, taken = [True] * len(tokens), {}
    for span in spans:
        source = full_kv(oracle, HEADER.token_ids + prompt.tokens(span))
        for position in range(span.start + repair, span.end):
            flags[position] = False
            taken[position] = (position - span.start + len(HEADER), source)
    assert gap(oracle.prompt_logits(prompt)[0], by_hand(oracle, prompt, flags, taken)) < 1e-4


def test_the_last_token_of_a_generated_span_is_computed_in_context(oracle: OracleModel) -> None:
    inner, answer, header = HEAD + D2, ids(12, 9), 3
    anchor = SpanPrompt(inner[:-header])
    span_ids = inner[-header:] + answer
    judge = ids(6, 10)
    prompt = SpanPrompt(judge + span_ids + TAIL, (Span(6, 6 + len(span_ids), anchor, 0, header),))
    source = full_kv(oracle, inner + answer)
    flags, taken = [True] * len(prompt), {}
    for position in range(6, 6 + len(span_ids) - 1):
        flags[position] = False
        taken[position] = (position - 6 + len(anchor), source)
    assert gap(oracle.prompt_logits(prompt)[0], by_hand(oracle, prompt, flags, taken)) < 1e-4
    text = SpanPrompt(prompt.token_ids, (Span(6, 6 + len(span_ids), anchor),))
    assert gap(oracle.prompt_logits(prompt), oracle.prompt_logits(text)) > 1e-4


def test_an_assembled_anchor_gives_other_kv_than_its_tokens(oracle: OracleModel) -> None:
    inner = joined(HEAD, [(D1, HEADER), (D2, HEADER)], TAIL)
    answer = ids(15, 11)
    assembled = SpanPrompt(HEAD + answer + TAIL, (Span(9, 24, inner, 0, 0),))
    plain = SpanPrompt(HEAD + answer + TAIL, (Span(9, 24, SpanPrompt(inner.token_ids), 0, 0),))
    assert gap(oracle.kv(assembled)[2][1][:, 9:23], oracle.kv(plain)[2][1][:, 9:23]) > 1e-2
    # its source is what the engine holds after running the inner prompt and sampling the answer
    sequence = oracle.prefill(inner, room=len(answer))
    for token in answer:
        sequence.step(token)
    held = sequence.cache.read(len(inner), len(inner) + len(answer))
    taken = [(oracle.rotate(k, 9 - len(inner))[:, :-1], v[:, :-1]) for k, v in held]
    for (k, v), (k2, v2) in zip(oracle.kv(assembled), taken, strict=True):
        assert gap(k[:, 9:23], k2) < 1e-4
        assert gap(v[:, 9:23], v2) < 1e-5


def test_two_levels_of_assembled_anchors_and_the_order_of_asking(oracle: OracleModel) -> None:
    first = joined(HEAD, [(D1, HEADER)], TAIL)
    second = SpanPrompt(HEAD + ids(8, 12) + TAIL, (Span(9, 17, first, 0, 0),))
    third = SpanPrompt(D2 + ids(8, 13) + TAIL, (Span(34, 42, second, 2, 0),))
    cold = oracle.prompt_logits(third)
    warm = oracle.prompt_logits(third)
    oracle.forget()
    for prompt in (second, first):
        oracle.prompt_logits(prompt)
    assert torch.equal(cold, warm)
    assert torch.equal(cold, oracle.prompt_logits(third))


def test_stepping_on_is_the_same_as_a_longer_prompt(oracle: OracleModel) -> None:
    prompt = joined(HEAD, [(D1, HEADER), (D2, HEADER)], TAIL, repair=4)
    sequence = oracle.prefill(prompt, room=5)
    for token in ids(5, 14):
        sequence.step(token)
    longer = SpanPrompt(prompt.token_ids + ids(5, 14), prompt.spans)
    assert gap(torch.log_softmax(sequence.logits, -1), oracle.prompt_logits(longer)) < 1e-4


def test_one_span_twice_and_a_span_at_the_very_end(oracle: OracleModel) -> None:
    twice = joined(HEAD, [(D1, HEADER), (D1, HEADER)], TAIL)
    k, v = oracle.kv(twice)[1]
    a, b = len(HEAD), len(HEAD) + len(D1)
    assert gap(v[:, a:b], v[:, b : b + len(D1)]) < 1e-6
    at_end = joined(HEAD, [(D1, HEADER)], ())
    ended = joined(HEAD, [(D1[:-1], HEADER)], D1[-1:])
    assert gap(oracle.prompt_logits(at_end), oracle.prompt_logits(ended)) < 1e-5


def test_sources_are_dropped_and_computed_again_with_the_same_values(
    oracle: OracleModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = joined(HEAD, [(D1, HEADER), (D2, HEADER)], TAIL)
    before = oracle.prompt_logits(prompt)
    oracle.forget()
    monkeypatch.setattr("spanflow.engine.oracle_model._KEPT_TOKENS", 1)
    assert torch.equal(before, oracle.prompt_logits(prompt))
    assert len(oracle._sources) == 1
    assert torch.equal(before, oracle.prompt_logits(prompt))


def test_tokens_without_logits_are_refused(oracle: OracleModel) -> None:
    prompt = joined(HEAD, [(D1, HEADER)], TAIL)
    with pytest.raises(QueryError, match=r"of the last 10 tokens 3 are taken from elsewhere.*repair more"):
        oracle.prompt_logits(prompt, last=10)
    with pytest.raises(QueryError, match="token id 128 is outside of the model's vocabulary of 128"):
        oracle.prompt_logits(SpanPrompt((5, 128)))
    with pytest.raises(QueryError, match="the last 0 tokens of a prompt of 2"):
        oracle.prompt_logits(SpanPrompt((5, 7)), last=0)


@pytest.mark.parametrize(
    ("rope", "why"),
    [
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, "rope type 'linear' is not plain RoPE"),
        ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, "rope type 'dynamic' is not plain RoPE"),
        (
            {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 4096},
            "rope type 'yarn' is not plain RoPE",
        ),
    ],
    ids=["linear", "dynamic", "yarn"],
)
def test_other_rope_types_are_refused_and_run_exactly(rope: dict[str, object], why: str) -> None:
    scaled = OracleModel(tiny_model(rope_parameters=rope))
    with pytest.raises(SpansUnsupported, match=why):
        scaled.prompt_logits(joined(HEAD, [(D1, HEADER)], TAIL))
    assert gap(scaled.prompt_logits(SpanPrompt(HEAD)), full_logits(scaled, HEAD)) < 1e-4


def test_a_sliding_window_is_refused() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=16,
    )  # fmt: skip
    assert "sliding" in OracleModel(MistralForCausalLM(config)).spans_unsupported


def test_keys_that_do_not_turn_with_the_position_are_found_by_the_probe() -> None:
    model = tiny_model()
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 1.0
    healthy = OracleModel(model)
    assert healthy.spans_unsupported == ""
    attention = model.model.layers[1].self_attn
    plain = attention.forward

    def without_position(position_embeddings, **rest):  # type: ignore[no-untyped-def]
        cos, sin = position_embeddings
        return plain(position_embeddings=(torch.ones_like(cos), torch.zeros_like(sin)), **rest)

    attention.forward = without_position
    assert OracleModel(model).spans_unsupported.startswith("layer 1: keys rotated to another place differ")
