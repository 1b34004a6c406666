"""Where in a text the nodes of its query are written, and which comments go with them."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from spanflow.ir.reading import split_path
from spanflow.ir.text.forms import AnyForm, Form, Group, Option
from spanflow.ir.text.parser import operands
from spanflow.ir.text.reader import read
from spanflow.ir.text.source import Source

_LINE_END = re.compile("\n")


@dataclass(frozen=True, slots=True)
class Written:
    """A node where it is written: `line` and `column` count from 1.

    `comments` are those that go with it or with a node around it: on a line before it, or behind it on its last line.
    """

    line: int
    column: int
    comments: tuple[str, ...]


class WrittenQuery:
    """A text that is a query; finds the nodes of the tree that `from_text` makes of it.

    Raises QuerySyntaxError for what is no query.

    >>> from spanflow.ir.text.written import WrittenQuery
    >>> WrittenQuery('(seq (user "a")\\n  (user "b")) ; two', "q.span").find("$.operands[1].parts[0]")
    Written(line=2, column=9, comments=('; two',))
    """

    def __init__(self, source: str, filename: str) -> None:
        self._document = read(Source(source, filename))
        self._line_starts = [0, *(found.end() for found in _LINE_END.finditer(source))]

    def find(self, path: str) -> Written:
        """The node at a path of the tree, as in `$.query.operands[2]`."""
        steps, _ = split_path(path)
        form: AnyForm = self._document.form
        comments = list(_comments(form))
        for step in steps:
            assert isinstance(form, Group)
            form = operands(form)[step]
            comments += _comments(form)
        line = bisect_right(self._line_starts, form.start)
        return Written(line, form.start - self._line_starts[line - 1] + 1, tuple(comments))


def _comments(form: AnyForm) -> Iterator[str]:
    own: list[Form] = [form]
    if isinstance(form, Group):
        own += [form.items[0], *(item for item in form.items if isinstance(item, Option))]
    for each in own:
        yield from filter(None, [*each.above, each.behind])
