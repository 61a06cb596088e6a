"""Request, answer and events of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from ascend_vllm.entrypoints.http.streaming import encode_json
from ascend_vllm.entrypoints.openai.protocol_common import ChunkWriter, GenerationRequest, Usage
from ascend_vllm.entrypoints.openai.structured_fields import checked_params
from ascend_vllm.entrypoints.parsers.tools_forced import arguments_schema, calls_schema
from ascend_vllm.errors import RequestError
from ascend_vllm.outputs import PositionLogprobs
from ascend_vllm.refusals import Refusal
from ascend_vllm.structured_outputs import StructuredOutputsParams


class ChatMessage(BaseModel):
    """One message of the conversation; any role is allowed, and unknown fields are passed to the template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any] | str] | None = None


class ChatCompletionRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    REFUSALS: ClassVar[dict[str, Refusal]] = {
        name: refusal for name, refusal in GenerationRequest.REFUSALS.items() if name != "thinking_token_budget"
    }

    messages: list[ChatMessage]
    logprobs: bool | None = False
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    # -1: no limit
    thinking_token_budget: Annotated[int, Field(ge=-1)] | None = None
    # texts that open and end the reasoning, see `exempt_reasoning`
    _reasoning_start: str = PrivateAttr(default="")
    _reasoning_end: str | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _check_combinations(self) -> ChatCompletionRequest:
        if self.continue_final_message and self.add_generation_prompt:
            # add_generation_prompt is true by default, which contradicts nothing unless it is set
            if "add_generation_prompt" in self.model_fields_set:
                raise ValueError("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
            self.add_generation_prompt = False
        if self.top_logprobs is not None:
            if self.top_logprobs < 0:
                raise ValueError("`top_logprobs` must be a positive value.")
            if self.top_logprobs > 0 and not self.logprobs:
                raise ValueError("when using `top_logprobs`, `logprobs` must be set to true.")
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        names = checked_tool_names(self.tools or ())
        if self.tool_choice in (None, "none"):
            return
        if not self.tools:
            raise ValueError("When using `tool_choice`, `tools` must be set.")
        if self.tool_choice == "auto":
            return
        if isinstance(self.tool_choice, dict):
            name = _function_name(self.tool_choice)
            if name is None:
                raise ValueError(
                    "Incorrectly formatted `tool_choice`. Should be like "
                    '`{"type": "function", "function": {"name": "my_function"}}`'
                )
            if name not in names:
                raise ValueError("The tool specified in `tool_choice` does not match any of the specified `tools`")
            if self.structured_outputs is not None:
                raise ValueError("You can only either use constraints for structured outputs or tools, not both.")
            if self.guided():
                raise ValueError("You can only either use guided decoding or tools, not both.")
        elif self.tool_choice != "required":
            raise ValueError('`tool_choice` must be "none", "auto", "required" or a named tool.')

    def requested_logprobs(self) -> int | None:
        """`top_logprobs` when `logprobs` is true."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def structured_outputs_params(self) -> StructuredOutputsParams | None:
        """The constraint on the output: the schema of a forced call, else that of the other fields."""
        params, budget = self._constraint(), self.thinking_token_budget
        if self._reasoning_end is None or (params is None and budget in (None, -1)):
            return params
        is_constrained = params is not None
        params = params or StructuredOutputsParams()
        params.begin_after = self._reasoning_end
        if budget != -1:
            params.begin_within = budget
            # before a constraint everything is reasoning
            params.begin_opener = "" if is_constrained else self._reasoning_start
        return params

    @property
    def constraint_field(self) -> str:
        """`tools` if a call is forced."""
        return super().constraint_field if self.demanded_tools is None else "tools"

    def exempt_reasoning(self, start: str, end: str) -> None:
        """Apply the constraint only to the answer behind the reasoning, and limit that to its budget.

        Args:
            start: tag that the output begins with if it has reasoning; "": it has, with or without a tag.
            end: tag that ends the reasoning.
        """
        self._reasoning_start, self._reasoning_end = start, end

    @property
    def has_exempt_reasoning(self) -> bool:
        """Whether there is a constraint that applies only after the reasoning."""
        return self._reasoning_end is not None and self._constraint() is not None

    def _constraint(self) -> StructuredOutputsParams | None:
        tools = self.demanded_tools
        if tools is None:
            return super().structured_outputs_params()
        if isinstance(self.effective_tool_choice, dict):
            return checked_params("tools", json=arguments_schema(tools[0]))
        try:
            schema = calls_schema(tools, parallel=self.parallel_tool_calls is not False)
        except ValueError as error:
            raise RequestError(str(error), "tools") from error
        return checked_params("tools", json=schema)

    @property
    def effective_tool_choice(self) -> str | dict[str, Any]:
        """`tool_choice`; by default "auto" if there are tools."""
        if not self.tools:
            return "none"
        return "auto" if self.tool_choice is None else self.tool_choice

    @property
    def demanded_tools(self) -> list[dict[str, Any]] | None:
        """The tools of which one must be called; None: no call is forced."""
        choice = self.effective_tool_choice
        if isinstance(choice, dict):
            name = _function_name(choice)
            return [tool for tool in self.tools or () if _function_name(tool) == name][:1]
        return self.tools if choice == "required" else None

    @property
    def effective_max_tokens(self) -> int | None:
        """`max_completion_tokens`, else `max_tokens`; None: up to the model's limit."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def template_kwargs(self) -> dict[str, Any]:
        """Variables for the chat template beside the messages."""
        variables: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            variables = {
                "reasoning_effort": self.reasoning_effort,
                "enable_thinking": self.reasoning_effort != "none",
            }
        if self.documents:
            variables["documents"] = self.documents
        return variables | (self.chat_template_kwargs or {})


def checked_tool_names(tools: Iterable[dict[str, Any]]) -> list[str]:
    """The names of a request's tools.

    Raises:
        ValueError: one of them is not of the right form.
    """
    names = []
    for tool in tools:
        name = _function_name(tool)
        if name is None:
            raise ValueError(
                'Each of `tools` must be like `{"type": "function", "function": {"name": "my_function"}}`.'
            )
        if not isinstance(tool["function"].get("parameters") or {}, dict):
            raise ValueError(f"The `parameters` of the tool '{name}' must be a JSON schema, which is an object.")
        names.append(name)
    return names


def _function_name(tool: dict[str, Any]) -> str | None:
    """The function's name in a tool or a tool choice; None if malformed."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if tool.get("type", "function") == "function" and isinstance(name, str) and name else None


class ChatTopLogprob(msgspec.Struct):
    """One candidate at a position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    """One generated token and the most likely candidates at its position."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of a choice."""

    content: list[ChatTokenLogprob]


class ChatResponseMessage(msgspec.Struct):
    """The generated message; the fields that are always null belong to models with other output than text."""

    role: str
    content: str | None
    tool_calls: list[dict[str, Any]]
    reasoning: str | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None


class ChatChoice(msgspec.Struct):
    """One generated message."""

    index: int
    message: ChatResponseMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletionResponse(msgspec.Struct, kw_only=True):
    """Answer of POST /v1/chat/completions without streaming."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_logprobs: Sequence[PositionLogprobs | None] | msgspec.Raw | None = None
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatChunkWriter(ChunkWriter):
    """Events of a /v1/chat/completions stream."""

    OBJECT = "chat.completion.chunk"
    NULL_USAGE = False
    PLAIN_END = b'},"logprobs":null,"finish_reason":null}'

    def text_event(self, index: int, text: str) -> bytes:
        """A chunk with text only, of a choice that goes on."""
        return self._choice_heads[index] + b'"delta":{"content":' + encode_json(text) + self._plain_tail

    def event(self, index: int, delta: dict[str, Any], usage: Usage | None, extra: dict[str, Any]) -> bytes:
        """A chunk with everything; `extra` are further keys of the choice beside its delta."""
        fields = {"delta": delta, "logprobs": None, "finish_reason": None, **extra}
        finished = fields["finish_reason"] is not None
        return self._choice_heads[index] + encode_json(fields)[1:] + self._tail(usage, finished)

    def opening_event(
        self, index: int, role: str, content: str | None, usage: Usage | None, prompt_token_ids: list[int] | None
    ) -> bytes:
        """A choice's first chunk: its role, and the prompt's token ids if they were requested.

        Args:
            index: of the choice.
            role: of its message.
            content: "", or None where a call is forced.
            usage: so far; None: not shown.
            prompt_token_ids: None: not requested.
        """
        ids = b"" if prompt_token_ids is None else b',"prompt_token_ids":' + encode_json(prompt_token_ids)
        choice = {"delta": {"role": role, "content": content}, "logprobs": None, "finish_reason": None}
        tail = self._tail(usage)
        return self._choice_heads[index] + encode_json(choice)[1:] + tail[:1] + ids + tail[1:]
