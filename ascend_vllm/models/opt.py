"""OPT: learned positions, LayerNorm before or after, no rotation, plain MLP.

Letters: T tokens, S sampling rows, H hidden, E width of the embedding, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ascend_vllm.attention.backend import AttentionBackend, AttentionSpec, ForwardBatch, LayerCache
from ascend_vllm.config.arch import ArchConfig, required
from ascend_vllm.config.model import ModelConfig
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.layers.attention import Attention, ForwardContext
from ascend_vllm.layers.base import Layer
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.layers.embedding import Embedding, VocabParallelEmbedding
from ascend_vllm.layers.linear import ColumnParallelLinear, QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from ascend_vllm.layers.norm import LayerNorm
from ascend_vllm.layers.quantization.base import Activation
from ascend_vllm.models.blocks import CausalLM

# name of the token embedding in checkpoints
_EMBEDDING = "model.decoder.embed_tokens"
# index of the first position's row
_POSITION_OFFSET = 2


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu_,
    "gelu": torch.nn.functional.gelu,
    "gelu_new": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
}


class OPTDecoderLayer(Layer):
    """Attention and MLP, each with a LayerNorm before (most sizes) or after it (350m)."""

    def __init__(self, arch: ArchConfig, context: BuildContext, index: int) -> None:
        prefix, affine = f"model.decoder.layers.{index}", arch.norm_affine
        cache_index = context.parallel.layers(len(arch.layers)).index(index)
        if arch.activation not in _ACTIVATIONS:
            raise ModelLoadError(
                f"config.json: activation_function {arch.activation!r} is not supported; "
                f"supported are {', '.join(sorted(_ACTIVATIONS))}"
            )
        self._activation = _ACTIVATIONS[arch.activation]
        self._norm_first = arch.layers[index].norm_first
        hidden, head_size = arch.hidden_size, arch.head_size
        intermediate = required(arch.intermediate_size, "ffn_dim")
        self.qkv_proj = QKVParallelLinear(
            context, f"{prefix}.self_attn", hidden, head_size, arch.num_heads, arch.num_kv_heads, bias=arch.qkv_bias
        )
        spec = AttentionSpec(self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, head_size, head_size**-0.5)
        self.attention = Attention(spec, cache_index, context.dtype, arch.layers[index].kv_cache)
        self.out_proj = RowParallelLinear(
            context, f"{prefix}.self_attn.out_proj", hidden, hidden, bias=arch.output_bias
        )
        self.fc1 = ColumnParallelLinear(context, f"{prefix}.fc1", hidden, intermediate, bias=arch.mlp_bias)
        self.fc2 = RowParallelLinear(context, f"{prefix}.fc2", intermediate, hidden, bias=arch.mlp_bias)
        # results of a norm after the layers are the residual, which is not quantized
        quants = (self.qkv_proj.activation_quant, self.fc1.activation_quant) if self._norm_first else (None, None)
        self.self_attn_layer_norm, self.final_layer_norm = (
            LayerNorm(context, f"{prefix}.{name}", hidden, affine=affine, activation_quant=quant)
            for name, quant in zip(("self_attn_layer_norm", "final_layer_norm"), quants, strict=True)
        )

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[T, H] → [T, H]; x is overwritten."""
        if self._norm_first:
            x += self._attend(self.self_attn_layer_norm.forward(x), context)
            x += self._mlp(self.final_layer_norm.forward(x))
            return x
        x = self.self_attn_layer_norm.forward(self._attend(x, context).add_(x))
        normed: torch.Tensor = self.final_layer_norm.forward(self._mlp(x).add_(x))
        return normed

    def _attend(self, x: Activation, context: ForwardContext) -> torch.Tensor:
        query, key, value = self.qkv_proj.project(x)
        return self.out_proj.forward(self.attention.forward(query, key, value, context))

    def _mlp(self, x: Activation) -> torch.Tensor:
        return self.fc2.forward(self._activation(self.fc1.forward(x)))


class OPTEmbeddings(Layer):
    """Tokens and their positions, at the width of the layers."""

    def __init__(self, arch: ArchConfig, context: BuildContext, num_positions: int) -> None:
        hidden, embed_width = arch.hidden_size, arch.embedding_size
        self.tokens = VocabParallelEmbedding(context, _EMBEDDING, arch.vocab_size, embed_width)
        self.positions = Embedding(
            context,
            "model.decoder.embed_positions",
            num_positions + _POSITION_OFFSET,
            hidden,
            offset=_POSITION_OFFSET,
        )
        self.project_in: ReplicatedLinear | None = None
        if embed_width != hidden:
            self.project_in = ReplicatedLinear(context, "model.decoder.project_in", embed_width, hidden)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """[T, H]."""
        x = self.tokens.forward(batch.input_ids)
        if self.project_in is not None:
            x = self.project_in.forward(x)
        x += self.positions.forward(batch.positions)
        return x


class OPTForCausalLM(CausalLM):
    """The OPT family; --max-model-len cannot exceed its learned positions."""

    supports_pp = True
    # in OPT checkpoints that were converted from fairseq
    ignored_weights = (*CausalLM.ignored_weights, r".*decoder\.version")

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        arch, parallel = config.arch, context.parallel
        hidden, embed_width = arch.hidden_size, arch.embedding_size
        num_positions = required(arch.num_learned_positions, "max_position_embeddings")
        if config.max_model_len > num_positions:
            raise ModelLoadError(
                f"max_model_len {config.max_model_len} exceeds the {num_positions} learned positions of the model"
            )
        self.embeddings: OPTEmbeddings | None = None
        if parallel.is_first_stage:
            self.embeddings = OPTEmbeddings(arch, context, num_positions)
        self.project_out: ReplicatedLinear | None = None
        if parallel.is_last_stage and embed_width != hidden:
            self.project_out = ReplicatedLinear(context, "model.decoder.project_out", hidden, embed_width)
        self.decoder_layers = [OPTDecoderLayer(arch, context, index) for index in parallel.layers(len(arch.layers))]
        self.final_layer_norm: LayerNorm | None = None
        if parallel.is_last_stage and arch.has_final_norm:
            self.final_layer_norm = LayerNorm(
                context, "model.decoder.final_layer_norm", hidden, affine=arch.norm_affine
            )
        table = None if self.embeddings is None else self.embeddings.tokens
        self.lm_head = self._make_lm_head(config, context, table, _EMBEDDING)
        decoder = r"model\.decoder\."
        self._leave_to_other_stages(
            config,
            context,
            rf"{decoder}layers\.",
            rf"{decoder}(embed_tokens|embed_positions|project_in)\.weight",
            rf"{decoder}(project_out\.weight|final_layer_norm\.(weight|bias))",
        )
        self.attention_layers = [layer.attention for layer in self.decoder_layers]

    @staticmethod
    def checkpoint_name(name: str) -> str:
        """Adds the prefix "model.", which checkpoints of the bare decoder lack."""
        return f"model.{name}" if name.startswith("decoder.") else name

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        kv_caches: list[LayerCache],
        backend: AttentionBackend,
        metadata: Any,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        context = ForwardContext(batch, kv_caches, backend, metadata)
        x = hidden if self.embeddings is None else self.embeddings.forward(batch)
        if x is None:
            raise ValueError("a stage behind the first needs the hidden states of the one before")
        for layer in self.decoder_layers:
            x = layer.forward(x, context)
        return x if self.final_layer_norm is None else self.final_layer_norm.forward(x)

    @torch.inference_mode()
    def output_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Projects to the width of the embedding, if that differs."""
        return hidden if self.project_out is None else self.project_out.forward(hidden)
