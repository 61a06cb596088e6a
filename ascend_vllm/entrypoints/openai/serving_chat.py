"""POST /v1/chat/completions: a conversation in, its next message out, whole or as a stream."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ascend_vllm.entrypoints.http.errors import json_response
from ascend_vllm.entrypoints.http.long_answers import make_answer, num_tokens
from ascend_vllm.entrypoints.http.request_ids import make_response_id
from ascend_vllm.entrypoints.openai.chat_tools import ChoiceParser
from ascend_vllm.entrypoints.openai.logprobs import chat_logprobs, prompt_logprobs, shown_positions
from ascend_vllm.entrypoints.openai.prompts import Prompt
from ascend_vllm.entrypoints.openai.protocol_chat import (
    ChatChoice,
    ChatChunkWriter,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatLogprobs,
    ChatResponseMessage,
)
from ascend_vllm.entrypoints.openai.protocol_common import UsageCounter, unix_time
from ascend_vllm.entrypoints.openai.request_limits import check_max_tokens, check_request, limit_tokens
from ascend_vllm.entrypoints.openai.serving_base import Events, ServingBase, event_stream
from ascend_vllm.entrypoints.parsers.reasoning import REASONING_END, REASONING_START, begins_with_reasoning
from ascend_vllm.entrypoints.templates.chat_template import parse_messages
from ascend_vllm.errors import RequestError
from ascend_vllm.outputs import CompletionOutput, RequestOutput


class ServingChat(ServingBase):
    """Answers chat requests."""

    async def create(self, request: ChatCompletionRequest, http: Request) -> Response:
        """The answer to one request."""
        prompt = await self.prepare(request, http)
        max_tokens = self.max_tokens(request, len(prompt.token_ids))
        response_id = make_response_id(request, "chatcmpl", http)
        answer = ChatAnswer(self, request, response_id, prompt)
        with _naming_tools(request):
            parts = self.engine_requests(request, response_id, http, [prompt], [max_tokens])
            if request.stream:
                return await self.generate_stream(parts, http, answer.encode, answer.stream)
            outputs = await self.generate_whole(parts, http)
        return await make_answer(num_tokens(outputs), lambda: json_response(answer.complete(outputs[0])))

    async def prepare(self, request: ChatCompletionRequest, http: Request | None = None) -> Prompt:
        """Check a request and render its conversation; sets fields of the request as the flags require.

        Args:
            request: of a client.
            http: preparing stops when its client disconnects; None: it does not stop.
        """
        await self.check_model(request.model)
        request.check_supported()
        check_request(request, 1, self.settings.max_sequences, self.settings.max_n, "messages")
        parsers = self.settings.parsers
        if request.thinking_token_budget is not None and (parsers.reasoning is None or request.use_beam_search):
            raise RequestError(
                "`thinking_token_budget` needs --reasoning-parser, and excludes beam search.", "thinking_token_budget"
            )
        tools = parsers.prepare(request) if request.tools else None
        text = await self.prompts.render(
            request.messages,
            model=request.model,
            request_template=request.chat_template,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            template_kwargs=request.template_kwargs(),
            tools=tools,
            http=http,
            any_length=request.truncate_prompt_tokens is not None,
        )
        if parsers.reasoning is not None:
            begins = begins_with_reasoning(parsers.reasoning, text, request.continue_final_message)
            if begins is not False:
                # if the end tag never comes, the whole text is reasoning, as in vLLM
                request.exempt_reasoning("" if begins else REASONING_START, REASONING_END)
        token_ids = await self.prompts.encode_prompt(request, text, request.add_special_tokens, http)
        return Prompt(token_ids, text)

    def max_tokens(self, request: ChatCompletionRequest, num_prompt_tokens: int) -> int:
        """Maximum number of tokens for a prepared request, which must fit in the model's length with its prompt."""
        requested = request.effective_max_tokens
        limit = self.settings.max_model_len
        name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        check_max_tokens(name, requested, limit)
        if requested is None:
            # the model's own default (max_new_tokens of generation_config.json), as far as it fits
            return limit_tokens(limit, num_prompt_tokens, self.sampling_defaults.get("max_tokens"), clamp=True)
        return limit_tokens(limit, num_prompt_tokens, requested, clamp=request.truncate_prompt_tokens == -1)


