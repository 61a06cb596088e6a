"""POST /v1/completions: prompts in, texts out, whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ascend_vllm.entrypoints.http.errors import json_response
from ascend_vllm.entrypoints.http.long_answers import make_answer, num_tokens
from ascend_vllm.entrypoints.http.request_ids import make_response_id
from ascend_vllm.entrypoints.openai.logprobs import completion_logprobs, prompt_logprobs, shown_positions
from ascend_vllm.entrypoints.openai.prompts import Prompt
from ascend_vllm.entrypoints.openai.protocol_common import UsageCounter, unix_time
from ascend_vllm.entrypoints.openai.protocol_completion import (
    CompletionChoice,
    CompletionChunkWriter,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from ascend_vllm.entrypoints.openai.request_limits import check_request, limit_tokens
from ascend_vllm.entrypoints.openai.serving_base import Events, ServingBase, event_stream
from ascend_vllm.entrypoints.openai.serving_settings import ServingSettings
from ascend_vllm.errors import RequestError
from ascend_vllm.outputs import CompletionOutput, PositionLogprobs, RequestOutput

if TYPE_CHECKING:
    from ascend_vllm.engine.async_llm import AsyncLLM


class ServingCompletion(ServingBase):
    """Answers completion requests."""

    def __init__(self, engine: AsyncLLM, settings: ServingSettings) -> None:
        super().__init__(engine, settings)
        self.forces_logprobs = settings.enable_cum_log_probs

    async def create(self, request: CompletionRequest, http: Request) -> Response:
        """The answer to one request."""
        await self.check_model(request.model)
        request.check_supported()
        prompts = await self._prompts(request, http)
        max_tokens = [self._max_tokens(request, prompt) for prompt in prompts]
        response_id = make_response_id(request, "cmpl", http)
        answer = _Answer(self, request, response_id, prompts)
        parts = self.engine_requests(request, response_id, http, prompts, max_tokens)
        if request.stream:
            return await self.generate_stream(parts, http, answer.encode, answer.stream)
        outputs = await self.generate_whole(parts, http)
        return await make_answer(num_tokens(outputs), lambda: json_response(answer.complete(outputs)))

    def _max_tokens(self, request: CompletionRequest, prompt: Prompt) -> int:
        if request.echo_only:
            return limit_tokens(self.settings.max_model_len, len(prompt.token_ids), 1)
        # a prompt truncated to the model's length leaves room for one token
        clamp = request.max_tokens is None or request.truncate_prompt_tokens == -1
        return limit_tokens(self.settings.max_model_len, len(prompt.token_ids), request.effective_max_tokens, clamp)

    async def _prompts(self, request: CompletionRequest, http: Request) -> list[Prompt]:
        given = request.prompt
        if given is None or given == "":
            raise RequestError("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
        if not given:
            raise RequestError("You must pass at least one prompt", param="prompt")
        several: list[Any] = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
        check_request(request, len(several), self.settings.max_sequences, self.settings.max_n)
        return [await self._prompt(request, prompt, http) for prompt in several]

    async def _prompt(self, request: CompletionRequest, prompt: str | list[int], http: Request) -> Prompt:
        if isinstance(prompt, str):
            token_ids = await self.prompts.encode_prompt(request, prompt, request.add_special_tokens, http)
            text: str | None = prompt
        else:
            token_ids = self.prompts.cut_prompt(request, prompt, [])
            text = None
        if request.echo and (text is None or request.truncate_prompt_tokens is not None):
            text = await self.prompts.tokenizer(request.model).decode_async(token_ids)
        return Prompt(token_ids, text)


class _Answer:
    """Converts the outputs of one request to the answer or its events."""

    def __init__(
        self, serving: ServingCompletion, request: CompletionRequest, response_id: str, prompts: Sequence[Prompt]
    ) -> None:
        self._request = request
        self._serving = serving
        self._settings = serving.settings
        self._id = response_id
        self._model = serving.model_name
        self._created = unix_time()
        self._prompts = prompts
        self._n = request.n or 1
        self._as_token_ids = bool(request.return_tokens_as_token_ids) or self._settings.return_tokens_as_token_ids
        self._usage = UsageCounter(
            self._n * len(prompts),
            shows_cached=self._settings.enable_prompt_tokens_details,
            shows_drafts=serving.engine.config.speculation is not None,
        )
        # per choice: characters of the tokens in its logprobs so far, and of its text so far
        self._logprob_offsets = [0] * (self._n * len(prompts))
        self._text_lengths = [0] * (self._n * len(prompts))
        # per prompt, once received
        self._prompt_logprobs: list[list[PositionLogprobs | None] | None] = [None] * len(prompts)
        # the same in the form of unstreamed answers
        self._shown_prompts: dict[int, Sequence[PositionLogprobs | None] | msgspec.Raw] = {}
        # choices whose logprobs have begun
        self._begun: set[int] = set()
        # for streams
        self._include_usage = request.include_usage or self._settings.force_include_usage
        self._shows_usage_so_far = self._include_usage and request.continuous_usage
        self._is_plain = request.logprobs is None and not (
            self._shows_usage_so_far or request.echo or request.return_token_ids
        )
        self._writer = CompletionChunkWriter(
            self._id,
            self._created,
            self._model,
            self._settings.fingerprint,
            self._n * len(prompts),
            usage_follows=self._include_usage,
        )
        self._sent_prompts: set[int] = set()  # choices whose prompt's token ids were sent

    def complete(self, outputs: Sequence[RequestOutput]) -> CompletionResponse:
        """The unstreamed answer; `outputs` are final, one per prompt."""
        choices = []
        for prompt_index, output in enumerate(outputs):
            self._usage.add(prompt_index, output)
            of_prompt = self._prompt_logprobs[prompt_index] = prompt_logprobs(output.prompt_logprobs)
            if of_prompt is not None:
                self._shown_prompts[prompt_index] = shown_positions(of_prompt)
            # the engine sorts the choices, best first; they are renumbered
            for order, generated in enumerate(output.outputs):
                choices.append(self._choice(prompt_index, prompt_index * self._n + order, generated))
        return CompletionResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=self._usage.total(),
            system_fingerprint=self._settings.fingerprint,
        )

    def _choice(self, prompt_index: int, index: int, generated: CompletionOutput) -> CompletionChoice:
        request = self._request
        self._usage.count(index, generated)
        text = self._with_echo(prompt_index, index, generated.text)
        choice = CompletionChoice(
            index=index,
            text=text,
            logprobs=self._logprobs(prompt_index, index, generated),
            finish_reason="length" if request.echo_only else generated.finish_reason,
            stop_reason=None if request.echo_only else generated.stop_reason,
            prompt_logprobs=self._shown_prompts.get(prompt_index),
            sentence_length=len(text),
            cum_log_probs=generated.cumulative_logprob,
        )
        if request.return_token_ids:
            choice.token_ids = generated.token_ids
            choice.prompt_token_ids = self._prompts[prompt_index].token_ids
        return choice

    def _with_echo(self, prompt_index: int, index: int, text: str) -> str:
        """`text`, preceded by the prompt's text in the choice's first chunk with `echo`."""
        if self._request.echo_only:
            text = ""
        if self._request.echo and not self._text_lengths[index]:
            text = (self._prompts[prompt_index].text or "") + text
        self._text_lengths[index] += len(text)
        return text

    def _logprobs(self, prompt_index: int, index: int, generated: CompletionOutput) -> CompletionLogprobs | None:
        """Log-probabilities of a choice's new tokens, preceded by the prompt's in its first chunk with `echo`."""
        request, tokenizer = self._request, None
        if request.logprobs is None or generated.logprobs is None:
            return None
        token_ids: list[int] = [] if request.echo_only else generated.token_ids
        positions: list[PositionLogprobs | None] = [] if request.echo_only else [*generated.logprobs]
        of_prompt = self._prompt_logprobs[prompt_index]
        if request.echo and index not in self._begun and of_prompt is not None:
            tokenizer = self._serving.prompts.tokenizer(request.model)
            token_ids = self._prompts[prompt_index].token_ids + token_ids
            positions = of_prompt + positions
        self._begun.add(index)
        result = completion_logprobs(
            token_ids, positions, self._logprob_offsets[index], self._as_token_ids, tokenizer
        )
        self._logprob_offsets[index] += sum(map(len, result.tokens))
        return result

    def encode(self, prompt_index: int, output: RequestOutput) -> bytes:
        """The events of a prompt's next output; see `ServingBase.generate_stream`.

        All state is per choice or prompt, as prompts may be encoded at the same time.
        """
        writer, usage = self._writer, self._usage
        usage.add(prompt_index, output)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[prompt_index] = output.prompt_logprobs
        events = []
        for generated in output.outputs:
            index = prompt_index * self._n + generated.index
            usage.count(index, generated)
            if self._is_plain and generated.finish_reason is None:
                self._text_lengths[index] += len(generated.text)
                events.append(writer.text_event(index, generated.text))
            else:
                events.append(self._event(writer, prompt_index, index, generated))
        return b"".join(events)

    def stream(self, events: Events) -> AsyncGenerator[bytes, None]:
        """The answer's stream of the events made by `encode`."""
        return event_stream(events, self._writer, self._usage if self._include_usage else None)

    def _event(
        self, writer: CompletionChunkWriter, prompt_index: int, index: int, generated: CompletionOutput
    ) -> bytes:
        """An event with more fields than text."""
        request = self._request
        extra: dict[str, Any] = {}
        text = self._with_echo(prompt_index, index, generated.text)
        if request.return_token_ids:
            extra["token_ids"] = generated.token_ids
            if index not in self._sent_prompts:
                self._sent_prompts.add(index)
                extra["prompt_token_ids"] = self._prompts[prompt_index].token_ids
        if generated.finish_reason is not None:
            extra["sentence_length"] = self._text_lengths[index]
            extra["cum_log_probs"] = generated.cumulative_logprob
        return writer.event(
            index,
            text,
            self._logprobs(prompt_index, index, generated),
            "length" if request.echo_only else generated.finish_reason,
            None if request.echo_only else generated.stop_reason,
            self._usage.choice_usage(prompt_index, index) if self._shows_usage_so_far else None,
            extra,
        )
