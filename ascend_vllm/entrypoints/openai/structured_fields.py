"""What an output must look like, as requests say it: `structured_outputs`, `response_format` and `guided_*`.

The first is today's vLLM's, the second OpenAI's, the last those of vLLM 0.6.3. All become `StructuredOutputsParams`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from ascend_vllm.errors import RequestError
from ascend_vllm.structured_outputs import CONSTRAINTS, MAX_BYTES, StructuredOutputsParams

# 0.6.3's fields → what they are called here
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


class StructuredOutputs(BaseModel):
    """`structured_outputs` of a request; see `StructuredOutputsParams`."""

    model_config = ConfigDict(extra="allow")

    json_: str | dict[str, Any] | bool | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None
    backend: str | None = None


class JsonSchemaFormat(BaseModel):
    """`json_schema` of a `response_format`."""

    model_config = ConfigDict(extra="allow")

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """`response_format`: text, any JSON object, or JSON of a schema."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuralTagFormat(BaseModel):
    """`response_format` with schemas that hold between a beginning and an end."""

    model_config = ConfigDict(extra="allow")

    type: Literal["structural_tag"]


def checked_params(name: str, **fields: Any) -> StructuredOutputsParams:
    """The engine's record.

    Args:
        name: field of the request that errors name.

    Raises:
        RequestError: the fields contradict one another, or one is too large.
    """
    for kind in CONSTRAINTS:
        _check_size(kind, fields.get(kind), name)
    try:
        return StructuredOutputsParams(**fields)
    except ValueError as error:
        raise RequestError(str(error), name) from error


def _check_size(kind: str, value: Any, name: str) -> None:
    """Refuse a constraint that the engine core refuses for its size, before it is copied, logged and sent there.

    Args:
        kind: one of `CONSTRAINTS`.
        value: text, or a schema.
        name: field of the request that the error names.

    Raises:
        RequestError: it is too large.
    """
    unit = "characters"
    if isinstance(value, dict):
        try:
            value, unit = msgspec.json.encode(value), "bytes"
        except (TypeError, ValueError, OverflowError, RecursionError):
            return  # what it holds is told by others
    if isinstance(value, str | bytes) and len(value) > MAX_BYTES:
        raise RequestError(f"{kind} is too large: {len(value)} {unit}, the limit is {MAX_BYTES} bytes.", name)


def check_schema_text(name: str, value: Any) -> None:
    """Refuse a schema that is given as text and is not JSON, with the text of Python's json as vLLM 0.6.3 does.

    Raises:
        RequestError: it is not JSON, or, as text or not, too large.
    """
    _check_size("json", value, name)
    if isinstance(value, str):
        try:
            json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(str(error), name) from error


def from_guided(
    values: Mapping[str, Any], backend: str | None, whitespace: str | None
) -> StructuredOutputsParams | None:
    """What 0.6.3's fields ask for.

    Args:
        values: at most one of `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar`.
        backend: `guided_decoding_backend`.
        whitespace: `guided_whitespace_pattern`.

    Raises:
        RequestError: the schema is not JSON, or the constraint too large.
    """
    if not values:
        return None
    ((name, value),) = values.items()
    check_schema_text("guided_json", values.get("guided_json"))
    return checked_params(name, **{_GUIDED[name]: value}, backend=backend, whitespace_pattern=whitespace)


def from_structured_outputs(fields: StructuredOutputs) -> StructuredOutputsParams:
    """What `structured_outputs` asks for.

    Raises:
        RequestError: no constraint or several at once, one that is too large, or a field that this server does not
            know.
    """
    if fields.model_extra:
        known = sorted(name.rstrip("_") for name in StructuredOutputs.model_fields)
        raise RequestError(
            f"`structured_outputs` has unknown fields {sorted(fields.model_extra)}; it may hold {known}.",
            "structured_outputs",
        )
    check_schema_text("structured_outputs", fields.json_)
    values = fields.model_dump(exclude_unset=True, by_alias=True)
    params = checked_params(
        "structured_outputs", **{name: value for name, value in values.items() if value is not None}
    )
    if not params.constraints():
        raise RequestError(
            f"You must use one kind of structured outputs constraint but none are specified: {values}",
            "structured_outputs",
        )
    return params


def from_response_format(
    form: ResponseFormat | StructuralTagFormat, backend: str | None, whitespace: str | None
) -> StructuredOutputsParams | None:
    """What `response_format` asks for; None: plain text.

    Raises:
        RequestError: a JSON schema is asked for and none is given.
    """
    if isinstance(form, StructuralTagFormat):
        text = json.dumps(form.model_dump(exclude_unset=True, by_alias=True))
        return checked_params("response_format", structural_tag=text, backend=backend)
    options = {"backend": backend, "whitespace_pattern": whitespace}
    if form.type == "json_object":
        return checked_params("response_format", json_object=True, **options)
    if form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema_ is None:
            raise RequestError(
                "When response_format type is 'json_schema', the 'json_schema' field must be provided.",
                "response_format",
            )
        return checked_params("response_format", json=form.json_schema.schema_, **options)
    return None
