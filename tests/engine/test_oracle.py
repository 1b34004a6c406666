"""The oracle as an engine: answers, stop strings, seeds, reports, leases, leaving early, refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from spanflow.engine.protocol import EngineOutput, EngineRequest, Lease
from spanflow.errors import EngineDied, EngineUnavailable, ModelError, PromptTooLong, QueryError
from spanflow.ir.nodes import Sampling
from spanflow.lowering.prompt import NO_ANCHOR, Span, SpanPrompt

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from engine.tiny_llama import save_tiny_model  # noqa: E402

from spanflow.engine.oracle import OracleEngine  # noqa: E402

HEAD, DOC, TAIL = (1, 20, 21, 22), tuple(range(30, 50)), (2, 60, 61)
HEADER = SpanPrompt((1, 20))
PLAIN = SpanPrompt(HEAD + DOC + TAIL)
SPANNED = SpanPrompt(PLAIN.token_ids, (Span(4, 24, HEADER, 2),))


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def engine(tiny_dir: Path) -> AsyncIterator[OracleEngine]:
    started = await OracleEngine.start(str(tiny_dir))
    yield started
    assert (await started.audit())["problems"] == []
    await started.close()


async def test_a_model_too_large_for_memory_is_refused_before_it_is_read(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spanflow.engine import oracle_model

    size = sum(p.numel() for p in oracle_model.OracleModel.load(tiny_dir).model.parameters()) * 4
    monkeypatch.setattr(oracle_model, "available_memory", lambda: size)
    await (await OracleEngine.start(str(tiny_dir))).close()
    monkeypatch.setattr(oracle_model, "available_memory", lambda: size - 1)
    with pytest.raises(EngineUnavailable, match=r"needs 0\.0 GiB for the weights of .* in float32, and 0\.0 GiB of"):
        await OracleEngine.start(str(tiny_dir))


async def test_a_model_whose_shapes_can_not_be_had_is_read_all_the_same(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    def from_config(config: object) -> None:
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", from_config)
    await (await OracleEngine.start(str(tiny_dir))).close()


def ask(prompt: SpanPrompt = PLAIN, request_id: str = "r", **options: object) -> EngineRequest:
    sampling = Sampling(**{"max_tokens": 12, **options})  # type: ignore[arg-type]
    return EngineRequest(request_id, prompt, sampling)


async def run(engine: OracleEngine, request: EngineRequest) -> tuple[str, tuple[int, ...], EngineOutput]:
    pieces = [piece async for piece in engine.stream(request)]
    assert all(piece.finish_reason is None for piece in pieces[:-1])
    return "".join(p.text for p in pieces), tuple(t for p in pieces for t in p.token_ids), pieces[-1]


async def test_greedy_equals_generate_of_transformers(engine: OracleEngine) -> None:
    text, token_ids, last = await run(engine, ask())
    with torch.no_grad():
        wanted = engine.model.model.generate(torch.tensor([PLAIN.token_ids]), max_new_tokens=12, do_sample=False)
    assert token_ids == tuple(wanted[0, len(PLAIN) :].tolist())
    assert text == engine.tokenizer.decode(list(token_ids), skip_special_tokens=True)
    assert last.usage is not None
    assert (last.usage.prompt, last.usage.completion) == (27, len(token_ids))


async def test_it_ends_at_an_end_token_and_says_stop(engine: OracleEngine) -> None:
    _, token_ids, last = await run(engine, ask())
    assert last.finish_reason == "length"
    engine._stop_ids = frozenset({token_ids[3]})
    text, shorter, last = await run(engine, ask())
    assert last.finish_reason == "stop"
    first = token_ids.index(token_ids[3])
    assert shorter == token_ids[: first + 1]
    assert text == engine.tokenizer.decode(list(token_ids[:first]), skip_special_tokens=True)


async def test_a_stop_string_ends_the_text_before_it(engine: OracleEngine) -> None:
    text, token_ids, _ = await run(engine, ask())
    stop = text[5:9]
    stopped, some, last = await run(engine, ask(stop=(stop,)))
    assert stopped == text[: text.index(stop)]
    assert last.finish_reason == "stop"
    assert some == token_ids[: len(some)]
    assert len(some) < len(token_ids)


async def test_a_seed_gives_the_same_answer_again_and_others_differ(engine: OracleEngine) -> None:
    answers = [(await run(engine, ask(temperature=1.0, seed=seed)))[1] for seed in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]


async def test_no_seed_is_not_the_same_seed(engine: OracleEngine) -> None:
    answers = {(await run(engine, ask(temperature=3.0)))[1] for _ in range(4)}
    assert len(answers) == 4


async def test_a_tiny_top_p_is_greedy(engine: OracleEngine) -> None:
    greedy = await run(engine, ask())
    assert (await run(engine, ask(temperature=2.0, top_p=1e-6, seed=5)))[1] == greedy[1]


async def test_logprobs_are_those_of_the_model_before_temperature(engine: OracleEngine) -> None:
    request = replace(ask(SPANNED, temperature=0.7, seed=1), logprobs=3)
    pieces = [piece async for piece in engine.stream(request)]
    wanted = engine.model.prompt_logits(SPANNED)[0]
    (first,) = pieces[0].logprobs
    assert pieces[0].token_ids[0] in first
    assert 3 <= len(first) <= 4
    assert set(torch.topk(wanted, 3).indices.tolist()) <= set(first)
    assert all(abs(value - float(wanted[token])) < 1e-4 for token, value in first.items())


async def test_an_answer_behind_spans_follows_the_moved_kv(engine: OracleEngine) -> None:
    _, token_ids, last = await run(engine, replace(ask(SPANNED), logprobs=0))
    longer = SpanPrompt(SPANNED.token_ids + token_ids[:-1], SPANNED.spans)
    assert int(engine.model.prompt_logits(longer)[0].argmax()) == token_ids[-1]
    assert last.usage is not None
    assert last.usage.cached == 18


async def test_reports_new_then_hit_per_tenant(engine: OracleEngine) -> None:
    first = (await run(engine, ask(SPANNED)))[2].spans
    moved_on = SpanPrompt((*HEAD, 7, *DOC, *TAIL), (Span(5, 25, HEADER, 2),))
    second = (await run(engine, ask(moved_on)))[2].spans
    third = (await run(engine, replace(ask(moved_on), salt="other")))[2].spans
    assert [(s.status, s.start, s.end) for s in (*first, *second, *third)] == [
        ("new", 4, 24), ("hit", 5, 25), ("new", 5, 25),
    ]  # fmt: skip
    assert (first[0].moved, first[0].repaired, first[0].computed) == (18, 2, 0)
    await engine.reset()
    assert (await run(engine, ask(SPANNED)))[2].spans[0].status == "new"


async def test_a_span_of_which_nothing_is_moved_says_so(engine: OracleEngine) -> None:
    repaired = SpanPrompt(PLAIN.token_ids, (Span(4, 24, NO_ANCHOR, 50),))
    _, token_ids, last = await run(engine, ask(repaired))
    assert token_ids == (await run(engine, ask()))[1]
    (report,) = last.spans
    assert (report.status, report.moved, report.repaired, report.computed) == ("computed", 0, 20, 0)
    assert report.why == "nothing of it is moved: all 20 tokens are computed in context"


async def test_a_leased_answer_is_a_hit_until_its_consumers_have_run(engine: OracleEngine) -> None:
    inner = ask(PLAIN, "inner")
    _, answer, _ = await run(engine, replace(inner, lease=Lease(consumers=2)))
    assert (await engine.audit())["leases"] == 1
    taken = PLAIN.token_ids[-2:] + answer
    outer = SpanPrompt(HEAD + taken + TAIL, (Span(4, 4 + len(taken), SpanPrompt(PLAIN.token_ids[:-2]), 0, 2),))
    for name, status, leases in (("a", "hit", 1), ("b", "hit", 0)):
        (report,) = (await run(engine, ask(outer, name)))[2].spans
        assert (report.status, report.moved, report.computed) == (status, len(taken) - 1, 1)
        assert (await engine.audit())["leases"] == leases
    await run(engine, replace(inner, lease=Lease()))
    await engine.release(("inner", "unknown"))
    assert (await engine.audit())["leases"] == 0
    await run(engine, replace(inner, lease=Lease(seconds=0.0)))
    assert (await engine.audit())["leases"] == 0


async def test_streams_take_turns_and_the_loop_is_free(engine: OracleEngine) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    answers = await asyncio.gather(*(run(engine, ask(SPANNED, f"r{i}")) for i in range(3)))
    ticking.cancel()
    assert len({token_ids for _, token_ids, _ in answers}) == 1
    assert ticks > 20


async def test_leaving_a_stream_early_aborts_it(engine: OracleEngine) -> None:
    stream = engine.stream(ask(max_tokens=4000))
    async for _ in stream:
        break
    await stream.aclose()  # type: ignore[attr-defined]
    assert (await engine.audit())["running"] == 0
    task = asyncio.create_task(run(engine, ask(max_tokens=4000)))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await engine.audit())["running"] == 0
    assert len((await run(engine, ask()))[1]) == 12


async def test_requests_that_cannot_be_served_are_refused(engine: OracleEngine) -> None:
    with pytest.raises(PromptTooLong, match=r"request 'r': the prompt has 27 tokens and asks for 8166 more"):
        await run(engine, ask(max_tokens=8166))
    with pytest.raises(QueryError, match="the oracle engine does not guide decoding by a schema"):
        await run(engine, ask(schema="{}"))
    with pytest.raises(QueryError, match="the oracle engine loads no adapters"):
        await run(engine, replace(ask(), adapter="lora"))
    with pytest.raises(QueryError, match="the prompt is empty"):
        await run(engine, ask(SpanPrompt(())))
    with pytest.raises(QueryError, match="max_tokens is None; ask for at least 1 token"):
        await run(engine, ask(max_tokens=None))
    with pytest.raises(QueryError, match=r"temperature -1.0 or top_p 1.0 is out of range"):
        await run(engine, ask(temperature=-1))
    with pytest.raises(QueryError, match="token id 500 is outside"):
        await run(engine, ask(SpanPrompt((500,))))
    stream = engine.stream(ask())
    await anext(aiter(stream))
    with pytest.raises(QueryError, match="request 'r' is still running"):
        await run(engine, ask())
    await stream.aclose()  # type: ignore[attr-defined]


async def test_closing_ends_what_runs(tiny_dir: Path) -> None:
    engine = await OracleEngine.start(str(tiny_dir))
    task = asyncio.create_task(run(engine, ask(max_tokens=4000)))
    await asyncio.sleep(0.05)
    await engine.close()
    await engine.close()
    with pytest.raises(EngineDied, match="the oracle engine is closed; start another one"):
        await task
    with pytest.raises(EngineDied):
        await run(engine, ask())


async def test_what_it_says_about_itself(tiny_dir: Path) -> None:
    engine = await OracleEngine.start(str(tiny_dir), max_model_len=100)
    assert (engine.info.name, engine.info.max_model_len, engine.info.spans_unsupported) == ("oracle", 100, "")
    assert set(engine.info.versions) == {"torch", "transformers"}
    await engine.close()
    with pytest.raises(QueryError, match=r"max_model_len 9000: model .* has a window of 8192 tokens"):
        await OracleEngine.start(str(tiny_dir), max_model_len=9000)


async def test_a_model_that_cannot_move_kv_runs_exactly_and_reports_why(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    engine = await OracleEngine.start(str(save_tiny_model(tmp_path, rope_parameters=rope)))
    exact = (await run(engine, ask()))[1]
    _, token_ids, last = await run(engine, ask(SPANNED))
    assert token_ids == exact
    (report,) = last.spans
    assert (report.status, report.moved, report.computed) == ("unsupported", 0, 20)
    assert report.why == engine.info.spans_unsupported != ""
    await engine.close()


async def test_broken_weights_and_a_wrong_configuration_are_model_errors(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "none"}')
    with pytest.raises(ModelError, match="does not load from"):
        await OracleEngine.start(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelError, match=f"the weights {tmp_path}/model.safetensors are damaged: .*header too large"):
        await OracleEngine.start(str(tmp_path))


async def test_the_default_model_answers_behind_moved_documents(model_dir: Path) -> None:
    engine = await OracleEngine.start(str(model_dir))
    tokens = engine.tokenizer

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokens(text, add_special_tokens=False)["input_ids"])

    head = ids("<|im_start|>user\n")
    docs = [ids("The dog of Anna is called Bello.\n\n"), ids("The cat of Paul is called Mimi.\n\n")]
    tail = ids("What is the name of Paul's cat?<|im_end|>\n<|im_start|>assistant\n")
    for order in (docs, docs[::-1]):
        second = len(head) + len(order[0])
        spans = (
            Span(len(head), second, SpanPrompt(head), 2),
            Span(second, second + len(order[1]), SpanPrompt(head), 2),
        )
        prompt = SpanPrompt(head + order[0] + order[1] + tail, spans)
        text, _, last = await run(engine, ask(prompt, max_tokens=16))
        assert "Mimi" in text
        assert [report.repaired for report in last.spans] == [2, 2]
    await engine.close()
