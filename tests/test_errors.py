"""Errors come whole out of a copy, and out of another process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest

import spanflow
from spanflow import PromptTooLong, QuerySyntaxError, SpanflowError
from spanflow.engine.protocol import Usage
from spanflow.result import Result

#: Errors whose message is made of other arguments.
MADE = {
    PromptTooLong: PromptTooLong(34, 8, 40, "$.query.operands[1]"),
    QuerySyntaxError: QuerySyntaxError("no operator", "q.span", 3, 4, 31, "   3 | (usr)\n     |  ^^^"),
}
PUBLIC = [
    kind
    for name in spanflow.__all__
    if isinstance(kind := getattr(spanflow, name), type) and issubclass(kind, SpanflowError)
]


def kinds(base: type[SpanflowError]) -> set[type[SpanflowError]]:
    return {base}.union(*(kinds(kind) for kind in base.__subclasses__()))


def test_no_kind_of_error_is_left_out() -> None:
    assert {kind for kind in kinds(SpanflowError) if kind.__module__.startswith("spanflow.")} == {*PUBLIC}
    assert len(PUBLIC) >= 11


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
@pytest.mark.parametrize("kind", PUBLIC)
def test_a_copy_of_an_error_says_the_same(
    kind: type[SpanflowError], again: Callable[[SpanflowError], SpanflowError]
) -> None:
    error = copy.copy(MADE.get(kind)) or kind("$: not like this")
    error.partial = {"$": (Result("fine", (1,), "stop", Usage(3, 1), 0.1, 0.2, 0.3),)}
    error.results = (None,)
    error.add_note("while the tests ran")
    found = again(error)
    assert type(found) is kind
    assert (str(found), found.args, vars(found)) == (str(error), error.args, vars(error))
    assert found is not error
    if (made := MADE.get(kind)) is not None:
        assert (str(found), found.args) == (str(made), made.args)
        assert vars(found).items() >= vars(made).items()


def test_an_error_without_results_has_the_empty_ones_still() -> None:
    (found,) = pickle.loads(pickle.dumps([MADE[PromptTooLong]]))
    assert (dict(found.partial), found.results, found.where) == ({}, (), "$.query.operands[1]")
