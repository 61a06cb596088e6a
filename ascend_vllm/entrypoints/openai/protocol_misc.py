"""Requests and answers of /tokenize, /detokenize and /v1/models."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
from pydantic import model_validator

from ascend_vllm.entrypoints.openai.protocol_chat import ChatMessage, checked_tool_names
from ascend_vllm.entrypoints.openai.protocol_common import ApiRequest, TokenId, unix_time


class TokenizeRequest(ApiRequest):
    """Body of POST /tokenize: a prompt, or messages for the chat template.

    `add_special_tokens` is true for a prompt and false for messages unless it is given.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, object] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_tools(self) -> TokenizeRequest:
        checked_tool_names(self.tools or ())
        return self

    @model_validator(mode="after")
    def _check_last_message(self) -> TokenizeRequest:
        if self.continue_final_message and self.add_generation_prompt:
            # as in a chat request: the generation prompt is on by default
            if "add_generation_prompt" in self.model_fields_set:
                raise ValueError("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
            self.add_generation_prompt = False
        return self


class TokenizeResponse(msgspec.Struct):
    """Answer of POST /tokenize; `token_strs` only if requested. Long lists are encoded as JSON in advance."""

    count: int
    max_model_len: int
    tokens: Sequence[int] | msgspec.Raw
    token_strs: Sequence[str] | msgspec.Raw | None = None


class DetokenizeRequest(ApiRequest):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


class DetokenizeResponse(msgspec.Struct):
    """Answer of POST /detokenize."""

    prompt: str


class ModelPermission(msgspec.Struct):
    """What a model may be used for: everything but fine-tuning."""

    id: str = msgspec.field(default_factory=lambda: f"modelperm-{secrets.token_hex(16)}")
    object: str = "model_permission"
    created: int = msgspec.field(default_factory=unix_time)
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(msgspec.Struct, kw_only=True):
    """One name under which a model is served."""

    id: str
    object: str = "model"
    created: int = msgspec.field(default_factory=unix_time)
    owned_by: str = "vllm"
    root: str
    parent: str | None = None
    # None of a LoRA adapter
    max_model_len: int | None
    permission: list[ModelPermission] = msgspec.field(default_factory=lambda: [ModelPermission()])


class ModelList(msgspec.Struct, kw_only=True):
    """Answer of GET /v1/models."""

    object: str = "list"
    data: list[ModelCard]
