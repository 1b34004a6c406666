"""What a query becomes and what it would cost, before anything runs: data first, text second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, get_args

from spanflow.compile import Compiled
from spanflow.engine.protocol import Prediction, SpanStatus
from spanflow.errors import QueryError
from spanflow.ir.draw import tree_mermaid, tree_svg, tree_text
from spanflow.ir.fidelity import Rung
from spanflow.ir.nodes import Node
from spanflow.lowering.lower import Lowered, lower
from spanflow.lowering.template import ChatTemplate
from spanflow.plan.cost import Cost, bound
from spanflow.plan.graph import Generation, Plan
from spanflow.runner.options import RunOptions


@dataclass(frozen=True, slots=True)
class Expected:
    """Tokens of a prompt as a running engine stands: `cached`, in its KV as prefix or to be moved, `computed` with the
    prompt (they add up to it), and `internal`: computed beside it, for spans that are missing."""

    cached: int
    computed: int
    internal: int


@dataclass(frozen=True, slots=True)
class ExplainedSpan:
    """A span of a prompt: tokens `[start, end)`, the path of its operand, and how it is computed.

    `num_anchor_tokens` counts the tokens that it is computed behind. `status` is what its report would say if the
    prompt ran now, or None where no engine told.
    """

    path: str
    start: int
    end: int
    rung: Rung
    anchor: Literal["header", "head", "none", "prompt"]
    num_anchor_tokens: int
    kind: Literal["text", "generated"]
    status: SpanStatus | None = None


@dataclass(frozen=True, slots=True)
class ExplainedGeneration:
    """One generate, with what is known of its prompt.

    `num_inner` counts the answers that its prompt waits for: then `num_tokens`, `spans` and the costs are of what is
    known, and `num_tokens` is None where nothing can be said (`notes` say why). `is_leased`: its answer's KV is kept
    for the prompt that reads it. `all_hit` and `all_new` are bounds: the costs when all spans are there, and when none
    is; prefix hits save more, and are not counted. `expected` is what a running engine would find if the prompt ran
    now, before all others; None where no engine runs, or it does not tell (`notes` say why, where there is a reason).
    """

    path: str
    stage: int
    num_samples: int
    seeds: tuple[int, ...]
    max_tokens: int
    num_inner: int
    is_leased: bool
    num_tokens: int | None
    spans: tuple[ExplainedSpan, ...]
    all_hit: Cost | None
    all_new: Cost | None
    expected: Expected | None
    num_tokens_differing: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExplainedPass:
    """What one pass of the optimizer did: which rules fired how often, the tree that came out, and what it has to say.

    `tree` is empty where the pass changed nothing.
    """

    name: str
    why: str
    rules: Mapping[str, int]
    tree: str
    notes: tuple[str, ...]


#: Which part of an explanation: the tree after each pass, the spans of each prompt, or both.
Stage: TypeAlias = Literal["passes", "spans", "all"]
_OF_STAGE: Mapping[str, tuple[str, ...]] = {
    "passes": ("passes",),
    "spans": ("tree", "generations", "window", "spans_unsupported", "is_engine_asked"),
}


_BOUNDS = "Costs are bounds: {} which spans are there, and prefix hits, which save more, do not count."
_EXPECTED = (
    "'As it stands' is what the engine would find now, prefix hits too; the other costs are bounds without those."
)

#: Lines between nodes that Mermaid draws; with more it shows an error in place of the picture.
_MAX_EDGES = 500


@dataclass(frozen=True, slots=True)
class Explanation:
    """A query taken apart; `str()` of it is for people, and notebooks draw it.

    `root` is the query as it runs, after all `passes`, and `tree` its drawing. `window` is the model's, in tokens,
    where it is known. `spans_unsupported` says why the engine serves no spans; then all of it runs with full attention.
    `is_engine_asked`: an engine ran, and was asked what it would find of each prompt that it could take.
    """

    root: Node
    generations: tuple[ExplainedGeneration, ...]
    window: int | None
    spans_unsupported: str = ""
    passes: tuple[ExplainedPass, ...] = ()
    is_engine_asked: bool = False

    @property
    def tree(self) -> str:
        """The drawing of the query as it runs."""
        return tree_text(self.root)

    def mermaid(self) -> str:
        """The query as it runs, as a Mermaid flowchart."""
        return tree_mermaid(self.root)

    def to_dict(self, stage: Stage | None = None) -> dict[str, Any]:
        """Plain values for JSON, of one stage or of all. Raises QueryError for an unknown stage."""
        _check_stage(stage)
        plain: dict[str, Any] = {
            "tree": self.tree,
            "generations": [asdict(generation) for generation in self.generations],
            "window": self.window,
            "spans_unsupported": self.spans_unsupported,
            "is_engine_asked": self.is_engine_asked,
            "passes": [asdict(each) for each in self.passes],
        }
        for generation in plain["generations"]:
            for span in generation["spans"]:
                span["rung"] = str(Rung(**span["rung"]))
        return {name: plain[name] for name in _OF_STAGE.get(stage or "all", plain)}

    def describe(self, stage: Stage | None = None) -> str:
        """A stage as text; None is an overview. Raises QueryError for an unknown stage.

        'passes' shows each pass with the rules that fired and the tree where that changed, 'spans' the tree as it runs
        with the prompt of each generation.
        """
        _check_stage(stage)
        passes = [line for each in self.passes for line in _describe_pass(each)]
        match stage:
            case "passes":
                lines = passes
            case "spans":
                lines = [self.tree, "", *self._prompts()]
            case "all":
                lines = [*passes, "", self.tree, "", *self._prompts()]
            case _:
                found = [line for each in self.passes for line in _summary(each)]
                lines = [self.tree, "", *found, *[""] * bool(found), *self._prompts()]
        return "\n".join(lines)

    def _prompts(self) -> list[str]:
        lines = []
        if self.spans_unsupported:
            lines += [f"spans run with full attention: {self.spans_unsupported}", ""]
        for generation in self.generations:
            lines += [*_describe(generation, self.window), ""]
        if any(generation.expected for generation in self.generations):
            return [*lines, _EXPECTED]
        if any(generation.spans for generation in self.generations):
            why = "the engine did not tell" if self.is_engine_asked else "no engine was asked"
            return [*lines, _BOUNDS.format(why)]
        return lines[:-1]

    def __str__(self) -> str:
        return self.describe()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """What a notebook shows: a picture; Mermaid where it draws that, and the tree is not too large for it."""
        drawing = self.mermaid()
        mermaid = {"text/vnd.mermaid": drawing} if drawing.count(" --> ") <= _MAX_EDGES else {}
        return mermaid | {"image/svg+xml": tree_svg(self.root), "text/plain": str(self)}


def _check_stage(stage: str | None) -> None:
    known = get_args(Stage)
    if stage is not None and stage not in known:
        raise QueryError(
            f"explain: there is no stage {stage!r}; stages are {', '.join(known)}, and None is an overview"
        )


def _summary(each: ExplainedPass) -> list[str]:
    fired = _fired(each)
    return [*[f"pass {each.name}: {fired}"] * bool(fired), *(f"  {line}" for line in each.notes)]


def _describe_pass(each: ExplainedPass) -> list[str]:
    lines = [f"pass {each.name}: {_fired(each) or 'changed nothing'}", f"  {each.why}"]
    return [*lines, *(f"  {line}" for line in each.notes), *(f"  {line}" for line in each.tree.splitlines())]


def _fired(each: ExplainedPass) -> str:
    return ", ".join(f"{rule} x{count}" for rule, count in each.rules.items())


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a prompt before it runs: as lowered with nothing in the places of answers that are not there
    yet, or None, and what is to be said of it."""

    generation: Generation
    lowered: Lowered | None
    notes: tuple[str, ...]


