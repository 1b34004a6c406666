"""The values of options, from forms and to forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, assert_never, get_args

from spanflow.errors import QueryError
from spanflow.ir.data import MAX_NESTING, schema_data, schema_text
from spanflow.ir.fidelity import EXACT, MOVED, Anchor, Rung, repair
from spanflow.ir.nodes import Sampling
from spanflow.ir.ranges import MAX_N, check_count, check_sampling
from spanflow.ir.reading import did_you_mean
from spanflow.ir.text.forms import AnyForm, Group, Number, Option, Pair, String, Word
from spanflow.ir.text.grammar import SAMPLING
from spanflow.ir.text.source import Source

_CONSTANTS: dict[str, bool | None] = {"true": True, "false": False, "null": None}
_RUNGS = {"exact": EXACT, "moved": MOVED}


def read_option(option: Option, source: Source) -> Any:
    """The value of any option but `from`, checked. Raises QuerySyntaxError at the value."""
    name, form = option.name, option.value
    try:
        value = _READERS[name](form)
        if name in SAMPLING:
            check_sampling(Sampling(**{name: value}), "")
    except _RefusedError as refused:
        raise source.error(refused.form.start, refused.form.end, f":{name} {refused}") from None
    except QueryError as error:
        problem = str(error).removeprefix(f": {name}").removeprefix(": ")
        place = f":{name}" if problem.startswith("[") else f":{name}: "
        raise source.error(form.start, form.end, place + problem) from None
    return value


def read_name(option: Option, source: Source) -> str:
    """The name of a retriever: a word or a text. Raises QuerySyntaxError."""
    form = option.value
    if isinstance(form, Word | String):
        return form.text
    raise source.error(form.start, form.end, f":{option.name} expects the name of a retriever, got {described(form)}")


def described(form: AnyForm) -> str:
    """A form in an error message."""
    match form:
        case Word(text=text):
            return repr(text if len(text) <= 40 else f"{text[:39]}…")
        case Number(value=value):
            shown = str(value)
            return f"the number {shown}" if len(shown) <= 40 else f"a number of {len(shown):,} digits"
        case String():
            return "text"
        case Group(bracket=bracket):
            return {"(": "a query", "[": "a list", "{": "an object"}[bracket]
        case Option() | Pair():
            return "an option"
        case _:
            assert_never(form)


def option_form(name: str, value: Any) -> Option:
    """An option with its value; `from` is given by name."""
    return Option(name, _value_form(name, value))


def _value_form(name: str, value: Any) -> AnyForm:
    match value:
        case Rung():
            if value.name != "repair":
                return Word(value.name)
            return Group("(", [Word("repair"), Number(value.num_tokens)])
        case str() if name == "schema":
            data = schema_data(value)
            return String(value) if data is None else _data_form(data)
        case str() if name in ("anchor", "reduce"):
            return Word(value)
        case (str() as alone,) if name == "stop":
            return String(alone)
        case _:
            return _data_form(value)


def _data_form(value: Any) -> AnyForm:
    """Plain values; checked before, so that they are nested a hundred levels deep at most."""
    match value:
        case None | bool():
            return Word({True: "true", False: "false", None: "null"}[value])
        case int():
            return Number(int(value))
        case float():
            return Number(float(value))
        case str():
            return String(value)
        case dict():
            return Group("{", [Pair(key, _data_form(item)) for key, item in value.items()])
        case _:
            return Group("[", [_data_form(item) for item in value])


class _RefusedError(Exception):
    """A form that an option cannot take."""

    def __init__(self, form: AnyForm, problem: str) -> None:
        super().__init__(problem)
        self.form = form


def _wanted(what: str, form: AnyForm, guess: str = "") -> _RefusedError:
    return _RefusedError(form, f"expects {what}, got {described(form)}{guess}")


def _count(least: int, most: int | None = None) -> Callable[[AnyForm], int]:
    def read(form: AnyForm) -> int:
        if not isinstance(form, Number) or not isinstance(form.value, int):
            raise _wanted("a whole number", form)
        bounds = (least,) if most is None else (least, most)
        check_count(form.value, "", *bounds)
        return form.value

    return read


def _real(form: AnyForm) -> float:
    if not isinstance(form, Number):
        raise _wanted("a number", form)
    try:
        return float(form.value)
    except OverflowError:
        raise _wanted("a number that is not as large", form) from None


def _text(form: AnyForm) -> str:
    if not isinstance(form, String):
        raise _wanted("text in quotes", form)
    return form.text


def _stop(form: AnyForm) -> tuple[str, ...]:
    match form:
        case String(text=text):
            return (text,)
        case Group(bracket="[", items=items):
            return tuple(_text(item) for item in items)
        case _:
            raise _wanted("text in quotes, or a list of texts", form)


def _flag(form: AnyForm) -> bool:
    match form:
        case Word(text="true"):
            return True
        case Word(text="false"):
            return False
        case _:
            raise _wanted("true or false", form)


def _rung(form: AnyForm) -> Rung:
    match form:
        case Word(text=text) if text in _RUNGS:
            return _RUNGS[text]
        case Group(bracket="(", items=[Word(text="repair"), Number(value=int() as num_tokens)]):
            return repair(num_tokens)
        case Word(text=text):
            raise _wanted("exact, moved or (repair 32)", form, did_you_mean(text, [*_RUNGS, "repair"]))
        case _:
            raise _wanted("exact, moved or (repair 32)", form)


def _one_of(*words: str) -> Callable[[AnyForm], str]:
    def read(form: AnyForm) -> str:
        if not isinstance(form, Word) or form.text not in words:
            guess = did_you_mean(form.text, words) if isinstance(form, Word) else ""
            raise _wanted(" or ".join(words), form, guess)
        return form.text

    return read


def _metadata(form: AnyForm) -> dict[str, Any]:
    if not isinstance(form, Group) or form.bracket != "{":
        raise _wanted('an object, as in {"page": 3}', form)
    data = _data(form)
    assert isinstance(data, dict)
    return data


def _schema(form: AnyForm) -> str:
    match form:
        case String(text=text):
            return text
        case Group(bracket="{") | Word(text="true" | "false"):
            return schema_text(_data(form))
        case _:
            raise _wanted('a JSON Schema, as in {"type": "object"}', form)


def _data(form: AnyForm, level: int = 1) -> Any:
    if level > MAX_NESTING + 1:
        raise _RefusedError(form, f"is nested more than {MAX_NESTING} levels deep")
    match form:
        case Number(value=value):
            return value
        case String(text=text):
            return text
        case Word(text=text) if text in _CONSTANTS:
            return _CONSTANTS[text]
        case Group(bracket="[", items=items):
            return [_data(item, level + 1) for item in items]
        case Group(bracket="{", items=items):
            return _object(items, level)
        case _:
            raise _wanted("plain values (text, numbers, true, false, null, lists, objects)", form)


def _object(items: list[AnyForm], level: int) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for item in items:
        assert isinstance(item, Pair)
        if item.key in data:
            raise _RefusedError(item, f"has the key {item.key[:40]!r} twice")
        data[item.key] = _data(item.value, level + 1)
    return data


_READERS: dict[str, Callable[[AnyForm], Any]] = {
    "id": _text,
    "metadata": _metadata,
    "rung": _rung,
    "anchor": _one_of(*get_args(Anchor)),
    "associative": _flag,
    "separator": _text,
    "model": _text,
    "max_tokens": _count(1),
    "temperature": _real,
    "top_p": _real,
    "n": _count(1, MAX_N),
    "stop": _stop,
    "seed": _count(0),
    "schema": _schema,
    "reduce": _one_of("tree"),
    "arity": _count(2),
    "k": _count(1),
}
