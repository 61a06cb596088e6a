"""Latent attention (MLA, DeepSeek-V2, 2024): keys and values of all heads are projections of one narrow latent.

Letters: T tokens, H hidden, N query heads (of this rank), L width of the latent, F of the rotated part of a head,
W = L+F, Q of the part of a head that is not rotated, V of a head's value.
"""

from __future__ import annotations

import torch

from ascend_vllm.attention.backend import AttentionSpec, LatentSpec, LatentWeights
from ascend_vllm.config.arch import ArchConfig, LayerPlan, required
from ascend_vllm.distributed.parallel_context import Shard
from ascend_vllm.layers.attention import Attention, ForwardContext
from ascend_vllm.layers.base import Layer, WeightSlot
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear
from ascend_vllm.layers.norm import RMSNorm
from ascend_vllm.layers.quantization.base import Activation, ActivationQuant, LinearOutput
from ascend_vllm.layers.quantization.matrix import QuantizedMatrix, WeightMethod
from ascend_vllm.layers.quantization.unquantized import Unquantized
from ascend_vllm.ops.gemm import has_kernel
from ascend_vllm.ops.latent import pack_heads

# of the norms of latents: transformers' classes and the repositories' code do not give them the one of config.json
_LATENT_EPS = 1e-6


class LatentAttention(Layer):
    """Attention over cached latents. Ranks share the heads; each has all latents, and caches them.

    Args:
        arch: of the model; its `latent` is not None.
        context: surroundings of the layer.
        prefix: name of the module, for example "model.layers.0.self_attn".
        cache_index: of the layer's cache among those of its stage.
        plan: of the decoder layer.
    """

    def __init__(
        self, arch: ArchConfig, context: BuildContext, prefix: str, cache_index: int, plan: LayerPlan
    ) -> None:
        latent = required(arch.latent, "kv_lora_rank")
        heads, head_size = context.parallel.shard(arch.num_heads, "attention heads"), arch.head_size
        row_width = latent.latent_width + latent.rotary_width
        query = LinearOutput(
            f"{prefix}.q_proj",
            arch.num_heads * head_size,
            Shard(heads.start * head_size, heads.size * head_size),
        )
        self.q_a_layernorm: RMSNorm | None = None
        self.q_b_proj: ColumnParallelLinear | None = None
        if (rank := latent.query_rank) is not None:
            query = LinearOutput(f"{prefix}.q_a_proj", rank, Shard(0, rank))
            self.q_a_layernorm = RMSNorm(context, f"{prefix}.q_a_layernorm", rank, _LATENT_EPS)
            self.q_b_proj = ColumnParallelLinear(context, f"{prefix}.q_b_proj", rank, arch.num_heads * head_size)
        row = LinearOutput(f"{prefix}.kv_a_proj_with_mqa", row_width, Shard(0, row_width))
        # both that read the hidden states, in one product if they have one format
        self.a_projs: list[Linear] = _projections(context, prefix, (query, row), arch.hidden_size)
        self.kv_a_layernorm = RMSNorm(context, f"{prefix}.kv_a_layernorm", latent.latent_width, _LATENT_EPS)
        self.o_proj = RowParallelLinear(
            context, f"{prefix}.o_proj", arch.num_heads * latent.value_width, arch.hidden_size
        )
        per_head = latent.nope_width + latent.value_width
        # [N, Q+V, L]: W_UK and W_UV of each head, until they are loaded
        self._kv_b = torch.empty(
            heads.size, per_head, latent.latent_width, dtype=context.dtype, device=context.device
        )
        shape = (arch.num_heads * per_head, latent.latent_width)
        kv_b_rows = Shard(heads.start * per_head, heads.size * per_head)
        kv_b = QuantizedMatrix(context, f"{prefix}.kv_b_proj", shape, kv_b_rows, Shard(0, latent.latent_width))
        self._slots: list[WeightSlot] = []
        self._quantized_kv_b: QuantizedMatrix | None = None
        if isinstance(kv_b.method, Unquantized):
            target = self._kv_b.view(-1, latent.latent_width)
            self._slots = [WeightSlot(f"{kv_b.prefix}.weight", shape, target, (kv_b_rows.start,))]
        else:
            kv_b.load(self._take_kv_b)
            self._quantized_kv_b = kv_b
        self._weights: LatentWeights | None = None
        self._is_packed = has_kernel(context.dtype, context.device)
        self._nope_width = latent.nope_width
        spec = AttentionSpec(
            num_heads=heads.size,
            num_kv_heads=1,
            head_size=row_width,
            scale=required(arch.attention_scale, "qk_nope_head_dim"),
            latent=LatentSpec(latent.latent_width, latent.rotary_width, latent.nope_width, latent.value_width),
        )
        self.attention = Attention(spec, cache_index, context.dtype, plan.kv_cache)

    @property
    def activation_quant(self) -> ActivationQuant | None:
        """How the norm before attention has to quantize its result; None: not at all."""
        return self.a_projs[0].activation_quant if len(self.a_projs) == 1 else None

    def slots(self) -> list[WeightSlot]:
        """The matrices that make keys and values of latents, unless they are quantized."""
        return self._slots

    def _take_kv_b(self, method: WeightMethod) -> None:
        """Attention multiplies queries by these matrices, so that they are kept in the model's dtype."""
        self._kv_b.view(-1, self._kv_b.shape[2]).copy_(method.panels.dequantized())

    def after_load(self) -> None:
        """Makes the forms of these matrices that attention uses, and frees the loaded one."""
        keys, values = self._kv_b.split_with_sizes((self._nope_width, self._kv_b.shape[1] - self._nope_width), dim=1)
        if self._is_packed:
            forms = (pack_heads(keys.transpose(1, 2)), pack_heads(values), pack_heads(keys))
        else:
            forms = (keys.contiguous(), values.transpose(1, 2).contiguous(), self._kv_b.flatten(0, 1))
        self._weights = LatentWeights(self.kv_a_layernorm.weight, self.kv_a_layernorm.epsilon, *forms)
        self._slots, self._quantized_kv_b = [], None
        del self._kv_b

    def forward(self, x: Activation, context: ForwardContext) -> torch.Tensor:
        """[T, H] → [T, H], or [S, H] of `ForwardContext.output_indices`.

        Raises:
            RuntimeError: the weights are not loaded.
        """
        if self._weights is None:
            raise RuntimeError("latent attention is used before its weights are loaded")
        first, latent = [
            part for proj in self.a_projs for part in proj.forward(x).split_with_sizes(proj.output_sizes, dim=-1)
        ]
        query = first
        if self.q_a_layernorm is not None and self.q_b_proj is not None:
            query = self.q_b_proj.forward(self.q_a_layernorm.forward(first))
        attended = self.attention.forward_latent(query, latent, self._weights, context)
        return self.o_proj.forward(context.of_outputs(attended))


def _projections(
    context: BuildContext, prefix: str, outputs: tuple[LinearOutput, ...], hidden_size: int
) -> list[Linear]:
    """Layers of matrices with the same input: one, or one for each if their formats differ."""
    hidden = Shard(0, hidden_size)
    kinds = {
        type(QuantizedMatrix(context, output.name, (output.total, hidden_size), output.shard, hidden).method)
        for output in outputs
    }
    if len(kinds) == 1:
        return [Linear(context, f"{prefix}.qkv_a_proj", outputs, hidden_size, bias=False)]
    return [Linear(context, output.name, [output], hidden_size, bias=False) for output in outputs]
