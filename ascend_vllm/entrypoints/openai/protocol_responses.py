"""Request and answer of POST /v1/responses.

A request is converted to a chat request by `ResponsesRequest.to_chat` and answered as such.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, Field, model_validator

from ascend_vllm.entrypoints.http.request_ids import ChosenId
from ascend_vllm.entrypoints.http.validation import validated
from ascend_vllm.entrypoints.openai.protocol_chat import ChatCompletionRequest
from ascend_vllm.entrypoints.openai.protocol_common import INT64_MAX, INT64_MIN, ApiRequest, unsupported_fields
from ascend_vllm.entrypoints.openai.structured_fields import OpenModel
from ascend_vllm.errors import RequestError
from ascend_vllm.refusals import Refusal
from ascend_vllm.sampling_params import SamplingParams

# values of `include`; those of tools that this server lacks are accepted without effect
Includable = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]

# the keys that clients expect of every function
_FUNCTION = {"name": None, "parameters": None, "strict": None, "type": "function", "description": None}
# fields of a chat request with another meaning, or that are converted
_OTHER_IN_CHAT = {"chat_template_kwargs", "request_id", "stream_options", "tool_choice", "tools", "top_logprobs"}


class Reasoning(OpenModel):
    """`reasoning`: the effort of reasoning, a variable of the chat template."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None


class TextFormat(OpenModel):
    """`text.format`: a constraint on the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    # "schema" in JSON: pydantic reserves that name
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> TextFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("`schema` must be given when the format's type is 'json_schema'.")
        return self

    def response_format(self) -> dict[str, Any]:
        """The format as `response_format` of a chat request."""
        if self.type != "json_schema":
            return {"type": self.type}
        schema = {"name": self.name or "schema", "schema": self.json_schema, "strict": self.strict}
        return {"type": "json_schema", "json_schema": schema}


class TextConfig(OpenModel):
    """`text`: format and, without effect, verbosity."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    def shown(self) -> dict[str, Any]:
        """`text` as repeated in the response."""
        has_schema = self.format is not None and self.format.type == "json_schema"
        shown = None if self.format is None else self.format.model_dump(by_alias=True, exclude_unset=not has_schema)
        return {"format": shown, "verbosity": self.verbosity}