def lower_known(plan: Plan, template: ChatTemplate, options: RunOptions) -> tuple[Known, ...]:
    """The prompt of each generate. Raises QueryError for one that cannot be lowered and waits for nothing."""
    return tuple(_lower_known(plan, each, template, options) for each in plan.order if each.index == 0)


def explain(
    compiled: Compiled,
    known: Sequence[Known],
    options: RunOptions,
    *,
    window: int | None,
    spans_unsupported: str = "",
    predictions: Mapping[str, Prediction | str] | None = None,
) -> Explanation:
    """Explain a compiled query with its lowered prompts.

    `predictions` are the engine's, by path, or what it says in place of one; None where no engine was asked.
    """
    plan = compiled.plan
    stages = {generation.path: number for number, stage in enumerate(plan.stages()) for generation in stage}
    explained = []
    for each in known:
        path = each.generation.path
        explained.append(_explain(plan, each, stages[path], options, window, (predictions or {}).get(path, "")))
    passes, is_asked = _explain_passes(compiled), predictions is not None
    return Explanation(compiled.tree, tuple(explained), window, spans_unsupported, passes, is_asked)


def _explain_passes(compiled: Compiled) -> tuple[ExplainedPass, ...]:
    return tuple(
        ExplainedPass(
            each.name,
            each.why,
            dict(each.rules),
            tree_text(each.root) if each.steps else "",
            tuple(each.notes()),
        )
        for each in compiled.passes
    )


