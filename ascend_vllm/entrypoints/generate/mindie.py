"""MindIE's format of /generate: requests, answers and errors.

Ranges are those of MindIE 1.0.RC1; the fields that its later versions added are taken too, and so are the fields of
vLLM's beam search. Where the versions of MindIE write errors differently, an answer holds what both have.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from ascend_vllm.args.tables.server import DEFAULT_MAX_SEQUENCES
from ascend_vllm.entrypoints.http.errors import (
    AnswerErrorsMiddleware,
    HttpError,
    json_response,
    retry_headers,
)
from ascend_vllm.entrypoints.http.validation import read_json
from ascend_vllm.entrypoints.openai.protocol_common import log_unknown_fields
from ascend_vllm.entrypoints.openai.request_limits import check_params, check_sizes
from ascend_vllm.errors import EngineBusyError, EngineDeadError, RequestError
from ascend_vllm.logger import init_logger
from ascend_vllm.outputs import RequestOutput
from ascend_vllm.sampling_params import RequestOutputKind, SamplingParams

logger = init_logger(__name__)

MAX_PROMPT_CHARACTERS = 512 * 1024
_MAX_TOP_K = 2**31 - 1
_MAX_SEED = 2**64 - 1

_GENERATION_FAILED = "Request failed during generation"

Positive = Annotated[int, msgspec.Meta(gt=0)]
NumSequences = Annotated[int, msgspec.Meta(ge=1, le=128)]
Penalty = Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)]


class MindieRequest(msgspec.Struct, kw_only=True):
    """The body of a request; the annotations are MindIE's ranges.

    Attributes:
        model: accepted; one model is served.
        max_tokens: at most the model's length.
        top_k: −1 or 1 … size of the vocabulary − 1; None: off. 0 may not be given.
        seed: at most 2^64 − 1.
    """

    prompt: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PROMPT_CHARACTERS)]
    stream: bool = False
    model: str | None = None
    max_tokens: Positive = 16
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0.0, le=2.0)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    temperature: Annotated[float, msgspec.Meta(ge=0.0)] = 1.0
    top_k: int | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    seed: Positive | None = None
    n: NumSequences = 1
    best_of: NumSequences | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False


_PASSED_ON = [
    name
    for name in MindieRequest.__struct_fields__
    if name not in ("prompt", "stream", "model", "top_k", "seed") and name in SamplingParams.__struct_fields__
]


class MindieFormat:
    """The format of requests and answers.

    Args:
        vocab_size: of the model.
        max_model_len: most tokens of prompt and output together; MindIE's maxIterTimes.
        max_sequences: limit of n and best_of.
    """

    def __init__(self, vocab_size: int, max_model_len: int, max_sequences: int = DEFAULT_MAX_SEQUENCES) -> None:
        self._max_sequences = max_sequences
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def parse(self, body: bytes) -> tuple[str, bool, SamplingParams]:
        """Prompt, whether to stream, and sampling parameters of a body; its content-type does not matter.

        Raises:
            RequestError: not JSON, no prompt, or a value of the wrong type or out of range.
        """
        fields = read_json(body)
        if not isinstance(fields, dict):
            raise RequestError("The request body must be a JSON object.", "body")
        check_sizes(fields)
        given = {name: value for name, value in fields.items() if value is not None}
        try:
            request = msgspec.convert(given, MindieRequest)
        except msgspec.ValidationError as error:
            raise RequestError(str(error)) from error
        self._check(request)
        log_unknown_fields(given.keys() - MindieRequest.__struct_fields__)
        params = _sampling_params(request)
        check_params(params, self._max_sequences)
        return request.prompt, request.stream, params

    def whole(self, prompt: str, output: RequestOutput) -> Response:
        """``{"text":["<prompt><output>", …]}``."""
        return json_response({"text": [prompt + generated.text for generated in output.outputs]})

    def frame(self, _prompt: str, params: SamplingParams, output: RequestOutput) -> bytes:
        """``{"text":["<new text>", …]}``, a text for every sequence, "" for one without new text."""
        texts = [""] * params.n
        for generated in output.outputs:
            texts[generated.index] = generated.text
        return msgspec.json.encode({"text": texts})

    def error_frame(self, error: Exception) -> bytes:
        """The body of the same error as an answer."""
        return msgspec.json.encode(to_mindie_error(error).body)

    def install_error_handlers(self, app: FastAPI) -> None:
        """Turn every exception that leaves a route into an error answer, also for unknown paths and methods."""

        async def answer(_request: Request, error: Exception) -> Response:
            return _answer_error(error)

        for kind in (RequestError, EngineDeadError, HTTPException, Exception):
            app.add_exception_handler(kind, answer)
        app.add_middleware(AnswerErrorsMiddleware, answer=_answer_error)

    def _check(self, request: MindieRequest) -> None:
        """Checks that depend on the model, or on several fields."""
        if request.max_tokens > self._max_model_len:
            raise RequestError(f"max_tokens must be in (0, {self._max_model_len}], got {request.max_tokens}.")
        top_k = request.top_k
        if top_k is not None and top_k != -1 and not 0 < top_k < min(self._vocab_size, _MAX_TOP_K + 1):
            raise RequestError(f"top_k must be -1 or in (0, {self._vocab_size}), got {top_k}.")
        if request.seed is not None and request.seed > _MAX_SEED:
            raise RequestError(f"seed must be in (0, {_MAX_SEED}], got {request.seed}.")
        if request.stream and request.best_of not in (None, request.n):
            raise RequestError(f"best_of must equal n in a stream, got n={request.n} and best_of={request.best_of}.")
        if request.stream and request.use_beam_search:
            raise RequestError("use_beam_search cannot be used in a stream: beams have no new text, they change.")


def _sampling_params(request: MindieRequest) -> SamplingParams:
    fields: dict[str, Any] = {name: getattr(request, name) for name in _PASSED_ON}
    # the engine's seeds have 63 bits
    seed = None if request.seed is None else request.seed & (2**63 - 1)
    kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    top_k = -1 if request.top_k is None else request.top_k
    try:
        return SamplingParams(**fields, seed=seed, top_k=top_k, output_kind=kind)
    except (TypeError, ValueError) as error:
        raise RequestError(str(error)) from error


def to_mindie_error(error: BaseException) -> HttpError:
    """Status and body for any exception; an unexpected one is logged, and its details are not sent."""
    if isinstance(error, EngineBusyError):
        return HttpError(429, {"error": "Model is overloaded"})
    if isinstance(error, RequestError):
        if error.status_code != HTTPStatus.BAD_REQUEST:
            return _typed(error.status_code, str(error))
        # earlier versions of MindIE send only the first three words
        return HttpError(422, {"type": "Input Validation Error", "error": f"Input validation error: {error}"})
    if isinstance(error, EngineDeadError):
        return HttpError(424, {"error": _GENERATION_FAILED})
    if isinstance(error, HTTPException):
        if error.status_code == 404:
            return HttpError(404, {"type": "NotFoundError", "error": "not found"})
        return _typed(error.status_code, str(error.detail))
    logger.error("Unexpected error while answering a request", exc_info=error)
    return HttpError(500, {"error": "Incomplete generation"})


def _answer_error(error: BaseException) -> Response:
    status, body = to_mindie_error(error)
    return json_response(body, status, retry_headers(error))


def _typed(status: int, message: str) -> HttpError:
    return HttpError(status, {"type": HTTPStatus(status).phrase, "error": message})
