"""POST /tokenize and /detokenize: the tokenizer over HTTP."""

from __future__ import annotations

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from ascend_vllm.entrypoints.http.errors import json_response
from ascend_vllm.entrypoints.http.long_answers import encode_list
from ascend_vllm.entrypoints.http.streaming import unless_gone
from ascend_vllm.entrypoints.openai.protocol_misc import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from ascend_vllm.entrypoints.openai.serving_base import ServingBase
from ascend_vllm.errors import RequestError


class ServingTokens(ServingBase):
    """Answers /tokenize and /detokenize."""

    async def tokenize(self, request: TokenizeRequest, http: Request) -> Response:
        """Token ids of a prompt, or of a conversation under the chat template.

        Raises:
            RequestError: both prompt and messages, an unknown model, or a text that is too long.
            ValidationError: neither prompt nor messages.
            EngineBusyError: too many long texts wait to be tokenised.
        """
        await self.check_model(request.model)
        if request.messages is None:
            if request.prompt is None:
                raise ValidationError.from_exception_data(
                    "TokenizeRequest",
                    [{"type": "missing", "loc": (name,), "input": {}} for name in ("prompt", "messages")],
                )
            text = request.prompt
        elif request.prompt is not None:
            raise RequestError("Exactly one of `prompt` and `messages` must be given.", param="prompt")
        else:
            text = await self.prompts.render(
                request.messages,
                model=request.model,
                request_template=request.chat_template,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                template_kwargs=request.chat_template_kwargs or {},
                tools=request.tools or None,
                http=http,
                any_length=True,
            )
        special = request.add_special_tokens
        token_ids = await self.prompts.encode_text(
            request.model, text, request.messages is None if special is None else special, http, any_length=True
        )
        tokens = None
        if request.return_token_strs:
            tokenizer = self.prompts.tokenizer(request.model)
            tokens = await encode_list(await tokenizer.convert_ids_to_tokens_async(token_ids))
        ids = await encode_list(token_ids)
        return json_response(TokenizeResponse(len(token_ids), self.settings.max_model_len, ids, tokens))

    async def detokenize(self, request: DetokenizeRequest, http: Request) -> Response:
        """Text of token ids.

        Raises:
            RequestError: an unknown model, or too many ids.
        """
        await self.check_model(request.model)
        tokenizer = self.prompts.tokenizer(request.model)
        tokenizer.check_num_ids(request.tokens, self.settings.max_model_len)
        decoding = tokenizer.decode_async(request.tokens)
        return json_response(DetokenizeResponse(await unless_gone(http, len(request.tokens), decoding)))
