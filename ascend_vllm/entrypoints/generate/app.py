"""The HTTP application of the plain /generate server."""

from __future__ import annotations

import functools
import json
import re
import secrets
from collections.abc import AsyncGenerator, Set
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

import ascend_vllm
from ascend_vllm.args.tables.server import GenerateServerArgs
from ascend_vllm.engine.tracing import trace_headers
from ascend_vllm.entrypoints.generate.mindie import MindieFormat
from ascend_vllm.entrypoints.http.access import ConcurrencyLimitMiddleware
from ascend_vllm.entrypoints.http.docs_pages import add_docs
from ascend_vllm.entrypoints.http.errors import (
    BodyError,
    install_error_handlers,
    json_response,
    shown_params,
    to_http_error,
)
from ascend_vllm.entrypoints.http.streaming import (
    ClientDisconnectedError,
    StreamResponse,
    run_unless_disconnected,
)
from ascend_vllm.entrypoints.http.validation import read_by, read_json
from ascend_vllm.entrypoints.openai.request_limits import check_params, check_sizes, n_limit
from ascend_vllm.errors import EngineDeadError, RequestError
from ascend_vllm.logger import init_logger
from ascend_vllm.outputs import RequestOutput
from ascend_vllm.sampling_params import RequestOutputKind, SamplingParams
from ascend_vllm.structured_outputs import CONSTRAINTS, StructuredOutputsParams

if TYPE_CHECKING:
    from ascend_vllm.engine.async_llm import AsyncLLM

logger = init_logger(__name__)

T = TypeVar("T")

# null means the default for these; vLLM 0.6.0 has no early_stopping=None
_DEFAULT_IF_NULL = ("use_beam_search", "length_penalty", "early_stopping")


_PLACE = re.compile(r"`\$\.(\w+)")
_FIRST_WORD = re.compile(r"(\w+) ")


