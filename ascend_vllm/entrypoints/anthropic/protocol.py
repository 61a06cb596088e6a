"""Requests of POST /v1/messages and /v1/messages/count_tokens.

A request is checked here in Anthropic's form and becomes a chat request, which everything else works on. The names
are those of Anthropic's Messages API.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, Field, field_validator, model_validator

from ascend_vllm.entrypoints.openai.protocol_chat import ChatCompletionRequest, ChatMessage
from ascend_vllm.entrypoints.openai.protocol_common import ApiRequest
from ascend_vllm.errors import RequestError

# block type → its required field
_REQUIRED_FIELDS = {
    "text": "text",
    "image": "source",
    "tool_use": "name",
    "tool_result": "tool_use_id",
    "thinking": "thinking",
}


class ContentBlock(BaseModel):
    """A part of a message. Images are passed on to the chat request, which is refused if the model has no vision."""

    type: Literal["text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str | None = None
    source: dict[str, Any] | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ContentBlock] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None

    @model_validator(mode="after")
    def _check_required(self) -> ContentBlock:
        name = _REQUIRED_FIELDS.get(self.type)
        if name is not None and getattr(self, name) is None:
            raise ValueError(f"{name} is required for {self.type} blocks")
        return self

    def as_part(self) -> dict[str, Any]:
        """A text or an image as a content part of a chat message."""
        if self.type == "text":
            return {"type": "text", "text": self.text}
        return {"type": self.type, "source": self.source}


class Message(BaseModel):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]

    @property
    def is_begun_answer(self) -> bool:
        """Whether this is text of the assistant, which the answer continues if it is the last message."""
        text: str | None = self.content if isinstance(self.content, str) else None
        if isinstance(self.content, list) and self.content and self.content[-1].type == "text":
            text = self.content[-1].text
        return self.role == "assistant" and bool(text and text.strip())


class Tool(BaseModel):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None

    def as_function(self) -> dict[str, Any]:
        """The same as a tool of a chat request."""
        function: dict[str, Any] = {"name": self.name, "parameters": {"type": "object"} | self.input_schema}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


class ToolChoice(BaseModel):
    """Whether the model may or must call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> ToolChoice:
        if self.type == "tool" and not self.name:
            raise ValueError("tool_choice.name is required when type is 'tool'")
        return self

    def as_chat(self) -> str | dict[str, Any]:
        """`tool_choice` of a chat request."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class ThinkingConfig(BaseModel):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1024)] | None = None


class OutputFormat(BaseModel):
    """The form of the answer's text."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    """Reasoning effort and output format."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(ApiRequest):
    """Body of POST /v1/messages/count_tokens; the fields are also those of POST /v1/messages."""

    model: Annotated[str, Field(min_length=1)]
    messages: list[Message]
    system: str | list[ContentBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def num_blocks(self) -> int:
        """Number of content blocks, those in tool results included, or of messages if that is larger."""
        contents = [message.content for message in self.messages]
        blocks = [block for content in contents if not isinstance(content, str) for block in content]
        inner = (block.content for block in blocks if block.content is not None)
        num_blocks = len(blocks) + sum(len(content) for content in inner if not isinstance(content, str))
        return max(len(contents), num_blocks)

    def to_chat(self) -> ChatCompletionRequest:
        """The same conversation as a chat request.

        Raises:
            pydantic.ValidationError: the tools do not fit each other.
            RequestError: a field needs a feature that this server does not have.
        """
        return ChatCompletionRequest(**self.chat_fields())

    def chat_fields(self) -> dict[str, Any]:
        """The fields of the chat request."""
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": self._chat_messages(),
            "chat_template_kwargs": dict(self.chat_template_kwargs or {}),
        }
        if self.tools:
            fields["tools"] = [tool.as_function() for tool in self.tools]
            if self.tool_choice is not None:
                fields["tool_choice"] = self.tool_choice.as_chat()
                fields["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        if self.messages and self.messages[-1].is_begun_answer:
            fields |= {"add_generation_prompt": False, "continue_final_message": True}
        self._add_thinking(fields)
        return fields

    def _add_thinking(self, fields: dict[str, Any]) -> None:
        """Adds the fields of the chat request for reasoning and output format."""
        if self.output_config is not None:
            fields["reasoning_effort"] = self.output_config.effort
            if self.output_config.format is not None:
                schema = {"name": "output", "schema": self.output_config.format.json_schema}
                fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        if self.thinking is None:
            return
        fields["chat_template_kwargs"].setdefault("enable_thinking", self.thinking.type != "disabled")
        if self.thinking.type == "disabled":
            fields["reasoning_effort"] = "none"
        elif self.thinking.budget_tokens is not None:
            fields["thinking_token_budget"] = self.thinking.budget_tokens

    def _chat_messages(self) -> list[ChatMessage]:
        messages = []
        if self.system:
            # the blocks of a system prompt are joined
            blocks = [self.system] if isinstance(self.system, str) else [block.text or "" for block in self.system]
            messages.append(ChatMessage(role="system", content="".join(blocks)))
        for message in self.messages:
            messages.extend(_chat_messages_of(message))
        return messages


class MessagesRequest(CountTokensRequest):
    """Body of POST /v1/messages."""

    max_tokens: int
    metadata: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    cache_salt: str | None = None
    priority: int | None = None

    @field_validator("max_tokens")
    @classmethod
    def _check_max_tokens(cls, max_tokens: int) -> int:
        if max_tokens <= 0:
            raise ValueError("max_tokens must be positive")
        return max_tokens

    @model_validator(mode="after")
    def _check_budget(self) -> MessagesRequest:
        budget = self.thinking.budget_tokens if self.thinking is not None else None
        if budget is not None and budget >= self.max_tokens:
            raise ValueError("thinking.budget_tokens must be less than max_tokens")
        return self

    def chat_fields(self) -> dict[str, Any]:
        """The fields of the chat request."""
        names = ("max_tokens", "stream", "temperature", "top_k", "top_p", "cache_salt", "priority")
        fields = super().chat_fields() | {name: getattr(self, name) for name in names}
        fields["stop"] = self.stop_sequences
        return fields


def _chat_messages_of(message: Message) -> list[ChatMessage]:
    """The chat messages of a message: tool results become messages of their own, before the others."""
    if isinstance(message.content, str):
        return [ChatMessage(role=message.role, content=message.content)]
    results, parts, calls, reasoning = [], [], [], []
    for block in message.content:
        if block.type == "tool_result":
            content = block.content if isinstance(block.content, str) else _parts_of(block.content or [])
            fields = {"role": "tool", "content": content, "tool_call_id": block.tool_use_id}
            results.append(ChatMessage.model_validate(fields))
        elif block.type == "tool_use":
            function = {"name": block.name, "arguments": msgspec.json.encode(block.input or {}).decode()}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type == "thinking":
            reasoning.append(block.thinking or "")
        elif block.type != "redacted_thinking":  # encrypted by Anthropic
            parts.append(block.as_part())
    if not parts and not calls and not reasoning:
        return results
    fields = {"role": message.role, "content": parts}
    if calls:
        fields["tool_calls"] = calls
    if reasoning:
        fields["reasoning"] = fields["reasoning_content"] = "".join(reasoning)
    return [*results, ChatMessage.model_validate(fields)]


def _parts_of(blocks: list[ContentBlock]) -> list[dict[str, Any]]:
    wrong = [block.type for block in blocks if block.type not in ("text", "image")]
    if wrong:
        raise RequestError(f"A tool's result cannot hold a block of type {wrong[0]}.", param="messages")
    return [block.as_part() for block in blocks]


def error_of(body: dict[str, Any]) -> dict[str, Any]:
    """An error in Anthropic's format, with vLLM's additional fields (param and code).

    Args:
        body: of `http.errors.error_body`.
    """
    return {"type": "error", "error": body["error"]}
