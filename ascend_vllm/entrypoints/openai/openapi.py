"""The document at /openapi.json: what requests and answers of each route contain.

Imported only when the document is asked for. It describes, and nothing else reads it: requests are validated by their
models, and answers are written as they are.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from ascend_vllm.entrypoints.http.access import needs_key
from ascend_vllm.entrypoints.openai.field_descriptions import Schema, describe_fields
from ascend_vllm.entrypoints.openai.protocol_chat import ChatCompletionResponse, ChatTokenLogprob
from ascend_vllm.entrypoints.openai.protocol_common import ApiRequest
from ascend_vllm.entrypoints.openai.protocol_completion import CompletionResponse
from ascend_vllm.entrypoints.openai.protocol_misc import DetokenizeResponse, ModelCard, ModelList, TokenizeResponse
from ascend_vllm.entrypoints.openai.protocol_pooling import (
    ClassificationData,
    EmbeddingData,
    PoolingData,
    PoolingResponse,
    RerankResponse,
    ScoreData,
)
from ascend_vllm.entrypoints.openai.protocol_responses import DeletedResponse, ItemList, ResponsesResponse

_REF = "#/components/schemas/{name}"
_JSON, _TEXT, _EVENTS, _BYTES = "application/json", "text/plain", "text/event-stream", "application/octet-stream"
# of a path
_PARAMETER = re.compile(r"{\w+}")


# ---- answers that the server writes without a class of their own ---------------------------------------------------


class ErrorDetail(msgspec.Struct):
    """What is wrong, and in which field."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorResponse(msgspec.Struct):
    """An error, in OpenAI's form and in vLLM 0.6.3's."""

    error: ErrorDetail
    object: Literal["error"]
    message: str
    type: str
    param: str | None
    code: int


class MessagesErrorResponse(msgspec.Struct):
    """An error in Anthropic's form."""

    type: Literal["error"]
    error: ErrorDetail


class UnauthorizedResponse(msgspec.Struct):
    """The key is missing or wrong."""

    error: Literal["Unauthorized"]


class VersionResponse(msgspec.Struct):
    """The server's version."""

    version: str


class LoadResponse(msgspec.Struct):
    """Requests in progress, with `--enable-server-load-tracking`."""

    server_load: int


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """Text."""

    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """Reasoning."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A tool call."""

    id: str
    name: str
    input: dict[str, Any]


class MessagesUsage(msgspec.Struct):
    """Tokens; those from the prefix cache with `--enable-prompt-tokens-details`."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int | msgspec.UnsetType = msgspec.UNSET
    cache_read_input_tokens: int | msgspec.UnsetType = msgspec.UNSET


class MessagesResponse(msgspec.Struct):
    """Answer of POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    model: str
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessagesUsage


class ContextManagement(msgspec.Struct):
    """Tokens before anything was left out; nothing is."""

    original_input_tokens: int


class CountTokensResponse(msgspec.Struct):
    """Answer of POST /v1/messages/count_tokens."""

    input_tokens: int
    context_management: ContextManagement


