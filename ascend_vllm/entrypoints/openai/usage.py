"""Counts the tokens of a request for the `usage` of its answer."""

from __future__ import annotations

from ascend_vllm.entrypoints.openai.protocol_common import PromptTokensDetails, Usage
from ascend_vllm.outputs import RequestOutput


class UsageCounter:
    """Counts the tokens of a request while its outputs arrive.

    Prompts count once each, however many choices they have; choices count every generated token.
    """

    def __init__(self, num_choices: int, tell_cached: bool) -> None:
        self.completion_tokens = [0] * num_choices
        self._prompts: dict[int, tuple[int, int]] = {}
        self._tell_cached = tell_cached

    @property
    def started(self) -> bool:
        """Whether any prompt was counted."""
        return bool(self._prompts)

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Take note of a prompt's size; `completion_tokens` is counted by the caller."""
        self._prompts[prompt_index] = (len(output.prompt_token_ids), output.num_cached_tokens)

    def choice_usage(self, prompt_index: int, choice_index: int) -> Usage:
        """Usage so far as a chunk of one choice tells it."""
        return self._usage([self._prompts[prompt_index]], self.completion_tokens[choice_index])

    def total(self) -> Usage:
        """Usage of the whole request."""
        return self._usage(list(self._prompts.values()), sum(self.completion_tokens))

    def _usage(self, prompts: list[tuple[int, int]], completion_tokens: int) -> Usage:
        prompt_tokens = sum(size for size, _ in prompts)
        details = PromptTokensDetails(sum(cached for _, cached in prompts)) if self._tell_cached else None
        return Usage(prompt_tokens, prompt_tokens + completion_tokens, completion_tokens, details)
