"""The interface between models and attention kernels.

Letters: T tokens of a step, R rows (sequences) of a step, B maximum blocks of a row, N query heads, K KV heads,
D head size, P blocks of the cache, S tokens of a block. Of latent attention: L width of the latent, F of the rotated
part of a head, W = L+F, Q of the part of a head that is not rotated, V of a head's value.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.ops.elementwise import rms_norm, rotary_embedding
from ascend_vllm.types.kv_cache import KEY_VALUE, LATENT, KVCacheSpec

# One layer's KV cache as its backend makes it (`AttentionBackend.make_cache`): a tensor of `kv_cache_shape`, or with
# its scales beside it. Only the backend accesses it.
LayerCache: TypeAlias = Any

QueryKeyValue: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# `ForwardBatch.state` if no layer has declared step state
NO_STATE: Mapping[str, torch.Tensor] = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One forward step as tensors on the device, made by the model runner without host syncs.

    Rows lie one after another: row r owns tokens query_start[r] … query_start[r+1]-1. A decoding row has one
    token, a prompt (or a chunk of it) any number; every row's keys of this step are stored before attention
    reads them, and its last token is at position seq_lens[r]-1.
    """

    # [T] int64, device
    input_ids: torch.Tensor
    # [T] int64, device: position of each token in its sequence
    positions: torch.Tensor
    # [T] int64, device: block * block_size + offset of each token's key and value; negative: not stored, which is
    # possible only for tokens of decoding steps, and for padding tokens
    slot_mapping: torch.Tensor
    # [R+1] int32, device
    query_start: torch.Tensor
    # [R] int32, device: tokens in the cache after this step
    seq_lens: torch.Tensor
    # [R, B] int32, device
    block_table: torch.Tensor
    # [S] int64, device: token indices whose logits are needed
    logits_indices: torch.Tensor
    # [R+1] int32 and [R] int32, host: query_start and seq_lens, to be read without waiting for the device
    query_start_np: npt.NDArray[np.int32]
    seq_lens_np: npt.NDArray[np.int32]
    # maximum query tokens of a row, and maximum sequence length, on the host
    max_query_len: int
    max_seq_len: int
    # [S] int64, device, at least one: the tokens whose hidden states are wanted, which the last layer computes
    # alone; None: all
    output_indices: torch.Tensor | None = None
    # step state (layers/step_state.py) by name: [T, …] or [R, …], device, in fixed memory
    state: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=lambda: NO_STATE)


@dataclasses.dataclass(frozen=True)
class LatentSpec:
    """Widths of latent attention (MLA, DeepSeek-V2, 2024).

    Attributes:
        latent_width: L, of what keys and values of all heads are projected from.
        rotary_width: F, of the rotated part of queries, and of the rotary key that all heads share.
        nope_width: Q, of the part of a head's query and key that is not rotated.
        value_width: V, of a head's value.
    """

    latent_width: int
    rotary_width: int
    nope_width: int
    value_width: int