class OutputText(msgspec.Struct):
    """Text of a message; `logprobs` if they are included."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenLogprob] | None


class ReasoningText(msgspec.Struct):
    """Text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class MessageItem(msgspec.Struct, tag_field="type", tag="message"):
    """A message."""

    id: str
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]
    phase: None


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    """A function call; `arguments` are JSON."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """Reasoning."""

    id: str
    summary: list[Any]
    content: list[ReasoningText] | None
    encrypted_content: None
    status: ItemStatus | None


def _listing(name: str, item: type) -> type[msgspec.Struct]:
    """An answer of a pooling endpoint with its items."""
    data = msgspec.defstruct(name, [("data", list[item])], bases=(PoolingResponse,), kw_only=True)  # type: ignore[valid-type]
    data.__doc__ = (item.__doc__ or "").strip()
    return data


# fields of answers that are encoded in advance
_ENCODED: dict[str, Any] = {
    "EmbeddingData.embedding": list[float] | str,
    "PoolingData.data": list[float | list[float]] | str,
    "ResponsesResponse.metadata": dict[str, str] | None,
    "ResponsesResponse.output": list[MessageItem | FunctionCallItem | ReasoningItem],
    "ResponsesResponse.reasoning": dict[str, Any] | None,
    "ResponsesResponse.text": dict[str, Any] | None,
    "ResponsesResponse.tool_choice": str | dict[str, Any],
    "ResponsesResponse.tools": list[dict[str, Any]],
}

# ---- routes --------------------------------------------------------------------------------------------------------


class Operation(NamedTuple):
    """What a route does with a method.

    Attributes:
        description: Markdown.
        answer: type of the JSON answer, or a media type; None: no body.
        others: media types that the answer may have instead.
        errors: statuses of errors.
        error: type of their answers.
        queries: parameters of the query, with their schemas.
        body: schema of a body that the route does not have itself.
    """

    description: str
    answer: Any = None
    others: tuple[str, ...] = ()
    errors: tuple[int, ...] = ()
    error: Any = ErrorResponse
    queries: Mapping[str, Schema] = {}
    body: Schema | None = None


def _post(description: str, answer: Any, *others: str, error: Any = ErrorResponse) -> Operation:
    """A route that uses the model."""
    return Operation(description, answer, others, (400, 404, 413, 503), error)


_FLAG = {"type": "boolean", "default": False}
_MODE = {"type": "string", "enum": ["abort", "wait", "keep"], "description": "What becomes of running requests."}
_SCORE = _post("Compares texts.", _listing("ScoreResponse", ScoreData))
_RERANK = _post("Sorts documents by how well they fit a query.", RerankResponse)
_PING = Operation("200 while the engine works, 503 when it has failed.", None, errors=(503,), error=None)

# method and path; names of the path's parameters are left out
OPERATIONS: dict[str, Operation] = {
    "GET /health": _PING,
    "GET /ping": _PING,
    "POST /ping": _PING,
    "GET /version": Operation("The server's version.", VersionResponse),
    "GET /metrics": Operation("Metrics in Prometheus' format.", _TEXT),
    "GET /load": Operation("The number of requests in progress.", LoadResponse),
    "GET /tokenizer_info": Operation("The tokenizer's settings.", dict[str, Any]),
    "GET /v1/models": Operation("The names under which the model is served.", ModelList),
    "GET /v1/models/{}": Operation("One of these names.", ModelCard, errors=(404,)),
    "POST /v1/completions": _post("Continues texts.", CompletionResponse, _EVENTS),
    "POST /v1/chat/completions": _post("Answers a conversation.", ChatCompletionResponse, _EVENTS),
    "POST /v1/chat/completions/batch": _post("Answers several conversations.", ChatCompletionResponse),
    "POST /v1/messages": _post(
        "Answers a conversation in the form of Anthropic's Messages API.",
        MessagesResponse,
        _EVENTS,
        error=MessagesErrorResponse,
    ),
    "POST /v1/messages/count_tokens": _post(
        "Counts the tokens of a conversation as the model reads it.",
        CountTokensResponse,
        error=MessagesErrorResponse,
    ),
    "POST /v1/responses": _post(
        "Answers in the form of OpenAI's Responses API, and stores the answer.", ResponsesResponse, _EVENTS
    ),
    "GET /v1/responses/{}": Operation(
        "A stored response.",
        ResponsesResponse,
        (_EVENTS,),
        (400, 404),
        queries={
            "stream": _FLAG | {"description": "Whether to send the events of a background response."},
            "starting_after": {"type": "integer", "description": "The number of the last event that was received."},
        },
    ),
    "DELETE /v1/responses/{}": Operation("Deletes a stored response.", DeletedResponse, errors=(400, 404)),
    "GET /v1/responses/{}/input_items": Operation(
        "The input items of a stored response.",
        ItemList,
        errors=(400, 404),
        queries={
            "limit": {
                "type": "integer",
                "minimum": 1,
                "maximum": 100,
                "default": 20,
                "description": "The most items of the answer.",
            },
            "order": {
                "type": "string",
                "enum": ["asc", "desc"],
                "default": "desc",
                "description": "Whether the first or the last item of the input comes first.",
            },
            "after": {"type": "string", "description": "The id of the last item that was received."},
        },
    ),
    "POST /v1/responses/{}/cancel": Operation(
        "Cancels a response that is generated in the background.", ResponsesResponse, errors=(400, 404)
    ),
    "POST /tokenize": _post("The tokens of a text or of a conversation.", TokenizeResponse),
    "POST /detokenize": _post("The text of tokens.", DetokenizeResponse),
    "POST /v1/embeddings": _post("The embeddings of prompts.", _listing("EmbeddingResponse", EmbeddingData), _BYTES),
    "POST /pooling": _post("The pooler's results for prompts.", _listing("PoolingDataResponse", PoolingData), _BYTES),
    "POST /classify": _post("The classes of prompts.", _listing("ClassificationResponse", ClassificationData)),
    **{f"POST {path}": _SCORE for path in ("/score", "/v1/score")},
    **{f"POST {path}": _RERANK for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
    "POST /invocations": Operation(
        "SageMaker's only route: the body is one of another route, which its fields determine.",
        dict[str, Any],
        errors=(400, 404, 413, 503),
        body={"type": "object"},
    ),
    # with VLLM_ALLOW_RUNTIME_LORA_UPDATING
    "POST /v1/load_lora_adapter": Operation("Loads a LoRA adapter of a directory of the server.", errors=(400, 404)),
    "POST /v1/unload_lora_adapter": Operation("Serves a LoRA adapter no longer.", errors=(400, 404)),
    # with VLLM_SERVER_DEV_MODE or VLLM_TORCH_PROFILER_DIR
    "POST /reset_prefix_cache": Operation("Forgets cached prefixes.", dict[str, bool]),
    "POST /pause": Operation(
        "Stops generating.",
        dict[str, str],
        queries={
            "mode": _MODE,
            "clear_cache": {"type": "boolean", "default": True, "description": "Whether to forget cached prefixes."},
        },
    ),
    "POST /resume": Operation("Goes on generating.", dict[str, str]),
    "GET /is_paused": Operation("Whether generating is stopped.", dict[str, bool]),
    "POST /abort_requests": Operation(
        "Aborts requests.",
        dict[str, Any],
        errors=(400,),
        body={
            "type": "object",
            "properties": {
                "request_ids": {
                    "type": ["array", "null"],
                    "items": {"type": "string"},
                    "description": "Ids of requests or of their answers; null: all.",
                }
            },
        },
    ),
    "POST /sleep": Operation(
        "Frees the devices' memory.",
        dict[str, Any],
        errors=(400,),
        queries={
            "level": {"type": "integer", "default": 1, "description": "1 keeps the weights in the host's memory."},
            "mode": _MODE,
        },
    ),
    "POST /wake_up": Operation(
        "Takes the memory again.",
        dict[str, Any],
        errors=(400,),
        queries={"tags": {"type": "array", "items": {"type": "string"}, "description": "What to restore."}},
    ),
    "GET /is_sleeping": Operation("Whether the engine sleeps.", dict[str, bool]),
    "GET /server_info": Operation(
        "The engine's configuration.",
        dict[str, Any],
        queries={
            "config_format": {"type": "string", "enum": ["text", "json"], "description": "The configuration's form."}
        },
    ),
    "POST /collective_rpc": Operation(
        "Calls a method of all workers.",
        dict[str, Any],
        errors=(400,),
        body={
            "type": "object",
            "required": ["method"],
            "properties": {
                "method": {"type": "string", "description": "The method's name."},
                "args": {"type": "array", "description": "Its positional arguments."},
                "kwargs": {"type": "object", "description": "Its named arguments."},
                "timeout": {"type": ["number", "null"], "description": "Seconds to wait; null: any time."},
            },
        },
    ),
    "POST /start_profile": Operation("Starts the workers' profilers."),
    "POST /stop_profile": Operation("Stops them."),
}


# ---- the document --------------------------------------------------------------------------------------------------


def request_schemas(models: Iterable[type[BaseModel]], server: Mapping[str, int]) -> dict[str, Schema]:
    """The schemas of requests and of their parts, by name.

    Args:
        models: of the requests.
        server: limits of this server, see `describe_fields`.
    """
    found: dict[str, Schema] = {}
    for model in models:
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        parts = schema.pop("$defs", {}) | {model.__name__: schema}
        refusals = model.REFUSALS if issubclass(model, ApiRequest) else {}
        for name, part in parts.items():
            refused = {field: refusal.reason for field, refusal in refusals.items()} if part is schema else {}
            describe_fields(name, part, refused, server)
            shorten(part)
        found |= parts
    return found


def make_document(
    app: FastAPI,
    operations: Mapping[str, Operation],
    requests: Mapping[str, Schema],
    key_scope: str | None = None,
) -> Schema:
    """The document of an application.

    Args:
        app: the application.
        operations: by method and path; others of the application have no description.
        requests: schemas of requests, by name.
        key_scope: --api-key-scope; None: no key is needed.
    """
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    if app.root_path:
        document["servers"] = [{"url": app.root_path}]
    schemas, components = _answer_schemas([*operations.values()])
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            operation = operations.get(f"{method.upper()} {_PARAMETER.sub('{}', path)}")
            if operation is not None:
                _describe(described, operation, schemas)
            if key_scope is not None:
                is_open = not needs_key(path, key_scope)
                described["security"] = [] if is_open else _security(path)
                if not is_open:
                    described["responses"]["401"] = _response(UnauthorizedResponse, schemas, "The key is wrong.")
    parts = document.setdefault("components", {})
    parts["schemas"] = dict(sorted((components | dict(requests)).items()))
    if key_scope is not None:
        parts["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer", "description": "A key of `--api-key`."},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key."},
        }
    return document


def _security(path: str) -> list[dict[str, list[str]]]:
    """The places for the key, any of which is enough."""
    names = ["key", "x-api-key"] if path.startswith("/v1/messages") else ["key"]
    return [{name: []} for name in names]


def _describe(described: Schema, operation: Operation, schemas: Mapping[Any, Schema]) -> None:
    """Adds to FastAPI's description of a route what that does not know."""
    described["description"] = operation.description
    described["responses"] = {"200": _response(operation.answer, schemas, "The answer.")}
    for media_type in operation.others:
        described["responses"]["200"]["content"][media_type] = {"schema": _OTHERS[media_type]}
    for status in operation.errors:
        described["responses"][str(status)] = _response(operation.error, schemas, _STATUSES[status])
    parameters = [one for one in described.get("parameters", []) if one["in"] == "path"]
    for name, schema in operation.queries.items():
        parameters.append({"name": name, "in": "query", "required": False, "schema": schema})
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {_JSON: {"schema": operation.body}}}


