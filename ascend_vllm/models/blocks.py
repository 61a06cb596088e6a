"""Shared parts of decoder-only models: gated MLP, rotary attention, pre-norm decoder layers, the whole model.

Differences between families are in `ArchConfig` (config/arch.py). Letters: T tokens, S sampling rows, H hidden,
I intermediate width, N query heads, K KV heads, D head size, V vocabulary.
"""

from __future__ import annotations

import abc
from typing import Any

import torch

from ascend_vllm.attention.backend import AttentionBackend, AttentionSpec, ForwardBatch, LayerCache
from ascend_vllm.config.arch import FULL_ATTENTION, SLIDING_ATTENTION, ArchConfig, LayerPlan, required
from ascend_vllm.config.model import ModelConfig
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.layers.attention import Attention, ForwardContext
from ascend_vllm.layers.base import Layer
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.layers.embedding import LMHead, NoLMHead, TiedLMHead, VocabParallelEmbedding
from ascend_vllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from ascend_vllm.layers.norm import RMSNorm
from ascend_vllm.layers.quantization.base import Activation, ActivationQuant
from ascend_vllm.layers.rotary import make_rotary_embedding
from ascend_vllm.models.pooler import Pooler

# names in config.json → names of the op
_GATED_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# name of the token embedding in checkpoints
_EMBEDDING = "model.embed_tokens"


def _norm(
    arch: ArchConfig, context: BuildContext, name: str, size: int, quant: ActivationQuant | None = None
) -> RMSNorm:
    return RMSNorm(context, name, size, required(arch.norm_eps, "rms_norm_eps"), quant)


class GatedMLP(Layer):
    """down(act(gate(x)) · up(x)), gate and up in one GEMM."""

    def __init__(self, arch: ArchConfig, context: BuildContext, prefix: str) -> None:
        hidden, intermediate = arch.hidden_size, required(arch.intermediate_size, "intermediate_size")
        if arch.activation not in _GATED_ACTIVATIONS:
            raise ModelLoadError(
                f"config.json: hidden_act {arch.activation!r} is not supported; "
                f"supported are {', '.join(sorted(_GATED_ACTIVATIONS))}"
            )
        self._activation = _GATED_ACTIVATIONS[arch.activation]
        self.gate_up_proj = MergedColumnParallelLinear(
            context,
            prefix,
            ("gate_proj", "up_proj"),
            hidden,
            (intermediate, intermediate),
            merged_name="gate_up_proj",
            bias=arch.mlp_bias,
        )
        self.down_proj = RowParallelLinear(context, f"{prefix}.down_proj", intermediate, hidden, bias=arch.mlp_bias)

    def forward(self, x: Activation) -> torch.Tensor:
        """[T, H] → [T, H]."""
        return self.down_proj.forward(self.gate_up_proj.forward_gated(x, self._activation))


