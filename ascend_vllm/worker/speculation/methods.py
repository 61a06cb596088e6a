"""The methods of speculative decoding that a worker has."""

from __future__ import annotations

from collections.abc import Callable

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.config.speculation import SpeculativeMethod
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.models.blocks import CausalLM
from ascend_vllm.worker.speculation.proposer import ProposerFactory

# Each gets the configuration, the model with its weights, and the context in which it was built.
METHODS: dict[SpeculativeMethod, Callable[[EngineConfig, CausalLM, BuildContext], ProposerFactory]] = {}