_OTHERS: dict[str, Schema] = {
    _EVENTS: {
        "type": "object",
        "description": "One of the events of a stream.",
        "required": ["data"],
        "properties": {
            "event": {"type": "string", "description": "The event's type, where the API has types."},
            "data": {"type": "string", "description": "JSON, or `[DONE]` at the end."},
        },
    },
    _BYTES: {"type": "string", "format": "binary"},
}
_STATUSES = {
    400: "The request is wrong.",
    404: "There is no such model or response.",
    413: "The body is too large.",
    503: "The server is busy, or its engine has failed.",
}


def _response(answer: Any, schemas: Mapping[Any, Schema], description: str) -> Schema:
    if answer is None:
        return {"description": description}
    if isinstance(answer, str):
        return {"description": description, "content": {answer: {"schema": {"type": "string"}}}}
    return {"description": description, "content": {_JSON: {"schema": schemas[repr(answer)]}}}


def _answer_schemas(operations: Iterable[Operation]) -> tuple[dict[str, Schema], dict[str, Schema]]:
    """The schemas of all answers by their type's `repr`, and those of their parts by name."""
    types: list[Any] = [UnauthorizedResponse, *_ENCODED.values()]
    types += [one for row in operations for one in (row.answer, row.error) if one is not None]
    types = [one for one in types if not isinstance(one, str)]
    found, components = msgspec.json.schema_components(types, ref_template=_REF)
    schemas = {repr(one): schema for one, schema in zip(types, found, strict=True)}
    for place, encoded in _ENCODED.items():
        name, field = place.split(".")
        if name in components:
            components[name]["properties"][field] = schemas[repr(encoded)]
    for component in components.values():
        shorten(component)
        properties: dict[str, Schema] = component.get("properties", {})
        # every field is sent, whatever its value
        sent = [name for name, value in properties.items() if "default" in value]
        component["required"] = [*component.get("required", ()), *sent]
        for name, value in properties.items():
            value.pop("default", None)
            # not {}: JSON that is encoded in advance may be anything to msgspec
            choices = [choice for choice in value.get("anyOf", ()) if choice]
            if choices:
                properties[name] = {"anyOf": choices} if len(choices) > 1 else choices[0]
    return schemas, components


def shorten(schema: Schema) -> None:
    """Leaves the first paragraph of a class's docstring: the others are for readers of the source."""
    if "description" in schema:
        schema["description"] = inspect.cleandoc(schema["description"]).split("\n\n")[0]
