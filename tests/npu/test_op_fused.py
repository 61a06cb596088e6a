"""Fused operators of torch_npu on the device against formulas of torch's own operators on the CPU.

Shapes and modes have tests in test_fused_ops.py and test_attention_ops.py; here each operator is shown to be the one
that is launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor
from torch.nn import functional

from tests.npu.attention_reference import attention, causal
from tests.npu.launches import Case, Values, flat, ids

_values = Values(7)
EPSILON = 1e-5
X = _values.normal(5, 64, dtype=torch.float16)
RESIDUAL = _values.normal(5, 64, dtype=torch.float16)
GAMMA = _values.normal(64, dtype=torch.float16)


def _either(on_npu: Callable[..., Any], formula: Callable[..., Any]) -> Callable[..., Any]:
    """The operator for tensors on the device, the formula for others."""
    return lambda *inputs: (on_npu if flat(list(inputs))[0].device.type == "npu" else formula)(*inputs)


def _rms_norm(x: Tensor, gamma: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPSILON) * gamma


def _sum_and_norm(x: Tensor, residual: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    return _rms_norm(x + residual, gamma), x + residual


def _add_rms_norm(x: Tensor, residual: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    y, _, total = torch_npu.npu_add_rms_norm(x, residual, gamma, EPSILON)
    return y, total


def _add_rms_norm_in_place(x: Tensor, residual: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    y, total = x.clone(), residual.clone()
    torch_npu.npu_add_rms_norm_v2(y, total, gamma, EPSILON)
    return y, total


def _norms_and_activations() -> list[Case]:
    return [
        Case("aclnnRmsNorm", _either(lambda x, g: torch_npu.npu_rms_norm(x, g, EPSILON)[0], _rms_norm), X, GAMMA),
        Case(
            "aclnnGemmaRmsNorm",
            _either(
                lambda x, g: torch_npu.npu_gemma_rms_norm(x, g, EPSILON)[0], lambda x, gamma: _rms_norm(x, 1 + gamma)
            ),
            X,
            GAMMA,
        ),
        Case("aclnnAddRmsNorm", _either(_add_rms_norm, _sum_and_norm), X, RESIDUAL, GAMMA),
        Case("aclnnInplaceAddRmsNorm", _either(_add_rms_norm_in_place, _sum_and_norm), X, RESIDUAL, GAMMA),
        Case(
            "aclnnSwiGlu",
            _either(torch_npu.npu_swiglu, lambda x: functional.silu(x[..., :32]) * x[..., 32:]),
            X,
        ),
        Case(
            "aclnnGeluMul",
            _either(
                lambda x: torch_npu.npu_gelu_mul(x, approximate="none"),
                lambda x: functional.gelu(x[..., :32]) * x[..., 32:],
            ),
            X,
        ),
        Case("aclnnFastGelu", _either(torch_npu.npu_fast_gelu, lambda x: x * torch.sigmoid(1.702 * x)), X),
    ]


TOKENS, HEADS, KV_HEADS, SIZE = 7, 4, 2, 64
QUERY = _values.normal(TOKENS, HEADS, SIZE, dtype=torch.float16)
KEY = _values.normal(TOKENS, KV_HEADS, SIZE, dtype=torch.float16)
VALUE = _values.normal(TOKENS, KV_HEADS, SIZE, dtype=torch.float16)
# [tokens, size / 2] each
_PHASE = torch.arange(TOKENS)[:, None] * 0.3 ** torch.arange(SIZE // 2)
COS, SIN = _PHASE.cos().half(), _PHASE.sin().half()
WIDE_COS, WIDE_SIN = torch.cat([COS, COS], -1)[:, None], torch.cat([SIN, SIN], -1)[:, None]
POSITIONS = torch.tensor([3, 0, 6, 1, 1, 5, 2])


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _rotated_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbours belong together; they come out in halves."""
    return _rotated(torch.cat([x[..., ::2], x[..., 1::2]], -1), cos, sin)