@dataclasses.dataclass(frozen=True, slots=True)
class LatentWeights:
    """Weights of latent attention between the projections of its inputs and of its output.

    W_UK [Q, L] and W_UV [V, L] of a head make its key and value of a latent. "Absorbed", they are applied to queries
    and to sums of latents instead, so that attention reads what is cached as it is.

    Attributes:
        norm: [L], weight of the RMS norm of latents.
        norm_eps: of that norm.
        absorb: W_UK of each head, for products with queries: [N, Q, L], or where weights are packed the transposed
            matrices [L, Q] as `ops.experts.packed_stack` arranges them.
        output: W_UV of each head, for products with sums of latents: transposed, [N, L, V], or where weights are
            packed the matrices [V, L] in such a stack.
        expand: W_UK and W_UV of one head after the other, [N*(Q+V), L], or where weights are packed the matrices W_UK
            [Q, L] in such a stack: `output` makes values of latents, too.
    """

    norm: torch.Tensor
    norm_eps: float
    absorb: torch.Tensor
    output: torch.Tensor
    expand: torch.Tensor


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Parameters of an attention layer.

    Attributes:
        num_heads: query heads N (of this rank).
        num_kv_heads: KV heads K (of this rank); N is a multiple of K.
        head_size: D.
        scale: factor on query·key, usually D**-0.5.
        sliding_window: a token attends to itself and the sliding_window-1 tokens before it; None: to all.
        soft_cap: c of c·tanh(score / c), which replaces scaled scores; None: they stay as they are.
        alibi_slopes: [N] float32 of this rank's heads: factors on the distance to a key, which is subtracted from its
            score; None: positions do not affect scores.
        latent: of latent attention, which caches one vector of D = W numbers; None: there are keys and values.
        k_scale: a cached byte of keys times this is the number; 1 for other caches.
        v_scale: likewise of values.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: torch.Tensor | None = dataclasses.field(default=None, compare=False)
    latent: LatentSpec | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class RotaryStep:
    """The rotation of queries and keys in one forward step."""

    # [T] int64: row of the table for each token
    positions: torch.Tensor
    # [rows, F] float32: cosines of the F/2 pairs, then sines
    cos_sin: torch.Tensor
    # pairs are elements i and i+F/2 of a head; otherwise 2i and 2i+1 (GPT-J)
    is_neox: bool

    def rotate(self, query: torch.Tensor, key: torch.Tensor, head_size: int) -> None:
        """query [T, N*D] and key [T, K*D], in place; rows may be views of a wider tensor."""
        rotary_embedding(self.positions, query, key, head_size, self.cos_sin, self.is_neox)