class RotaryAttention(Layer):
    """Grouped-query attention with rotary positions; query, key and value in one GEMM."""

    def __init__(
        self, arch: ArchConfig, context: BuildContext, prefix: str, cache_index: int, plan: LayerPlan
    ) -> None:
        hidden, head_size = arch.hidden_size, arch.head_size
        if arch.num_heads % arch.num_kv_heads:
            raise ModelLoadError(
                f"config.json: {arch.num_heads} attention heads do not divide evenly among "
                f"{arch.num_kv_heads} KV heads"
            )
        self.qkv_proj = QKVParallelLinear(
            context, prefix, hidden, head_size, arch.num_heads, arch.num_kv_heads, bias=arch.qkv_bias
        )
        self.o_proj = RowParallelLinear(
            context, f"{prefix}.o_proj", arch.num_heads * head_size, hidden, bias=arch.output_bias
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if arch.qk_norm:
            self.q_norm = _norm(arch, context, f"{prefix}.q_norm", head_size)
            self.k_norm = _norm(arch, context, f"{prefix}.k_norm", head_size)
        self._head_size = head_size
        spec = AttentionSpec(
            num_heads=self.qkv_proj.num_heads,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            head_size=head_size,
            scale=head_size**-0.5,
            sliding_window=plan.sliding_window,
        )
        self.attention = Attention(spec, cache_index, context.dtype, plan.kv_cache)

    def forward(self, x: Activation, context: ForwardContext) -> torch.Tensor:
        """[T, H] → [T, H]."""
        query, key, value = self.qkv_proj.project(x)
        if self.q_norm is not None and self.k_norm is not None:
            query = self._norm_heads(self.q_norm, query)
            key = self._norm_heads(self.k_norm, key)
        return self.o_proj.forward(self.attention.forward(query, key, value, context))

    def _norm_heads(self, norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
        heads: torch.Tensor = norm.forward(x.view(x.shape[0], -1, self._head_size))
        return heads.view(x.shape)


class DecoderLayer(Layer):
    """Norm, attention, norm, MLP; the residual is added inside the norms."""

    def __init__(self, arch: ArchConfig, context: BuildContext, index: int) -> None:
        prefix, plan = f"model.layers.{index}", arch.layers[index]
        if plan.attention not in (FULL_ATTENTION, SLIDING_ATTENTION):
            raise ModelLoadError(f"config.json: layer_types has {plan.attention!r}, which is not supported")
        cache_index = context.parallel.layers(len(arch.layers)).index(index)
        hidden = arch.hidden_size
        self.self_attn = RotaryAttention(arch, context, f"{prefix}.self_attn", cache_index, plan)
        self.mlp = GatedMLP(arch, context, f"{prefix}.mlp")
        # the norms quantize their results for the layers that read them
        quant = self.self_attn.qkv_proj.activation_quant
        self.input_layernorm = _norm(arch, context, f"{prefix}.input_layernorm", hidden, quant)
        quant = self.mlp.gate_up_proj.activation_quant
        self.post_attention_layernorm = _norm(arch, context, f"{prefix}.post_attention_layernorm", hidden, quant)

    def forward(self, x: torch.Tensor | None, residual: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """One layer.

        Args:
            x: [T, H], the previous layer's output, not yet added to the residual; overwritten. None in the first
                layer.
            residual: [T, H], updated in place.
            context: of this step.

        Returns:
            [T, H], which the next norm adds to the residual.
        """
        norm = self.input_layernorm
        normed = norm.forward(residual) if x is None else norm.forward_add(x, residual)
        x = self.self_attn.forward(normed, context)
        return self.mlp.forward(self.post_attention_layernorm.forward_add(x, residual))


class CausalLM(Layer, abc.ABC):
    """The interface of models to the worker.

    Args:
        config: the model's section of the configuration.
        context: surroundings of the layers.

    Attributes:
        supports_pp: pipeline stages can hold a part of the layers, and `forward` takes `hidden`.
        attention_layers: those of this stage, in the order of the KV caches.
        lm_head: made by `_make_lm_head`.
        ignored_weights: checkpoint tensors that the model does not need, as regular expressions over whole names.
        pooler: of a pooling model, instead of the LM head.

    Raises:
        ModelLoadError: config.json has an unsupported value.
        KeyError: config.json lacks a value.
    """

    supports_pp: bool = False
    attention_layers: list[Attention]
    lm_head: LMHead | TiedLMHead | NoLMHead
    ignored_weights: tuple[str, ...] = (r".*rotary_emb\.(inv_freq|cos_cached|sin_cached)",)
    pooler: Pooler | None = None

    @abc.abstractmethod
    def __init__(self, config: ModelConfig, context: BuildContext) -> None: ...

    def _make_lm_head(
        self, config: ModelConfig, context: BuildContext, embedding: VocabParallelEmbedding | None, name: str
    ) -> LMHead | TiedLMHead | NoLMHead:
        """Makes the LM head of a model, or of one of its stages.

        Pooling models, whatever is in the checkpoint, and stages before the last get a `NoLMHead`.

        Args:
            embedding: token embedding, if this stage has it.
            name: of the embedding in the checkpoint, without ".weight", for heads that share its weight.
        """
        arch = config.arch
        if config.pooler is not None or not context.parallel.is_last_stage:
            self.ignored_weights = (*self.ignored_weights, r"(lm_head|score)\.weight")
            return NoLMHead()
        if not arch.tie_word_embeddings:
            return LMHead(context, "lm_head", arch.embedding_size, arch.vocab_size)
        # some checkpoints contain the shared weight twice
        self.ignored_weights = (*self.ignored_weights, r"lm_head\.weight")
        if embedding is None:
            return LMHead(context, name, arch.embedding_size, arch.vocab_size)
        return TiedLMHead(embedding)

    def _leave_to_other_stages(
        self, config: ModelConfig, context: BuildContext, layers: str, first: str, last: str
    ) -> None:
        """Makes the loader skip the tensors of other stages.

        Args:
            layers: prefix of a layer's number in checkpoint names, a regular expression like the next ones.
            first: whole names of the tensors of the first stage only.
            last: whole names of the tensors of the last stage only, without the head.
        """
        parallel = context.parallel
        own = parallel.layers(config.num_layers)
        others = [str(index) for index in range(config.num_layers) if index not in own]
        patterns = [
            *([] if parallel.is_first_stage else [first]),
            *([] if parallel.is_last_stage else [last]),
            *([rf"{layers}({'|'.join(others)})\..*"] if others else []),
        ]
        self.ignored_weights = (*self.ignored_weights, *patterns)

    @staticmethod
    def checkpoint_name(name: str) -> str:
        """The canonical name of a checkpoint tensor; families with several naming schemes override this."""
        return name

    @abc.abstractmethod
    def forward(
        self,
        batch: ForwardBatch,
        kv_caches: list[LayerCache],
        backend: AttentionBackend,
        metadata: Any,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One step.

        Args:
            batch: tokens and rows.
            kv_caches: one per attention layer, made by `backend`; written.
            backend: computes attention.
            metadata: what `backend.prepare(batch)` returned.
            hidden: [T, H] in the model's dtype, output of the previous stage; overwritten. None in the first stage.

        Returns:
            [T, H] in the model's dtype: input of `compute_logits`, or of the next stage.
        """

    def output_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, H], rows of the result of `forward` → [S, H] or narrower, the input of heads and poolers."""
        return hidden

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, H], rows of the result of `forward` → [S, V] in the model's dtype."""
        return self.lm_head.forward(self.output_states(hidden))


class DecoderForCausalLM(CausalLM):
    """A decoder-only model with RMSNorm, rotary positions and gated MLPs, with Llama's tensor names."""

    supports_pp = True

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        arch, parallel = config.arch, context.parallel
        hidden = arch.hidden_size
        self.embed_tokens: VocabParallelEmbedding | None = None
        if parallel.is_first_stage:
            self.embed_tokens = VocabParallelEmbedding(context, _EMBEDDING, arch.vocab_size, hidden)
        rope = required(arch.rope, "rope_parameters")
        self.rotary = make_rotary_embedding(rope, config.max_model_len, context.device)
        self.decoder_layers = [DecoderLayer(arch, context, index) for index in parallel.layers(len(arch.layers))]
        self.norm: RMSNorm | None = None
        if parallel.is_last_stage:
            self.norm = _norm(arch, context, "model.norm", hidden)
        self.lm_head = self._make_lm_head(config, context, self.embed_tokens, _EMBEDDING)
        self._leave_to_other_stages(
            config, context, r"model\.layers\.", r"model\.embed_tokens\.weight", r"model\.norm\.weight"
        )
        self.attention_layers = [layer.self_attn.attention for layer in self.decoder_layers]

    @staticmethod
    def checkpoint_name(name: str) -> str:
        """Adds the prefix "model.", which checkpoints of XModel lack."""
        return f"model.{name}" if name.startswith(("embed_tokens.", "layers.", "norm.")) else name

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        kv_caches: list[LayerCache],
        backend: AttentionBackend,
        metadata: Any,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        context = ForwardContext(batch, kv_caches, backend, metadata, self.rotary.prepare(batch))
        residual = hidden if self.embed_tokens is None else self.embed_tokens.forward(batch.input_ids)
        if residual is None:
            raise ValueError("a stage behind the first needs the hidden states of the one before")
        # later stages add zeros by the operator that one worker would use for the sum: its rounding differs, and
        # results must not depend on the number of stages
        x = torch.zeros_like(residual) if self.embed_tokens is None else None
        for layer in self.decoder_layers:
            x = layer.forward(x, residual, context)
        if self.norm is None:
            # the sum is what the next stage's first norm reads
            return residual if x is None else residual.add_(x)
        normed: torch.Tensor = self.norm.forward(residual) if x is None else self.norm.forward_add(x, residual)
        return normed
