"""The methods of speculative decoding that a worker has."""

from __future__ import annotations

from collections.abc import Callable

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.config.speculation import SpeculativeMethod
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.models.blocks import CausalLM
from ascend_vllm.worker.speculation.draft_model import make_draft_model
from ascend_vllm.worker.speculation.eagle import make_eagle
from ascend_vllm.worker.speculation.ngram import NgramFactory
from ascend_vllm.worker.speculation.proposer import ProposerFactory


def _make_ngram(config: EngineConfig, model: CausalLM, context: BuildContext) -> NgramFactory:
    del model, context
    assert config.speculation is not None
    return NgramFactory(config.speculation)


# Each gets the configuration, the model with its weights, and the context in which it was built.
METHODS: dict[SpeculativeMethod, Callable[[EngineConfig, CausalLM, BuildContext], ProposerFactory]] = {
    SpeculativeMethod.DRAFT_MODEL: make_draft_model,
    SpeculativeMethod.EAGLE: make_eagle,
    SpeculativeMethod.EAGLE3: make_eagle,
    SpeculativeMethod.NGRAM: _make_ngram,
}
