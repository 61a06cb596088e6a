"""DeepSeek-V2, V2-Lite, V3 and R1."""

from __future__ import annotations

from ascend_vllm.config.model import ModelConfig
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.models.blocks import DecoderForCausalLM


class DeepseekForCausalLM(DecoderForCausalLM):
    """The shared decoder with latent attention and mixtures of experts.

    The layer behind the last one, which V3 has to predict a second token, is not loaded.
    """

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        self.ignored_weights = (*self.ignored_weights, rf"model\.layers\.{config.num_layers}\..*")
