"""The document at /openapi.json of the /generate server; imported only when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI

from ascend_vllm.args.tables.server import GenerateServerArgs
from ascend_vllm.entrypoints.generate.mindie import MindieRequest
from ascend_vllm.entrypoints.openai.field_descriptions import (
    MAX_LOGPROBS,
    MAX_MODEL_LEN,
    MAX_N,
    Schema,
    describe_fields,
)
from ascend_vllm.entrypoints.openai.openapi import OPERATIONS, Operation, make_document, shorten
from ascend_vllm.entrypoints.openai.request_limits import n_limit
from ascend_vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ascend_vllm.engine.async_llm import AsyncLLM

# fields of `SamplingParams` that /generate does not take
_NOT_TAKEN = ("logits_processors", "output_kind")


class GenerateResponse(msgspec.Struct):
    """One text for each sequence, behind the prompt."""

    text: list[str]


class _VllmRequest(msgspec.Struct):
    """What a body has beside sampling parameters."""

    prompt: str
    stream: bool | None = False


def make_generate_document(app: FastAPI, engine: AsyncLLM, args: GenerateServerArgs) -> Schema:
    """The document of a server.

    Args:
        app: the application.
        engine: of the server.
        args: the server's flags.
    """
    struct: type[msgspec.Struct] = MindieRequest if args.generate_format == "mindie" else SamplingParams
    _, requests = msgspec.json.schema_components((struct, _VllmRequest), ref_template="#/components/schemas/{name}")
    head: dict[str, Any] = requests.pop("_VllmRequest")
    body = requests[struct.__name__]
    body["properties"] = head["properties"] | body["properties"]
    body["required"] = ["prompt"]
    for name in _NOT_TAKEN:
        body["properties"].pop(name, None)
    server = {
        MAX_MODEL_LEN: engine.max_model_len,
        MAX_LOGPROBS: engine.config.model.max_logprobs,
        MAX_N: n_limit(args.sequence_limit),
    }
    for name, schema in requests.items():
        describe_fields(name.replace("StructuredOutputsParams", "StructuredOutputs"), schema, {}, server)
        shorten(schema)
    operation = Operation(
        "Continues a text. Parts of a stream end with a zero byte.",
        GenerateResponse,
        errors=(400, 413, 503),
        # the formats differ
        error=dict[str, Any],
        body={"$ref": f"#/components/schemas/{struct.__name__}"},
    )
    return make_document(app, {"POST /generate": operation, "GET /health": OPERATIONS["GET /health"]}, requests)
