"""The forms in which `LLM` takes prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ascend_vllm.engine.input_processor import PromptType, TokensPrompt
from ascend_vllm.entrypoints.offline.arguments import refuse
from ascend_vllm.errors import RequestError

Prompts = PromptType | list[int] | Sequence[PromptType | list[int]]
Messages = Sequence[Mapping[str, Any]]


def collect_prompts(
    prompts: Prompts | None,
    prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None,
    **unsupported: Any,
) -> list[PromptType]:
    """The prompts of a call, in any accepted form.

    Args:
        prompts: one or a list: text, ids, {"prompt": text} or {"prompt_token_ids": ids}.
        prompt_token_ids: ids instead, or beside their texts: of one prompt or of each.
        unsupported: see `refuse`.

    Raises:
        RequestError: there are none, or not as many texts as ids; or an argument needs an unsupported feature.
    """
    refuse(**unsupported)
    return _pair_texts_and_ids(prompts, prompt_token_ids)


def _pair_texts_and_ids(
    prompts: Prompts | None, prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None
) -> list[PromptType]:
    texts = None if prompts is None else _as_list(prompts)
    if prompt_token_ids is None:
        if texts is None:
            raise RequestError("Either prompts or prompt_token_ids must be provided.", "prompts")
        return [TokensPrompt(prompt_token_ids=one) if isinstance(one, list) else one for one in texts]
    ids: list[Any] = list(prompt_token_ids)
    if ids and isinstance(ids[0], int):
        ids = [ids]
    if texts is None:
        return [TokensPrompt(prompt_token_ids=one) for one in ids]
    if len(texts) != len(ids):
        raise RequestError("The lengths of prompts and prompt_token_ids must be the same.", "prompt_token_ids")
    return [TokensPrompt(prompt=text, prompt_token_ids=one) for text, one in zip(texts, ids, strict=True)]


def _as_list(prompts: Any) -> list[Any]:
    is_ids = isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], int)
    return [prompts] if is_ids or isinstance(prompts, str | dict) else list(prompts)
