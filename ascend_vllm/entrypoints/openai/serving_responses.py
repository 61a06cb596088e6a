"""POST /v1/responses: items in, items out, whole, as a stream or in the background."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ascend_vllm import envs
from ascend_vllm.entrypoints.http.access import caller_of, keep_slot
from ascend_vllm.entrypoints.http.errors import json_response, to_http_error
from ascend_vllm.entrypoints.http.request_ids import claim_id, claims_of
from ascend_vllm.entrypoints.http.streaming import StreamResponse, merge, open_stream, run_unless_disconnected
from ascend_vllm.entrypoints.openai.logprobs import chat_logprobs
from ascend_vllm.entrypoints.openai.prompts import Prompt
from ascend_vllm.entrypoints.openai.protocol_chat import ChatCompletionRequest, ChatTokenLogprob
from ascend_vllm.entrypoints.openai.protocol_common import unix_time
from ascend_vllm.entrypoints.openai.protocol_responses import (
    DeletedResponse,
    IncompleteDetails,
    InputTokensDetails,
    ItemList,
    ListQuery,
    OutputTokensDetails,
    RawMessage,
    ResponseError,
    ResponsesRequest,
    ResponsesResponse,
    ResponseUsage,
    encode_part,
)
from ascend_vllm.entrypoints.openai.request_limits import check_max_tokens, check_number, limit_tokens
from ascend_vllm.entrypoints.openai.responses_events import OutputItems
from ascend_vllm.entrypoints.openai.responses_input import (
    continues_message,
    input_items,
    listed_items,
    to_messages,
)
from ascend_vllm.entrypoints.openai.responses_store import (
    MAX_CONVERSATION,
    EventLog,
    InvalidResponseError,
    ResponseNotFoundError,
    ResponseStore,
    StoredResponse,
    StoreFullError,
    Turn,
)
from ascend_vllm.entrypoints.openai.serving_base import EngineRequest
from ascend_vllm.entrypoints.openai.serving_chat import ServingChat
from ascend_vllm.entrypoints.openai.serving_settings import ServingSettings
from ascend_vllm.errors import RequestError
from ascend_vllm.outputs import CompletionOutput, RequestOutput
from ascend_vllm.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from ascend_vllm.engine.async_llm import AsyncLLM

# an output and its encoded events
OutputEvents: TypeAlias = tuple[RequestOutput, list[bytes]]
OutputStream: TypeAlias = AsyncGenerator[tuple[int, OutputEvents], None]

_NO_STORE = (
    "This vLLM engine does not support `store=True` and therefore does not support the background mode. To enable "
    "these features, set the environment variable `VLLM_ENABLE_RESPONSES_API_STORE=1` when launching the vLLM server."
)
# field of the chat request → the client's field that was converted to it, for errors
_CLIENT_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "logprobs": "top_logprobs",
}


class ServingResponses:
    """Answers requests for responses, and stores the responses.

    Args:
        chat: renders conversations and sends requests to the engine.
    """

    def __init__(self, engine: AsyncLLM, settings: ServingSettings) -> None:
        self._chat = ServingChat(engine, settings)
        self._settings = settings
        self.store = ResponseStore() if envs.enable_responses_api_store() else None

    async def create(self, request: ResponsesRequest, http: Request) -> Response:
        """The answer to one request; for a background request, the queued response.

        Raises:
            RequestError: the request is wrong.
        """
        try:
            return await self._create(request, http)
        except RequestError as error:
            error.param = _CLIENT_NAMES.get(error.param or "", error.param)
            raise

    async def _create(self, request: ResponsesRequest, http: Request) -> Response:
        """See `create`; errors may name fields as the chat endpoint calls them."""
        await self._chat.check_model(request.model)
        request.check_supported()
        if request.background and self.store is None:
            raise InvalidResponseError(_NO_STORE, "background")
        items = input_items(request.input)
        caller = caller_of(http.scope)
        previous = self._previous(request, caller)
        answer = await self._prepare(request, items, previous, http)
        answer.trace_headers = self._chat.trace_headers(http)
        entry = None
        if self.store is not None and request.kept:
            entry = StoredResponse(answer.response, encode_part(items, "input"), previous, caller)
        if entry is not None and request.background:
            num_other_bytes = max(0, len(await http.body()) - entry.turn.size)
            entry.begin_running(
                len(answer.prompt.token_ids), len(answer.prompt.text or ""), num_other_bytes, request.wants_logprobs
            )
            return self._begin_background(answer, entry, http, stream=bool(request.stream))
        outputs = [answer.generate()]
        if request.stream:
            return await open_stream(
                http, outputs, lambda events: self._stream(answer, events, entry), self._settings.keep_alive_s
            )
        await run_unless_disconnected(http.receive, answer.collect(merge(outputs)))
        if entry is None:
            return json_response(answer.response)
        self._keep(entry)
        return _encoded_response(entry)

    async def retrieve(self, response_id: str, http: Request, stream: bool, starting_after: int | None) -> Response:
        """The current state of a stored response.

        Args:
            response_id: of the response.
            http: of the caller, who must own the response.
            stream: stream the events of a background response instead, from the first one on.
            starting_after: sequence number of the last event that the client received.

        Raises:
            RequestError: there is no such response, or its events are not stored.
        """
        entry = self._stored(response_id, caller_of(http.scope))
        if not stream:
            return _encoded_response(entry)
        if entry.events is None:
            raise InvalidResponseError(
                f"Response with id '{response_id}' has no events: it was not made with `background` and `stream`.",
                "stream",
            )
        return _follow(entry.events, -1 if starting_after is None else starting_after)

    async def cancel(self, response_id: str, http: Request) -> Response:
        """Cancel a background response.

        Raises:
            RequestError: there is no such response, or it is not running.
        """
        entry = self._stored(response_id, caller_of(http.scope))
        if not await self._stop(entry):
            raise InvalidResponseError("Cannot cancel a synchronous response.", "response_id")
        return _encoded_response(entry)

    async def delete(self, response_id: str, http: Request) -> Response:
        """Delete a stored response; a background response is cancelled first.

        Raises:
            RequestError: there is no such response.
        """
        caller = caller_of(http.scope)
        await self._stop(self._stored(response_id, caller))
        if self.store is not None:
            self.store.delete(response_id, caller)
        return json_response(DeletedResponse(response_id))

    def list_input_items(self, response_id: str, http: Request, query: ListQuery) -> Response:
        """A page of the items that a stored response was made of, those of earlier turns included.

        Raises:
            RequestError: there is no such response, or no such item to go on from.
        """
        entry = self._stored(response_id, caller_of(http.scope))
        items = listed_items(entry.turn.conversation(with_answer=False), response_id)
        if query.order == "desc":
            items.reverse()
        if query.after is not None:
            ids = [item["id"] for item in items]
            if query.after not in ids:
                raise InvalidResponseError(f"There is no input item with the id '{query.after}'.", "after")
            items = items[ids.index(query.after) + 1 :]
        page = items[: query.limit]
        first_id, last_id = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        return json_response(ItemList(page, first_id, last_id, len(items) > len(page)))

    async def _stop(self, entry: StoredResponse) -> bool:
        """Cancel a background response; False: it is none, or has ended."""
        if entry.task is None or entry.response is None:
            return False
        entry.response.status = "cancelled"
        entry.task.cancel()
        # closing the outputs aborts the request in the engine
        await asyncio.gather(entry.task, return_exceptions=True)
        self._keep(entry)  # a task that is cancelled before it begins does not run its `finally`
        return True

    def _previous(self, request: ResponsesRequest, caller: bytes) -> Turn | None:
        """The last turn of the conversation that a request continues."""
        if request.previous_response_id is None:
            return None
        previous = self._stored(request.previous_response_id, caller)
        if previous.response is not None:
            raise InvalidResponseError(
                f"Response with id '{request.previous_response_id}' is still {previous.response.status}.",
                "previous_response_id",
            )
        if previous.turn.conversation_size > MAX_CONVERSATION:
            raise InvalidResponseError(
                f"The conversation up to the response with id '{request.previous_response_id}' has "
                f"{previous.turn.conversation_size} bytes; at most {MAX_CONVERSATION} can be gone on with. Send what "
                "matters of it as `input`.",
                "previous_response_id",
            )
        return previous.turn

    def _stored(self, response_id: str, caller: bytes) -> StoredResponse:
        if self.store is None:
            raise ResponseNotFoundError(response_id)
        return self.store.get(response_id, caller)

    async def _prepare(
        self, request: ResponsesRequest, items: list[dict[str, Any]], previous: Turn | None, http: Request
    ) -> _Answer:
        """Check a request, and make its prompt and sampling parameters."""
        conversation = [*(previous.conversation() if previous else ()), *items]
        length = self._settings.max_model_len
        if request.truncation != "auto":
            check_number(len(conversation), length, "input")
        messages = to_messages(conversation)
        if request.instructions is not None:
            messages.insert(0, {"role": "system", "content": request.instructions})
        if not messages:
            raise RequestError("Cannot apply chat template to an empty conversation. Provide at least one message.")
        chat = request.to_chat(messages, continues_message(conversation), length)
        prompt = await self._chat.prepare(chat, http)
        # events need the output chunk by chunk; so do log-probabilities, to separate those of the text
        whole = not (request.stream or request.background or request.wants_logprobs)
        params = chat.sampling_params(
            self._chat.sampling_defaults, self._max_tokens(request, len(prompt.token_ids)), force_logprobs=False
        )
        params.output_kind = RequestOutputKind.FINAL_ONLY if whole else RequestOutputKind.DELTA
        # the messages are in the prompt now: free their memory while the answer is generated
        chat.messages = []
        chosen = claim_id(request, http)
        if chosen is not None and self.store is not None and self.store.has(chosen, caller_of(http.scope)):
            raise RequestError(f"There is a response with the id '{chosen}' already.", "request_id")
        return _Answer(self._chat, request, chat, prompt, params, chosen or f"resp_{secrets.token_hex(8)}")

    def _max_tokens(self, request: ResponsesRequest, num_prompt_tokens: int) -> int:
        requested, limit = request.max_output_tokens, self._settings.max_model_len
        check_max_tokens("max_output_tokens", requested, limit)
        if requested is None:
            requested = self._chat.sampling_defaults.get("max_tokens")
        return limit_tokens(limit, num_prompt_tokens, requested, clamp=True)

    def _keep(self, entry: StoredResponse) -> None:
        """Store a response that has ended, successfully or not."""
        if self.store is not None and entry.response is not None:
            entry.end()
            self.store.put(entry)

    async def _stream(
        self, answer: _Answer, outputs: OutputStream, entry: StoredResponse | None
    ) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(answer.stream(outputs)) as events:
            async for data in events:
                yield b"".join(data)
        if entry is not None:
            self._keep(entry)

    def _begin_background(self, answer: _Answer, entry: StoredResponse, http: Request, stream: bool) -> Response:
        """Generate in a task that does not depend on the client's connection.

        Raises:
            StoreFullError: there are too many background responses.
        """
        if self.store is None:
            raise InvalidResponseError(_NO_STORE, "background")
        entry.events = EventLog() if stream else None
        self.store.begin(entry)
        claims, leave = claims_of(http).hand_over(), keep_slot(http.scope)
        entry.task = asyncio.create_task(self._run(answer, entry, self.store), name=f"response-{entry.id}")
        entry.task.add_done_callback(lambda _: claims.release())
        entry.task.add_done_callback(lambda _: leave())
        return _encoded_response(entry) if entry.events is None else _follow(entry.events)

    async def _run(self, answer: _Answer, entry: StoredResponse, store: ResponseStore) -> None:
        outputs = merge([answer.generate()])
        try:
            async with contextlib.aclosing(answer.stream(outputs)) as events:
                async for data in events:
                    entry.add_events(data)
                    store.grow(entry)
        except StoreFullError as error:
            entry.add_events(answer.fail(error))
        finally:
            await outputs.aclose()
            self._keep(entry)


def _encoded_response(entry: StoredResponse) -> Response:
    return Response(entry.encoded(), media_type="application/json")


def _follow(events: EventLog, starting_after: int = -1) -> StreamResponse:
    async def nothing() -> None:
        """Closing the stream changes nothing: generating goes on."""

    return StreamResponse(events.follow(starting_after), "text/event-stream", nothing)


class _Answer:
    """Builds the response, or its events, from the outputs of one request.

    Attributes:
        response: its current state.
        prompt: of the engine request.
        trace_headers: W3C headers of the request's trace; None: it is not traced.
    """

    def __init__(
        self,
        serving: ServingChat,
        request: ResponsesRequest,
        chat: ChatCompletionRequest,
        prompt: Prompt,
        params: SamplingParams,
        response_id: str,
    ) -> None:
        self.prompt = prompt
        self.trace_headers: dict[str, str] | None = None
        self.response = ResponsesResponse.from_request(
            request, params, response_id=response_id, created_at=unix_time(), model=serving.model_name
        )
        self._serving = serving
        self._shows_messages = request.enable_response_messages
        self._num_top_logprobs = request.top_logprobs or 0
        self._chat = chat
        self._params = params
        self._parser = serving.settings.parsers.make(chat, prompt.text or "", "responses")
        self._is_streamed = bool(request.stream or request.background)
        self._items = OutputItems(streamed=self._is_streamed)
        # the first event is made before the output thread makes any, as events are numbered when they are made
        self._created = self._whole("response.created") if self._is_streamed else b""
        self._has_begun = False
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._num_tokens = 0
        self._logprobs: list[ChatTokenLogprob] | None = [] if params.logprobs is not None else None

    def generate(self) -> AsyncGenerator[OutputEvents, None]:
        """The engine's outputs with their events, which are encoded in the output thread."""
        # the client may reuse its id while the engine still has the old request
        engine_id = f"{self.response.id}-{secrets.token_hex(4)}"
        request = EngineRequest(
            self._chat,
            engine_id,
            self.prompt,
            self._params,
            self.trace_headers,
            # background responses are scheduled behind requests whose clients wait
            is_further=self.response.background,
        )
        return self._serving.generate(request, self._take)

    async def collect(self, outputs: OutputStream) -> None:
        """Consume all outputs; then `response` is the answer."""
        async with contextlib.aclosing(outputs):
            async for _, (output, _events) in outputs:
                if output.finished:
                    await self._finish(output)

    async def stream(self, outputs: OutputStream) -> AsyncGenerator[list[bytes], None]:
        """Yields the events of each output; an error becomes the event of a failed response, the last one."""
        try:
            yield [self._created]
            async for _, (output, events) in outputs:
                if self.response.status == "queued":
                    self.response.status = "in_progress"
                if events:  # none while a parser buffers text
                    yield events
                if output.finished:
                    closing = await self._finish(output)
                    yield [*closing, self._whole(f"response.{self.response.status}")]
        except Exception as error:
            yield self.fail(error)

    def fail(self, error: Exception) -> list[bytes]:
        """Mark the response as failed; returns its last event."""
        status, failure = to_http_error(error)
        self.response.status = "failed"
        code = "invalid_prompt" if status < 500 else "server_error"
        self.response.error = ResponseError(code, failure["message"])
        return [self._whole("response.failed")]

    def _whole(self, name: str) -> bytes:
        return self._items.whole(name, self.response)

    def _take(self, output: RequestOutput) -> OutputEvents:
        """Process an output; returns it with its events, the first one also with ``response.in_progress``."""
        begin: list[bytes] = []
        if self._is_streamed and not self._has_begun:
            self._has_begun = True
            # a copy: only the event loop changes the response itself, e.g. when it is cancelled
            begun = msgspec.structs.replace(self.response, status="in_progress")
            begin.append(self._items.whole("response.in_progress", begun))
        return output, begin + self._take_text(output.outputs[0])

    def _take_text(self, generated: CompletionOutput) -> list[bytes]:
        """Process generated text; returns its events."""
        self._num_tokens += len(generated.token_ids)
        if self._shows_messages:
            self._texts.append(generated.text)
            self._token_ids.extend(generated.token_ids)
        if self._logprobs is not None and generated.logprobs is not None:
            as_ids = self._serving.settings.return_tokens_as_token_ids
            shown = chat_logprobs(generated.token_ids, generated.logprobs, self._num_top_logprobs, as_ids)
            self._logprobs += shown.content
        final = generated.finish_reason is not None
        if self._parser is not None:
            deltas = self._parser.feed(generated.text, final)
        else:
            deltas = [{"content": generated.text}] if generated.text else []
        return [event for delta in deltas for event in self._add(delta)]

    def _add(self, delta: dict[str, Any]) -> list[bytes]:
        logprobs = self._logprobs
        if logprobs is not None:
            # log-probabilities of reasoning and calls are dropped
            self._logprobs = []
        return self._items.add(delta, logprobs)

    async def _finish(self, output: RequestOutput) -> list[bytes]:
        """Complete the response: output, usage and status; returns the events that close its items."""
        is_cut = output.outputs[0].finish_reason == "length"
        events = self._items.close(is_cut)
        response = self.response
        response.output = self._items.items
        response.usage = await self._usage(output)
        if is_cut:
            response.status, response.incomplete_details = "incomplete", IncompleteDetails()
        else:
            response.status = "completed"
        if self._shows_messages:
            response.input_messages = [RawMessage(self.prompt.text or "", self.prompt.token_ids)]
            response.output_messages = [RawMessage("".join(self._texts), self._token_ids)]
        return events

    async def _usage(self, output: RequestOutput) -> ResponseUsage:
        num_input = len(output.prompt_token_ids)
        reasoning = self._items.reasoning
        num_reasoning_tokens = (
            len(await self._serving.prompts.tokenizer().encode_async(reasoning, add_special_tokens=False))
            if reasoning
            else 0
        )
        return ResponseUsage(
            num_input,
            InputTokensDetails(output.num_cached_tokens, self._num_newly_cached(num_input, output.num_cached_tokens)),
            self._num_tokens,
            OutputTokensDetails(min(num_reasoning_tokens, self._num_tokens)),
            num_input + self._num_tokens,
        )

    def _num_newly_cached(self, num_input: int, num_cached: int) -> int:
        """Tokens of the prompt's full blocks that were not in the prefix cache before."""
        cache = self._serving.engine.config.cache
        return num_input // cache.block_size * cache.block_size - num_cached if cache.enable_prefix_caching else 0
