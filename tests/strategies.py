"""Random queries for property tests: valid trees of every kind of node."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from spanflow.ir.fidelity import EXACT, MOVED, repair
from spanflow.ir.nodes import (
    DEFAULT_SEPARATOR,
    Chat,
    Commute,
    Fragment,
    Generate,
    Message,
    Node,
    Retrieve,
    Sampling,
    Seq,
    Text,
)
from spanflow.ir.walk import preorder

#: Words that have meaning to a template, a tokenizer, a parser or a terminal, beside plain and empty ones.
WORDS = ["", "a", "b", "no", "two words", "\n", " ", '"', "\\", "\x00", "\x1b[1m", "é", "漢字", "🙂"]
WORDS += ["<|im_start|>", "<|im_end|>", "[INST]", "<s>", "{{ x }}", "# +[", "✶"]


def shelf(query: str, k: int | None = None) -> list[str]:
    """A retriever that finds the same two texts whatever is asked."""
    return ["first find", "second find"][:k]


def drawer(query: str, k: int | None = None) -> list[str]:
    """A retriever that finds the question itself."""
    return [query][:k]


def texts() -> st.SearchStrategy[str]:
    """Any text that a tokenizer can read, often with words that try to be more than data."""
    plain = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    return st.one_of(st.sampled_from(WORDS), plain, st.lists(st.sampled_from(WORDS), max_size=4).map(" ".join))


def rungs() -> st.SearchStrategy[Any]:
    """A rung, or None for the session's."""
    return st.one_of(st.none(), st.sampled_from([EXACT, MOVED]), st.integers(1, 64).map(repair))


def anchors() -> st.SearchStrategy[Any]:
    """An anchor, or None for the session's."""
    return st.sampled_from([None, "header", "head", "none"])


def samplings() -> st.SearchStrategy[Sampling]:
    """Sampling options within their ranges, the defaults more often than not."""
    changed = st.builds(
        Sampling,
        max_tokens=st.none() | st.integers(1, 4096),
        temperature=st.floats(0, 4, allow_nan=False),
        top_p=st.floats(0, 1, exclude_min=True),
        stop=st.lists(texts().filter(bool), max_size=3).map(tuple),
        seed=st.none() | st.integers(0, 2**63 - 1),
        schema=st.sampled_from([None, '{"type":"object"}', '{"type":"array","items":{"type":"string"}}']),
    )
    return st.one_of(st.just(Sampling()), changed)


def fragments() -> st.SearchStrategy[Node]:
    """Fragments with and without names and metadata."""
    metadata = st.dictionaries(
        st.sampled_from(["source", "page", "ü"]), st.integers() | texts() | st.none(), max_size=2
    )
    return st.builds(Fragment, texts(), st.none() | texts(), metadata)


def retrieves() -> st.SearchStrategy[Node]:
    """Retrieves from the two retrievers of this module."""
    k = st.none() | st.integers(1, 9)
    return st.builds(Retrieve, st.sampled_from([shelf, drawer]), texts(), k, rungs(), anchors())


def queries(max_leaves: int = 12, *, retrieve: bool = True, generate: bool = True) -> st.SearchStrategy[Node]:
    """Trees that `verify` accepts, with all kinds of nodes at all places where they may stand.

    `max_leaves` bounds the leaves outside messages. Without `retrieve` there is no Retrieve, without `generate`
    neither Generate nor Chat.
    """
    leaves = st.one_of(texts().map(Text), fragments(), *([retrieves()] if retrieve else []))
    plain = _messages(st.recursive(leaves, _joins, max_leaves=4))
    messages = plain
    if generate:
        # An answer may be part of what is said.
        asked = _generates(st.one_of(plain, leaves, _joins(plain)))
        said = st.recursive(st.one_of(leaves, leaves, leaves, asked), _joins, max_leaves=4)
        messages = st.one_of(plain, plain, _messages(said))

    def around(inner: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
        return st.one_of(_joins(inner), *([_generates(inner), _chats(inner)] if generate else []))

    return st.recursive(st.one_of(messages, messages, leaves), around, max_leaves=max_leaves)


def _messages(parts: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    roles = st.sampled_from(["system", "user", "assistant"])
    return st.builds(Message, roles, _some(parts.map(_one_sample), 0, 3))


def _some(nodes: st.SearchStrategy[Node], least: int, most: int) -> st.SearchStrategy[tuple[Node, ...]]:
    return st.lists(nodes, min_size=least, max_size=most).map(tuple)


def _joins(nodes: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    single = nodes.map(_one_sample)
    separators = st.sampled_from([DEFAULT_SEPARATOR, "", "\n---\n"])
    return st.one_of(
        st.builds(Seq, _some(single, 0, 4)),
        st.builds(Commute, _some(nodes, 1, 4), rungs(), anchors(), st.booleans(), separators),
    )


def _generates(nodes: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    samples = st.sampled_from([1, 1, 2, 5])
    models = st.sampled_from([None, None, "other/model"])
    reduce = st.sampled_from([None, None, "tree"])
    return st.builds(Generate, nodes.map(_readable), samplings(), samples, models, reduce, st.integers(2, 4))


def _chats(nodes: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    ending = st.just(Message("user", (Text("and now?"),)))
    messages = st.tuples(_some(nodes.map(_one_sample), 0, 3), ending).map(lambda pair: (*pair[0], pair[1]))
    return st.builds(Chat, messages, samplings())


def _one_sample(node: Node) -> Node:
    """Several samples may only stand directly in a commute."""
    return replace(node, n=1) if isinstance(node, Generate) else node


def _readable(node: Node) -> Node:
    """A query with something to read in it."""
    node = _one_sample(node)
    readable = any(
        isinstance(n, Retrieve) or (isinstance(n, Text | Fragment) and n.text != "") for _, n in preorder(node)
    )
    return node if readable else Seq((node, Message("user", (Text("why?"),))))
