"""POST /v1/chat/completions/batch: several conversations under the same parameters, one choice for each."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ascend_vllm.entrypoints.http.errors import json_response
from ascend_vllm.entrypoints.http.long_answers import make_answer, num_tokens
from ascend_vllm.entrypoints.http.request_ids import make_response_id
from ascend_vllm.entrypoints.http.validation import validated
from ascend_vllm.entrypoints.openai.protocol_chat import ChatCompletionRequest, ChatCompletionResponse, ChatMessage
from ascend_vllm.entrypoints.openai.protocol_common import (
    ApiRequest,
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
)
from ascend_vllm.entrypoints.openai.request_limits import check_request, check_sequences
from ascend_vllm.entrypoints.openai.serving_chat import ChatAnswer, ServingChat
from ascend_vllm.errors import RequestError


class ChatBatchRequest(ApiRequest):
    """Body of POST /v1/chat/completions/batch: all other fields are those of a chat request, not yet validated."""

    messages: Annotated[list[Annotated[list[ChatMessage], Field(min_length=1)]], Field(min_length=1)]

    def to_chat(self) -> list[ChatCompletionRequest]:
        """One chat request per conversation.

        Raises:
            pydantic.ValidationError: a field is wrong.
            RequestError: a feature is not available in batches.
        """
        fields: dict[str, Any] = dict(self.model_extra or {})
        n = fields.get("n")
        if isinstance(n, int) and n > 1:
            raise RequestError("Batch chat completions do not support `n > 1`. Please set `n` to 1.", "n")
        if fields.get("stream"):
            raise RequestError("Batch chat completions do not support `stream`.", "stream")
        first = validated(ChatCompletionRequest, fields | {"messages": self.messages[0]})
        # the fields are validated once, then copied for each conversation
        return [first.model_copy(update={"messages": messages}) for messages in self.messages]


class ServingChatBatch:
    """Answers batches as chat requests."""

    def __init__(self, chat: ServingChat) -> None:
        self._chat = chat

    async def create(self, batch: ChatBatchRequest, http: Request) -> Response:
        """The answer to one batch.

        Raises:
            RequestError: a conversation, or a field, is wrong; nothing was generated.
            pydantic.ValidationError: a field is of the wrong type.
        """
        chat = self._chat
        check_sequences(len(batch.messages), None, None, chat.settings.max_sequences, "messages")
        requests = batch.to_chat()
        check_request(requests[0], len(requests), chat.settings.max_sequences, chat.settings.max_n, "messages")
        prompts = [await chat.prepare(request, http) for request in requests]
        max_tokens = [
            chat.max_tokens(request, len(prompt.token_ids)) for request, prompt in zip(requests, prompts, strict=True)
        ]
        # the requests differ only in their messages
        response_id = make_response_id(requests[0], "chatcmpl", http)
        parts = chat.engine_requests(requests[0], response_id, http, prompts, max_tokens)
        outputs = await chat.generate_whole(parts, http)

        def make() -> Response:
            answers = [
                ChatAnswer(chat, request, response_id, prompt).complete(output)
                for request, prompt, output in zip(requests, prompts, outputs, strict=True)
            ]
            return json_response(_joined(answers))

        return await make_answer(num_tokens(outputs), make)


def _joined(answers: list[ChatCompletionResponse]) -> ChatCompletionResponse:
    """One answer with the choices of all, numbered by conversation."""
    whole = answers[0]
    whole.choices = [choice for answer in answers for choice in answer.choices]
    for index, choice in enumerate(whole.choices):
        choice.index = index
    usages = [answer.usage for answer in answers]
    details = [usage.prompt_tokens_details for usage in usages if usage.prompt_tokens_details is not None]
    drafts = [usage.completion_tokens_details for usage in usages if usage.completion_tokens_details is not None]
    whole.usage = Usage(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.total_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        PromptTokensDetails(sum(detail.cached_tokens for detail in details)) if details else None,
        CompletionTokensDetails(
            sum(detail.accepted_prediction_tokens for detail in drafts),
            sum(detail.rejected_prediction_tokens for detail in drafts),
        )
        if drafts
        else None,
    )
    return whole