def _explain(
    plan: Plan, known: Known, stage: int, options: RunOptions, window: int | None, word: Prediction | str
) -> ExplainedGeneration:
    prediction, why = (None, word) if isinstance(word, str) else (word, "")
    generation, lowered, notes = known.generation, known.lowered, known.notes
    node = generation.node
    num_inner = plan.num_inner(generation.key)
    prompt = None if lowered is None else lowered.prompt
    max_tokens = node.sampling.max_tokens or options.max_tokens
    if prompt is not None and window is not None:
        room = window - len(prompt)
        if room < (node.sampling.max_tokens or 1):
            notes += (f"{generation.path}: too long: {len(prompt)} tokens and {max_tokens} more of {window}",)
            why = ""  # it is this
        elif node.sampling.max_tokens is None:
            max_tokens = min(max_tokens, room)
    if why:
        notes += (f"the engine did not tell what it would find: {why}",)
    seeds = [sample.seed for sample in plan.samples(generation.path) if sample.seed is not None]
    return ExplainedGeneration(
        path=generation.path,
        stage=stage,
        num_samples=node.n,
        seeds=tuple(seeds),
        max_tokens=max_tokens,
        num_inner=num_inner,
        is_leased=generation.is_leased,
        num_tokens=None if prompt is None else len(prompt),
        spans=() if lowered is None else _spans(lowered, prediction),
        all_hit=None if prompt is None else bound(prompt, are_there=True),
        all_new=None if prompt is None else bound(prompt, are_there=False),
        expected=None if prediction is None else Expected(prediction.cached, prediction.computed, prediction.internal),
        num_tokens_differing=0 if lowered is None else lowered.num_tokens_differing,
        notes=notes,
    )


def _lower_known(plan: Plan, generation: Generation, template: ChatTemplate, options: RunOptions) -> Known:
    path = generation.path
    generated = plan.not_yet(path)
    try:
        lowered = lower(
            generation.node.query,
            template,
            generated=generated,
            rung=options.rung,
            anchor=options.anchor,
            path=f"{path}.query",
        )
    except QueryError as error:
        if not generated:
            raise
        return Known(generation, None, (f"nothing is known of this prompt before its answers are there: {error}",))
    return Known(generation, lowered, lowered.notes)


def _spans(lowered: Lowered, prediction: Prediction | None) -> tuple[ExplainedSpan, ...]:
    found: Sequence[SpanStatus | None] = [None] * len(lowered.sources)
    if prediction is not None:
        found = [report.status for report in prediction.spans]
    return tuple(
        ExplainedSpan(s.path, span.start, span.end, s.rung, s.anchor, len(span.anchor), s.kind, status)
        for span, s, status in zip(lowered.prompt.spans, lowered.sources, found, strict=True)
    )


def _describe(generation: ExplainedGeneration, window: int | None) -> list[str]:
    samples = "" if generation.num_samples == 1 else f", {generation.num_samples} samples"
    head = f"stage {generation.stage}  {generation.path}: at most {generation.max_tokens} tokens{samples}"
    if generation.seeds:
        shown = ", ".join(map(str, generation.seeds[:3])) + (", ..." if len(generation.seeds) > 3 else "")
        head += f", seed {shown}" if generation.num_samples == 1 else f", seeds {shown}"
    lines = [head]
    if generation.num_tokens is not None:
        size = f"prompt: {generation.num_tokens} tokens" + ("" if window is None else f" of {window}")
        lines.append(f"  {size}{_waits(generation.num_inner)}")
    elif generation.num_inner:
        lines.append(f"  prompt: unknown{_waits(generation.num_inner)}")
    for span in generation.spans:
        lines.append(f"  span [{span.start}, {span.end}) {_describe_span(span)}: {span.path}")
    if (expected := generation.expected) is not None:
        beside = f", {expected.internal} beside it" if expected.internal else ""
        lines.append(f"  as it stands: {expected.cached} cached, {expected.computed} computed{beside}")
    for name, cost in (("all spans there", generation.all_hit), ("all spans new", generation.all_new)):
        if cost is not None and generation.spans:
            beside = f", {cost.internal} beside it" if cost.internal else ""
            lines.append(
                f"  {name}: {cost.moved} moved, {cost.computed} computed ({cost.repaired} of them repaired){beside}"
            )
    if generation.is_leased:
        lines.append("  its KV is kept for the prompt that reads it")
    if generation.num_tokens_differing:
        lines.append(f"  {generation.num_tokens_differing} tokens differ from a tokenisation in one go")
    return lines + [f"  note: {note}" for note in generation.notes]


def _describe_span(span: ExplainedSpan) -> str:
    behind = "nothing" if span.anchor == "none" else f"the {span.anchor} of {_tokens(span.num_anchor_tokens)}"
    status = "" if span.status is None else f", {span.status}"
    return f"{_tokens(span.end - span.start)}, {span.rung}, behind {behind}, {span.kind}{status}"


def _tokens(number: int) -> str:
    return f"{number} token{'' if number == 1 else 's'}"


def _waits(num_inner: int) -> str:
    if not num_inner:
        return ""
    return f", and what {num_inner} inner generation{'s' if num_inner > 1 else ''} will say"
