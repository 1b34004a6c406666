"""What it costs to optimise a query, verification on: time by size, for queries of several shapes.

No model and no engine: the optimizer is plain Python in one thread, so the processor time of the process is taken,
which on a quiet machine is the time that passes.

    python -m benchmarks.compile_cost [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from benchmarks._machine import this_machine, versions
from benchmarks._measure import Spread, spread
from benchmarks._report import Report, Row, text_table
from spanflow.api.combinators import chat, commute, fragment, generate, seq, system, user
from spanflow.ir.nodes import Node
from spanflow.ir.verify import Verified, verify
from spanflow.ir.walk import preorder
from spanflow.optimizer.driver import rewrite
from spanflow.optimizer.order import order_exact
from spanflow.optimizer.passes import DEFAULT, Pass
from spanflow.optimizer.pipeline import optimise

SMALL, LARGE = 1_000, 10_000
#: A query of about so many nodes, and no more.
Shape: TypeAlias = Callable[[int], Node]


def judge(num_nodes: int) -> Node:
    """A judge over candidates: nothing to rewrite."""
    return judged(candidates((num_nodes - 7) // 6))


def judges(num_nodes: int) -> Node:
    """A judge over judges of 24 candidates each: nothing to rewrite."""
    inner = [judged(candidates(24, f"{i}.")) for i in range((num_nodes - 7) // 151)]
    return judged(inner)


def documents(num_nodes: int) -> Node:
    """Messages in a commute, and a question: nothing to rewrite."""
    group = commute([user(f"Document {i}") for i in range((num_nodes - 7) // 2)])
    return generate(seq(system("Answer."), group, user("Which?")))


def operands(num_nodes: int) -> Node:
    """Fragments in a message, not all of them in ASCII, and a question: nothing to rewrite."""
    group = commute([fragment(f"Straße {i}", id=f"s{i}", metadata={"page": i}) for i in range(num_nodes - 7)])
    return generate(seq(system("Answer."), user(group, "Which?")))


def exact(num_nodes: int) -> Node:
    """Messages in an exact commute: put in order, once."""
    group = commute([user(f"Document {i}") for i in range((num_nodes - 7) // 2)], rung="exact")
    return generate(seq(system("Answer."), group, user("Which?")))


def nested(num_nodes: int) -> Node:
    """Documents in joins that nest, with empty texts among them."""
    groups = [seq("", commute(commute(user(f"a {i}"), user(f"b {i}")), "")) for i in range((num_nodes - 6) // 9)]
    return generate(seq(system("Answer."), commute(groups), user("Which?")))


def tree(num_nodes: int) -> Node:
    """A wide judge that becomes a tree of judges over four candidates each."""
    group = commute(candidates((num_nodes - 7) // 6), associative=True)
    return generate(seq(system("Judge."), group, user("Which is best?")), reduce="tree", arity=4)


def chats(num_nodes: int) -> Node:
    """A judge over chats: each of them is written anew."""
    return judged([chat([("system", "Write."), ("user", f"Topic {i}")]) for i in range((num_nodes - 7) // 5)])


def bare(num_nodes: int) -> Node:
    """A judge over candidates that are asked with bare text: a rewrite for every two nodes."""
    return judged([generate(f"Topic {i}") for i in range((num_nodes - 7) // 2)])


def deep(num_nodes: int) -> Node:
    """Ordered joins and commutes by turns, each inside the one before: nothing to rewrite, and no way to be quick."""
    root: Node = seq("bottom", "of it")
    for level in range((num_nodes - 5) // 2):
        root = seq(f"{level}", root) if level % 2 else commute(f"{level}", root)
    return generate(user(root))


def judged(operands: Sequence[Node]) -> Node:
    """A judge over operands."""
    return generate(seq(system("Judge."), commute(operands), user("Which is best?")))


def candidates(number: int, name: str = "") -> list[Node]:
    """Candidates of six nodes each."""
    return [generate(seq(system("Write."), user(f"Topic {name}{i}"))) for i in range(number)]


SHAPES: tuple[Shape, ...] = (
    judge,
    judges,
    documents,
    operands,
    exact,
    nested,
    tree,
    chats,
    bare,
    deep,
)
COLUMNS = {
    "shape": "shape",
    "nodes": "nodes",
    "rewrites": "rewrites",
    "build_ms": "build ms",
    "optimise_ms": "optimise ms",
    "low_ms": "least",
    "high_ms": "most",
    "us_per_node": "us a node",
    "most_in": "most of it in",
}


def timed(run: Callable[[], object], repeats: int) -> Spread:
    """Milliseconds of processor time of a run."""
    run()
    values = []
    for _ in range(repeats):
        begun = time.process_time()
        run()
        values.append(1e3 * (time.process_time() - begun))
    return spread(values)


def shares(root: Node, repeats: int) -> dict[str, float]:
    """Milliseconds of each pass alone, and of the verification around them."""
    parts: dict[str, float] = {}
    trees = [root]
    for each in DEFAULT:
        before = trees[-1]
        parts[each.name] = timed(lambda each=each, before=before: run_pass(each, before), repeats).median  # type: ignore[misc]
        after = run_pass(each, before)
        if after.digest != before.digest:
            trees.append(after)
    parts["verify"] = timed(lambda: verify_all(trees), repeats).median
    return parts


def verify_all(trees: Sequence[Node]) -> None:
    """Verification as `optimise` does it, before the first pass and after each that changed something."""
    verified = Verified()
    for root in trees:
        verify(root, verified)


def run_pass(each: Pass, root: Node) -> Node:
    """One pass, without verification."""
    return order_exact(root)[0] if each.orders else rewrite(root, each.rules, at_root=each.at_root).root


def measure(shape: Shape, size: int, repeats: int) -> Row:
    """One row: a shape at a size."""
    root = shape(size)
    num_nodes = sum(1 for _ in preorder(root))
    whole = timed(lambda: optimise(root), repeats)
    parts = shares(root, max(3, repeats // 3))
    largest = sorted(parts, key=parts.__getitem__, reverse=True)[:3]
    return {
        "shape": shape.__name__,
        "nodes": num_nodes,
        "rewrites": len(optimise(root).steps),
        "build_ms": round(timed(lambda: shape(size), 3).median, 3),
        "optimise_ms": round(whole.median, 3),
        "low_ms": round(whole.low, 3),
        "high_ms": round(whole.high, 3),
        "us_per_node": round(1e3 * whole.median / num_nodes, 3),
        "most_in": ", ".join(f"{name} {parts[name]:.1f}" for name in largest),
    } | {f"{name}_ms": round(ms, 3) for name, ms in parts.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.compile_cost", description=__doc__)
    options.add_argument("--quick", action="store_true", help="few repeats")
    options.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions, rows and figures here")
    options.add_argument("--repeats", type=int, help="runs of each size (25, or 7 with --quick)")
    asked = options.parse_args(arguments)
    repeats = asked.repeats or (7 if asked.quick else 25)
    report = Report(
        "compile_cost", this_machine(), versions(), 0, {"nodes": f"{SMALL} and {LARGE}", "repeats": repeats}
    )
    print(report.heading(), flush=True)
    for shape in SHAPES:
        small, large = (measure(shape, size, repeats) for size in (SMALL, LARGE))
        report.rows += [small, large]
        name = shape.__name__
        report.figures[f"optimise_10k_ms_{name}"] = float(large["optimise_ms"])  # type: ignore[arg-type]
        report.figures[f"growth_{name}"] = large["us_per_node"] / small["us_per_node"]  # type: ignore[operator]
    report.figures["optimise_10k_ms"] = report.figures[f"optimise_10k_ms_{judge.__name__}"]
    report.figures["optimise_10k_ms_worst"] = max(report.figures[f"optimise_10k_ms_{s.__name__}"] for s in SHAPES)
    report.figures["growth"] = max(report.figures[f"growth_{shape.__name__}"] for shape in SHAPES)
    report.notes += [
        "medians of processor time, with the least and the most; optimise_10k_ms is that of a judge over candidates as "
        "the package's functions write it, growth that of the worst shape",
        "growth is the time per node at 10,000 nodes over that at 1,000: 1 is linear",
        f"passes in order: {', '.join(each.name for each in DEFAULT)}; the tree is verified before and after each",
    ]
    print(text_table(COLUMNS, report.rows))
    print(report.footing())
    if asked.json is not None:
        report.write(asked.json)


if __name__ == "__main__":
    main()
