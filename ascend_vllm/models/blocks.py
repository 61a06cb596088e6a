"""Shared parts of decoder-only models: gated MLP, rotary attention, pre-norm decoder layers, the whole model.

Differences between families are in `ArchConfig` (config/arch.py). Letters: T tokens, S sampling rows, H hidden,
I intermediate width, N query heads, K KV heads, D head size, V vocabulary.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from ascend_vllm.attention.backend import (
    AttentionBackend,
    AttentionSpec,
    ForwardBatch,
    HeadNorms,
    LayerCache,
    RotaryStep,
)
from ascend_vllm.config.arch import FULL_ATTENTION, SLIDING_ATTENTION, ArchConfig, LayerPlan, required
from ascend_vllm.config.model import ModelConfig
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.layers.attention import Attention, ForwardContext
from ascend_vllm.layers.base import Layer, WeightSlot
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.layers.embedding import LMHead, NoLMHead, TiedLMHead, VocabParallelEmbedding
from ascend_vllm.layers.experts import Experts
from ascend_vllm.layers.latent_attention import LatentAttention
from ascend_vllm.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    Router,
    RowParallelLinear,
)
from ascend_vllm.layers.norm import LayerNorm, RMSNorm
from ascend_vllm.layers.quantization.base import Activation, ActivationQuant
from ascend_vllm.layers.rotary import RotaryEmbedding, make_rotary_embedding
from ascend_vllm.models.pooler import Pooler
from ascend_vllm.ops.elementwise import add_rows, concat_columns, to_float32

# names in config.json → names of the op
_GATED_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# names in config.json → functions of plain MLPs
_PLAIN_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu_,
    "gelu": torch.nn.functional.gelu,
    "gelu_new": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
}

# name of the token embedding in checkpoints
_EMBEDDING = "model.embed_tokens"

Norm: TypeAlias = RMSNorm | LayerNorm


def _rms_norm(
    arch: ArchConfig, context: BuildContext, name: str, size: int, quant: ActivationQuant | None = None
) -> RMSNorm:
    return RMSNorm(context, name, size, required(arch.norm_eps, "rms_norm_eps"), quant, arch.norm_offset)


def _norm(arch: ArchConfig, context: BuildContext, name: str, quant: ActivationQuant | None = None) -> Norm:
    """A norm of the residual stream."""
    if not arch.layer_norm:
        return _rms_norm(arch, context, name, arch.hidden_size, quant)
    return LayerNorm(
        context, name, arch.hidden_size, required(arch.norm_eps, "layer_norm_epsilon"), activation_quant=quant
    )


def _check_activation(arch: ArchConfig, supported: Mapping[str, object]) -> None:
    if arch.activation not in supported:
        raise ModelLoadError(
            f"config.json: hidden_act {arch.activation!r} is not supported; "
            f"supported are {', '.join(sorted(supported))}"
        )


class GatedMLP(Layer):
    """down(act(gate(x)) · up(x)), gate and up in one GEMM.

    Args:
        prefix: name of the module.
        intermediate_size: width inside; None: that of config.json.
        adds_ranks: otherwise the caller adds the ranks' results.
    """

    def __init__(
        self,
        arch: ArchConfig,
        context: BuildContext,
        prefix: str,
        *,
        intermediate_size: int | None = None,
        adds_ranks: bool = True,
    ) -> None:
        hidden = arch.hidden_size
        intermediate = intermediate_size or required(arch.intermediate_size, "intermediate_size")
        _check_activation(arch, _GATED_ACTIVATIONS)
        self._activation = _GATED_ACTIVATIONS[arch.activation]
        self.gate_up_proj = MergedColumnParallelLinear(
            context,
            prefix,
            ("gate_proj", "up_proj"),
            hidden,
            (intermediate, intermediate),
            merged_name="gate_up_proj",
            bias=arch.mlp_bias,
            is_fused=arch.gate_up_fused,
        )
        self.down_proj = RowParallelLinear(
            context, f"{prefix}.down_proj", intermediate, hidden, bias=arch.mlp_bias, adds_ranks=adds_ranks
        )

    def forward(self, x: Activation) -> torch.Tensor:
        """[T, H] → [T, H]."""
        return self.down_proj.forward(self.gate_up_proj.forward_gated(x, self._activation))

    @property
    def activation_quant(self) -> ActivationQuant | None:
        """How the norm before the MLP has to quantize its result; None: not at all."""
        return self.gate_up_proj.activation_quant


class PlainMLP(Layer):
    """down(act(up(x)))."""

    def __init__(self, arch: ArchConfig, context: BuildContext, prefix: str) -> None:
        hidden, intermediate = arch.hidden_size, required(arch.intermediate_size, "intermediate_size")
        _check_activation(arch, _PLAIN_ACTIVATIONS)
        self._activation = _PLAIN_ACTIVATIONS[arch.activation]
        self.up_proj = ColumnParallelLinear(context, f"{prefix}.up_proj", hidden, intermediate, bias=arch.mlp_bias)
        self.down_proj = RowParallelLinear(context, f"{prefix}.down_proj", intermediate, hidden, bias=arch.mlp_bias)

    def forward(self, x: Activation) -> torch.Tensor:
        """[T, H] → [T, H]."""
        return self.down_proj.forward(self._activation(self.up_proj.forward(x)))

    @property
    def activation_quant(self) -> ActivationQuant | None:
        """As `GatedMLP.activation_quant`."""
        return self.up_proj.activation_quant


class MoE(Layer):
    """A mixture of experts, and in some families an MLP that all tokens use."""

    activation_quant = None

    def __init__(self, arch: ArchConfig, context: BuildContext, prefix: str) -> None:
        experts, hidden = required(arch.experts, "num_experts"), arch.hidden_size
        _check_activation(arch, _GATED_ACTIVATIONS)
        activation = _GATED_ACTIVATIONS[arch.activation]
        self._is_wide = experts.has_wide_router
        of_router = dataclasses.replace(context, dtype=torch.float32) if self._is_wide else context
        self.gate = Router(of_router, f"{prefix}.gate", hidden, experts.count)
        self.experts = Experts(context, f"{prefix}.experts", experts, hidden, activation)
        self.shared: GatedMLP | None = None
        self.shared_gate: Router | None = None
        if experts.shared_size > 0:
            name = f"{prefix}.{experts.shared_name}"
            self.shared = GatedMLP(arch, context, name, intermediate_size=experts.shared_size, adds_ranks=False)
            if experts.has_shared_gate:
                self.shared_gate = Router(context, f"{name}_gate", hidden, 1)
        self._correction: torch.Tensor | None = None
        self._slots: list[WeightSlot] = []
        if experts.has_correction:
            self._correction = torch.empty(experts.count, device=context.device)
            name = f"{prefix}.gate.e_score_correction_bias"
            self._slots = [WeightSlot(name, (experts.count,), self._correction)]

    def slots(self) -> list[WeightSlot]:
        """The correction of the experts' scores, if there is one."""
        return self._slots

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] → [T, H]."""
        shared = None if self.shared is None else self.shared.forward(x)
        shared_gate = None if self.shared_gate is None else self.shared_gate.forward(x)
        widens = self._is_wide and x.dtype != torch.float32
        logits = self.gate.forward(to_float32(x) if widens else x)
        return self.experts.forward(x, logits, self._correction, shared, shared_gate)


# kind of MLP, see `LayerPlan.mlp` → its layer
_MLPS: dict[str, type[GatedMLP | PlainMLP | MoE]] = {"plain": PlainMLP, "experts": MoE}


class RotaryAttention(Layer):
    """Grouped-query attention with rotary positions or ALiBi; query, key and value in one GEMM.

    Args:
        prefix: name of the module.
        cache_index: of the layer's cache in `ForwardContext.kv_caches`.
        plan: of the layer.
        input_size: width of the input; None: that of the residual stream.
    """

    def __init__(
        self,
        arch: ArchConfig,
        context: BuildContext,
        prefix: str,
        cache_index: int,
        plan: LayerPlan,
        *,
        input_size: int | None = None,
    ) -> None:
        hidden, head_size = arch.hidden_size, arch.head_size
        if arch.num_heads % arch.num_kv_heads:
            raise ModelLoadError(
                f"config.json: {arch.num_heads} attention heads do not divide evenly among "
                f"{arch.num_kv_heads} KV heads"
            )
        self.qkv_proj = QKVParallelLinear(
            context,
            prefix,
            input_size or hidden,
            head_size,
            arch.num_heads,
            arch.num_kv_heads,
            bias=arch.qkv_bias,
            layout=arch.qkv_layout,
        )
        self.o_proj = RowParallelLinear(
            context, f"{prefix}.o_proj", arch.num_heads * head_size, hidden, bias=arch.output_bias
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if arch.qk_norm:
            self.q_norm = _rms_norm(arch, context, f"{prefix}.q_norm", head_size)
            self.k_norm = _rms_norm(arch, context, f"{prefix}.k_norm", head_size)
        self._norms: HeadNorms | None = None
        if self.q_norm is not None and self.k_norm is not None:
            self._norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.epsilon)
        slopes: torch.Tensor | None = None
        if arch.alibi_slopes:
            own = self.qkv_proj.heads
            slopes = torch.tensor(arch.alibi_slopes[own.start : own.start + own.size], device=context.device)
        spec = AttentionSpec(
            num_heads=self.qkv_proj.num_heads,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            head_size=head_size,
            scale=head_size**-0.5 if arch.attention_scale is None else arch.attention_scale,
            sliding_window=plan.sliding_window,
            soft_cap=arch.attention_cap,
            alibi_slopes=slopes,
        )
        self.attention = Attention(spec, cache_index, context.dtype, plan.kv_cache, is_local=plan.is_local)

    @property
    def activation_quant(self) -> ActivationQuant | None:
        """How the norm before attention has to quantize its result; None: not at all."""
        return self.qkv_proj.activation_quant

    def forward(self, x: Activation, context: ForwardContext) -> torch.Tensor:
        """[T, H] → [T, H], or [S, H] of `ForwardContext.output_indices`."""
        query, key, value = self.qkv_proj.project(x)
        attended = self.attention.forward(query, key, value, context, self._norms)
        return self.o_proj.forward(context.of_outputs(attended))


class DecoderLayer(Layer):
    """Norm, attention, norm, MLP; the residual is added inside the norms."""

    def __init__(self, arch: ArchConfig, context: BuildContext, index: int) -> None:
        prefix, plan = f"model.layers.{index}", arch.layers[index]
        if plan.attention not in (FULL_ATTENTION, SLIDING_ATTENTION):
            raise ModelLoadError(f"config.json: layer_types has {plan.attention!r}, which is not supported")
        cache_index = context.parallel.layers(len(arch.layers)).index(index)
        attention_class = RotaryAttention if arch.latent is None else LatentAttention
        self.self_attn = attention_class(arch, context, f"{prefix}.self_attn", cache_index, plan)
        self.mlp = _MLPS.get(plan.mlp, GatedMLP)(arch, context, f"{prefix}.mlp")
        self._make_norms(arch, context, prefix)
        self._residual_scale = arch.residual_scale
        # of the results of attention and MLP
        self.post_self_attn_layernorm: Norm | None = None
        self.post_mlp_layernorm: Norm | None = None
        if arch.sandwich_norms:
            self.post_self_attn_layernorm = _norm(arch, context, f"{prefix}.post_self_attn_layernorm")
            self.post_mlp_layernorm = _norm(arch, context, f"{prefix}.post_mlp_layernorm")

    def _make_norms(self, arch: ArchConfig, context: BuildContext, prefix: str) -> None:
        # the norms quantize their results for the layers that read them
        quant = self.self_attn.activation_quant
        self.input_layernorm = _norm(arch, context, f"{prefix}.input_layernorm", quant)
        quant = self.mlp.activation_quant
        self.post_attention_layernorm = _norm(arch, context, f"{prefix}.post_attention_layernorm", quant)

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer.

        Args:
            x: [T, H], the previous layer's output, not yet added to the residual; overwritten. None in the first
                layer.
            residual: [T, H], updated in place.
            context: of this step.

        Returns:
            [T, H], which the next norm adds to the residual, and the residual; of `ForwardContext.output_indices`
            both are [S, H].
        """
        norm = self.input_layernorm
        normed = norm.forward(residual) if x is None else norm.forward_add(x, residual)
        x = self._finish(self.self_attn.forward(normed, context), self.post_self_attn_layernorm)
        residual = context.of_outputs(residual)
        x = self.mlp.forward(self.post_attention_layernorm.forward_add(x, residual))
        return self._finish(x, self.post_mlp_layernorm), residual

    def _finish(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """What is added to the residual: x normalised and scaled, if the family does that; x is overwritten."""
        if norm is not None:
            x = norm.forward(x)
        return x if self._residual_scale == 1.0 else x.mul_(self._residual_scale)


class ParallelDecoderLayer(DecoderLayer):
    """Attention and MLP read the same residual, behind a norm each or behind one that they share."""

    def _make_norms(self, arch: ArchConfig, context: BuildContext, prefix: str) -> None:
        # one norm for both cannot quantize its result for one of them
        shares = arch.parallel_norms == 1
        names = ("input_layernorm",) if shares else ("ln_attn", "ln_mlp")
        quants = (None,) if shares else (self.self_attn.activation_quant, self.mlp.activation_quant)
        self._norms = [
            _norm(arch, context, f"{prefix}.{name}", quant) for name, quant in zip(names, quants, strict=True)
        ]

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `DecoderLayer.forward`."""
        normed = self._norms[0].forward(residual) if x is None else self._norms[0].forward_add(x, residual)
        attended = self.self_attn.forward(normed, context)
        if len(self._norms) > 1:
            residual = context.of_outputs(residual)
            return attended.add_(self.mlp.forward(self._norms[1].forward(residual))), residual
        # what norms return may be quantized, and rows of that cannot be taken
        return attended.add_(context.of_outputs(self.mlp.forward(normed))), context.of_outputs(residual)


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
        num_weights: numbers in the weights of this stage and rank, set when they are loaded.
        embed_tokens: token embedding; None: this stage has none.

    Raises:
        ModelLoadError: config.json has an unsupported value.
        KeyError: config.json lacks a value.
    """

    supports_pp: bool = False
    attention_layers: list[Attention]
    lm_head: LMHead | TiedLMHead | NoLMHead
    ignored_weights: tuple[str, ...] = (r".*rotary_emb\.(inv_freq|cos_cached|sin_cached)",)
    pooler: Pooler | None = None
    num_weights: int = 0
    embed_tokens: VocabParallelEmbedding | None = None

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
            normalizes = arch.normalizes_head
            return LMHead(context, "lm_head", arch.embedding_size, arch.vocab_size, normalizes=normalizes)
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
            [T, H] in the model's dtype: input of `compute_logits`, or of the next stage. Models may return [S, H] of
            `ForwardBatch.output_indices` instead.
        """

    def report_states(self, layers: Sequence[int]) -> None:  # noqa: ARG002 - of classes that can
        """Makes `forward` report the residual stream in front of some layers (EAGLE-3), beside its own result.

        Args:
            layers: n of them, counted from 0; the same one may be there twice.

        Raises:
            ModelLoadError: this class of models cannot.
        """
        raise ModelLoadError(f"EAGLE-3 needs hidden states of layers, which {type(self).__name__} does not report")

    def output_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, H], rows of the result of `forward` → [S, H] or narrower, the input of heads and poolers."""
        return hidden

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, H], rows of the result of `forward` → [S, V] in the model's dtype."""
        return self.lm_head.forward(self.output_states(hidden))


