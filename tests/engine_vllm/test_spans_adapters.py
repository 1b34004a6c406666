"""Adapters on one engine: KV of its own for each, compared with an oracle whose weights the adapter is merged into."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from vllm_rig import TOLERANCE, Answer, Judge, Rig, difference, generate_candidates

from spanflow import commute, generate, seq, user
from spanflow.compile import compile_query
from spanflow.engine.protocol import Lease
from spanflow.errors import QueryError
from spanflow.lowering.prompt import SpanPrompt
from spanflow.lowering.template import ChatTemplate
from spanflow.result import Done
from spanflow.runner import Host, RunOptions, run_plan

pytestmark = pytest.mark.vllm

NAMES = (None, "red", "blue")
_RANK, _ALPHA = 8, 16
_TARGETS = ("q_proj", "k_proj", "v_proj")


@pytest.fixture(scope="module")
def weights(judge: Judge) -> dict[str, dict[str, Any]]:
    """The random matrices A and B of two adapters, by the names of the layers that they stand beside."""
    import torch

    found: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(("red", "blue")):
        random = torch.Generator().manual_seed(number)
        found[name] = {}
        for layer, module in judge.oracle.model.named_modules():
            if layer.endswith(_TARGETS):
                shapes = ("A", (_RANK, module.in_features)), ("B", (module.out_features, _RANK))
                for letter, shape in shapes:
                    found[name][f"{layer}.lora_{letter}.weight"] = torch.randn(shape, generator=random) * 0.05
    return found


@pytest.fixture(scope="module")
def rig(start_rig: Any, weights: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Rig:
    """An engine with two LoRA adapters, in the format of the peft library."""
    from safetensors.torch import save_file

    paths = {}
    for name, matrices in weights.items():
        path = tmp_path_factory.mktemp(name)
        save_file(
            {f"base_model.model.{key}": value for key, value in matrices.items()}, path / "adapter_model.safetensors"
        )
        about = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _ALPHA, "target_modules": [*_TARGETS], "bias": "none"}
        (path / "adapter_config.json").write_text(json.dumps(about))
        paths[name] = str(path)
    # vLLM on a CPU copies the matrices of the largest rank for each token.
    options = {"adapters": paths, "max_lora_rank": _RANK}
    rig: Rig = start_rig(max_model_len=1024, kv_cache_gib=0.3, **options)
    return rig


@pytest.fixture(scope="module")
def judges(judge: Judge, model_dir: Path, weights: dict[str, dict[str, Any]]) -> dict[str | None, Judge]:
    """An oracle for each adapter: W + (alpha / r) B A."""
    import torch

    found: dict[str | None, Judge] = {None: judge}
    for name, matrices in weights.items():
        found[name] = Judge(model_dir)
        layers = dict(found[name].oracle.model.named_modules())
        with torch.no_grad():
            for layer in {key.partition(".lora_")[0] for key in matrices}:
                a, b = (matrices[f"{layer}.lora_{letter}.weight"] for letter in "AB")
                layers[layer].weight += _ALPHA / _RANK * b @ a
    return found


def under_each(rig: Rig, prompt: SpanPrompt) -> dict[str | None, Answer]:
    """One prompt under each adapter and none, all at once."""

    async def together() -> list[Answer]:
        return list(await asyncio.gather(*(rig.run(prompt, adapter=name) for name in NAMES)))

    return dict(zip(NAMES, rig.wait(together()), strict=True))


@pytest.mark.parametrize("repair", [0, 4])
def test_adapters_share_nothing(rig: Rig, judges: dict[str | None, Judge], repair: int) -> None:
    rig.reset()
    documents = [rig.document(1 + repair, 1), rig.document(2 + repair, 1)]
    prompt = rig.prompt(documents, repair=repair)
    first, again = under_each(rig, prompt), under_each(rig, prompt)
    for name, its in judges.items():
        assert first[name].statuses == ["new", "new"]
        assert again[name].statuses == ["hit", "hit"]
        assert difference(first[name], again[name]) < 1e-5
        its.check(first[name], again[name])
        # Another adapter's weights would be seen.
        assert all(its.distance(first[other]) > 100 * TOLERANCE for other in NAMES if other != name)


def test_everything_repaired_is_full_attention_under_each_adapter(rig: Rig, judges: dict[str | None, Judge]) -> None:
    whole = rig.prompt([rig.document(3, 1), rig.document(4, 1)], repair=9999)
    full = SpanPrompt(whole.token_ids)
    for name, answer in under_each(rig, whole).items():
        judges[name].check(answer)
        assert judges[name].distance(answer, full) < TOLERANCE


def test_a_candidate_is_taken_over_under_its_own_adapter(rig: Rig, judges: dict[str | None, Judge]) -> None:
    rig.reset()
    inner = generate_candidates(rig, 2, adapter="red", lease=Lease(consumers=2))
    judges["red"].check(*inner)
    for repair in (0, 4):
        outer = rig.judge(inner, repair=repair)
        taken = rig.one(outer, adapter="red")
        assert taken.statuses == ["hit", "hit"]
        judges["red"].check(taken)
    assert rig.audit()["leases"] == 0
    rig.reset()
    cold = rig.one(outer, adapter="red")
    assert cold.statuses == ["evicted", "evicted"]
    judges["red"].check(cold)


def test_another_adapter_takes_nothing_over(rig: Rig, judges: dict[str | None, Judge]) -> None:
    """Not even where it ran the same inner prompt: the KV of these tokens is then computed under itself."""
    rig.reset()
    inner = generate_candidates(rig, 2, adapter="red")
    outer = rig.judge(inner)
    for name in (None, "blue"):
        with pytest.raises(QueryError, match="never ran under a lease"):
            rig.one(outer, adapter=name)
    tokens = rig.one(SpanPrompt(outer.token_ids), adapter="blue")
    assert tokens.last.usage.cached == 0
    own = generate_candidates(rig, 1, adapter="blue")
    answer = rig.one(outer, adapter="blue")
    assert "hit" not in answer.statuses
    judges["blue"].check(tokens, *own, answer)
    taken = rig.one(outer, adapter="red")
    assert taken.statuses == ["hit", "hit"]
    judges["red"].check(taken)


@pytest.mark.parametrize(("reader", "own"), [(None, 0), ("red", 1)])
def test_a_query_reads_an_answer_of_another_adapter_as_its_tokens(rig: Rig, reader: str | None, own: int) -> None:
    candidates = [generate(user("Name a colour."), model=name, max_tokens=6) for name in (None, "red")]
    query = generate(seq(commute(*candidates), user("Which is best?")), model=reader, max_tokens=2)
    plan = compile_query(query, RunOptions(), model="m", adapters=["red"]).plan
    host = Host(rig.engine, ChatTemplate(rig.tokenizer), model="m", max_concurrency=8)

    async def last() -> Any:
        async with aclosing(run_plan(plan, host, RunOptions())) as events:
            return [event async for event in events][-1]

    done = rig.wait(last())
    assert isinstance(done, Done)
    assert [(span.path, span.status) for span in done.result.spans] == [(f"$.query.operands[0].operands[{own}]", "hit")]
    assert len(done.result.inner) == 2
