"""Sampling options as authors write them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

from spanflow.api.coerce import as_real, as_text, as_whole, described
from spanflow.errors import QueryError
from spanflow.ir.nodes import Sampling
from spanflow.ir.ranges import check_sampling


@runtime_checkable
class SchemaModel(Protocol):
    """A class that describes itself as a JSON Schema, such as a pydantic model."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        """The JSON Schema of an instance."""


#: A JSON Schema, or a pydantic model class whose schema is meant.
Schema: TypeAlias = "Mapping[str, Any] | type[SchemaModel]"


def as_sampling(
    function: str,
    *,
    max_tokens: int | None,
    temperature: float,
    top_p: float,
    stop: str | Iterable[str] | None,
    seed: int | None,
    schema: Schema | None,
) -> Sampling:
    """The options of one answer, checked. Raises QueryError that names the function and the option."""
    sampling = Sampling(
        max_tokens=as_whole(max_tokens),
        temperature=as_real(temperature),
        top_p=as_real(top_p),
        stop=_as_stop(stop, f"{function}(): stop"),
        seed=as_whole(seed),
        schema=None if schema is None else schema_text(schema, f"{function}(): schema"),
    )
    check_sampling(sampling, f"{function}()")
    return sampling


def schema_text(schema: Schema, where: str = "schema") -> str:
    """A JSON Schema as compact JSON text. Raises QueryError.

    Properties keep the order in which the author wrote them: it is the order in which the model answers them.
    """
    if isinstance(schema, type) and isinstance(schema, SchemaModel):
        schema = schema.model_json_schema()
    if not isinstance(schema, Mapping):
        raise QueryError(
            f"{where}: expected a JSON Schema as a dict, or a pydantic model class, got {described(schema)}"
        )
    try:
        return json.dumps(dict(schema), separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise QueryError(f"{where}: the schema has no JSON form: {error}") from error


def _as_stop(stop: str | Iterable[str] | None, where: str) -> tuple[str, ...]:
    if stop is None:
        return ()
    if isinstance(stop, str):
        return (as_text(stop, where),)
    if isinstance(stop, Mapping) or not isinstance(stop, Iterable):
        raise QueryError(f"{where}: expected text or a list of texts, got {described(stop)}")
    return tuple(as_text(text, f"{where}[{index}]") for index, text in enumerate(stop))