class DecoderForCausalLM(CausalLM):
    """A decoder-only model with norms before attention and MLP, with Llama's tensor names.

    Attributes:
        renames: parts of tensor names in the family's checkpoints, and what replaces them, one after another.
    """

    supports_pp = True
    renames: tuple[tuple[str, str], ...] = ()

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        arch, parallel = config.arch, context.parallel
        hidden = arch.hidden_size
        if parallel.is_first_stage:
            self.embed_tokens = VocabParallelEmbedding(context, _EMBEDDING, arch.vocab_size, hidden)
        self._hidden_size = hidden
        # layers of `report_states`
        self._reported: tuple[int, ...] = ()
        # rounded as the product of two tensors of the dtype would be
        self._embedding_scale = torch.tensor(arch.embedding_scale, dtype=context.dtype).item()
        self._logit_scale, self._logit_cap = arch.logit_scale, arch.logit_cap
        self.rotary, self.local_rotary = (
            None if rope is None else make_rotary_embedding(rope, config.max_model_len, context.device)
            for rope in (arch.rope, arch.local_rope)
        )
        layer_class = ParallelDecoderLayer if arch.parallel_norms else DecoderLayer
        self.decoder_layers = [layer_class(arch, context, index) for index in parallel.layers(len(arch.layers))]
        self.norm: Norm | None = None
        if parallel.is_last_stage:
            self.norm = _norm(arch, context, "model.norm")
        self.lm_head = self._make_lm_head(config, context, self.embed_tokens, _EMBEDDING)
        self._leave_to_other_stages(
            config, context, r"model\.layers\.", r"model\.embed_tokens\.weight", r"model\.norm\.(weight|bias)"
        )
        self.attention_layers = [layer.self_attn.attention for layer in self.decoder_layers]

    @classmethod
    def checkpoint_name(cls, name: str) -> str:
        """Renames, and adds the prefix "model.", which checkpoints of XModel lack."""
        for old, new in cls.renames:
            name = name.replace(old, new)
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
        rotary, local = (_prepare(rotary, batch) for rotary in (self.rotary, self.local_rotary))
        context = ForwardContext(batch, kv_caches, backend, metadata, rotary, local)
        residual = hidden if self.embed_tokens is None else self.embed_tokens.forward(batch.input_ids)
        if residual is None:
            raise ValueError("a stage behind the first needs the hidden states of the one before")
        if self.embed_tokens is not None and self._embedding_scale != 1.0:
            residual.mul_(self._embedding_scale)
        # later stages add zeros by the operator that one worker would use for the sum: its rounding differs, and
        # results must not depend on the number of stages
        x = torch.zeros_like(residual) if self.embed_tokens is None else None
        states: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self.decoder_layers):
            if index in self._reported:
                states[index] = residual.clone() if x is None else add_rows(residual, x)
            if layer is self.decoder_layers[-1] and self.norm is not None:
                context.output_indices = batch.output_indices
            x, residual = layer.forward(x, residual, context)
        if self.norm is None:
            # the sum is what the next stage's first norm reads
            return residual if x is None else residual.add_(x)
        normed: torch.Tensor = self.norm.forward(residual) if x is None else self.norm.forward_add(x, residual)
        if not self._reported:
            return normed
        reported = [context.of_outputs(states[index]) for index in self._reported]
        result: torch.Tensor = concat_columns([normed, *reported])
        return result

    def report_states(self, layers: Sequence[int]) -> None:
        """As `CausalLM.report_states`: `forward` returns [T, H + n*H], its own result first."""
        self._reported = tuple(layers)

    def output_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `CausalLM.output_states`: without the states that are reported beside."""
        return hidden[:, : self._hidden_size].contiguous() if self._reported else hidden

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `CausalLM.compute_logits`, with the family's scale and soft cap."""
        logits = super().compute_logits(hidden)
        if self._logit_scale != 1.0:
            logits.mul_(self._logit_scale)
        if self._logit_cap is not None:
            logits.div_(self._logit_cap).tanh_().mul_(self._logit_cap)
        return logits


def _prepare(rotary: RotaryEmbedding | None, batch: ForwardBatch) -> RotaryStep | None:
    return None if rotary is None else rotary.prepare(batch)
