"""The JSON form: each kind of node as a pydantic model of one level, and the JSON Schema of all of them.

What stands below a node is left unread by its model, so that depth is no limit; the reader goes on from there.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, WithJsonSchema

from spanflow.ir.nodes import DEFAULT_SEPARATOR
from spanflow.ir.numbers import MAX_INT
from spanflow.ir.ranges import MAX_N, MAX_STOPS

#: The version of the JSON form that is written, and the only one that is read.
VERSION = 1

#: Stands for any node in the schema of one model, which knows no others.
_NODE = {"title": "any node"}
_STRICT = ConfigDict(extra="forbid", strict=True, frozen=True)

OneNode: TypeAlias = Annotated[Any, WithJsonSchema(_NODE)]
Nodes: TypeAlias = Annotated[list[Any], WithJsonSchema({"type": "array", "items": _NODE})]
SomeNodes: TypeAlias = Annotated[
    list[Any], Field(min_length=1), WithJsonSchema({"type": "array", "items": _NODE, "minItems": 1})
]
RungText: TypeAlias = Annotated[str, StringConstraints(pattern=r"^(exact|moved|repair\([1-9][0-9]{0,9}\))$")]
AnchorText: TypeAlias = Literal["header", "head", "none"]
StopText: TypeAlias = Annotated[str, StringConstraints(min_length=1)]
SchemaOrText: TypeAlias = Annotated[Any, WithJsonSchema({"type": ["object", "boolean", "string", "null"]})]


class FragmentModel(BaseModel):
    """A piece of a corpus. `metadata` is carried along and is no part of the prompt."""

    model_config = _STRICT
    type: Literal["fragment"]
    text: str
    id: str | None = None
    metadata: dict[str, Any] = {}


class MessageModel(BaseModel):
    """A chat message of text, fragments, generated answers and joins of them."""

    model_config = _STRICT
    type: Literal["system", "user", "assistant"]
    parts: Nodes


class SeqModel(BaseModel):
    """The ordered join of its operands."""

    model_config = _STRICT
    type: Literal["seq"]
    operands: Nodes


class CommuteModel(BaseModel):
    """The join of operands that may stand in any order and need not see each other."""

    model_config = _STRICT
    type: Literal["commute"]
    operands: SomeNodes
    rung: RungText | None = None
    anchor: AnchorText | None = None
    associative: bool = False
    separator: str = DEFAULT_SEPARATOR


class SampledModel(BaseModel):
    """How an answer is sampled. `max_tokens` of null is the session's default; temperature 0 is greedy."""

    model_config = _STRICT
    max_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    temperature: float = Field(0.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    stop: list[StopText] = Field([], max_length=MAX_STOPS)
    seed: int | None = Field(None, ge=0, le=MAX_INT)
    schema_: SchemaOrText = Field(None, alias="schema", description="A JSON Schema, or its text.")


class GenerateModel(SampledModel):
    """Ask the model; the value is an assistant message, or `n` of them inside a commute."""

    type: Literal["generate"]
    query: OneNode
    n: int = Field(1, ge=1, le=MAX_N)
    model: str | None = None
    reduce: Literal["tree"] | None = None
    arity: int = Field(2, ge=2, le=MAX_INT)


class RetrieveModel(BaseModel):
    """Fragments from a corpus: `from` names a retriever that the reader is given."""

    model_config = _STRICT
    type: Literal["retrieve"]
    from_: str = Field(alias="from")
    query: str
    k: int | None = Field(None, ge=1, le=MAX_INT)
    rung: RungText | None = None
    anchor: AnchorText | None = None


class ChatModel(SampledModel):
    """Ask the model for the next message of a chat."""

    type: Literal["chat"]
    messages: SomeNodes


class QueryModel(BaseModel):
    """A span query and the version of the form that it is written in."""

    model_config = _STRICT
    spanflow: Literal[1]
    query: OneNode


NodeModel: TypeAlias = (
    FragmentModel | MessageModel | SeqModel | CommuteModel | GenerateModel | RetrieveModel | ChatModel
)

#: The model of each value of `type`.
MODELS: dict[str, type[NodeModel]] = {
    "system": MessageModel,
    "user": MessageModel,
    "assistant": MessageModel,
    "fragment": FragmentModel,
    "seq": SeqModel,
    "commute": CommuteModel,
    "generate": GenerateModel,
    "retrieve": RetrieveModel,
    "chat": ChatModel,
}


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of the JSON form, which is also the package's file `ir/json/schema.json`."""
    models = list(dict.fromkeys(MODELS.values()))
    text = {"type": "string", "description": "Plain text: data, never markup."}
    definitions: dict[str, Any] = {
        "Node": {"title": "Node", "anyOf": [text, *({"$ref": f"#/$defs/{model.__name__}"} for model in models)]}
    }
    definitions |= {model.__name__: _with_nodes(model.model_json_schema()) for model in models}
    query: dict[str, Any] = _with_nodes(QueryModel.model_json_schema())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **query, "$defs": definitions}


def _with_nodes(schema: Any) -> Any:
    """A model's schema in which any node is one of the definitions."""
    if isinstance(schema, dict):
        if _NODE.items() <= schema.items():
            return {"$ref": "#/$defs/Node"}
        return {key: _with_nodes(value) for key, value in schema.items()}
    return [_with_nodes(item) for item in schema] if isinstance(schema, list) else schema
