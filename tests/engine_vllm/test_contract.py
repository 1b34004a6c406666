"""vLLM is extended, not changed: no symbol of it is reassigned, and every name used stands in the contract."""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import re
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import fields
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import spanflow

PACKAGE = Path(spanflow.__file__).parent
FOLDER = PACKAGE / "engine" / "vllm"
SOURCES = sorted(FOLDER.glob("*.py"))

#: Where vLLM may be imported.
IMPORTERS = {"contract.py"}

#: Names on what no type is known of, by whose they are. None of them is vLLM's.
OTHERS = {
    "torch": "__version__ arange device dim element_size float64 itemsize shape transpose unbind view zero_",
    "a model's own config, and its tokenizer": (
        "architectures chat_template dual_chunk_attention_config from_pretrained layer_rope_theta layer_types "
        "no_rope_layers rope_parameters use_rope_layers"
    ),
    "prometheus_client": "inc labels",
    "dicts and strings out of configs": "get startswith values",
    "the type of anything": "__name__",
}

#: Each line that ends with `#!` breaks a rule; the others don't.
PLANTED = """
import builtins
from typing import Any
from unittest.mock import patch #!

import vllm.v1.request as module

from spanflow.engine.vllm import contract
from spanflow.engine.vllm.contract import AsyncScheduler, BlockPool, Request, RequestOutput, SamplingParams
from spanflow.engine.vllm.scheduler import SpanScheduler
from spanflow.engine.vllm.state import SpanRequest


def reads(request: Request, pool: BlockPool, unknown: Any, scheduler: AsyncScheduler, state: SpanRequest) -> None:
    print(request.num_tokens, pool.blocks, state.exact, state.request.request_id, unknown.shape)
    print(request.num_encoder_inputs) #!
    print(state.request.num_encoder_inputs) #!
    print([r for r in scheduler.running][0].use_structured_output) #!
    print(getattr(pool, "metrics_collector", None)) #!
    print(hasattr(request, "num_tokens"))
    print(hasattr(request, str(unknown))) #!
    print(pool.sampling_params) #!
    print(unknown.block_hashes) #!
    manager = scheduler.kv_cache_manager
    manager.block_pool.get_new_blocks(1) #!
    manager.allocate_slots(request, 1, delay_cache_blocks=True)
    manager.allocate_slots(request, 1, num_lookahead_tokens=2) #!
    SamplingParams(max_tokens=1)
    SamplingParams(top_k=3) #!
    print(module.RequestStatus) #!


def gives() -> RequestOutput:
    raise NotImplementedError


def reads_what_is_given() -> None:
    print(gives().finished)
    print(gives().metrics) #!


class Ours(SpanScheduler):
    def schedule_all(self) -> None:
        self.mine = 1
        self.add_plain(self.running[0])
        print(self.policy) #!
        self.policy = None #!
        super().set_pause_state(0) #!


def sets(request: Request, pool: BlockPool, unknown: Any, scheduler: AsyncScheduler, state: SpanRequest) -> None:
    request.priority = 3
    state.request.num_computed_tokens += 1
    state.exact = ""
    request.num_preemptions += 1 #!
    request.status = 0 #!
    state.request.status: int = 0 #!
    scheduler.vllm_config.cache_config.block_size = 7 #!
    del request.prefill_stats #!
    for request.num_prompt_tokens in (1, 2): #!
        pass
    (pool.blocks, state.exact) = [], "" #!
    unknown.priority = 3 #!
    setattr(request, "priority", 3) #!
    builtins.setattr(request, "priority", 3) #!
    vars(pool)["touch"] = None #!
    pool.__dict__["touch"] = None #!
    object.__setattr__(pool, "touch", None) #!


def replaces(pool: BlockPool) -> None:
    BlockPool.touch = None #!
    kind = BlockPool
    kind.touch = None #!
    type(pool).touch = None #!
    module.Request = None #!
    contract.check = None #!
    AsyncScheduler.schedule.__code__ = None #!
    print(patch.object) #!
"""


def test_vllm_is_imported_through_the_contract_only() -> None:
    """By nobody else in the whole package."""
    importers = {
        path.relative_to(FOLDER).as_posix() if path.is_relative_to(FOLDER) else str(path)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if ((node.module if isinstance(node, ast.ImportFrom) else alias.name) or "").partition(".")[0] == "vllm"
    }
    assert importers == IMPORTERS


