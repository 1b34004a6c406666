"""vLLM is extended, not changed: no symbol of it is reassigned, and every name used stands in the contract."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import spanflow

FOLDER = Path(spanflow.__file__).parent / "engine" / "vllm"
SOURCES = sorted(FOLDER.glob("*.py"))

#: Where vLLM may be imported.
IMPORTERS = {"contract.py"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_vllm_is_imported_through_the_contract_only(path: Path) -> None:
    names = [
        node.module if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]
    imported = {name for name in names if name and (name == "vllm" or name.startswith("vllm."))}
    assert not imported or path.name in IMPORTERS


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_symbol_of_vllm_is_reassigned(path: Path) -> None:
    """No attribute of an imported name is a target of an assignment, a deletion or setattr."""
    tree = ast.parse(path.read_text())
    imported = {
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    targets: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.Delete):
            targets += node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets.append(node.target)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"setattr", "delattr"}:
            targets.append(ast.Attribute(node.args[0], "x", ast.Store()))
    changed = [
        ast.unparse(target)
        for target in targets
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id in imported
    ]
    assert changed == []


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


@pytest.mark.vllm
class TestInstalled:
    """Against the vLLM that is installed here."""

    def test_all_names_are_there(self) -> None:
        from spanflow.engine.vllm import contract

        contract.check()

    def test_a_missing_name_and_a_wrong_version_are_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from spanflow.engine.vllm import contract
        from spanflow.errors import EngineUnavailable

        monkeypatch.setitem(contract.NAMES, contract.BlockPool, ("touch", "no_such_name"))
        with pytest.raises(EngineUnavailable, match=r"gone: BlockPool\.no_such_name.*engine='oracle'"):
            contract.check()
        monkeypatch.undo()
        monkeypatch.setattr(contract, "version", lambda: "0.99.1")
        with pytest.raises(EngineUnavailable, match=r"vLLM 0\.99\.1 is installed; spans were built for 0\.32"):
            contract.check()

    def test_every_attribute_used_is_listed(self) -> None:
        """What is read from objects of vLLM in our code stands in the contract's tables, private names too."""
        from spanflow.engine.vllm import contract

        listed = {name for names in contract.NAMES.values() for name in names}
        listed |= {*contract.SCHEDULER_ATTRIBUTES, *contract.REQUEST_ATTRIBUTES, *contract.POOL_ATTRIBUTES}
        listed |= {*contract.MANAGER_ATTRIBUTES, *contract.COORDINATOR_ATTRIBUTES, *contract.TABLE_ATTRIBUTES}
        listed |= {*contract.BLOCK_ATTRIBUTES, *contract.QUEUE_ATTRIBUTES, *contract.OUTPUT_ATTRIBUTES}
        listed |= {*contract.CLIENT_ATTRIBUTES, *contract.FREE_QUEUE_ATTRIBUTES}
        owners = {
            "scheduler": contract.AsyncScheduler,
            "request": contract.Request,
            "parent": contract.Request,
            "child": contract.Request,
            "pool": contract.BlockPool,
            "manager": contract.KVCacheManager,
            "block": contract.KVCacheBlock,
        }
        ours = {"spans", "add_plain", "audit"}
        unlisted = set()
        for path in SOURCES:
            if path.name in IMPORTERS | {"backend.py", "client.py", "support.py"}:
                continue  # these read our own requests, and vLLM's configuration
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute):
                    base = node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", "")
                    if base in owners and node.attr not in listed | ours:
                        unlisted.add(f"{path.name}: {base}.{node.attr}")
        assert sorted(unlisted) == []

    def test_the_scheduler_overrides_what_exists(self) -> None:
        """Each method that we override has the base's parameters, so a changed signature is seen here first."""
        from spanflow.engine.vllm.contract import AsyncScheduler
        from spanflow.engine.vllm.scheduler import SpanScheduler

        for name, method in vars(SpanScheduler).items():
            base = getattr(AsyncScheduler, name, None)
            if base is None or not callable(method) or name == "__init__":
                continue
            ours = [p for p in inspect.signature(method).parameters if p not in {"args", "kwargs"}]
            theirs = list(inspect.signature(base).parameters)
            assert ours == theirs[: len(ours)], name
