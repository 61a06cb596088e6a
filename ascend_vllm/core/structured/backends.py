"""Grammar backends by name; each library is imported on first use."""

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


# name → constructor, called with the vocabulary and the number of threads
BACKENDS: dict[str, Callable[[Vocabulary, int], GrammarBackend]] = {
    "xgrammar": _make_xgrammar,
    "guidance": _make_guidance,
}
