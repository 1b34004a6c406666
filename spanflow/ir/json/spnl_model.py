"""What stands inside of spnl's forms, as pydantic models of one level."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from spanflow.ir.ranges import MAX_N

_STRICT = ConfigDict(extra="forbid", strict=True, frozen=True)
#: spnl carries it as a signed number of 32 bits.
MAX_TOKENS = 2**31 - 1
#: What spnl takes where a query does not say.
DEFAULT_TEMPERATURE = 0.6

Role: TypeAlias = Literal["system", "user", "assistant"]


class MetadataBody(BaseModel):
    """How to generate. `max_tokens` of 0, null or nothing is the engine's default."""

    model_config = _STRICT
    model: str = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    temperature: float | None = Field(DEFAULT_TEMPERATURE, ge=0, allow_inf_nan=False)


class GenerateBody(MetadataBody):
    """`g`: generate from an input, which is a query or a list of them."""

    input: Any


class RepeatBody(BaseModel):
    """`repeat`: `n` answers to one `g`, whose body stands under `g` or `generate`; or to a `query` that is a `g`."""

    model_config = _STRICT
    n: int = Field(ge=1, le=MAX_N)
    g: Any = None
    generate: Any = None
    query: Any = None


class MapBody(BaseModel):
    """`map`: one answer to each user message."""

    model_config = _STRICT
    metadata: Any
    inputs: list[str] = Field(min_length=1)


class ZipBody(BaseModel):
    """`zip`: the first before each of the second."""

    model_config = _STRICT
    first: Any
    second: Any


class AugmentBody(BaseModel):
    """`augment`: what a document says about a question. `doc` is a name and `{"Text": ...}` or `{"Binary": [...]}`."""

    model_config = _STRICT
    embedding_model: str
    body: Any
    doc: list[Any] = Field(min_length=2, max_length=2)
