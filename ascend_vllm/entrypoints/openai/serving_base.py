"""The base class of the serving classes: checks the model's name and sends requests to the engine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from starlette.requests import Request

from ascend_vllm.engine.tracing import trace_headers
from ascend_vllm.entrypoints.http.errors import shown_params, to_http_error
from ascend_vllm.entrypoints.http.request_ids import make_engine_id
from ascend_vllm.entrypoints.http.streaming import (
    StreamResponse,
    collect,
    encode_json,
    open_stream,
    run_unless_disconnected,
)
from ascend_vllm.entrypoints.openai.prompts import Prompt, PromptMaker
from ascend_vllm.entrypoints.openai.protocol_common import ChunkWriter, GenerationRequest, UsageCounter
from ascend_vllm.entrypoints.openai.request_limits import check_repeated_prompts
from ascend_vllm.entrypoints.openai.serving_settings import ServingSettings
from ascend_vllm.errors import RequestError
from ascend_vllm.logger import init_logger
from ascend_vllm.lora.request import LoRARequest
from ascend_vllm.outputs import RequestOutput
from ascend_vllm.pooling_params import PoolingParams
from ascend_vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ascend_vllm.engine.async_llm import AsyncLLM

logger = init_logger(__name__)

T = TypeVar("T")

# encoded events of outputs, each with its prompt's index; b"" for an output without events
Events: TypeAlias = AsyncGenerator[tuple[int, bytes], None]
# encodes the events of a prompt's next output
Encoder: TypeAlias = Callable[[int, RequestOutput], bytes]


@dataclasses.dataclass
class EngineRequest:
    """One prompt of a client's request, a request of the engine.

    Attributes:
        request: of the client, with priority and cache salt.
        engine_id: the engine's request id.
        prompt: with its token ids.
        params: the sampling parameters.
        headers: W3C headers of the caller's trace; None: there is none.
        is_further: whether it is not the first prompt of its request: those are scheduled behind requests of others.
    """

    request: GenerationRequest
    engine_id: str
    prompt: Prompt
    params: SamplingParams
    headers: Mapping[str, str] | None
    is_further: bool = False


def _logged(shape: Callable[[RequestOutput], T], engine_id: str) -> Callable[[RequestOutput], T]:
    """Wraps a shape function so that it logs each choice's text when the choice has ended."""
    texts: dict[int, str] = {}

    def log_and_shape(output: RequestOutput) -> T:
        for generated in output.outputs:
            text = texts[generated.index] = texts.get(generated.index, "") + generated.text
            if generated.finish_reason is not None:
                logger.info(
                    "Generated response %s, choice %d: output: %r, finish_reason: %s",
                    engine_id,
                    generated.index,
                    text,
                    generated.finish_reason,
                )
        return shape(output)

    return log_and_shape


async def _name_constraint(outputs: AsyncGenerator[T, None], field: str) -> AsyncGenerator[T, None]:
    """Passes outputs on; errors about the constraint name the field that the client sent."""
    async with contextlib.aclosing(outputs):
        try:
            async for output in outputs:
                yield output
        except RequestError as error:
            if error.param == "structured_outputs":
                error.param = field
            raise


async def event_stream(
    events: Events, writer: ChunkWriter, usage: UsageCounter | None
) -> AsyncGenerator[bytes, None]:
    """The stream of an answer: its events, then the usage and the end; an error becomes an event.

    Args:
        events: of the outputs.
        writer: makes the event with the usage.
        usage: of the whole request, complete when the events have ended; None: the stream has no such event.
    """
    try:
        async for _, data in events:
            if data:
                yield data
        if usage is not None:
            yield writer.usage_event(usage.total())
    except Exception as error:
        yield b"data: " + encode_json(to_http_error(error).body) + b"\n\n"
    yield b"data: [DONE]\n\n"