def _sampling_params(fields: dict[str, Any], stream: bool) -> SamplingParams:
    fields = {name: value for name, value in fields.items() if value is not None or name not in _DEFAULT_IF_NULL}
    known = {field.name for field in msgspec.structs.fields(SamplingParams)} - {"output_kind"}
    for name in fields:
        if name not in known:
            raise RequestError(
                f"Unknown field `{name}`: /generate takes `prompt`, `stream` and sampling parameters.", name
            )
    for name in ("structured_outputs", "guided_decoding"):
        _check_constraint(name, fields.get(name))
    try:
        # checks the types; the constructor then checks the ranges
        params = msgspec.convert(fields, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        raise RequestError(str(error), _field_of(error, known)) from error
    params.output_kind = RequestOutputKind.CUMULATIVE if stream else RequestOutputKind.FINAL_ONLY
    return params


def _field_of(error: msgspec.ValidationError, known: Set[str]) -> str | None:
    """The field at fault: errors about types end with its path, those about ranges begin with its name."""
    found = _PLACE.search(str(error)) or _FIRST_WORD.match(str(error))
    return found[1] if found is not None and found[1] in known else None


def _check_constraint(name: str, value: Any) -> None:
    """Refuse unknown keys of a constraint, which would otherwise be ignored."""
    if not isinstance(value, dict):
        return
    known = {field.name for field in msgspec.structs.fields(StructuredOutputsParams)}
    unknown = sorted(value.keys() - known)
    if unknown:
        raise RequestError(f"`{name}` has unknown fields {unknown}; it may hold {sorted(known)}.", name)
    if not any(value.get(constraint) for constraint in CONSTRAINTS):
        raise RequestError(
            f"You must use one kind of structured outputs constraint but none are specified: {value}", name
        )


def _texts(prompt: str, output: RequestOutput) -> dict[str, list[str]]:
    return {"text": [prompt + generated.text for generated in output.outputs]}


class VllmFormat:
    """vLLM's: prompt and text together, everything so far in every frame; ASCII alone in streams.

    Args:
        max_sequences: limit of n and best_of.
    """

    def __init__(self, max_sequences: int) -> None:
        self._max_sequences = max_sequences

    def parse(self, body: bytes) -> tuple[str, bool, SamplingParams]:
        """Prompt, whether to stream, and sampling parameters of a body; its content-type does not matter.

        Raises:
            RequestError: not JSON, no prompt, an unknown field, or a value out of range.
        """
        fields = read_json(body)
        if not isinstance(fields, dict):
            raise BodyError("The request body must be a JSON object.", "body")
        check_sizes(fields)
        prompt = fields.pop("prompt", None)
        if not isinstance(prompt, str):
            raise RequestError("`prompt` must be given as a string.", param="prompt")
        stream = fields.pop("stream", None) or False
        if not isinstance(stream, bool):
            raise RequestError("`stream` must be true or false.", param="stream")
        params = _sampling_params(fields, stream)
        check_params(params, self._max_sequences)
        return prompt, stream, params

    def whole(self, prompt: str, output: RequestOutput) -> Response:
        """The answer to a request that does not stream: ``{"text":["<prompt><output>", …]}``."""
        return json_response(_texts(prompt, output))

    def frame(self, prompt: str, _params: SamplingParams, output: RequestOutput) -> bytes:
        """A chunk of a stream, without its terminating zero byte: ``{"text": ["<prompt><output so far>", …]}``."""
        return json.dumps(_texts(prompt, output)).encode()

    def error_frame(self, error: Exception) -> bytes:
        """The last chunk of a stream that fails: the body of the same error as an answer."""
        return json.dumps(to_http_error(error).body).encode()

    def install_error_handlers(self, app: FastAPI) -> None:
        """The error answers of the OpenAI-compatible server."""
        install_error_handlers(app)


GenerateFormat = VllmFormat | MindieFormat


async def _frames(
    form: GenerateFormat, first: bytes, rest: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    """All frames with their terminators; an error is sent as the last frame."""
    try:
        yield first + b"\0"
        async for frame in rest:
            yield frame + b"\0"
    except Exception as error:
        yield form.error_frame(error) + b"\0"


async def _first(answers: AsyncGenerator[T, None], http: Request) -> T:
    """The first item of a request's outputs; the request ends if that is an error or the client disconnects."""
    try:
        return await run_unless_disconnected(http.receive, anext(answers))
    except BaseException:
        await answers.aclose()
        raise


async def generate(engine: AsyncLLM, form: GenerateFormat, http: Request) -> Response:
    """The answer to one request.

    Raises:
        RequestError: the request is invalid.
        ClientDisconnectedError: the client disconnected; the generation was aborted.
    """
    prompt, stream, params = await read_by(http, form.parse)
    headers = trace_headers(http.headers)
    request_id = f"generate-{secrets.token_hex(8)}"
    if engine.config.observability.log_requests:
        # as vLLM's server does, but without the prompt, since this program has no --max-log-len
        logger.info("Received request %s: params: %s.", request_id, shown_params(params))
    if stream:
        # frames are made in the output thread, like the text
        shape = functools.partial(form.frame, prompt, params)
        frames = engine.generate_shaped(prompt, params, request_id, shape, trace_headers=headers)
        return StreamResponse(_frames(form, await _first(frames, http), frames), None, frames.aclose)
    make_whole = functools.partial(form.whole, prompt)
    answers = engine.generate_shaped(prompt, params, request_id, make_whole, trace_headers=headers)
    answer = await _first(answers, http)
    # the only one
    await answers.aclose()
    return answer


def _describe(app: FastAPI, engine: AsyncLLM, args: GenerateServerArgs) -> dict[str, Any]:
    """The document at /openapi.json; what it takes is imported only when it is asked for."""
    from ascend_vllm.entrypoints.generate.openapi import make_generate_document

    return make_generate_document(app, engine, args)


def build_app(engine: AsyncLLM, args: GenerateServerArgs) -> FastAPI:
    """The application: /generate, /health and the documentation pages."""
    # see `add_docs` for the document
    app = FastAPI(title="ascend-vllm", version=ascend_vllm.__version__, openapi_url=None)
    app.root_path = (args.root_path or "").rstrip("/")
    form: GenerateFormat = VllmFormat(n_limit(args.sequence_limit))
    if args.generate_format == "mindie":
        form = MindieFormat(engine.config.model.vocab_size, engine.max_model_len, n_limit(args.sequence_limit))

    @app.get("/health")
    async def health() -> Response:
        try:
            await engine.check_health()
        except EngineDeadError:
            return Response(status_code=503)
        return Response(status_code=200)

    @app.post("/generate")
    async def generate_route(http: Request) -> Response:
        return await generate(engine, form, http)

    add_docs(app, functools.partial(_describe, app, engine, args))

    @app.exception_handler(ClientDisconnectedError)
    async def client_gone(_http: Request, _error: Exception) -> Response:
        return Response(status_code=499)

    if args.max_concurrent_requests_per_key:
        app.add_middleware(ConcurrencyLimitMiddleware, limit=args.max_concurrent_requests_per_key)
    form.install_error_handlers(app)
    return app
