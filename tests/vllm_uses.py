"""What of vLLM our sources use, and what of it they set: found by type, not by the names of variables.

mypy is asked for the type of everything that a name is read from or set on. It reads the modules of vLLM that the
contract imports from; torch, transformers and the rest of vLLM are Any to it. So a receiver is ours or the standard
library's, or a class of vLLM, or nobody knows; only the first kind needs no listing.
"""

from __future__ import annotations

import ast
import importlib
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from mypy import build
from mypy.main import process_options
from mypy.nodes import ARG_NAMED, CallExpr, Expression, MemberExpr, MypyFile, RefExpr, SuperExpr, TypeInfo
from mypy.server.subexpr import get_subexpressions
from mypy.types import (
    CallableType,
    FunctionLike,
    Instance,
    LiteralType,
    NoneType,
    TupleType,
    TypedDictType,
    TypeType,
    TypeVarType,
    UnionType,
    get_proper_type,
)

import spanflow

ROOT = Path(spanflow.__file__).parents[1]
FOLDER = ROOT / "spanflow" / "engine" / "vllm"
CONTRACT = FOLDER / "contract.py"
PACKAGE = "spanflow.engine.vllm"

#: Modules of vLLM whose types are read besides those that the contract imports from: what leads from one to another.
_BETWEEN = (
    "vllm",
    "vllm.config.*",
    "vllm.engine.arg_utils",
    "vllm.v1.core.*",
    "vllm.v1.core.sched.*",
    "vllm.v1.engine.core",
)

#: Ways round an assignment: no code of ours mentions them.
BACK_DOORS = {
    *("setattr", "delattr", "vars", "globals", "locals", "exec", "eval", "modules", "patch", "monkeypatch"),
    *("__dict__", "__setattr__", "__delattr__", "__class__", "__bases__", "__code__", "attrgetter", "methodcaller"),
}


@dataclass(frozen=True)
class Use:
    """A name that is not ours. `how`: 'read', 'set' on an instance, 'replaced' on a class or module, 'keyword' of a
    call, 'back door'. `owner` is the class of vLLM, or what is called; None where no type says."""

    module: str
    line: int
    how: str
    owner: Any
    name: str

    def __str__(self) -> str:
        owner = getattr(self.owner, "__qualname__", self.owner)
        return f"{self.module}:{self.line}: {self.how} {owner}.{self.name}"


def imports(path: Path) -> dict[str, str]:
    """Names that a file imports from vLLM, each with its module."""
    return {
        alias.asname or alias.name: node.module
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm"
        for alias in node.names
    }


def find_uses(planted: str) -> list[Use]:
    """All uses in our sources, and in `planted`, the text of a module of that name."""
    with NamedTemporaryFile("w", suffix=".ini") as config:
        config.write(_config())
        config.flush()
        sources, options = process_options(["--config-file", config.name, "-p", PACKAGE])
    options.export_types = options.preserve_asts = True
    options.incremental = False
    options.mypy_path = [str(ROOT)]
    result = build.build([*sources, build.BuildSource("planted.py", "planted", planted)], options)
    uses = []
    for module, state in result.graph.items():
        if module == "planted" or module.startswith(f"{PACKAGE}."):
            text = planted if module == "planted" else Path(state.path or "").read_text()
            assert state.tree is not None
            uses += list(_Reader(module, ast.parse(text), state.tree, result.types).uses())
    return uses


def pickled_uses(planted: str) -> bytes:
    """The same for another process, to be read there where vLLM may be imported: not on a thread beside any test, which
    has filters of warnings of its own."""
    return pickle.dumps(find_uses(planted))


def _config() -> str:
    followed = sorted({*imports(CONTRACT).values(), *_BETWEEN})
    skipped = "".join(f"[mypy-{name}.*]\nfollow_imports = skip\n" for name in ("torch", "transformers", "vllm"))
    read = "".join(f"[mypy-{name}]\nfollow_imports = silent\nignore_errors = true\n" for name in followed)
    return f"[mypy]\npython_version = 3.11\nignore_missing_imports = true\ncheck_untyped_defs = true\n{skipped}{read}"


