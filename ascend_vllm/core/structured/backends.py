"""Grammar backends by name; each library is imported on first use."""

from __future__ import annotations

from ascend_vllm import plugins
from ascend_vllm.core.structured.grammar import GrammarBackend
from ascend_vllm.core.structured.vocabulary import Vocabulary

# name → "module:Class"; called with the vocabulary and the number of threads
BACKENDS: dict[str, str] = {
    "xgrammar": "ascend_vllm.core.structured.backend_xgrammar:XGrammarBackend",
    "guidance": "ascend_vllm.core.structured.backend_guidance:LLGuidanceBackend",
}


def make_backend(name: str, vocabulary: Vocabulary, num_threads: int) -> GrammarBackend:
    """A library for one vocabulary; see the constructor of its class."""
    backend: GrammarBackend = plugins.import_object(BACKENDS[name])(vocabulary, num_threads)
    return backend
