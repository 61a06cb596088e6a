"""Prompts of requests: renders conversations, tokenises texts off the event loop, and truncates."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from ascend_vllm.engine.tokenization import truncate
from ascend_vllm.entrypoints.http.streaming import run_unless_disconnected, unless_gone
from ascend_vllm.entrypoints.openai.protocol_chat import ChatMessage
from ascend_vllm.entrypoints.openai.protocol_common import GenerationRequest
from ascend_vllm.entrypoints.openai.request_limits import check_conversation
from ascend_vllm.entrypoints.openai.serving_settings import ServingSettings
from ascend_vllm.entrypoints.templates.chat_template import described_tool, render_chat
from ascend_vllm.errors import RequestError

if TYPE_CHECKING:
    from ascend_vllm.engine.adapter_tokenizers import AdapterTokenizers
    from ascend_vllm.engine.tokenization import Tokenizer


@dataclasses.dataclass
class Prompt:
    """A prompt ready for the engine.

    Attributes:
        text: for `echo`; None if the prompt was given as token ids.
    """

    token_ids: list[int]
    text: str | None


class PromptMaker:
    """Makes prompts of texts, token ids and conversations.

    Args:
        tokenizer: None under --skip-tokenizer-init.
        settings: flags that shape prompts.
        tokenizers: of LoRA adapters; None: all have the model's.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, settings: ServingSettings, tokenizers: AdapterTokenizers | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._tokenizers = tokenizers

    async def load_tokenizer(self, model: str | None) -> None:
        """Loads the tokenizer of the adapter that a request names as its model, off the event loop."""
        lora = self._settings.adapters.by_name.get(model or "")
        if self._tokenizers is not None and lora is not None:
            await self._tokenizers.load(lora)

    def tokenizer(self, model: str | None = None) -> Tokenizer:
        """The tokenizer of the model, or of the adapter that a request names as its model.

        Raises:
            RequestError: the server runs with --skip-tokenizer-init.
        """
        if self._tokenizer is None:
            raise RequestError("This server runs with --skip-tokenizer-init: prompts must be token ids.")
        lora = self._settings.adapters.by_name.get(model or "")
        own = None if self._tokenizers is None or lora is None else self._tokenizers.of(lora)
        return own or self._tokenizer

    async def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        model: str | None,
        request_template: str | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        http: Request | None = None,
        any_length: bool = False,
    ) -> str:
        """Renders a conversation off the event loop; returns the prompt's text.

        A request's own template is rendered in a process of its own, the server's in a thread. What cannot be a
        prompt is refused before.

        Args:
            messages: the conversation.
            model: that the request names.
            request_template: the template that came with the request.
            add_generation_prompt: end with the beginning of an answer.
            continue_final_message: leave the last message open.
            template_kwargs: further variables of the template.
            tools: functions the model may call.
            http: rendering stops when its client disconnects; None: it does not stop.
            any_length: the prompt is truncated or not generated from, so that it may exceed the model's length.

        Raises:
            RequestError: the request may not bring a template, the template refuses the messages, or takes more
                than it may; or there are more messages than any prompt has.
            EngineBusyError: too many long conversations wait.
        """
        tokenizer, pool = self.tokenizer(model), self._settings.request_templates
        if request_template is not None and pool is None:
            raise RequestError(
                "Chat template is passed with request, but --trust-request-chat-template is not set. Refused "
                "request with untrusted chat template.",
                param="chat_template",
            )
        size = check_conversation(
            messages,
            self._settings.max_model_len,
            tools=tools or (),
            template_kwargs=template_kwargs,
            any_length=any_length,
        )

        def make_options() -> dict[str, Any]:
            return {
                "messages": [message.model_dump(exclude_unset=True) for message in messages],
                "model_name": self._settings.model_names[0],
                "chat_template": request_template or self._settings.chat_template,
                "content_format": self._settings.content_format,
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
                "tools": None if tools is None else [described_tool(tool) for tool in tools],
                "template_kwargs": {**self._settings.default_chat_template_kwargs, **template_kwargs},
            }

        own = tokenizer.chat_template
        # `chat_template` may also be the name of one of the model's templates
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
        """Tokenises a prompt off the event loop, and truncates it if requested.

        Raises:
            RequestError: the text is far too long, which is checked before it is tokenised.
            EngineBusyError: too many long texts wait to be tokenised.
        """
        is_cut = request.truncate_prompt_tokens is not None
        token_ids = await self.encode_text(request.model, text, add_special_tokens, http, any_length=is_cut)
        if not is_cut:
            return token_ids
        empty_ids = self.tokenizer(request.model).encode("") if add_special_tokens else []
        return self.cut_prompt(request, token_ids, empty_ids)

    async def encode_text(
        self,
        model: str | None,
        text: str,
        add_special_tokens: bool,
        http: Request | None,
        *,
        any_length: bool = False,
    ) -> list[int]:
        """`Tokenizer.encode_async` with the model's length; stops if the client disconnects. See `encode_prompt`."""
        limit = self._settings.max_model_len
        encoding = self.tokenizer(model).encode_async(text, add_special_tokens, limit, any_length)
        return await unless_gone(http, len(text), encoding)

    def cut_prompt(self, request: GenerationRequest, token_ids: list[int], empty_ids: list[int]) -> list[int]:
        """Truncates a prompt to `truncate_prompt_tokens` ids; -1: the model's length less one.

        Args:
            request: with the options of truncation.
            token_ids: of the whole prompt.
            empty_ids: of an empty text: the special tokens around every text, which are kept.
        """
        limit = request.truncate_prompt_tokens
        if limit is None:
            return token_ids
        limit = self._settings.max_model_len - 1 if limit < 0 else limit
        return truncate(token_ids, limit, request.truncation_side or "left", empty_ids)
