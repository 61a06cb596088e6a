"""What the serving classes share: model names, tokens of prompts, limits, usage."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from starlette.requests import Request

from ascend_vllm.engine.pooling_requests import truncate
from ascend_vllm.engine.tracing import trace_headers
from ascend_vllm.entrypoints.http.access import caller_of
from ascend_vllm.entrypoints.http.errors import shown_params
from ascend_vllm.entrypoints.http.request_ids import NamedRequest, claims_of, header_id
from ascend_vllm.entrypoints.http.streaming import (
    StreamResponse,
    merge,
    run_unless_disconnected,
    unless_gone,
    with_keep_alive,
)
from ascend_vllm.entrypoints.openai.protocol_chat import ChatMessage
from ascend_vllm.entrypoints.openai.protocol_common import (
    GenerationRequest,
)
from ascend_vllm.entrypoints.openai.request_limits import check_lists, check_sequences, check_told_prompts
from ascend_vllm.entrypoints.openai.serving_settings import ServingSettings
from ascend_vllm.entrypoints.templates.chat_template import described_tool, render_chat
from ascend_vllm.entrypoints.templates.conversation_limits import check_conversation
from ascend_vllm.errors import ModelNotFoundError, RequestError
from ascend_vllm.logger import init_logger
from ascend_vllm.outputs import RequestOutput
from ascend_vllm.pooling_params import PoolingParams
from ascend_vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ascend_vllm.engine.async_llm import AsyncLLM
    from ascend_vllm.engine.tokenization import Tokenizer

logger = init_logger(__name__)

T = TypeVar("T")

# outputs with their prompt's index, as they come
Outputs: TypeAlias = AsyncGenerator[tuple[int, RequestOutput], None]
# events made of outputs, likewise; b"" while an output has none
Events: TypeAlias = AsyncGenerator[tuple[int, bytes], None]
# makes events of a prompt's outputs, in turn
Encoder: TypeAlias = Callable[[int, RequestOutput], bytes]


@dataclasses.dataclass
class Prompt:
    """A prompt ready for the engine.

    Attributes:
        text: what `echo` returns; None when it was given as token ids.
    """

    token_ids: list[int]
    text: str | None


async def _chain(
    first: asyncio.Future[tuple[int, T]], rest: AsyncGenerator[tuple[int, T], None]
) -> AsyncGenerator[tuple[int, T], None]:
    yield await first
    async for item in rest:
        yield item


async def _close(first: asyncio.Future[tuple[int, T]], rest: AsyncGenerator[tuple[int, T], None]) -> None:
    """End the generators, also while the first output is still waited for."""
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await rest.aclose()


@dataclasses.dataclass
class _EngineRequest:
    """One prompt of a request, on its way to the engine; see `ServingBase.generate_shaped`."""

    request: GenerationRequest
    engine_id: str
    prompt: Prompt
    params: SamplingParams
    headers: Mapping[str, str] | None
    # not the first prompt of the request
    is_further: bool = False


def _logged(shape: Callable[[RequestOutput], T], engine_id: str) -> Callable[[RequestOutput], T]:
    """The same shape; each choice is logged when it has ended."""
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


def _unchanged(output: RequestOutput) -> RequestOutput:
    return output


async def _name_constraint(outputs: AsyncGenerator[T, None], field: str) -> AsyncGenerator[T, None]:
    """The same outputs; what the engine finds wrong with the constraint names the field that the client sent."""
    async with contextlib.aclosing(outputs):
        try:
            async for output in outputs:
                yield output
        except RequestError as error:
            if error.param == "structured_outputs":
                error.param = field
            raise


class ServingBase:
    """Shared steps of the serving classes.

    Args:
        engine: the engine's front.
        settings: flags that shape answers.

    Attributes:
        forces_logprobs: log-probabilities are computed whether or not a request shows them.
    """

    forces_logprobs = False

    def __init__(self, engine: AsyncLLM, settings: ServingSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.sampling_defaults = engine.default_sampling_params()

    @property
    def model_name(self) -> str:
        """The name that answers carry."""
        return self.settings.model_names[0]

    def check_model(self, model: str | None) -> None:
        """Raise `ModelNotFoundError` unless the name is served; no name means the served model."""
        if model and model not in self.settings.model_names:
            raise ModelNotFoundError(
                f"The model `{model}` does not exist. Valid aliases: {', '.join(self.settings.model_names)}.",
                param="model",
            )

    def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            RequestError: the server runs with --skip-tokenizer-init.
        """
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise RequestError("This server runs with --skip-tokenizer-init: prompts must be token ids.")
        return tokenizer

    async def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        request_template: str | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        http: Request | None = None,
        any_length: bool = False,
    ) -> str:
        """The prompt's text for a conversation, made off the event loop.

        A request's own template is rendered in a process of its own, the server's in a thread. What cannot be a
        prompt is refused before.

        Args:
            messages: the conversation.
            request_template: the template that came with the request.
            add_generation_prompt: end with the beginning of an answer.
            continue_final_message: leave the last message open.
            template_kwargs: further variables of the template.
            tools: functions the model may call.
            http: whose client ends the rendering by going away; None: nothing does.
            any_length: the prompt is cut or only told, so that there may be more messages.

        Raises:
            RequestError: the request may not bring a template, the template refuses the messages, or takes more
                than it may; or there are more messages than any prompt has.
            EngineBusyError: too many long conversations wait.
            ClientDisconnectedError: the client went away.
        """
        tokenizer, pool = self.tokenizer(), self.settings.request_templates
        if request_template is not None and pool is None:
            raise RequestError(
                "Chat template is passed with request, but --trust-request-chat-template is not set. Refused "
                "request with untrusted chat template.",
                param="chat_template",
            )
        size = check_conversation(
            messages,
            self.settings.max_model_len,
            tools=tools or (),
            template_kwargs=template_kwargs,
            any_length=any_length,
        )

        def make_options() -> dict[str, Any]:
            return {
                "messages": [message.model_dump(exclude_unset=True) for message in messages],
                "model_name": self.model_name,
                "chat_template": request_template or self.settings.chat_template,
                "content_format": self.settings.content_format,
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
                "tools": None if tools is None else [described_tool(tool) for tool in tools],
                "template_kwargs": {**self.settings.default_chat_template_kwargs, **template_kwargs},
            }

        own = tokenizer.chat_template
        # a request may also name one of several templates of the model
        is_own = not request_template or (isinstance(own, dict) and request_template in own)
        if is_own or pool is None:
            rendering = tokenizer.render_async(size, lambda: render_chat(tokenizer, **make_options()))
            return await unless_gone(http, size, rendering)
        options = await tokenizer.render_async(size, make_options)
        rendering = pool.render(tokenizer.special_tokens, options)
        return await (rendering if http is None else run_unless_disconnected(http.receive, rendering))

    async def encode_prompt(
        self, request: GenerationRequest, text: str, add_special_tokens: bool, http: Request | None = None
    ) -> list[int]:
        """Token ids of a prompt, off the event loop, cut if the request says so.

        Raises:
            RequestError: the text is far too long, which is seen before it is tokenised.
            EngineBusyError: too many long texts wait to be tokenised.
            ClientDisconnectedError: the client went away.
        """
        is_cut = request.truncate_prompt_tokens is not None
        token_ids = await self.encode_text(text, add_special_tokens, http, any_length=is_cut)
        if not is_cut:
            return token_ids
        return self.cut_prompt(request, token_ids, self.tokenizer().encode("") if add_special_tokens else [])

    async def encode_text(
        self, text: str, add_special_tokens: bool, http: Request | None, *, any_length: bool = False
    ) -> list[int]:
        """`Tokenizer.encode_async` with the model's length, until the client goes away; raises as `encode_prompt`."""
        limit = self.settings.max_model_len
        encoding = self.tokenizer().encode_async(text, add_special_tokens, limit, any_length)
        return await unless_gone(http, len(text), encoding)

    def cut_prompt(self, request: GenerationRequest, token_ids: list[int], empty_ids: list[int]) -> list[int]:
        """As many ids of a prompt as `truncate_prompt_tokens` keeps; -1 leaves room for one more.

        Args:
            request: whose prompt it is.
            token_ids: all of them.
            empty_ids: of an empty text: what surrounds every text stays.
        """
        limit = request.truncate_prompt_tokens
        if limit is None:
            return token_ids
        limit = self.settings.max_model_len - 1 if limit < 0 else limit
        return truncate(token_ids, limit, request.truncation_side or "left", empty_ids)

    def limit_tokens(self, num_prompt_tokens: int, requested: int | None, clamp: bool = False) -> int:
        """`max_tokens` of a prompt.

        Args:
            num_prompt_tokens: tokens of the prompt.
            requested: what the request says; None: all that fits.
            clamp: lower `requested` to what fits instead of refusing it.

        Raises:
            RequestError: prompt and output do not fit in the model's length.
        """
        limit = self.settings.max_model_len
        head = f"This model's maximum context length is {limit} tokens. However, you requested"
        room = limit - num_prompt_tokens
        if room < 1 or num_prompt_tokens == 0:
            if num_prompt_tokens == 0:
                raise RequestError("The decoder prompt cannot be empty", param="prompt")
            raise RequestError(
                f"{head} {num_prompt_tokens} tokens in the messages, Please reduce the length of the messages."
            )
        if requested is None or (clamp and requested > room):
            return room
        if requested > room:
            raise RequestError(
                f"{head} {num_prompt_tokens + requested} tokens ({num_prompt_tokens} in the messages, {requested} in "
                "the completion). Please reduce the length of the messages or completion.",
                param="max_tokens",
            )
        return requested

    def check_sequences(self, request: GenerationRequest, num_prompts: int, field: str = "prompt") -> None:
        """Refuse a request for too many sequences, or with long lists for many, before anything is made for it.

        Args:
            request: of a client.
            num_prompts: prompts or conversations that it has.
            field: holds them.

        Raises:
            RequestError: tells the limit.
        """
        check_sequences(num_prompts, request.n, request.best_of, self.settings.max_sequences, field)
        check_lists(request, num_prompts)

    def response_id(self, request: NamedRequest, prefix: str, http: Request) -> str:
        """The id of the answer to a request: what the client chose, if it did, behind the prefix.

        It is the request's from here on.

        Raises:
            DuplicateRequestError: the request names itself like another one that lives.
            RequestError: the header's id is none.
        """
        return f"{prefix}-{self.claim_id(request, http) or header_id(http) or secrets.token_hex(8)}"

    def claim_id(self, request: NamedRequest, http: Request) -> str | None:
        """The name that a request has in its body, taken for it; None: it has none.

        Raises:
            DuplicateRequestError: another one that lives has it.
        """
        if request.request_id:
            claims_of(http).take(self.caller(http), request.request_id)
        return request.request_id

    def caller(self, http: Request) -> bytes:
        """Who sends a request, by its API key."""
        return caller_of(http.scope)

    def engine_id(self, request: NamedRequest, response_id: str, http: Request) -> str:
        """What the ids in the engine begin with; with a random end, for clients repeat the ids they choose."""
        is_chosen = request.request_id or header_id(http)
        return f"{response_id}-{secrets.token_hex(4)}" if is_chosen else response_id

    def start_request(
        self,
        request: GenerationRequest,
        response_id: str,
        http: Request,
        prompts: Sequence[Prompt],
        max_tokens: Sequence[int],
    ) -> list[AsyncGenerator[RequestOutput, None]]:
        """One engine request per prompt.

        Raises:
            RequestError: a sampling parameter is wrong.
        """
        return [
            self._generate(part, _unchanged) for part in self._parts(request, response_id, http, prompts, max_tokens)
        ]

    def start_stream(
        self,
        request: GenerationRequest,
        response_id: str,
        http: Request,
        prompts: Sequence[Prompt],
        max_tokens: Sequence[int],
        encode: Encoder,
    ) -> list[AsyncGenerator[bytes, None]]:
        """One engine request per prompt; what comes of it are events.

        Args:
            request, response_id, http, prompts, max_tokens: as of `start_request`.
            encode: makes events of the outputs of the prompt with this index; called as `AsyncLLM.generate_shaped`
                says, with the outputs of several prompts at the same time perhaps, but never with two of one.

        Raises:
            RequestError: a sampling parameter is wrong.
        """
        return [
            self._generate(part, functools.partial(encode, index))
            for index, part in enumerate(self._parts(request, response_id, http, prompts, max_tokens))
        ]

    def generate_shaped(
        self,
        request: GenerationRequest,
        engine_id: str,
        prompt: Prompt,
        params: SamplingParams,
        shape: Callable[[RequestOutput], T],
        headers: Mapping[str, str] | None = None,
        *,
        is_further: bool = False,
    ) -> AsyncGenerator[T, None]:
        """What a shape makes of the outputs of one engine request, which begins when the first is waited for.

        Args:
            request: whose priority and salt count.
            engine_id: of the request in the engine.
            prompt: what is answered.
            params: how to sample.
            shape: called as `AsyncLLM.generate_shaped` says.
            headers: W3C headers of the caller's trace; None: there is none.
            is_further: requests of others pass it.
        """
        return self._generate(_EngineRequest(request, engine_id, prompt, params, headers, is_further), shape)

    def _parts(
        self,
        request: GenerationRequest,
        response_id: str,
        http: Request,
        prompts: Sequence[Prompt],
        max_tokens: Sequence[int],
    ) -> list[_EngineRequest]:
        """The engine requests."""
        engine_id = self.engine_id(request, response_id, http)
        headers = self.trace_headers(http)
        num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        check_told_prompts(
            num_prompt_tokens,
            request.n or 1,
            request.requested_prompt_logprobs(),
            are_repeated=bool(request.echo or request.return_token_ids),
        )
        # but for the number of tokens they are the same for all prompts, and may hold long lists
        params = request.sampling_params(self.sampling_defaults, min(max_tokens), self.forces_logprobs)
        return [
            _EngineRequest(
                request, f"{engine_id}-{index}", prompt, params.clone(max_tokens=limit), headers, is_further=index > 0
            )
            for index, (prompt, limit) in enumerate(zip(prompts, max_tokens, strict=True))
        ]

    def _generate(self, part: _EngineRequest, shape: Callable[[RequestOutput], T]) -> AsyncGenerator[T, None]:
        """What a shape makes of the outputs of an engine request."""
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
        )
        if part.params.structured_outputs is not None:
            outputs = _name_constraint(outputs, part.request.constraint_field)
        return outputs

    def trace_headers(self, http: Request) -> dict[str, str] | None:
        """What names the trace that a request belongs to; None: requests are not traced."""
        return trace_headers(http.headers) if self.settings.trace else None

    async def collect(self, generators: Sequence[AsyncGenerator[RequestOutput, None]]) -> list[RequestOutput]:
        """The final outputs, in the order of the prompts."""
        async with contextlib.aclosing(merge(generators)) as outputs:
            finals = {index: output async for index, output in outputs}
        return [finals[index] for index in range(len(generators))]

    async def open_stream(
        self,
        http: Request,
        generators: Sequence[AsyncGenerator[T, None]],
        shape: Callable[[AsyncGenerator[tuple[int, T], None]], AsyncGenerator[bytes, None]],
    ) -> StreamResponse:
        """A stream of events, begun only once the engine has answered.

        Waiting for the first output lets what the engine refuses (a full queue) become a plain error status.

        Args:
            http: whose client may go away.
            generators: the outputs of each prompt, or events made of them.
            shape: makes the stream of them, each with its prompt's index.

        Raises:
            RequestError: the engine refused the request.
            EngineDeadError: the engine is gone.
        """
        outputs = merge(generators)
        first = asyncio.ensure_future(anext(outputs))
        interval_s = self.settings.keep_alive_s
        try:
            # with signs of life the answer begins after the first interval, whatever becomes of it
            await run_unless_disconnected(http.receive, asyncio.wait((first,), timeout=interval_s or None))
            if first.done():
                first.result()
        except BaseException:
            await _close(first, outputs)
            raise
        body = shape(_chain(first, outputs))
        if interval_s:
            body = with_keep_alive(body, interval_s)
        return StreamResponse(
            body, "text/event-stream", lambda: _close(first, outputs), on_end=claims_of(http).release
        )

    def _log_request(self, engine_id: str, prompt: Prompt, params: SamplingParams | PoolingParams) -> None:
        size = self.settings.max_log_len
        logger.info(
            "Received request %s: prompt: %r, params: %s, prompt_token_ids: %s.",
            engine_id,
            None if prompt.text is None else prompt.text[:size],
            shown_params(params),
            prompt.token_ids[:size],
        )
