"""Constraints as the offline classes take them: `guided_options_request`, and LMDeploy's `response_format`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ascend_vllm.errors import RequestError
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.structured_outputs import StructuredOutputsParams

# fields of a guided_options_request → their names here
_CONSTRAINTS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
}
_OPTIONS = {"guided_decoding_backend": "backend", "guided_whitespace_pattern": "whitespace_pattern"}


def with_guided_options(params: Sequence[SamplingParams], options: Any) -> list[SamplingParams]:
    """Sampling parameters with the constraint of a `guided_options_request` of vLLM 0.6.3.

    Args:
        params: of each prompt.
        options: a dict with one of guided_json, guided_regex, guided_choice, guided_grammar and guided_json_object,
            and perhaps guided_decoding_backend and guided_whitespace_pattern, or an object with these attributes;
            guided_json may be a pydantic model. None: no constraint.

    Raises:
        RequestError: several constraints, an unknown field, or parameters with a constraint of their own.
    """
    constraint = None if options is None else _read_options(options)
    if constraint is None:
        return list(params)
    if any(one.structured_outputs is not None for one in params):
        raise RequestError(
            "Cannot set both guided_options_request and params.guided_decoding.", "guided_options_request"
        )
    return [one.clone(structured_outputs=constraint) for one in params]


def _read_options(options: Any) -> StructuredOutputsParams | None:
    known = _CONSTRAINTS | _OPTIONS
    fields = options if isinstance(options, Mapping) else {name: getattr(options, name, None) for name in known}
    unknown = sorted(map(str, fields.keys() - known.keys()))
    if unknown:
        raise RequestError(
            f"guided_options_request has unknown field(s): {', '.join(unknown)}", "guided_options_request"
        )
    given = {name: value for name, value in fields.items() if value is not None and value is not False}
    constraints = [name for name in given if name in _CONSTRAINTS]
    if len(constraints) > 1:
        raise RequestError(
            f"You can only use one guided decoding but multiple is specified: {dict(fields)}",
            "guided_options_request",
        )
    if not constraints:
        return None
    schema = given.get("guided_json")
    if schema is not None and hasattr(schema, "model_json_schema"):
        given["guided_json"] = schema.model_json_schema()
    try:
        values = {known[name]: value for name, value in given.items()}
        return StructuredOutputsParams(**values, single_space=schema is not None)
    except ValueError as error:
        raise RequestError(str(error), "guided_options_request") from error


def from_response_format(form: Any) -> StructuredOutputsParams | None:
    """The constraint of LMDeploy's `response_format`; None: any text.

    Args:
        form: ``{"type": "text"}``, ``{"type": "json_object"}``, ``{"type": "regex_schema", "regex_schema": "..."}``
            or ``{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}``.

    Raises:
        RequestError: it is of another form.
    """
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    named = form.get("json_schema") if kind == "json_schema" else None
    schema = named.get("schema", named) if isinstance(named, Mapping) else None
    if isinstance(schema, Mapping):
        return StructuredOutputsParams(json=json.dumps(schema))
    if kind == "regex_schema" and isinstance(form.get("regex_schema"), str):
        return StructuredOutputsParams(regex=form["regex_schema"])
    raise RequestError(
        "response_format must be a dict of type 'text', 'json_object', 'json_schema' or 'regex_schema', with what it "
        f"needs, got {form!r}.",
        "response_format",
    )