class _Reader:
    """One module: its syntax says where names are read and set, mypy on what."""

    def __init__(self, module: str, tree: ast.Module, typed: MypyFile, types: dict[Expression, Any]) -> None:
        self.module = module
        self.tree = tree
        self.types = types
        expressions = get_subexpressions(typed)
        self.typed = {(e.line, e.column, e.end_line, e.end_column): e for e in expressions}
        self.calls = [e for e in expressions if isinstance(e, CallExpr)]

    def uses(self) -> Iterator[Use]:
        for node in _without_annotations(self.tree):
            if isinstance(node, ast.Attribute):
                how = "read" if isinstance(node.ctx, ast.Load) else "set"
                found = self._typed(node)
                if isinstance(found, SuperExpr):
                    yield from self._of_classes(node, how, node.attr, _vllm_bases(found.info, node.attr))
                else:
                    yield from self._of_receiver(node, how, node.attr, getattr(found, "expr", None))
            elif isinstance(node, ast.Name | ast.alias):
                name = node.id if isinstance(node, ast.Name) else node.name
                if name in BACK_DOORS:
                    yield Use(self.module, node.lineno, "back door", None, name)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                yield from self._by_string(node, node.func.id)
        for call in self.calls:
            yield from self._keywords(call)

    def _typed(self, node: ast.expr) -> Expression | None:
        return self.typed.get((node.lineno, node.col_offset, node.end_lineno, node.end_col_offset))

    def _by_string(self, node: ast.Call, function: str) -> Iterator[Use]:
        """`getattr` and `hasattr`, which take a name as a string."""
        if function not in {"getattr", "hasattr"}:
            return
        match node.args:
            case [receiver, ast.Constant(value=str(name)), *_]:
                yield from self._of_receiver(node, "read", name, self._typed(receiver))
            case _:
                yield Use(self.module, node.lineno, "read", None, f"{function} of a name that is computed")

    def _of_receiver(self, node: ast.expr, how: str, name: str, receiver: Expression | None) -> Iterator[Use]:
        if name in BACK_DOORS:
            yield Use(self.module, node.lineno, "back door", None, name)
        whole = receiver.node if isinstance(receiver, RefExpr) else None
        if isinstance(whole, MypyFile):
            if how == "set":
                yield Use(self.module, node.lineno, "replaced", whole.fullname, name)
            elif whole.fullname.split(".")[0] == "vllm":
                yield Use(self.module, node.lineno, how, None, name)
            return
        kinds: list[Any] = [None]
        if receiver is not None:
            kinds = [whole] if isinstance(whole, TypeInfo) else _kinds(self.types.get(receiver))
        for kind in kinds:
            if kind is None:
                yield Use(self.module, node.lineno, how, None, name)
            elif isinstance(kind, TypeInfo):  # the class itself
                bases = _vllm_bases(kind, name)
                yield from self._of_classes(node, "replaced" if how == "set" else how, name, bases)
            else:
                yield from self._of_classes(node, how, name, _vllm_bases(kind.type, name))

    def _of_classes(self, node: ast.expr, how: str, name: str, classes: list[Any]) -> Iterator[Use]:
        for owner in classes:
            yield Use(self.module, node.lineno, how, owner, name)

    def _keywords(self, call: CallExpr) -> Iterator[Use]:
        """Names of parameters of what is vLLM's."""
        names = [n for n, kind in zip(call.arg_names, call.arg_kinds, strict=True) if kind == ARG_NAMED and n]
        callee = call.callee
        if not names:
            return
        owners: list[Any] = []
        if isinstance(callee, RefExpr) and callee.fullname.split(".")[0] == "vllm":
            owners = [_load(callee.fullname)]
        elif isinstance(callee, RefExpr) and isinstance(callee.node, TypeInfo):  # of ours: is the signature vLLM's?
            maker = next((base for base in callee.node.mro if "__init__" in base.names), None)
            owners = [_load(maker.fullname)] if maker and maker.fullname.split(".")[0] == "vllm" else []
        elif isinstance(callee, SuperExpr):
            owners = [getattr(base, callee.name) for base in _vllm_bases(callee.info, callee.name)]
        elif isinstance(callee, MemberExpr):
            for kind in _kinds(self.types.get(callee.expr)):
                if isinstance(kind, Instance):
                    owners += [getattr(b, callee.name) for b in _vllm_bases(kind.type, callee.name)]
        for owner in owners:
            for name in names:
                yield Use(self.module, call.line, "keyword", owner, name)


def _kinds(found: Any) -> list[Any]:
    """What a type may be: an Instance, a TypeInfo (a class itself), or None where nobody knows."""
    match get_proper_type(found):
        case UnionType(items=items):
            return [kind for item in items for kind in _kinds(item)]
        case NoneType():
            return []
        case Instance() as instance:
            return [instance]
        case TypeType(item=item):
            return [kind.type if isinstance(kind, Instance) else kind for kind in _kinds(item)]
        case FunctionLike() as function if function.is_type_obj():
            return [function.type_object()]
        case CallableType() | LiteralType() | TypedDictType() as other:
            return [other.fallback]
        case TupleType(partial_fallback=fallback):
            return [fallback]
        case TypeVarType(upper_bound=bound):
            return _kinds(bound)
    return [None]


def _vllm_bases(info: TypeInfo, name: str) -> list[Any]:
    """The class of vLLM that a name of a class belongs to: itself, or a base of ours; [None] where nobody knows."""
    defined = [base for base in info.mro if name in base.names]
    of_vllm = [base for base in info.mro if base.fullname.split(".")[0] == "vllm"]
    if of_vllm and (of_vllm[0] is info or not defined or any(base in of_vllm for base in defined)):
        return [_load(of_vllm[0].fullname)]
    return [] if defined else [None]


@cache
def _load(fullname: str) -> Any:
    """A class or function by its full name."""
    module, _, name = fullname.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _without_annotations(tree: ast.Module) -> Iterator[ast.AST]:
    """All nodes that are run."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        yield node
        for field, value in ast.iter_fields(node):
            if field not in {"annotation", "returns"}:
                todo += [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, ast.AST)]