class ResponsesRequest(ApiRequest):
    """Body of POST /v1/responses."""

    REFUSALS = unsupported_fields(previous_input_messages=(None,)) | {
        "prompt": Refusal("prompt template is not supported"),
        "conversation": Refusal(
            "`conversation` is not supported by this version of the server; use `previous_response_id`."
        ),
    }

    input: str | list[Any]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = True
    background: bool | None = False
    stream: bool | None = False
    include: list[Includable] | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = True
    reasoning: Reasoning | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = "auto"
    temperature: float | None = None
    text: TextConfig | None = None
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = Field(default_factory=list)
    top_logprobs: Annotated[int, Field(ge=0)] | None = 0
    top_p: float | None = None
    truncation: Literal["auto", "disabled"] | None = "disabled"
    user: str | None = None
    # without effect
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    stream_options: dict[str, Any] | None = None
    # refused by name
    prompt: Any = None
    conversation: Any = None
    previous_input_messages: Any = None

    # vLLM's extensions
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: float | None = None
    seed: Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[str, float] | None = None
    include_reasoning: bool = True
    request_id: Annotated[ChosenId, Field(min_length=1)] | None = None
    priority: int = 0
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    enable_response_messages: bool = False
    kv_transfer_params: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None

    @property
    def kept(self) -> bool:
        """Whether the response is stored."""
        return self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer contains log-probabilities of the text."""
        return "message.output_text.logprobs" in (self.include or ())

    def check_supported(self) -> None:
        """Refuse combinations that cannot be answered, and fields whose feature is not available.

        Raises:
            RequestError: names the field.
        """
        super().check_supported()
        if self.background and not self.kept:
            raise RequestError("background can only be used when `store` is true", "background")
        if self.text is not None and self.text.format is not None and self.structured_outputs is not None:
            raise RequestError("Cannot specify both structured_outputs and text.format", "structured_outputs")
        if self.cache_salt == "":
            raise RequestError("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
        self._check_tools()

    def _check_tools(self) -> None:
        for tool in self.tools:
            kind = tool.get("type")
            if kind != "function":
                raise RequestError(f"Tools of type {kind!r} are not supported; only 'function' is.", "tools")
            if not isinstance(tool.get("name"), str) or not tool["name"]:
                raise RequestError("Each of `tools` must have a name.", "tools")
            if not isinstance(tool.get("parameters"), dict | None):
                raise RequestError(f"The parameters of the tool {tool['name']!r} must be an object.", "tools")
        choice = self.tool_choice
        if isinstance(choice, str):
            if choice not in ("none", "auto", "required"):
                raise RequestError(
                    f"`tool_choice` must be 'none', 'auto', 'required' or a function, got {choice!r}.", "tool_choice"
                )
            if choice == "required" and not self.tools:
                raise RequestError("Tool choice 'required' must be specified with 'tools' parameter.", "tool_choice")
            return
        kind = choice.get("type")
        if kind not in ("function", "allowed_tools"):
            raise RequestError(f"A `tool_choice` of type {kind!r} is not supported.", "tool_choice")
        if kind == "allowed_tools" and choice.get("mode", "auto") not in ("auto", "required"):
            raise RequestError("The mode of allowed tools must be 'auto' or 'required'.", "tool_choice")
        names = {tool["name"] for tool in self.tools}
        if not self._chosen_names() or not self._chosen_names() <= names:
            raise RequestError("Tool choice 'function' not found in 'tools' parameter.", "tool_choice")

    def _chosen_names(self) -> set[Any]:
        """Names of the functions in a `tool_choice` that is an object."""
        choice = self.tool_choice
        if not isinstance(choice, dict):
            return set()
        named = choice.get("tools") if choice.get("type") == "allowed_tools" else [choice]
        if not isinstance(named, list):
            return set()
        names = [tool.get("name") if isinstance(tool, dict) else None for tool in named]
        return {name if isinstance(name, str) else None for name in names}

    @property
    def effective_tool_choice(self) -> str | dict[str, Any]:
        """`tool_choice`; "none" without tools."""
        return self.tool_choice if self.tools else "none"

    def to_chat(self, messages: list[dict[str, Any]], continues: bool, max_model_len: int) -> ChatCompletionRequest:
        """The equivalent chat request.

        Args:
            messages: the whole conversation.
            continues: whether the answer continues the last message.
            max_model_len: most tokens of prompt and output; truncation keeps the prompt's end that leaves room for
                `max_output_tokens`, by default a quarter of this.

        Raises:
            pydantic.ValidationError: a value does not fit.
        """
        same = ResponsesRequest.model_fields.keys() & ChatCompletionRequest.model_fields.keys() - _OTHER_IN_CHAT
        fields = {name: value for name in same if (value := getattr(self, name)) is not None}
        fields |= {"messages": messages, "max_completion_tokens": self.max_output_tokens}
        fields |= {"add_generation_prompt": not continues, "continue_final_message": continues}
        fields |= self._chat_thinking() | self._chat_tools()
        if self.wants_logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = self.text.format.response_format()
        if self.truncation == "auto":
            fields["truncate_prompt_tokens"] = max(1, max_model_len - (self.max_output_tokens or max_model_len // 4))
        return validated(ChatCompletionRequest, fields)

    def _chat_thinking(self) -> dict[str, Any]:
        kwargs = dict(self.chat_template_kwargs or {})
        if self.reasoning is None or self.reasoning.effort is None:
            return {"chat_template_kwargs": kwargs}
        # a variable in templates of models whose reasoning can be switched off
        kwargs.setdefault("enable_thinking", self.reasoning.effort != "none")
        return {"chat_template_kwargs": kwargs, "reasoning_effort": self.reasoning.effort}

    def _chat_tools(self) -> dict[str, Any]:
        if not self.tools:
            return {}
        choice: Any = self.effective_tool_choice
        tools = self.tools
        if isinstance(choice, dict) and choice["type"] == "allowed_tools":
            tools = [tool for tool in tools if tool["name"] in self._chosen_names()]
            choice = choice.get("mode", "auto")
        elif isinstance(choice, dict):
            choice = {"type": "function", "function": {"name": choice["name"]}}
        return {"tools": [_chat_tool(tool) for tool in tools], "tool_choice": choice}


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": function}


class RetrieveQuery(BaseModel):
    """Query of GET /v1/responses/{id}: whether to stream the events, and the number of the last one received."""

    stream: bool = False
    starting_after: int | None = None


class ListQuery(BaseModel):
    """Query of GET /v1/responses/{id}/input_items: most items, their order, and the id of the last one received."""

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


# ---- answers -------------------------------------------------------------------------------------------------


class ItemList(msgspec.Struct):
    """A page of a response's input items; the ids are null if it is empty."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class DeletedResponse(msgspec.Struct):
    """Answer of DELETE /v1/responses/{id}."""

    id: str
    object: str = "response"
    deleted: bool = True


