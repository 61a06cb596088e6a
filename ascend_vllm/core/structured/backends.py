"""The libraries that compile grammars, by name; each is imported when it is needed."""

from __future__ import annotations

from collections.abc import Callable

from ascend_vllm.core.structured.grammar import GrammarBackend
from ascend_vllm.core.structured.vocabulary import Vocabulary


def _make_xgrammar(vocabulary: Vocabulary, num_threads: int) -> GrammarBackend:
    from ascend_vllm.core.structured.backend_xgrammar import XGrammarBackend

    return XGrammarBackend(vocabulary, num_threads)


def _make_guidance(vocabulary: Vocabulary, num_threads: int) -> GrammarBackend:
    from ascend_vllm.core.structured.backend_guidance import LLGuidanceBackend

    return LLGuidanceBackend(vocabulary, num_threads)


# name → backend for a vocabulary that may use so many threads
BACKENDS: dict[str, Callable[[Vocabulary, int], GrammarBackend]] = {
    "xgrammar": _make_xgrammar,
    "guidance": _make_guidance,
}