class ServingBase:
    """Shared steps of the serving classes.

    All methods that answer a request raise `RequestError` if it is wrong or the engine refuses it, `EngineDeadError`
    if the engine has died, and `ClientDisconnectedError` if the client has disconnected, which aborts its engine
    requests; their docstrings do not repeat this.

    Args:
        engine: generates the outputs.
        settings: flags that shape answers.

    Attributes:
        prompts: tokenises and renders prompts.
        forces_logprobs: compute log-probabilities even for requests that do not return them.
    """

    forces_logprobs = False

    def __init__(self, engine: AsyncLLM, settings: ServingSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.prompts = PromptMaker(engine.tokenizer, settings, engine.tokenizers)
        self.sampling_defaults = engine.default_sampling_params()

    @property
    def model_name(self) -> str:
        return self.settings.model_names[0]

    async def check_model(self, model: str | None) -> None:
        """Raise `ModelNotFoundError` unless the name is served; no name means the served model."""
        settings = self.settings
        if not model or model in settings.model_names:
            return
        if model not in settings.adapters.by_name and not await settings.adapters.find(self.engine, model):
            raise settings.unknown_model(model)
        await self.prompts.load_tokenizer(model)

    def adapter_of(self, model: str | None) -> LoRARequest | None:
        """The adapter that a request names as its model; None: the model as it is.

        Raises:
            ModelNotFoundError: the name is served no longer.
        """
        settings = self.settings
        if not model or model in settings.model_names:
            return None
        if (adapter := settings.adapters.by_name.get(model)) is None:
            raise settings.unknown_model(model)
        return adapter

    async def generate_whole(self, parts: Sequence[EngineRequest], http: Request) -> list[RequestOutput]:
        """The final outputs of engine requests, in their order."""
        generators = [self.generate(part, lambda output: output) for part in parts]
        return await run_unless_disconnected(http.receive, collect(generators))

    async def generate_stream(
        self,
        parts: Sequence[EngineRequest],
        http: Request,
        encode: Encoder,
        shape: Callable[[Events], AsyncGenerator[bytes, None]],
    ) -> StreamResponse:
        """Streams the events of engine requests.

        Args:
            parts: the engine requests.
            http: the client's request.
            encode: encodes the events of an output, given its prompt's index; called as `AsyncLLM.generate_shaped`
                says, with the outputs of several prompts at the same time perhaps, but never with two of one.
            shape: makes the response's stream of the events.
        """
        events = [self.generate(part, functools.partial(encode, index)) for index, part in enumerate(parts)]
        return await open_stream(http, events, shape, self.settings.keep_alive_s)

    def engine_requests(
        self,
        request: GenerationRequest,
        response_id: str,
        http: Request,
        prompts: Sequence[Prompt],
        max_tokens: Sequence[int],
    ) -> list[EngineRequest]:
        """One engine request per prompt of a client's request, each with its own `max_tokens`."""
        engine_id = make_engine_id(request, response_id, http)
        headers = self.trace_headers(http)
        num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        check_repeated_prompts(
            num_prompt_tokens,
            request.n or 1,
            request.requested_prompt_logprobs(),
            are_repeated=bool(request.echo or request.return_token_ids),
        )
        # made once, as it may contain long lists; the prompts' copies differ in max_tokens only
        params = request.sampling_params(self.sampling_defaults, min(max_tokens), self.forces_logprobs)
        return [
            EngineRequest(
                request, f"{engine_id}-{index}", prompt, params.clone(max_tokens=limit), headers, is_further=index > 0
            )
            for index, (prompt, limit) in enumerate(zip(prompts, max_tokens, strict=True))
        ]

    def generate(self, part: EngineRequest, shape: Callable[[RequestOutput], T]) -> AsyncGenerator[T, None]:
        """Results of `shape` for the outputs of an engine request, which is sent when the first one is awaited.

        Args:
            part: the engine request.
            shape: called as `AsyncLLM.generate_shaped` says.
        """
        if self.settings.log_requests:
            self._log_request(part.engine_id, part.prompt, part.params)
        outputs = self.engine.generate_shaped(
            {"prompt_token_ids": part.prompt.token_ids},
            part.params,
            part.engine_id,
            _logged(shape, part.engine_id) if self.settings.log_outputs else shape,
            priority=part.request.priority or 0,
            cache_salt=part.request.cache_salt,
            trace_headers=part.headers,
            is_further=part.is_further,
            lora_request=self.adapter_of(part.request.model),
        )
        if part.params.structured_outputs is not None:
            outputs = _name_constraint(outputs, part.request.constraint_field)
        return outputs

    def trace_headers(self, http: Request) -> dict[str, str] | None:
        """The W3C headers of a request's trace; None: requests are not traced."""
        return trace_headers(http.headers) if self.settings.trace else None

    def _log_request(self, engine_id: str, prompt: Prompt, params: SamplingParams | PoolingParams) -> None:
        size = self.settings.max_log_len
        logger.info(
            "Received request %s: prompt: %r, params: %s, prompt_token_ids: %s.",
            engine_id,
            None if prompt.text is None else prompt.text[:size],
            shown_params(params),
            prompt.token_ids[:size],
        )