@dataclasses.dataclass(frozen=True, slots=True)
class HeadNorms:
    """Root-mean-square norms of each head of queries and keys, before they are rotated (Qwen3)."""

    # [D] each, in the model's dtype
    query_weight: torch.Tensor
    key_weight: torch.Tensor
    epsilon: float

    def apply(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """query [T, N*D] and key [T, K*D] → the same, contiguous."""
        return self._norm(query, self.query_weight), self._norm(key, self.key_weight)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        heads: torch.Tensor = rms_norm(x.view(x.shape[0], -1, weight.shape[0]), weight, self.epsilon)
        return heads.view(x.shape)


class Splitter(Protocol):
    """Captures a forward pass in pieces: a graph ends before each attention call, and the next begins after it."""

    def keep(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> QueryKeyValue:
        """[T, …] each, inputs of a layer's attention → contiguous copies of them, in memory that all layers share."""

    def split(self, attend: Callable[[Any], torch.Tensor], query: torch.Tensor) -> torch.Tensor:
        """Leaves attention out of the graphs.

        Args:
            attend: gets `prepare`'s result for a step of t tokens; reads the first t of each kept tensor, and returns
                [t, N*D]. Called by each replay.
            query: [T, N, D].

        Returns:
            [T, N*D], into which replays copy the result.
        """


class AttentionBackend(abc.ABC):
    """Attention over a paged KV cache on one kind of device. One object serves all layers of a model.

    Args:
        block_size: tokens of a block.

    Attributes:
        dtypes: of the queries, keys and values that it supports.
        head_sizes: that it supports; so with `block_sizes`.
        changes_scores: it supports soft caps and ALiBi.
        supports_latent: it supports latent attention, by `forward_latent`.
        norms_heads: it has `forward_normed`.
    """

    name: str
    dtypes: tuple[torch.dtype, ...]
    head_sizes: range
    block_sizes: tuple[int, ...]
    changes_scores: bool = False
    supports_latent: bool = False
    norms_heads: bool = False

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    @classmethod
    def unsupported_reason(cls, spec: AttentionSpec, dtype: torch.dtype, block_size: int) -> str | None:
        """Why this backend does not support a layer, as a sentence; None if it does."""
        if dtype not in cls.dtypes:
            return f"dtype {dtype} is not one of {', '.join(map(str, cls.dtypes))}"
        if (reason := cls._unsupported_sizes_reason(spec)) is not None:
            return reason
        if not cls.changes_scores and (spec.soft_cap is not None or spec.alibi_slopes is not None):
            return "its operators have no parameter for soft caps and ALiBi, which this model's attention needs"
        if block_size not in cls.block_sizes:
            return f"block size {block_size} is not one of {', '.join(map(str, cls.block_sizes))}"
        if spec.sliding_window is not None and spec.sliding_window < 1:
            return f"sliding window {spec.sliding_window} is below one token"
        return None

    @classmethod
    def _unsupported_sizes_reason(cls, spec: AttentionSpec) -> str | None:
        """Why this backend does not support heads of this size, or so many; None if it does."""
        if spec.latent is not None:
            return None if cls.supports_latent else "it has no latent attention (MLA), which this model needs"
        if spec.head_size not in cls.head_sizes:
            return (
                f"head size {spec.head_size} is not a multiple of {cls.head_sizes.step} "
                f"from {cls.head_sizes[0]} to {cls.head_sizes[-1]}"
            )
        if spec.num_kv_heads < 1 or spec.num_heads % spec.num_kv_heads:
            return f"{spec.num_heads} query heads cannot share {spec.num_kv_heads} KV heads evenly"
        return cls._unsupported_heads_reason(spec)

    @classmethod
    def _unsupported_heads_reason(cls, spec: AttentionSpec) -> str | None:  # noqa: ARG003 - most have no such limits
        """Why this backend does not support so many heads; None if it does."""
        return None

    @classmethod
    def unsupported_cache_reason(cls, cache: KVCacheSpec, dtype: torch.dtype) -> str | None:
        """Why this backend does not support a layer's KV cache, as a sentence; None if it does.

        Args:
            cache: of the layer.
            dtype: of its queries, keys and values; most backends cache them in this dtype only.
        """
        kinds = (KEY_VALUE, LATENT) if cls.supports_latent else (KEY_VALUE,)
        own = str(dtype).removeprefix("torch.")
        if cache.kind in kinds and cache == KVCacheSpec(cache.kind, cache.block_shape, own):
            return None
        return f"it caches keys and values in {dtype}, not {cache.kind} in {cache.dtype}"

    @classmethod
    def can_split(cls, cache: KVCacheSpec, dtype: torch.dtype) -> bool:  # noqa: ARG003 - most have no `prepare_split`
        """Whether attention of a layer can run between captured graphs, by `prepare_split`.

        Args:
            cache: of the layer.
            dtype: of its queries, keys and values.
        """
        return False

    @abc.abstractmethod
    def kv_cache_shape(self, num_blocks: int, cache: KVCacheSpec) -> tuple[int, ...]:
        """Shape of one layer's cache without scales: the dimensions of blocks and `num_blocks`, in any order."""

    def make_cache(self, memory: torch.Tensor, num_blocks: int, cache: KVCacheSpec) -> LayerCache:
        """Makes one layer's cache in the given memory. Backends that store scales beside the values override this.

        Args:
            memory: [num_blocks * cache.block_bytes] uint8, on the device or in CPU memory.
            num_blocks: blocks, spare ones included.
            cache: of the layer.
        """
        shape, dtype = self.kv_cache_shape(num_blocks, cache), getattr(torch, cache.dtype)
        return memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def advice(self, config: EngineConfig) -> list[str]:  # noqa: ARG002 - most backends have none
        """Settings that users should change for this model, as sentences, which are logged as warnings."""
        return []

    def replay_arguments(
        self,
        seq_lens: list[int],  # noqa: ARG002 - of those that can be replayed
        query_len: int = 1,  # noqa: ARG002
    ) -> dict[str, list[int]] | None:
        """Host-side arguments to update in each replay of a captured decoding step; None: it cannot be replayed.

        Args:
            seq_lens: tokens of each row, those of the step included.
            query_len: tokens of each row in the step.

        Returns:
            Lists by the names of the operators' arguments.
        """
        return None

    def prepare_split(self, batch: ForwardBatch, splitter: Splitter) -> Any:
        """`prepare` for a pass that is captured in pieces; only if all layers `can_split`.

        Args:
            batch: padded. Its rows say nothing of those of a replay.
            splitter: of the capture.
        """
        raise NotImplementedError(f"attention backend {self.name} cannot be split off")

    def prepare_compiled(self, batch: ForwardBatch, seq_lens: list[int]) -> Any:
        """`prepare` for compiled code, of rows of `max_query_len` tokens each; only if `replay_arguments` has lists.

        Args:
            batch: without the host arrays.
            seq_lens: tokens of each row, which are variables for the compiler.
        """
        raise NotImplementedError(f"attention backend {self.name} cannot be compiled")

    def describe(self) -> str:
        """Everything beside the arguments that affects what the backend computes, in one line."""
        return self.name

    def num_spare_blocks(self, max_num_tokens: int) -> int:  # noqa: ARG002 - not needed by kernels that skip tokens
        """Number of blocks after those of the pool, for tokens that are not to be stored; 0 if not needed.

        Args:
            max_num_tokens: maximum tokens of a decoding step, or of a step that is captured in pieces.
        """
        return 0

    def bind(self, specs: Sequence[AttentionSpec], kv_caches: Sequence[LayerCache], num_blocks: int) -> None:
        """Called with the caches before the first step, and again when they are replaced.

        Args:
            specs: one per layer.
            kv_caches: one per layer, of `num_blocks + num_spare_blocks(...)` blocks.
            num_blocks: blocks of the pool.
        """
        del specs, kv_caches, num_blocks  # most backends need nothing before the first step

    def host_planes(self, kv_cache: LayerCache) -> Sequence[torch.Tensor]:  # noqa: ARG002 - nothing is in host memory
        """[num_blocks, bytes] uint8 each: the parts of a layer's cache whose blocks are neighbours in host memory."""
        return ()

    @abc.abstractmethod
    def copy_blocks(
        self, source: LayerCache, source_blocks: torch.Tensor, target: LayerCache, target_blocks: torch.Tensor
    ) -> None:
        """Copies whole blocks of one layer; all sources are read before a target is written.

        Args:
            source: a layer's cache.
            source_blocks: [C] int64, on source's device.
            target: likewise, of any number of blocks and on any device; may be `source`.
            target_blocks: [C] int64, on target's device, none twice.
        """

    @abc.abstractmethod
    def prepare(self, batch: ForwardBatch) -> Any:
        """Makes what all layers share in a step; called once per step, and passed to `forward` as `metadata`."""

    @abc.abstractmethod
    def forward(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: LayerCache,
        batch: ForwardBatch,
        metadata: Any,
        rotary: RotaryStep | None = None,
    ) -> torch.Tensor:
        """Stores key and value, then computes attention.

        Args:
            spec: of the layer.
            query: [T, N*D].
            key: [T, K*D]; may be float32 for a cache in bytes without scales of its own.
            value: likewise.
            kv_cache: of the layer; written.
            batch: the step's tokens and rows.
            metadata: result of `prepare`.
            rotary: rotates query and key first, which may be overwritten; None: they are not to be rotated.

        Returns:
            [T, N*D], in query's dtype.
        """

    def forward_normed(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: LayerCache,
        batch: ForwardBatch,
        metadata: Any,
        rotary: RotaryStep | None,
        norms: HeadNorms,
    ) -> torch.Tensor:
        """`forward` of queries and keys whose heads are to be normalised first; only where `norms_heads` is set."""
        raise NotImplementedError(f"attention backend {self.name} does not normalise heads")

    def forward_latent(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        latent: torch.Tensor,
        weights: LatentWeights,
        kv_cache: LayerCache,
        batch: ForwardBatch,
        metadata: Any,
        rotary: RotaryStep,
    ) -> torch.Tensor:
        """`forward` of latent attention: stores normed latents and rotated keys, then computes attention.

        A head's key of a token is (W_UK·latent, rotary key), its value W_UV·latent. The backend decides whether it
        makes them, or applies W_UK to queries and W_UV to sums of latents.

        Args:
            spec: of the layer; its `latent` is not None.
            query: [T, N*(Q+F)]; the last F numbers of a head are to be rotated. Rows may be strided, and may be
                overwritten.
            latent: [T, W], what is cached of each token, before the norm of the first L numbers and the rotation of
                the others; rows may be strided.
            weights: of the layer.
            kv_cache: of the layer; written.
            batch: the step's tokens and rows.
            metadata: result of `prepare`.
            rotary: of queries and keys.

        Returns:
            [T, N*V], in query's dtype.
        """
        raise NotImplementedError(f"attention backend {self.name} has no latent attention")
