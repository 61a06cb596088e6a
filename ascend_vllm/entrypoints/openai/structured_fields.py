"""Constraints on the output in requests: `structured_outputs`, `response_format` and `guided_*`.

These are the fields of today's vLLM, OpenAI and vLLM 0.6.3. All are converted to `StructuredOutputsParams`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from ascend_vllm.errors import RequestError
from ascend_vllm.structured_outputs import CONSTRAINTS, MAX_BYTES, StructuredOutputsParams

# type of a `response_format` → its keys; vLLM allows `json_schema` beside any type but the last
_FORMAT_KEYS = {
    "text": ["json_schema", "type"],
    "json_object": ["json_schema", "schema", "type", "value"],
    "json_schema": ["json_schema", "type"],
    "structural_tag": ["format", "structures", "triggers", "type"],
}
# unknown keys that an error names, and characters of each
_MAX_NAMED = 10
_MAX_NAMED_CHARACTERS = 100
# fields of vLLM 0.6.3 → fields of `StructuredOutputsParams`
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


class OpenModel(BaseModel):
    """A part of a request with further fields, which are kept apart (`model_extra`)."""

    model_config = ConfigDict(extra="allow")


class StructuredOutputs(OpenModel):
    """`structured_outputs` of a request; see `StructuredOutputsParams`."""

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


class JsonSchemaFormat(OpenModel):
    """`json_schema` of a `response_format`."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(OpenModel):
    """`response_format`: text, a JSON object, perhaps of a schema, or JSON of a schema.

    Clients of other servers send the schema of a JSON object as `schema` or `value`, as an object or a JSON string.
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: str | dict[str, Any] | None = Field(None, alias="schema")
    value: str | dict[str, Any] | None = None


class StructuralTagFormat(OpenModel):
    """`response_format` with schemas that apply between a begin and an end tag."""

    type: Literal["structural_tag"]


def checked_params(name: str, **fields: Any) -> StructuredOutputsParams:
    """Makes the engine's parameters and checks them.

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
    """Refuse a constraint that is too large for the engine core before it is copied, logged and sent there.

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
            return  # its contents are checked elsewhere
    if isinstance(value, str | bytes) and len(value) > MAX_BYTES:
        raise RequestError(f"{kind} is too large: {len(value)} {unit}, the limit is {MAX_BYTES} bytes.", name)


def check_schema_text(name: str, value: Any) -> None:
    """Refuse a schema given as text that is not JSON, with the error text of Python's json as in vLLM 0.6.3.

    Raises:
        RequestError: it is not JSON, or it is too large (also if not given as text).
    """
    _check_size("json", value, name)
    if isinstance(value, str):
        try:
            json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(str(error), name) from error


def from_guided(values: Mapping[str, Any], backend: str | None, whitespace: str | None) -> StructuredOutputsParams:
    """The constraint in the `guided_*` fields.

    Args:
        values: one of `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar`.
        backend: `guided_decoding_backend`.
        whitespace: `guided_whitespace_pattern`.

    Raises:
        RequestError: the schema is not JSON, or the constraint too large.
    """
    ((name, value),) = values.items()
    check_schema_text("guided_json", values.get("guided_json"))
    options = {"backend": backend, "whitespace_pattern": whitespace, "single_space": name == "guided_json"}
    return checked_params(name, **{_GUIDED[name]: value}, **options)


def from_structured_outputs(fields: StructuredOutputs) -> StructuredOutputsParams:
    """The constraint in `structured_outputs`.

    Raises:
        RequestError: no constraint or several at once, one that is too large, or a field unknown to this server.
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
    """The constraint in `response_format`; None: plain text.

    Raises:
        RequestError: an unknown key, a schema that is not JSON, two schemas, or the type is `json_schema` and there
            is no schema.
    """
    _check_keys("response_format", _given_keys(form), _FORMAT_KEYS[form.type])
    if isinstance(form, StructuralTagFormat):
        text = json.dumps(form.model_dump(exclude_unset=True, by_alias=True))
        return checked_params("response_format", structural_tag=text, backend=backend)
    if form.json_schema is not None:
        known = [name.rstrip("_") for name in JsonSchemaFormat.model_fields]
        _check_keys("response_format.json_schema", _given_keys(form.json_schema), known)
    options = {"backend": backend, "whitespace_pattern": whitespace}
    if form.type == "json_object":
        schemas = [schema for schema in (form.schema_, form.value) if schema is not None]
        if len(schemas) > 1:
            raise RequestError(
                "`response_format` has both `schema` and `value`, which mean the same.", "response_format"
            )
        # an empty schema would allow more than objects
        if not schemas or schemas == [{}]:
            return checked_params("response_format", json_object=True, **options)
        check_schema_text("response_format", schemas[0])
        return checked_params("response_format", json=schemas[0], **options)
    if form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema_ is None:
            raise RequestError(
                "When response_format type is 'json_schema', the 'json_schema' field must be provided.",
                "response_format",
            )
        return checked_params("response_format", json=form.json_schema.schema_, **options)
    return None


def _given_keys(part: OpenModel) -> set[str]:
    """The keys of a part of a request, as the request spells them."""
    fields = type(part).model_fields
    given = {fields[name].alias or name for name in part.model_fields_set & fields.keys()}
    return given | (part.model_extra or {}).keys()


def _check_keys(name: str, given: set[str], known: list[str]) -> None:
    """Refuses keys that would be ignored.

    Raises:
        RequestError: there are some; names them, and those that are allowed.
    """
    unknown = [key[:_MAX_NAMED_CHARACTERS] for key in sorted(given.difference(known))[:_MAX_NAMED]]
    if unknown:
        raise RequestError(f"`{name}` has unknown keys {unknown}; it may hold {sorted(known)}.", "response_format")