@contextlib.contextmanager
def _naming_tools(request: ChatCompletionRequest) -> Iterator[None]:
    """Makes errors about a schema made of the tools name `tools`."""
    try:
        yield
    except RequestError as error:
        if request.demanded_tools is None or error.status_code != RequestError.status_code:
            raise
        names = ", ".join(tool["function"]["name"] for tool in request.demanded_tools)
        raise RequestError(f"The `parameters` of the tools ({names}) cannot be used: {error}", "tools") from error


class ChatAnswer:
    """Converts the outputs of one request to the answer or its events."""

    def __init__(
        self,
        serving: ServingChat,
        request: ChatCompletionRequest,
        response_id: str,
        prompt: Prompt,
    ) -> None:
        self._request = request
        self._settings = serving.settings
        self._id = response_id
        self._model = serving.model_name
        self._created = unix_time()
        self._prompt = prompt
        self._n = request.n or 1
        self._role = self._settings.response_role if request.add_generation_prompt else request.messages[-1].role
        self._echo = self._echoed()
        self._as_token_ids = bool(request.return_tokens_as_token_ids) or self._settings.return_tokens_as_token_ids
        self._usage = UsageCounter(
            self._n,
            shows_cached=self._settings.enable_prompt_tokens_details,
            shows_drafts=serving.engine.config.speculation is not None,
        )
        # for streams
        self._include_usage = request.include_usage or self._settings.force_include_usage
        self._shows_usage_so_far = self._include_usage and request.continuous_usage
        self._is_plain = not (request.logprobs or self._shows_usage_so_far or request.return_token_ids)
        self._writer = ChatChunkWriter(
            self._id,
            self._created,
            self._model,
            self._settings.fingerprint,
            self._n,
            usage_follows=self._include_usage,
        )
        self._parsers = [self._make_parser() if request.stream else None for _ in range(self._n)]

    def _echoed(self) -> str:
        """The last message's text if `echo` repeats it, which requires the answer's role."""
        last = self._request.messages[-1]
        if not self._request.echo or last.role != self._role:
            return ""
        (message,) = parse_messages([last.model_dump(exclude_unset=True)], "string", self._model)
        return str(message["content"])

    def complete(self, output: RequestOutput) -> ChatCompletionResponse:
        """The unstreamed answer; `output` is final."""
        self._usage.add(0, output)
        choices = [self._choice(generated) for generated in output.outputs]
        of_prompt = prompt_logprobs(output.prompt_logprobs)
        response = ChatCompletionResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=self._usage.total(),
            system_fingerprint=self._settings.fingerprint,
            prompt_logprobs=None if of_prompt is None else shown_positions(of_prompt),
        )
        if self._request.return_token_ids:
            response.prompt_token_ids = self._prompt.token_ids
        return response

    def _choice(self, generated: CompletionOutput) -> ChatChoice:
        self._usage.count(generated.index, generated)
        message = ChatResponseMessage(self._role, self._echo + generated.text, [])
        finish_reason = generated.finish_reason
        parser = self._make_parser()
        if parser is not None:
            parser.feed(generated.text, final=True)
            finish_reason = parser.finish_reason(finish_reason)
            message.content = self._echo + parser.content if self._echo else parser.message_content
            message.tool_calls = parser.tool_calls
            if parser.reasoning is not None:
                message.reasoning = parser.reasoning or None
        choice = ChatChoice(
            generated.index,
            message,
            self._logprobs(generated),
            finish_reason,
            generated.stop_reason,
        )
        if self._request.return_token_ids:
            choice.token_ids = generated.token_ids
        return choice

    def _make_parser(self) -> ChoiceParser | None:
        """A parser for one choice's text; None: the whole text is the content."""
        parsers = self._settings.parsers
        if not self._request.tools and parsers.reasoning is None:
            return None
        return parsers.make(self._request, self._prompt.text or "")

    def _logprobs(self, generated: CompletionOutput) -> ChatLogprobs | None:
        if not self._request.logprobs or generated.logprobs is None:
            return None
        num_top = self._request.top_logprobs or 0
        return chat_logprobs(generated.token_ids, generated.logprobs, num_top, self._as_token_ids)

    def encode(self, _prompt_index: int, output: RequestOutput) -> bytes:
        """The events of the next output, none while a parser buffers text; see `ServingBase.generate_stream`."""
        writer, plain, usage = self._writer, self._is_plain, self._usage
        events = []
        if not usage.started:
            usage.add(0, output)
            events.extend(self._opening(writer))
        for generated in output.outputs:
            usage.count(generated.index, generated)
            parser = self._parsers[generated.index]
            if parser is not None:
                events.extend(self._parsed_events(writer, generated, parser, plain))
            elif plain and generated.finish_reason is None:
                events.append(writer.text_event(generated.index, generated.text))
            else:
                events.append(self._event(writer, generated))
        return b"".join(events)

    def stream(self, events: Events) -> AsyncGenerator[bytes, None]:
        """The answer's stream of the events made by `encode`."""
        return event_stream(events, self._writer, self._usage if self._include_usage else None)

    def _opening(self, writer: ChatChunkWriter) -> list[bytes]:
        """Events before the first token: each choice's role, then the echoed text."""
        token_ids = self._prompt.token_ids if self._request.return_token_ids else None
        content = "" if self._request.demanded_tools is None else None
        events = [
            writer.opening_event(index, self._role, content, self._usage_now(index), token_ids)
            for index in range(self._n)
        ]
        if self._echo:
            delta = {"content": self._echo}
            events.extend(writer.event(index, delta, self._usage_now(index), {}) for index in range(self._n))
        return events

    def _usage_now(self, index: int) -> Any:
        return self._usage.choice_usage(0, index) if self._shows_usage_so_far else None

    def _parsed_events(
        self, writer: ChatChunkWriter, generated: CompletionOutput, parser: ChoiceParser, plain: bool
    ) -> list[bytes]:
        """Events of a choice with a parser; the last one has an empty delta."""
        finished = generated.finish_reason is not None
        deltas = parser.feed(generated.text, final=finished)
        if finished or not (deltas or plain):
            deltas.append({})
        extras: list[dict[str, Any]] = [{} for _ in deltas]
        if not plain:  # the first delta carries the tokens of all of them
            extras[0]["logprobs"] = self._logprobs(generated)
            if self._request.return_token_ids:
                extras[0]["token_ids"] = generated.token_ids
        if finished:
            extras[-1]["finish_reason"] = parser.finish_reason(generated.finish_reason)
            extras[-1]["stop_reason"] = generated.stop_reason
        usage = self._usage_now(generated.index)
        return [
            writer.event(generated.index, delta, usage, extra) for delta, extra in zip(deltas, extras, strict=True)
        ]

    def _event(self, writer: ChatChunkWriter, generated: CompletionOutput) -> bytes:
        """An event with more fields than text."""
        extra: dict[str, Any] = {"logprobs": self._logprobs(generated)}
        if generated.finish_reason is not None:
            extra["finish_reason"] = generated.finish_reason
            extra["stop_reason"] = generated.stop_reason
        if self._request.return_token_ids:
            extra["token_ids"] = generated.token_ids
        # the last token often has no text; the event then has an empty delta
        delta = {} if generated.finish_reason is not None and not generated.text else {"content": generated.text}
        return writer.event(generated.index, delta, self._usage_now(generated.index), extra)