def _rotate_both(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    rotated: tuple[Tensor, ...] = torch_npu.npu_apply_rotary_pos_emb(query.clone(), key.clone(), cos, sin, "TND")
    return tuple(rotated)


def _rotate_by_table(positions: Tensor, query: Tensor, key: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    rotated: tuple[Tensor, ...] = torch_npu.npu_mrope(
        positions, query.flatten(1), key.flatten(1), table, SIZE, mrope_section=[0, 0, 0], rotary_mode="half"
    )
    return tuple(rotated)


def _rotated_by_table(positions: Tensor, query: Tensor, key: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    cos, sin = (torch.cat([part, part], -1)[:, None] for part in table[positions].chunk(2, -1))
    return tuple(_rotated(x, cos, sin).flatten(1) for x in (query, key))


# latent attention: a value of 512 that is normalised, and a key of 64 that is rotated
LATENT = _values.normal(TOKENS, 1, 1, 512 + SIZE, dtype=torch.float16)
LATENT_GAMMA = _values.normal(512, dtype=torch.float16)
LATENT_PLACES = torch.tensor([17, 3, 8, 40, 0, 21, 47])


def _store_latent(kv: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor, places: Tensor) -> tuple[Tensor, ...]:
    caches = [torch.zeros(3, 16, 1, size, dtype=kv.dtype, device=kv.device) for size in (SIZE, 512)]
    torch_npu.npu_kv_rmsnorm_rope_cache(
        kv, gamma, cos[:, None], sin[:, None], places, *caches, cache_mode="PA", is_output_kv=True
    )
    return tuple(caches)


def _stored_latent(kv: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor, places: Tensor) -> tuple[Tensor, ...]:
    rows = _rotated_pairs(kv[..., 512:], cos[:, None], sin[:, None]), _rms_norm(kv[..., :512], gamma)
    caches = []
    for part in rows:
        cache = torch.zeros(48, part.shape[-1], dtype=kv.dtype)
        caches.append(cache.index_copy(0, places, part.flatten(1)).view(3, 16, 1, -1))
    return tuple(caches)


def _rotary() -> list[Case]:
    return [
        Case(
            "aclnnRotaryPositionEmbedding",
            _either(lambda x, cos, sin: torch_npu.npu_rotary_mul(x, cos, sin, "half"), _rotated),
            QUERY[None],
            WIDE_COS[None],
            WIDE_SIN[None],
        ),
        Case(
            "aclnnApplyRotaryPosEmbV2",
            _either(_rotate_both, lambda q, k, cos, sin: (_rotated(q, cos, sin), _rotated(k, cos, sin))),
            QUERY,
            KEY,
            WIDE_COS,
            WIDE_SIN,
        ),
        Case(
            "aclnnRopeWithSinCosCacheV2",
            _either(_rotate_by_table, _rotated_by_table),
            POSITIONS,
            QUERY,
            KEY,
            torch.cat([COS, SIN], -1),
        ),
        Case(
            "aclnnInterleaveRope",
            _either(torch_npu.npu_interleave_rope, _rotated_pairs),
            QUERY[:, :, None].contiguous(),
            WIDE_COS[:, :, None],
            WIDE_SIN[:, :, None],
        ),
        Case(
            "aclnnKvRmsNormRopeCache",
            _either(_store_latent, _stored_latent),
            LATENT,
            LATENT_GAMMA,
            WIDE_COS,
            WIDE_SIN,
            LATENT_PLACES,
        ),
    ]


SCALE = SIZE**-0.5
# two sequences of 3 and 4 tokens
ENDS = [3, 7]
SINK = _values.normal(HEADS, dtype=torch.bfloat16)


def _mask(query: Tensor) -> Tensor:
    return torch.ones(2048, 2048, dtype=torch.int8, device=query.device).triu_(1)


def _causal(query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None = None) -> Tensor:
    """Of the two sequences, one after another."""
    outs = []
    for rows in (slice(0, ENDS[0]), slice(*ENDS)):
        hidden = causal(rows.stop - rows.start, rows.stop - rows.start)
        parts = (tensor[rows].transpose(0, 1) for tensor in (query, key, value))
        outs.append(attention(*parts, SCALE, hidden, sink, query.dtype)[0].transpose(0, 1))
    return torch.cat(outs)


def _fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    result: Tensor = torch_npu.npu_fused_infer_attention_score(
        query,
        key,
        value,
        num_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        scale=SCALE,
        input_layout="TND",
        actual_seq_lengths=ENDS,
        actual_seq_lengths_kv=ENDS,
        atten_mask=_mask(query),
        sparse_mode=3,
    )[0]
    return result


def _fused_with_sink(query: Tensor, key: Tensor, value: Tensor, sink: Tensor) -> Tensor:
    result: Tensor = torch_npu.npu_fused_infer_attention_score_v2(
        query,
        key,
        value,
        num_query_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        softmax_scale=SCALE,
        input_layout="TND",
        actual_seq_qlen=ENDS,
        actual_seq_kvlen=ENDS,
        atten_mask=_mask(query),
        sparse_mode=3,
        learnable_sink=sink,
    )[0]
    return result


def _training(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    result: Tensor = torch_npu.npu_fusion_attention(
        query,
        key,
        value,
        HEADS,
        "TND",
        atten_mask=_mask(query).bool(),
        scale=SCALE,
        sparse_mode=2,
        actual_seq_qlen=ENDS,
        actual_seq_kvlen=ENDS,
    )[0]
    return result


def _training_of_one(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Of all tokens as one sequence."""
    result: Tensor = torch_npu.npu_fusion_attention(
        query[None], key[None], value[None], HEADS, "BSND", atten_mask=_mask(query).bool(), scale=SCALE, sparse_mode=3
    )[0]
    return result[0]


def _one(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    parts = (tensor.transpose(0, 1) for tensor in (query, key, value))
    return attention(*parts, SCALE, causal(TOKENS, TOKENS), dtype=query.dtype)[0].transpose(0, 1)


def _prompt(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    result: Tensor = torch_npu.npu_prompt_flash_attention(
        *(tensor.flatten(1)[None] for tensor in (query, key, value)),
        atten_mask=_mask(query),
        num_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        scale_value=SCALE,
        next_tokens=0,
        input_layout="BSH",
        # 10 more than the causal mode: high precision
        sparse_mode=13,
    )
    return result.view(query.shape)


BLOCK_SIZE = 16
KEY_CACHE = _values.normal(4, BLOCK_SIZE, KV_HEADS, SIZE, dtype=torch.float16)
VALUE_CACHE = _values.normal(4, BLOCK_SIZE, KV_HEADS, SIZE, dtype=torch.float16)
TABLE = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
LENGTHS = [30, 17]
SLOTS = torch.tensor([40, 0, 17, 16, 63, 5, 22])


def _decode(query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> Tensor:
    result: Tensor = torch_npu.npu_incre_flash_attention(
        query.flatten(1)[:, None],
        key.flatten(2),
        value.flatten(2),
        actual_seq_lengths=LENGTHS,
        block_table=table,
        block_size=BLOCK_SIZE,
        num_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        scale_value=SCALE,
        input_layout="BSH",
        inner_precise=0,
    )
    return result.view(query.shape)


def _decoded(query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> Tensor:
    rows = []
    for row, blocks, length in zip(query, table.long(), LENGTHS, strict=True):
        own = (cache[blocks].flatten(0, 1)[:length].transpose(0, 1) for cache in (key, value))
        rows.append(attention(row[:, None], *own, SCALE, dtype=query.dtype)[0][:, 0])
    return torch.stack(rows)


def _scatter(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> list[Tensor]:
    caches = [key_cache.clone(), value_cache.clone()]
    torch_npu.npu_scatter_pa_kv_cache(key, value, *caches, slots, cache_mode="Norm")
    return caches


def _scattered(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> list[Tensor]:
    pairs = ((key, key_cache), (value, value_cache))
    return [cache.flatten(0, 1).index_copy(0, slots, rows).view(cache.shape) for rows, cache in pairs]


def _gather(key_cache: Tensor, value_cache: Tensor, table: Tensor, lengths: Tensor) -> list[Tensor]:
    outs = [torch.empty(sum(LENGTHS), KV_HEADS, SIZE, dtype=cache.dtype).npu() for cache in (key_cache, value_cache)]
    torch_npu.npu_gather_pa_kv_cache(
        key_cache,
        value_cache,
        table,
        lengths,
        *outs,
        seq_offset=torch.zeros_like(lengths),
        is_seq_lens_cumsum=False,
    )
    return outs


def _gathered(key_cache: Tensor, value_cache: Tensor, table: Tensor, lengths: Tensor) -> list[Tensor]:
    rows = list(zip(table.long(), lengths.tolist(), strict=True))
    return [
        torch.cat([cache[blocks].flatten(0, 1)[:length] for blocks, length in rows])
        for cache in (key_cache, value_cache)
    ]


def _merged(sums: list[Tensor], parts: list[Tensor]) -> Tensor:
    weights = torch.softmax(torch.stack(sums), 0)[..., None]
    return (torch.stack(parts) * weights).sum(0)


def _attention() -> list[Case]:
    rows = (QUERY, KEY, VALUE)
    caches = (KEY_CACHE, VALUE_CACHE)
    return [
        Case("aclnnFusedInferAttentionScoreV3", _either(_fused, _causal), *rows),
        Case(
            "aclnnFusedInferAttentionScoreV4",
            _either(_fused_with_sink, _causal),
            *(tensor.bfloat16() for tensor in rows),
            SINK,
        ),
        Case("aclnnFlashAttentionVarLenScore", _either(_training, _causal), *rows),
        Case("aclnnFlashAttentionScore", _either(_training_of_one, _one), *rows),
        Case("aclnnPromptFlashAttentionV3", _either(_prompt, _one), *rows),
        Case("aclnnIncreFlashAttentionV4", _either(_decode, _decoded), QUERY[:2], *caches, TABLE),
        Case("aclnnScatterPaKvCache", _either(_scatter, _scattered), KEY, VALUE, *caches, SLOTS),
        Case("aclnnGatherPaKvCache", _either(_gather, _gathered), *caches, TABLE, torch.tensor(LENGTHS).int()),
        Case(
            "aclnnAttentionUpdate",
            _either(lambda sums, parts: torch_npu.npu_attention_update(sums, parts, 0)[0], _merged),
            [_values.normal(6), _values.normal(6) * 3],
            [_values.normal(6, SIZE), _values.normal(6, SIZE)],
        ),
    ]


def _advance(sampled: Tensor, lengths: Tensor, table: Tensor) -> list[Tensor]:
    """Of three rows the first two go on."""
    ids, positions, slots = (torch.full_like(lengths, 7) for _ in range(3))
    lengths = lengths.clone()
    torch_npu.npu_advance_step_flashattn(ids, sampled, positions, lengths, slots, table, 3, 2, BLOCK_SIZE)
    return [ids, positions, lengths, slots]


def _advanced(sampled: Tensor, lengths: Tensor, table: Tensor) -> list[Tensor]:
    old, rest = lengths[:2], torch.tensor([7])
    slots = table[:2].gather(1, old[:, None] // BLOCK_SIZE)[:, 0] * BLOCK_SIZE + old % BLOCK_SIZE
    return [torch.cat(pair) for pair in ((sampled[:, 0], rest), (old, rest), (old + 1, lengths[2:]), (slots, rest))]


def _filtered(logits: Tensor, p: Tensor, k: Tensor) -> Tensor:
    """The k largest, and of these the smallest set with the probability p."""
    values, order = logits.double().sort(-1, descending=True)
    values = values.masked_fill(torch.arange(logits.shape[-1]) >= k[:, None], float("-inf"))
    probabilities = values.softmax(-1)
    hidden = (probabilities.cumsum(-1) - probabilities >= p.double()[:, None]) | values.isinf()
    return logits.masked_fill(torch.zeros_like(hidden).scatter(-1, order, hidden), float("-inf"))


def _steps_and_sampling() -> list[Case]:
    return [
        Case(
            "aclnnAdvanceStep",
            _either(_advance, _advanced),
            torch.tensor([[11], [12]]),
            torch.tensor([15, 16, 4]),
            torch.tensor([[2, 5], [3, 1], [9, 9]]),
        ),
        Case(
            "aclnnApplyTopKTopP",
            _either(torch_npu.npu_top_k_top_p, _filtered),
            _values.normal(3, 200) * 2,
            torch.tensor([0.9, 0.5, 0.8]),
            torch.tensor([20, 3, 150], dtype=torch.int32),
        ),
    ]


CASES = [*_norms_and_activations(), *_rotary(), *_attention(), *_steps_and_sampling()]


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_the_device_agrees_with_the_cpu(case: Case) -> None:
    case.check()