class IncompleteDetails(msgspec.Struct):
    """Why a response has the status "incomplete"."""

    reason: str = "max_output_tokens"


class InputTokensDetails(msgspec.Struct):
    """Tokens of the prompt that were in the prefix cache, and tokens that were added to it."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(msgspec.Struct):
    """Number of reasoning tokens."""

    reasoning_tokens: int
    tool_output_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """`usage` of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    """Why a response has the status "failed"."""

    code: str
    message: str


class RawMessage(msgspec.Struct):
    """Text and token ids of the prompt or the output, with `enable_response_messages`."""

    message: str
    tokens: list[int]
    type: str = "raw_message_tokens"


class ResponsesResponse(msgspec.Struct, kw_only=True):
    """A response, finished or not; `error` only if it failed.

    The fields that repeat the request are encoded as JSON in advance.
    """

    id: str
    created_at: int
    error: ResponseError | msgspec.UnsetType = msgspec.UNSET
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    metadata: msgspec.Raw
    model: str
    object: str = "response"
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    temperature: float
    tool_choice: msgspec.Raw
    tools: msgspec.Raw
    top_p: float
    background: bool
    max_output_tokens: int | None
    max_tool_calls: int | None
    previous_response_id: str | None
    prompt: None = None
    reasoning: msgspec.Raw
    service_tier: str
    status: Status
    text: msgspec.Raw
    top_logprobs: int | None
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None
    presence_penalty: float
    frequency_penalty: float
    input_messages: list[RawMessage] | None = None
    output_messages: list[RawMessage] | None = None

    @classmethod
    def from_request(
        cls, request: ResponsesRequest, params: SamplingParams, *, response_id: str, created_at: int, model: str
    ) -> ResponsesResponse:
        """A response at its start."""
        return cls(
            id=response_id,
            created_at=created_at,
            instructions=request.instructions,
            metadata=_raw(request.metadata, "metadata"),
            model=model,
            output=[],
            parallel_tool_calls=request.parallel_tool_calls is not False,
            temperature=params.temperature,
            tool_choice=_raw(request.effective_tool_choice, "tool_choice"),
            tools=_raw([_FUNCTION | tool for tool in request.tools], "tools"),
            top_p=params.top_p,
            background=bool(request.background),
            max_output_tokens=params.max_tokens,
            max_tool_calls=request.max_tool_calls,
            previous_response_id=request.previous_response_id,
            reasoning=_raw(None if request.reasoning is None else request.reasoning.model_dump(), "reasoning"),
            service_tier=request.service_tier or "auto",
            status="queued" if request.background else "in_progress",
            text=_raw(None if request.text is None else request.text.shown(), "text"),
            top_logprobs=params.logprobs,
            truncation=request.truncation or "disabled",
            user=request.user,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
        )


def encode_part(value: Any, field: str) -> bytes:
    """Encodes a part of a request as JSON.

    Raises:
        RequestError: it is nested too deeply.
    """
    try:
        return msgspec.json.encode(value)
    except RecursionError as error:
        raise RequestError(f"`{field}` is nested too deeply.", field) from error


def _raw(value: Any, field: str) -> msgspec.Raw:
    return msgspec.Raw(encode_part(value, field))
