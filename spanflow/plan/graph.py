"""The graph of generations: which run, what waits for which, and whose KV is kept for whom."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import networkx as nx

from spanflow.errors import QueryError
from spanflow.ir.fidelity import EXACT, Rung
from spanflow.ir.nodes import Chat, Commute, Generate, Node
from spanflow.ir.walk import ROOT, child_path, children
from spanflow.lowering.conversation import Generated
from spanflow.lowering.prompt import SpanPrompt

#: A generation: the path of its generate in the tree, and the number of the sample.
Key: TypeAlias = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Candidate:
    """Where a generation stands in a commute, from which it may be dropped.

    `operand` is the path of the operand that goes with it. `group` is the path of the commute that loses it (the
    outermost where commutes stand directly in one another), and `num_operands` how many it has, samples counted.
    """

    operand: str
    group: str
    num_operands: int


@dataclass(frozen=True, slots=True)
class Generation:
    """One node of a plan: one answer to ask for.

    `seed` is None for a greedy one. `consumers` are the generations that read the answer; `is_leased` says that they
    take its KV over as a span. `candidate` is None where its reader cannot do without it.
    """

    path: str
    node: Generate
    index: int
    seed: int | None
    consumers: tuple[Key, ...]
    is_leased: bool
    candidate: Candidate | None

    @property
    def key(self) -> Key:
        """Its name in the plan."""
        return self.path, self.index


@dataclass(frozen=True, slots=True)
class Plan:
    """All generations of a query, frozen before anything runs.

    `graph` has one node a generation, named by its key, with the attribute `generation`, and edges from inner to
    outer ones. `order` is the order of submission. `inner` maps the path of each generate to those directly in it.
    """

    root: Generate
    graph: nx.DiGraph
    order: tuple[Generation, ...]
    inner: Mapping[str, tuple[str, ...]]

    def samples(self, path: str) -> tuple[Generation, ...]:
        """The generations of the generate at a path, by sample."""
        num_samples = self._generation((path, 0)).node.n
        return tuple(self._generation((path, index)) for index in range(num_samples))

    def not_yet(self, path: str) -> dict[str, tuple[Generated, ...]]:
        """Answers of no words in the places of those that the generate at a path reads, to lower it before they are
        there."""
        silence = Generated(SpanPrompt((0,)), (), "")
        return {inner: (silence,) * len(self.samples(inner)) for inner in self.inner[path]}

    def num_inner(self, key: Key) -> int:
        """How many answers a generation waits for."""
        return int(self.graph.in_degree(key))

    def stages(self) -> tuple[tuple[Generation, ...], ...]:
        """The generations by stage: all of one stage can run at once when the stages before it have run."""
        return tuple(tuple(map(self._generation, stage)) for stage in nx.topological_generations(self.graph))

    def _generation(self, key: Key) -> Generation:
        found: Generation = self.graph.nodes[key]["generation"]
        return found


def build_plan(root: Generate, *, rung: Rung | None, seed: int) -> Plan:
    """The plan of a bound and verified tree: generates at any depth, and nothing else that asks a model.

    `rung` is the session's, for commutes that name none; None where it names none either. `seed` is what the seeds of
    generates derive from that have none of their own. Raises QueryError for a chat, which has to be rewritten as a
    generate before.
    """
    places = _find(root, rung)
    readers = {place.path: place.reader for place in places}
    nodes = {place.path: place.node for place in places}
    inner: defaultdict[str, list[str]] = defaultdict(list)
    graph = nx.DiGraph()
    for place in places:
        consumers: tuple[Key, ...] = ()
        is_leased = False
        if place.reader is not None:
            inner[place.reader].append(place.path)
            consumers = tuple((place.reader, index) for index in range(nodes[place.reader].n))
            # Another adapter's KV is of no use to the reader.
            is_leased = place.is_taken and place.node.model == nodes[place.reader].model
        for index in range(place.node.n):
            generation = Generation(
                place.path,
                place.node,
                index,
                _seed(place.node, seed, place.path, index),
                consumers,
                is_leased,
                place.candidate,
            )
            graph.add_node(generation.key, generation=generation)
            graph.add_edges_from((generation.key, consumer) for consumer in consumers)
    rank = {path: number for number, path in enumerate(readers)}
    names = nx.lexicographical_topological_sort(graph, key=lambda key: (rank[key[0]], key[1]))
    order = tuple(graph.nodes[key]["generation"] for key in names)
    plan = Plan(root, nx.freeze(graph), order, MappingProxyType({path: tuple(inner[path]) for path in readers}))
    _check(plan)
    return plan


class _Place(NamedTuple):
    """A generate where it stands, who reads it, and how."""

    path: str
    node: Generate
    reader: str | None
    is_taken: bool
    candidate: Candidate | None


class _Commutes(NamedTuple):
    """The commutes directly above a node: what they say together, as lowering reads them."""

    rung: Rung | None
    has_spans: bool
    group: str
    num_operands: int


class _Scope(NamedTuple):
    """What is known above a node, up to the generate that reads it."""

    reader: str | None = None
    is_in_span: bool = False
    is_taken: bool = False
    candidate: Candidate | None = None
    commutes: _Commutes | None = None


def _find(root: Generate, rung: Rung | None) -> list[_Place]:
    """All generates in reading order."""
    places: list[_Place] = []
    stack: list[tuple[str, Node, _Scope]] = [(ROOT, root, _Scope())]
    while stack:
        path, node, scope = stack.pop()
        below = [child_path(node, path, index) for index in range(len(children(node)))]
        match node:
            case Generate():
                places.append(_Place(path, node, scope.reader, scope.is_taken, scope.candidate))
                scopes = [_Scope(reader=path)]
            case Chat():
                raise QueryError(f"{path}: a chat is not planned as it is; rewrite it as a generate of a seq first")
            case Commute():
                scopes = _within_commute(node, path, below, scope, rung)
            case _:
                scopes = [scope._replace(commutes=None)] * len(below)
        stack.extend(reversed(list(zip(below, children(node), scopes, strict=True))))
    return places


def _within_commute(commute: Commute, path: str, below: list[str], scope: _Scope, rung: Rung | None) -> list[_Scope]:
    """The scopes of the operands of a commute: which of them become spans follows the rules of lowering."""
    above = scope.commutes
    own = commute.rung or (above.rung if above else None)
    has_spans = bool(above and above.has_spans) or (not scope.is_in_span and (own or rung) != EXACT)
    is_taken = scope.is_taken
    if has_spans and not scope.is_in_span:
        is_taken = own != EXACT
    group = above.group if above else path
    num_operands = above.num_operands if above else _num_operands(commute)
    commutes = _Commutes(own, has_spans, group, num_operands)
    return [
        # A commute directly in a commute is no operand: its operands are.
        scope._replace(commutes=commutes)
        if isinstance(operand, Commute)
        else _Scope(
            scope.reader,
            scope.is_in_span or has_spans,
            is_taken,
            Candidate(name, group, num_operands),
        )
        for name, operand in zip(below, commute.operands, strict=True)
    ]


def _num_operands(commute: Commute) -> int:
    number = 0
    stack: list[Node] = list(commute.operands)
    while stack:
        node = stack.pop()
        match node:
            case Commute(operands=operands):
                stack += operands
            case Generate(n=n):
                number += n
            case _:
                number += 1
    return number


def _seed(node: Generate, session: int, path: str, index: int) -> int | None:
    """The seed of one sample; None where nothing is drawn."""
    if node.sampling.temperature == 0:
        return None
    own = session if node.sampling.seed is None else node.sampling.seed
    digest = blake2b(f"{own}|{path}|{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # 63 bits: carried as a signed number


def _check(plan: Plan) -> None:
    """Assert what the runner relies on."""
    graph: Any = plan.graph
    assert nx.is_frozen(graph)
    assert [key for key in graph if not graph.out_degree(key)] == [(ROOT, index) for index in range(plan.root.n)]
    position = {generation.key: number for number, generation in enumerate(plan.order)}
    assert len(position) == len(graph)
    counted = Counter(generation.path for generation in plan.order)
    for generation in plan.order:
        assert counted[generation.path] == generation.node.n
        assert set(graph.successors(generation.key)) == set(generation.consumers)
        assert all(position[consumer] > position[generation.key] for consumer in generation.consumers)
