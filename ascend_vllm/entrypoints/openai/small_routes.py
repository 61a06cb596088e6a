"""Small routes: /load, /tokenizer_info, SageMaker's /invocations, and refusals of routes that vLLM has."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from ascend_vllm.entrypoints.http.errors import error_body, json_response
from ascend_vllm.entrypoints.http.metrics import ServerLoad
from ascend_vllm.entrypoints.http.validation import read_by, read_json
from ascend_vllm.errors import RequestError

if TYPE_CHECKING:
    from ascend_vllm.args.tables.server import FrontendArgs
    from ascend_vllm.engine.async_llm import AsyncLLM
    from ascend_vllm.engine.tokenization import Tokenizer

# field of a body → route; the first pair whose field is given and whose route exists
_INVOCATIONS = (
    ("messages", "/v1/chat/completions"),
    ("prompt", "/v1/completions"),
    ("text_1", "/score"),
    ("data_1", "/score"),
    ("queries", "/score"),
    ("query", "/rerank"),
    ("input", "/v1/embeddings"),
    ("input", "/classify"),
    ("input", "/pooling"),
    ("messages", "/v1/embeddings"),
    ("messages", "/classify"),
)
_INVOCATIONS_DEFAULT = "/v1/completions"

# routes between the servers of a vLLM cluster
_SCALE_OUT_ROUTES = (
    "/inference/v1/generate",
    "/v1/completions/render",
    "/v1/chat/completions/render",
    "/v1/messages/render",
    "/v1/responses/render",
)


def add_small_routes(app: FastAPI, engine: AsyncLLM, args: FrontendArgs, load: ServerLoad) -> None:
    """Adds the routes; /invocations looks up the route to forward to with each request."""

    @app.get("/load")
    async def server_load() -> Response:
        return json_response({"server_load": load.num_requests})

    if args.enable_tokenizer_info_endpoint and engine.tokenizer is not None:
        tokenizer = engine.tokenizer

        @app.get("/tokenizer_info")
        async def tokenizer_info() -> Response:
            return json_response(describe_tokenizer(tokenizer, args.chat_template))

    _add_invocations(app)
    for path in _SCALE_OUT_ROUTES:
        app.add_api_route(path, _refuse_scale_out, methods=["POST"], include_in_schema=False)


def _add_invocations(app: FastAPI) -> None:
    @app.post("/invocations")
    async def invocations(http: Request) -> Response:
        """SageMaker's only route: the body's fields determine the route that answers."""
        routes = {getattr(route, "path", ""): route for route in app.routes}
        # the request caches its body, so that the other route can read it again
        body = await read_by(http, read_json)
        path = _INVOCATIONS_DEFAULT
        if isinstance(body, dict):
            path = next((path for field, path in _INVOCATIONS if field in body and path in routes), path)
        if path not in routes:
            known = sorted({field for field, known in _INVOCATIONS if known in routes})
            raise RequestError(f"Cannot find suitable handler for request. Expected one of the fields: {known}")
        endpoint: Any = getattr(routes[path], "endpoint", None)
        response: Response = await endpoint(http)
        return response


async def _refuse_scale_out() -> Response:
    message = "Scale-out endpoints are disabled. This version of the server does not have them."
    return json_response(error_body(message, "PermissionDeniedError", 403), 403)


def describe_tokenizer(tokenizer: Tokenizer, chat_template: str | None) -> dict[str, Any]:
    """The tokenizer's settings as in its files, with tokens as text.

    Args:
        tokenizer: to describe.
        chat_template: replaces the tokenizer's own template; None: not replaced.
    """
    hf = tokenizer.hf
    info: dict[str, Any] = {"tokenizer_class": type(hf).__name__} | dict(getattr(hf, "init_kwargs", {}))
    info["chat_template"] = chat_template or tokenizer.chat_template
    # added tokens, and settings of custom tokenizers, may be objects that JSON cannot encode
    described: dict[str, Any] = json.loads(json.dumps(info, default=str))
    return described