def test_each_variable_of_the_environment_that_we_name_is_vllms() -> None:
    """One that vLLM has renamed would be set in vain, and nobody would say so."""
    from vllm import envs

    sources = [path.read_text() for path in FOLDER.parents[1].rglob("*.py")]
    named = {name for source in sources for name in re.findall(r"\bVLLM_[A-Z0-9_]+", source)}
    assert {"VLLM_CPU_NUM_OF_RESERVED_CPU", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_STREAM"} <= named
    assert named - envs.environment_variables.keys() == set()


def test_our_lines_are_counted() -> None:
    """How much code it takes: printed with -rP, held to a bound so that growth is a decision."""
    lines = sum(
        1
        for path in SOURCES
        for line in path.read_text().splitlines()
        if line.strip() and not line.strip().startswith("#")
    )
    print(f"engine/vllm: {lines} lines in {len(SOURCES)} files")
    assert 500 < lines < 2800


def is_listed(use: Any, *tables: dict[Any, str]) -> bool:
    """Whether a table has a use's name under its owner, or under a base or subclass of it."""
    return any(
        use.name in names.split()
        for table in tables
        for owner, names in table.items()
        if owner is use.owner or are_related(owner, use.owner)
    )


def are_related(one: Any, other: Any) -> bool:
    return one in getattr(other, "__mro__", ()) or other in getattr(one, "__mro__", ())


def is_wrong(use: Any) -> bool:
    """Whether a use is neither in the contract nor of what is known to be no part of vLLM."""
    from spanflow.engine.vllm import contract

    match use.how:
        case "read" if use.owner is None:
            return use.name not in " ".join(OTHERS.values()).split()
        case "read":
            return not is_listed(use, contract.NAMES, contract.INSTANCE_NAMES) and not use.name.startswith("__")
        case "keyword":
            return not is_listed(use, contract.PARAMETERS)
        case "set":
            return not is_listed(use, contract.ASSIGNED)
        case _:
            return True


def overridden() -> Iterator[tuple[type, type, str]]:
    """Our classes, the class of vLLM that each extends, and each name of it that ours defines again."""
    for path in SOURCES:
        module = importlib.import_module(f"spanflow.engine.vllm.{path.stem}")
        for ours in vars(module).values():
            if isinstance(ours, type) and ours.__module__ == module.__name__:
                for base in ours.__mro__:
                    if base.__module__.split(".")[0] == "vllm":
                        yield from (
                            (ours, base, n)
                            for n in vars(ours)
                            if n in vars(base) and n[:2] != "__" and n != "_abc_impl"
                        )


@cache
def begin_early() -> tuple[ProcessPoolExecutor, Future[bytes]]:
    """Begin to look for the uses in our sources and in what is planted, which takes most of a minute.

    mypy has a process of its own: it leaves millions of objects behind, and each later collection of garbage would walk
    through them.
    """
    from vllm_uses import pickled_uses

    pool = ProcessPoolExecutor(1, get_context("spawn"))
    return pool, pool.submit(pickled_uses, PLANTED)


@pytest.fixture(scope="module")
def uses() -> list[Any]:
    """What was found."""
    pool, found = begin_early()
    with pool:
        uses: list[Any] = pickle.loads(found.result())
    return uses


@pytest.mark.vllm
@pytest.mark.slow
class TestUses:
    """Every name that our sources read from, set on or pass to what is vLLM's, by type."""

    def test_planted_violations_are_found(self, uses: list[Any]) -> None:
        marked = {number for number, line in enumerate(PLANTED.splitlines(), 1) if line.endswith("#!")}
        found = {use.line for use in uses if use.module == "planted" and is_wrong(use)}
        assert found == marked

    def test_every_name_is_listed_and_nothing_else_is_set(self, uses: list[Any]) -> None:
        ours = [use for use in uses if use.module != "planted"]
        # The contract looks names up by design; what it sets is looked at as everywhere else.
        wrong = [use for use in ours if is_wrong(use) and (use.how != "read" or use.module[-9:] != ".contract")]
        assert sorted(map(str, wrong)) == []
        assert len({use.module for use in ours}) > 15

    def test_nothing_is_listed_that_is_not_used(self, uses: list[Any]) -> None:
        from spanflow.engine.vllm import contract

        def idle(table: dict[Any, str], *hows: str) -> list[str]:
            ours = [u for u in uses if u.module != "planted" and u.module[-9:] != ".contract" and u.how in hows]
            return [
                f"{owner.__qualname__}.{name}"
                for owner, names in table.items()
                for name in names.split()
                if not any(u.name == name and is_listed(u, {owner: name}) for u in ours)
            ]

        hooks = {f"{base.__qualname__}.{name}" for _, base, name in overridden()}
        assert set(idle(contract.NAMES, "read", "set")) - hooks == set()
        assert idle(contract.INSTANCE_NAMES, "read", "set") == []
        assert idle(contract.ASSIGNED, "set") == []
        arguments = {f"AsyncEngineArgs.{name}" for name in engine_arguments()}
        assert set(idle(contract.PARAMETERS, "keyword")) - arguments == set()


def engine_arguments() -> set[str]:
    """The engine arguments that our sources name as keys."""
    from spanflow.engine.vllm.contract import AsyncEngineArgs

    words = {
        node.value
        for path in SOURCES
        if path.name != "contract.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return words & {field.name for field in fields(AsyncEngineArgs)}


@pytest.mark.vllm
class TestInstalled:
    """Against the vLLM that is installed here."""

    def test_all_names_are_there(self) -> None:
        from spanflow.engine.vllm import contract

        contract.check()

    def test_a_missing_name_and_a_wrong_version_are_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from spanflow import installing
        from spanflow.engine.vllm import contract
        from spanflow.errors import EngineUnavailable

        monkeypatch.setitem(contract.NAMES, contract.BlockPool, "touch no_such_name")
        with pytest.raises(EngineUnavailable, match=r"gone: BlockPool\.no_such_name.*engine='oracle'"):
            contract.check()
        monkeypatch.undo()
        monkeypatch.setattr(installing, "vllm_version", lambda: "0.99.1")
        with pytest.raises(EngineUnavailable, match=r"vLLM 0\.99\.1 is installed; spans were built for 0\.32 up to"):
            contract.check()

    async def test_a_version_that_cannot_even_be_imported_is_named(
        self, model_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from spanflow import installing
        from spanflow.engine.vllm import client
        from spanflow.errors import EngineUnavailable

        def gone() -> None:
            raise ImportError("cannot import name 'AsyncScheduler'")

        monkeypatch.setattr(client, "_import", gone)
        for found, said in (("0.99.1", True), ("0.32.4", False), ("unknown", False)):
            for module in (installing, client):
                monkeypatch.setattr(module, "vllm_version", lambda found=found: found)
            with pytest.raises(EngineUnavailable, match="cannot import name 'AsyncScheduler'") as caught:
                await client.VllmEngine.start(str(model_dir))
            assert ("0.99.1 is installed; spans were built for 0.32 up to" in str(caught.value)) == said

    def test_each_class_that_lost_any_of_its_names_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One name at a time, of classes and of parameters."""
        from spanflow.engine.vllm import contract
        from spanflow.errors import EngineUnavailable

        for table in (contract.NAMES, contract.PARAMETERS, contract.INSTANCE_NAMES):
            for owner, names in list(table.items()):
                if table is contract.INSTANCE_NAMES and owner.__name__ not in {"Request", "RequestOutput"}:
                    continue  # of an engine that runs: see the test below
                for name in names.split():
                    with monkeypatch.context() as patch:
                        patch.setitem(table, owner, names.replace(name, f"{name}_of_another_version"))
                        with pytest.raises(EngineUnavailable, match=f"{name}_of_another_version"):
                            contract.check()

    def test_a_scheduler_that_lost_any_of_its_names_is_refused(
        self, model_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By the real scheduler, when it starts; a core and a client where one is made of them."""
        from symbolic_engine import SymbolicEngine

        from spanflow.engine.vllm import contract
        from spanflow.errors import EngineUnavailable

        scheduler = SymbolicEngine(model_dir).scheduler
        clients = [object.__new__(kind) for kind in (contract.AsyncLLM, contract.LLMEngine)]
        core, inside = object.__new__(contract.InprocClient), object.__new__(contract.EngineCore)
        inside.scheduler, core.engine_core = scheduler, inside
        for client in clients:
            client.vllm_config, client.model_config = scheduler.vllm_config, scheduler.vllm_config.model_config
        clients[0].output_handler, clients[1].engine_core = None, core
        checks = [(contract.check_scheduler, scheduler), *((contract.check_client, client) for client in clients)]
        for check, checked in checks:
            check(checked)
        refused = []
        for owner, names in list(contract.INSTANCE_NAMES.items()):
            for name in names.split():
                with monkeypatch.context() as patch:
                    patch.setitem(contract.INSTANCE_NAMES, owner, names.replace(name, f"{name}_of_another_version"))
                    for check, checked in checks:
                        with suppress(EngineUnavailable):
                            check(checked)
                            continue
                        refused.append((owner, name))
        made_by_check = {"Request", "RequestOutput"}
        missed = [
            f"{owner.__name__}.{name}"
            for owner, names in contract.INSTANCE_NAMES.items()
            for name in names.split()
            if (owner, name) not in refused and owner.__name__ not in made_by_check
        ]
        assert missed == []

    def test_what_is_defined_again_is_listed(self) -> None:
        """A hook that vLLM renamed would never be called."""
        from spanflow.engine.vllm import contract

        hooks = list(overridden())
        unlisted = {
            f"{base.__name__}.{name}"
            for _, base, name in hooks
            if not is_listed(SimpleNamespace(owner=base, name=name), contract.NAMES, contract.INSTANCE_NAMES)
        }
        assert unlisted == set()
        assert {ours.__name__ for ours, _, _ in hooks} == {"SpanConnector", "SpanScheduler", "SpanStats", "StepResult"}

    def test_the_engine_arguments_that_we_name_are_listed(self) -> None:
        from spanflow.engine.vllm import contract

        # 'enable_dbo' is read from a configuration, too.
        assert engine_arguments() - {"enable_dbo"} == set(contract.PARAMETERS[contract.AsyncEngineArgs].split())

    def test_what_is_defined_again_has_the_same_parameters(self) -> None:
        """So a changed signature is seen here first."""
        for ours, base, name in overridden():
            method = getattr(ours, name)
            if not callable(method):
                continue
            mine = [p for p in inspect.signature(method).parameters if p not in {"args", "kwargs"}]
            theirs = list(inspect.signature(getattr(base, name)).parameters)
            assert mine == theirs[: len(mine)], f"{ours.__name__}.{name}"
