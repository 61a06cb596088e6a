"""Calls that the documentation of the operators rules out are refused, and the error that Python sees tells which
operator and which argument is at fault.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor

TRIANGLE = torch.triu(torch.ones(2048, 2048, dtype=torch.int8), 1)


def half(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float16)


# two sequences over a paged cache, four query heads, two key heads of 64
PAGED: dict[str, Any] = {
    "query": half(5, 4, 64),
    "key": half(6, 128, 128),
    "value": half(6, 128, 128),
    "atten_mask": TRIANGLE,
    "sparse_mode": 3,
    "block_table": torch.tensor([[1, 0], [2, 3]], dtype=torch.int32),
    "block_size": 128,
    "input_layout": "TND",
    "num_heads": 4,
    "num_key_value_heads": 2,
    "actual_seq_lengths": [3, 5],
    "actual_seq_lengths_kv": [3, 200],
}
NOT_PAGED = {"block_table": None, "block_size": 0}
# two sequences of eight rows after the first five tokens of a prefix
AFTER_PREFIX: dict[str, Any] = {
    "query": half(2, 4, 8, 64),
    "key": half(2, 2, 20, 64),
    "value": half(2, 2, 20, 64),
    "key_shared_prefix": half(1, 2, 7, 64),
    "value_shared_prefix": half(1, 2, 7, 64),
    "actual_shared_prefix_len": [5],
    "atten_mask": TRIANGLE,
    "sparse_mode": 3,
    "input_layout": "BNSD",
    "num_heads": 4,
    "num_key_value_heads": 2,
}
# one token each of two sequences over latents of 512, with a rotary part of 64; eight query heads
LATENT: dict[str, Any] = {
    "query": half(2, 8, 1, 512),
    "key": half(6, 1, 128, 512),
    "value": half(6, 1, 128, 512),
    "query_rope": half(2, 8, 1, 64),
    "key_rope": half(6, 1, 128, 64),
    "block_table": torch.tensor([[1, 0], [2, 3]], dtype=torch.int32),
    "block_size": 128,
    "input_layout": "BNSD_NBSD",
    "num_heads": 8,
    "num_key_value_heads": 1,
    "actual_seq_lengths_kv": [3, 200],
}
# the same with five tokens of two sequences
LATENT_PACKED: dict[str, Any] = LATENT | {
    "query": half(5, 8, 512),
    "query_rope": half(5, 8, 64),
    "input_layout": "TND_NTD",
    "actual_seq_lengths": [3, 5],
    "atten_mask": TRIANGLE,
    "sparse_mode": 3,
}
# one token each of two sequences over bytes whose scales are in blocks, too
IN_BYTES: dict[str, Any] = PAGED | {
    "query": half(2, 4, 1, 64),
    "key": torch.ones(6, 2, 128, 64, dtype=torch.int8),
    "value": torch.ones(6, 2, 128, 64, dtype=torch.int8),
    "key_antiquant_scale": torch.ones(6, 2, 128),
    "value_antiquant_scale": torch.ones(6, 2, 128),
    "key_antiquant_mode": 5,
    "value_antiquant_mode": 5,
    "atten_mask": None,
    "sparse_mode": 0,
    "input_layout": "BNSD",
    "actual_seq_lengths": None,
}
# likewise, with scales of channels
OF_CHANNELS = {"key_antiquant_mode": 0, "value_antiquant_mode": 0} | {
    f"{half_of_cache}_antiquant_scale": half(2, 1, 64) for half_of_cache in ("key", "value")
}
FUSED = "aclnnFusedInferAttentionScoreV3"
# name of a correct call → its operator, torch_npu's function, and the arguments
CALLS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fused": (FUSED, "npu_fused_infer_attention_score", PAGED),
    # keys and values one after another
    "fused, fresh": (
        FUSED,
        "npu_fused_infer_attention_score",
        PAGED | NOT_PAGED | {"key": half(9, 2, 64), "value": half(9, 2, 64), "actual_seq_lengths_kv": [3, 9]},
    ),
    # two sequences of eight rows
    "fused, batched": (
        FUSED,
        "npu_fused_infer_attention_score",
        PAGED
        | NOT_PAGED
        | {
            "query": half(2, 4, 8, 64),
            "key": half(2, 2, 20, 64),
            "value": half(2, 2, 20, 64),
            "input_layout": "BNSD",
            "actual_seq_lengths": None,
            "actual_seq_lengths_kv": None,
        },
    ),
    "fused, bytes": (FUSED, "npu_fused_infer_attention_score", IN_BYTES),
    "fused, channels": (FUSED, "npu_fused_infer_attention_score", IN_BYTES | OF_CHANNELS),
    "fused, prefix": (FUSED, "npu_fused_infer_attention_score", AFTER_PREFIX),
    "fused, latent": (FUSED, "npu_fused_infer_attention_score", LATENT),
    "fused, packed latent": (FUSED, "npu_fused_infer_attention_score", LATENT_PACKED),
    "latent cache": (
        "aclnnKvRmsNormRopeCache",
        "npu_kv_rmsnorm_rope_cache",
        {
            "kv": half(3, 1, 1, 576),
            "gamma": half(512),
            "cos": half(3, 1, 1, 64),
            "sin": half(3, 1, 1, 64),
            "index": torch.tensor([0, 63, 5]),
            "k_cache": half(4, 16, 1, 64),
            "ckv_cache": half(4, 16, 1, 512),
            "cache_mode": "PA",
        },
    ),
    "product per head": (
        "aclnnTransposeBatchMatMul",
        "npu_transpose_batchmatmul",
        {
            "input": half(3, 8, 128),
            "weight": half(8, 128, 512),
            "perm_x1": (1, 0, 2),
            "perm_x2": (0, 1, 2),
            "perm_y": (1, 0, 2),
        },
    ),
    "prompt": (
        "aclnnPromptFlashAttentionV3",
        "npu_prompt_flash_attention",
        {
            "query": half(1, 8, 256),
            "key": half(1, 8, 128),
            "value": half(1, 8, 128),
            "atten_mask": TRIANGLE,
            "sparse_mode": 3,
            "num_heads": 4,
            "num_key_value_heads": 2,
        },
    ),
    "incremental": (
        "aclnnIncreFlashAttentionV4",
        "npu_incre_flash_attention",
        {
            "query": half(2, 1, 256),
            "key": half(6, 128, 128),
            "value": half(6, 128, 128),
            "block_table": torch.tensor([[1, 0], [2, 3]], dtype=torch.int32),
            "block_size": 128,
            "actual_seq_lengths": [3, 200],
            "num_heads": 4,
            "num_key_value_heads": 2,
        },
    ),
    "scatter": (
        "aclnnScatterPaKvCache",
        "npu_scatter_pa_kv_cache",
        {
            "key": half(3, 2, 64),
            "value": half(3, 2, 64),
            "key_cache": half(4, 16, 2, 64),
            "value_cache": half(4, 16, 2, 64),
            "slot_mapping": torch.tensor([0, 63, 5], dtype=torch.int32),
            "cache_mode": "Norm",
        },
    ),
    "gather": (
        "aclnnGatherPaKvCache",
        "npu_gather_pa_kv_cache",
        {
            "key_cache": half(4, 16, 1, 64),
            "value_cache": half(4, 16, 1, 64),
            "block_tables": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
            "seq_lens": torch.tensor([3, 20], dtype=torch.int32),
            "key": half(23, 1, 64),
            "value": half(23, 1, 64),
        },
    ),
}
# name of a call → changes that are refused, and the argument at fault
REFUSED: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "fused": [
        ("query", {"query": torch.ones(5, 4, 64)}),
        ("query", {"query": half(5, 4, 72), "key": half(6, 128, 144), "value": half(6, 128, 144)}),
        ("key", {"key": half(6, 128, 128).bfloat16()}),
        ("value", {"value": half(6, 128, 128).bfloat16()}),
        ("value", {"value": half(5, 128, 128)}),
        ("num_heads", {"num_heads": 8}),
        ("num_key_value_heads", {"num_key_value_heads": 3}),
        ("actual_seq_lengths", {"actual_seq_lengths": [3, 4]}),
        ("actual_seq_lengths", {"actual_seq_lengths": [3, 2]}),
        ("actual_seq_lengths", {"actual_seq_lengths": None}),
        ("actual_seq_lengths_kv", {"actual_seq_lengths_kv": None}),
        ("actual_seq_lengths_kv", {"actual_seq_lengths_kv": [3]}),
        ("actual_seq_lengths_kv", {"actual_seq_lengths_kv": [3, 257]}),
        ("actual_seq_lengths_kv", {"actual_seq_lengths_kv": [-1, 20]}),
        ("block_size", {"block_size": 0}),
        ("block_size", {"block_size": 64}),
        (
            "block_size",
            {
                "block_size": 40,
                "key": half(6, 40, 128),
                "value": half(6, 40, 128),
                "actual_seq_lengths_kv": [3, 70],
            },
        ),
        ("block_size", {"block_size": 1040, "key": half(6, 1040, 128), "value": half(6, 1040, 128)}),
        ("block_table", {"block_table": torch.zeros(2, 2, dtype=torch.int64)}),
        ("block_table", {"block_table": torch.zeros(3, 2, dtype=torch.int32)}),
        ("block_table", {"block_table": torch.tensor([[1, 0], [2, 6]], dtype=torch.int32)}),
        ("block_table", {"block_table": torch.tensor([[-1, 0], [2, 3]], dtype=torch.int32)}),
        ("atten_mask", {"atten_mask": None}),
        ("atten_mask", {"atten_mask": TRIANGLE[:1024, :1024].contiguous()}),
        ("atten_mask", {"atten_mask": TRIANGLE.half()}),
        ("atten_mask", {"atten_mask": 1 - TRIANGLE}),
        ("atten_mask", {"sparse_mode": 0}),
        ("sparse_mode", {"sparse_mode": 2}),
        ("sparse_mode", {"sparse_mode": 5}),
        ("pre_tokens", {"sparse_mode": 4, "pre_tokens": 2, "next_tokens": -3}),
        ("input_layout", {"input_layout": "NSD"}),
        ("inner_precise", {"inner_precise": 4}),
        (
            "inner_precise",
            {"inner_precise": 1, "query": half(5, 4, 80), "key": half(6, 128, 160), "value": half(6, 128, 160)},
        ),
        ("query_rope", {"key_rope": half(6, 128, 128)}),
        ("antiquant_scale", {"antiquant_scale": half(2, 128)}),
        # in TND only heads of 64 and 128 go over blocks of more than 512 tokens
        (
            "block_size",
            {"query": half(5, 4, 96), "key": half(6, 528, 192), "value": half(6, 528, 192), "block_size": 528},
        ),
    ],
    "fused, bytes": [
        ("key_antiquant_scale", {"key_antiquant_scale": half(6, 2, 128)}),
        ("key_antiquant_scale", {"key_antiquant_scale": torch.ones(6, 128, 2)}),
        ("key_antiquant_scale", {"key_antiquant_mode": 4, "value_antiquant_mode": 4}),
        ("value_antiquant_scale", {"value_antiquant_scale": None}),
        ("value_antiquant_scale", {"value_antiquant_mode": 4}),
        ("key_antiquant_offset", {"key_antiquant_offset": torch.ones(6, 2, 64)}),
        ("key", {"key_antiquant_scale": None, "value_antiquant_scale": None}),
        ("key", {"key": half(6, 2, 128, 64)}),
        ("value", {"value": half(6, 2, 128, 64)}),
        # the order of axes of the other layouts
        ("key", {"key": IN_BYTES["key"].view(6, 128, 128), "value": IN_BYTES["value"].view(6, 128, 128)}),
        # several rows of a sequence
        ("query", {"query": half(2, 4, 2, 64)}),
        (
            "query",
            {"query": half(2, 4, 1, 48)} | {k: IN_BYTES["key"][..., :48].contiguous() for k in ("key", "value")},
        ),
        ("input_layout", {"query": half(2, 4, 64), "input_layout": "TND", "actual_seq_lengths": [1, 2]}),
        (
            "block_size",
            {k: torch.ones(6, 2, 16, 64, dtype=torch.int8) for k in ("key", "value")}
            | {k: torch.ones(6, 2, 16) for k in ("key_antiquant_scale", "value_antiquant_scale")}
            | {"block_size": 16, "actual_seq_lengths_kv": [3, 20]},
        ),
    ],
    "fused, channels": [
        ("key_antiquant_scale", {"key_antiquant_scale": torch.ones(2, 1, 64)}),
        ("key_antiquant_scale", {"key_antiquant_scale": half(2, 64)}),
        ("value_antiquant_scale", {"value_antiquant_scale": half(1)}),
    ],
    "fused, latent": [
        ("query", {"query": half(2, 8, 1, 256), "key": half(6, 1, 128, 256), "value": half(6, 1, 128, 256)}),
        ("query_rope", {"query_rope": half(2, 8, 1, 32), "key_rope": half(6, 1, 128, 32)}),
        ("key_rope", {"key_rope": half(6, 1, 128, 32)}),
        ("key_rope", {"key_rope": None}),
        ("num_heads", {"query": half(2, 12, 1, 512), "query_rope": half(2, 12, 1, 64), "num_heads": 12}),
        ("num_heads", {"query": half(2, 256, 1, 512), "query_rope": half(2, 256, 1, 64), "num_heads": 256}),
        ("sparse_mode", {"sparse_mode": 3, "atten_mask": TRIANGLE}),
        ("input_layout", {"input_layout": "BNSD_BSND"}),
        (
            "block_size",
            {"key": half(6, 1, 24, 512), "value": half(6, 1, 24, 512), "key_rope": half(6, 1, 24, 64)}
            | {"block_size": 24, "actual_seq_lengths_kv": [3, 40]},
        ),
        ("key", {"block_table": None, "block_size": 0}),
    ],
    "fused, packed latent": [
        ("softmax_lse", {"softmax_lse_flag": True}),
        ("sparse_mode", {"sparse_mode": 0, "atten_mask": None}),
        ("atten_mask", {"atten_mask": None}),
        (
            "actual_seq_lengths",
            {"query": half(19, 8, 512), "query_rope": half(19, 8, 64), "actual_seq_lengths": [17, 19]},
        ),
    ],
    "latent cache": [
        ("kv", {"kv": half(3, 1, 1, 320), "gamma": half(256), "ckv_cache": half(4, 16, 1, 256)}),
        ("gamma", {"gamma": half(256)}),
        ("cos", {"cos": half(3, 1, 1, 32), "sin": half(3, 1, 1, 32)}),
        ("cos", {"cos": torch.ones(3, 1, 1, 64)}),
        ("index", {"index": torch.tensor([0, 63, 5], dtype=torch.int32)}),
        ("index", {"index": torch.tensor([0, 64, 5])}),
        ("index", {"index": torch.tensor([5, 0, 5])}),
        # the cache of rotary keys comes first
        ("k_cache", {"k_cache": half(4, 16, 1, 512), "ckv_cache": half(4, 16, 1, 64)}),
        ("k_cache", {"k_cache": half(4, 24, 1, 64), "ckv_cache": half(4, 24, 1, 512)}),
        ("cache_mode", {"cache_mode": "ND"}),
    ],
    "product per head": [
        ("permX2", {"perm_x2": (0, 2, 1), "weight": half(8, 512, 128)}),
        ("permY", {"perm_y": (0, 1, 2)}),
        ("x2", {"weight": half(8, 128, 24)}),
        ("x2", {"input": half(3, 8, 24), "weight": half(8, 24, 128)}),
        ("x2", {"weight": half(8, 128, 512).bfloat16()}),
    ],
    "fused, fresh": [
        # as many key heads as query heads have no fast form in bfloat16
        (
            "inner_precise",
            {"num_key_value_heads": 4, "inner_precise": 1}
            | {
                "query": half(5, 4, 64).bfloat16(),
                "key": half(9, 4, 64).bfloat16(),
                "value": half(9, 4, 64).bfloat16(),
            },
        ),
        (
            "actual_seq_lengths",
            {"query": half(4097, 4, 64), "key": half(4097, 2, 64), "value": half(4097, 2, 64)}
            | {"actual_seq_lengths": list(range(1, 4098)), "actual_seq_lengths_kv": list(range(1, 4098))},
        ),
        # lengths of single sequences where cumulative ones are due
        ("actual_seq_lengths_kv", {"actual_seq_lengths_kv": [3, 6]}),
        ("actual_seq_lengths_kv", {"actual_seq_lengths_kv": [6, 3]}),
        ("num_key_value_heads", {"key": half(9, 4, 64), "value": half(9, 4, 64)}),
        ("value", {"value": half(9, 2, 32)}),
        ("value", {"value": half(8, 2, 64)}),
    ],
    "fused, batched": [
        ("atten_mask", {"sparse_mode": 0, "atten_mask": torch.zeros(8, 19, dtype=torch.bool)}),
        ("atten_mask", {"sparse_mode": 0, "atten_mask": torch.zeros(3, 1, 8, 20, dtype=torch.bool)}),
        ("actual_seq_lengths", {"actual_seq_lengths": [8, 9]}),
        ("actual_seq_lengths_kv", {"actual_seq_lengths_kv": [20, 21]}),
        (
            "actual_seq_lengths_kv",
            {
                "query": half(3, 4, 8, 64),
                "key": half(3, 2, 20, 64),
                "value": half(3, 2, 20, 64),
                "actual_seq_lengths_kv": [20, 20],
            },
        ),
        ("key", {"key": half(3, 2, 20, 64), "value": half(3, 2, 20, 64)}),
        ("query", {"query": half(2, 4, 8, 40), "key": half(2, 2, 20, 40), "value": half(2, 2, 20, 40)}),
        (
            "num_key_value_heads",
            {
                "query": half(2, 128, 8, 16),
                "key": half(2, 1, 20, 16),
                "value": half(2, 1, 20, 16),
                "num_heads": 128,
                "num_key_value_heads": 1,
            },
        ),
        # one row knows no correction
        (
            "inner_precise",
            {"query": half(2, 4, 1, 64), "sparse_mode": 0, "atten_mask": None, "inner_precise": 2},
        ),
    ],
    "fused, prefix": [
        ("key_shared_prefix", {"key_shared_prefix": None}),
        ("value_shared_prefix", {"value_shared_prefix": None}),
        ("key_shared_prefix", {"key_shared_prefix": half(1, 2, 7, 64).bfloat16()}),
        ("value_shared_prefix", {"value_shared_prefix": half(1, 2, 7, 64).bfloat16()}),
        # one for all sequences, with the heads and the size of the keys
        ("key_shared_prefix", {"key_shared_prefix": half(2, 2, 7, 64)}),
        ("key_shared_prefix", {"key_shared_prefix": half(1, 4, 7, 64)}),
        ("key_shared_prefix", {"key_shared_prefix": half(1, 2, 7, 128)}),
        ("key_shared_prefix", {"key_shared_prefix": half(1, 7, 128)}),
        ("value_shared_prefix", {"value_shared_prefix": half(1, 2, 6, 64)}),
        ("actual_shared_prefix_len", {"actual_shared_prefix_len": [8]}),
        ("actual_shared_prefix_len", {"actual_shared_prefix_len": [-1]}),
        ("actual_shared_prefix_len", {"actual_shared_prefix_len": [5, 5]}),
        # rows, keys and the prefix
        ("atten_mask", {"sparse_mode": 0, "atten_mask": torch.zeros(8, 24, dtype=torch.bool)}),
        ("pse_shift", {"pse_shift": half(1, 4, 8, 24)}),
        # not over blocks, nor for tokens one after another
        (
            "key_shared_prefix",
            {"key": half(6, 2, 128, 64), "value": half(6, 2, 128, 64), "actual_seq_lengths_kv": [3, 200]}
            | {"block_table": PAGED["block_table"], "block_size": 128},
        ),
        (
            "key_shared_prefix",
            {"query": half(5, 4, 64), "key": half(9, 2, 64), "value": half(9, 2, 64), "input_layout": "TND"}
            | {f"{half_of_cache}_shared_prefix": half(7, 2, 64) for half_of_cache in ("key", "value")}
            | {"actual_seq_lengths": [3, 5], "actual_seq_lengths_kv": [3, 9]},
        ),
        # one row of query takes 262144 keys in all
        (
            "key_shared_prefix",
            {"query": half(1, 1, 1, 16), "key": half(1, 1, 1, 16), "value": half(1, 1, 1, 16)}
            | {f"{half_of_cache}_shared_prefix": half(1, 1, 262144, 16) for half_of_cache in ("key", "value")}
            | {"actual_shared_prefix_len": None, "num_heads": 1, "num_key_value_heads": 1},
        ),
    ],
    "prompt": [
        ("query", {"query": half(1, 8, 288), "key": half(1, 8, 144), "value": half(1, 8, 144)}),
        ("key", {"key": half(1, 8, 128).bfloat16()}),
        ("sparse_mode", {"sparse_mode": 9}),
        ("atten_mask", {"atten_mask": None}),
        ("input_layout", {"input_layout": "BSND_NBSD"}),
        ("actual_seq_lengths", {"actual_seq_lengths": [9]}),
    ],
    "incremental": [
        ("query", {"query": half(2, 2, 256)}),
        ("actual_seq_lengths", {"actual_seq_lengths": None}),
        ("actual_seq_lengths", {"actual_seq_lengths": [3, 300]}),
        (
            "block_size",
            {
                "block_size": 24,
                "key": half(6, 24, 128),
                "value": half(6, 24, 128),
                "actual_seq_lengths": [3, 40],
            },
        ),
        ("block_table", {"block_table": torch.tensor([[1, 0], [2, 9]], dtype=torch.int32)}),
        ("inner_precise", {"inner_precise": 2}),
        ("input_layout", {"key": half(6, 2, 128, 64), "value": half(6, 2, 128, 64)}),
        ("key", {"key": half(6, 2, 4, 128, 16), "value": half(6, 2, 4, 128, 16)}),
    ],
    "scatter": [
        ("slot_mapping", {"slot_mapping": torch.tensor([0, 64, 5])}),
        ("slot_mapping", {"slot_mapping": torch.tensor([0, -1, 5])}),
        ("slot_mapping", {"slot_mapping": torch.tensor([5, 0, 5])}),
        ("slot_mapping", {"slot_mapping": torch.tensor([0, 1])}),
        ("slot_mapping", {"slot_mapping": torch.tensor([0.0, 1.0, 2.0])}),
        ("key", {"key": torch.ones(3, 2, 64)}),
        ("value", {"value": half(3, 2, 64).bfloat16()}),
        ("value", {"value": half(3, 1, 64)}),
        ("key_cache", {"key_cache": half(4, 16, 2, 64).bfloat16()}),
        ("key_cache", {"key_cache": half(4, 16, 1, 64)}),
        ("key_cache", {"cache_mode": "PA_NZ"}),
        ("value_cache", {"value_cache": half(5, 16, 2, 64)}),
        ("cache_mode", {"cache_mode": "ND"}),
        ("seq_lens", {"seq_lens": torch.tensor([3], dtype=torch.int32)}),
    ],
    "gather": [
        ("seq_lens", {"seq_lens": torch.tensor([3, 33], dtype=torch.int32)}),
        ("seq_lens", {"seq_lens": torch.tensor([3, 20, 1], dtype=torch.int32)}),
        ("block_tables", {"block_tables": torch.tensor([[0, 1], [2, 4]], dtype=torch.int32)}),
        ("key", {"key": half(24, 1, 64), "value": half(24, 1, 64)}),
        ("seq_offset", {"seq_offset": torch.tensor([0, 3], dtype=torch.int32)}),
    ],
}


def call(name: str, **changes: Any) -> None:
    """Makes a call, with changes."""
    _, function, arguments = CALLS[name]
    on_chip = {
        argument: value.npu() if isinstance(value, Tensor) else value
        for argument, value in (arguments | changes).items()
    }
    getattr(torch_npu, function)(**on_chip)


def top_k_top_p(k: list[int] | None, p: list[float] | None, p_dtype: torch.dtype = torch.float32) -> None:
    torch_npu.npu_top_k_top_p(
        torch.zeros(2, 4000).npu(),
        None if p is None else torch.tensor(p, dtype=p_dtype).npu(),
        None if k is None else torch.tensor(k, dtype=torch.int32).npu(),
    )


def refused(call: Callable[[], object], operator: str, argument: str) -> None:
    # Errors about what tensors hold come when the call runs. On an ordinary stream that is after Python has gone on:
    # torch_npu then writes the text to its log, and after that its queue takes calls without running them.
    with pytest.raises(RuntimeError) as error, torch.npu.stream(torch.npu.SyncLaunchStream()):
        call()
    assert f"{operator}: {argument}: " in str(error.value)


@pytest.mark.parametrize("name", CALLS)
def test_correct_calls_are_taken(name: str) -> None:
    """What the wrong calls differ from is right."""
    call(name)
    torch.npu.synchronize()


@pytest.mark.parametrize(
    ("name", "argument", "changes"), [(name, *case) for name, cases in REFUSED.items() for case in cases]
)
def test_wrong_calls_are_refused(name: str, argument: str, changes: dict[str, Any]) -> None:
    refused(lambda: call(name, **changes), CALLS[name][0], argument)


def test_strided_tensors() -> None:
    refused(lambda: call("fused", query=half(5, 4, 128).npu()[..., :64]), FUSED, "query")
    refused(lambda: call("fused", value=half(6, 256, 128).npu()[:, :128]), FUSED, "value")
    refused(lambda: call("scatter", key=half(3, 2, 128).npu()[..., :64]), CALLS["scatter"][0], "key")


def test_modes_of_training() -> None:
    query = half(1, 2, 16, 64).npu()
    refused(
        lambda: torch_npu.npu_fusion_attention(query, query, query, 2, "BNSD", sparse_mode=6),
        "aclnnFlashAttentionScore",
        "sparse_mode",
    )


@pytest.mark.parametrize(
    ("argument", "k", "p"),
    [("p", None, [0.5, 1.5]), ("p", None, None)],
)
def test_sampling(argument: str, k: list[int] | None, p: list[float] | None) -> None:
    refused(lambda: top_k_top_p(k, p), "aclnnApplyTopKTopP", argument)


def test_dtype_of_p() -> None:
    refused(lambda: top_k_top_p(None, [0.5, 0.5], torch.float16), "aclnnApplyTopKTopP", "p")


def test_norms() -> None:
    refused(lambda: torch_npu.npu_rms_norm(half(3, 64).npu(), half(32).npu()), "aclnnRmsNorm", "gamma")
    refused(
        lambda: torch_npu.npu_add_rms_norm(half(3, 64).npu(), half(3, 64).npu(), torch.ones(64).npu()),
        "aclnnAddRmsNorm",
        "gamma",
    )


def test_rotary() -> None:
    x, angle = half(1, 4, 2, 64).npu(), half(1, 4, 1, 32).npu()
    refused(lambda: torch_npu.npu_rotary_mul(x, angle, angle), "aclnnRotaryPositionEmbedding", "cos")
    small, wide = half(3, 2, 96).npu(), half(3, 1, 96).npu()
    refused(
        lambda: torch_npu.npu_apply_rotary_pos_emb(small, small.clone(), wide, wide, "TND"),
        "aclnnApplyRotaryPosEmbV2",
        "query",
    )


def test_swiglu() -> None:
    refused(lambda: torch_npu.npu_swiglu(half(3, 64).npu()[:, :32]), "aclnnSwiGlu", "x")
    refused(lambda: torch_npu.npu_swiglu(half(3, 63).npu()), "aclnnSwiGlu", "x")


def test_positions_beyond_the_table() -> None:
    positions, table = torch.tensor([0, 10]).npu(), half(10, 64).npu()
    refused(
        lambda: torch_npu.npu_mrope(
            positions, half(2, 128).npu(), half(2, 64).npu(), table, 64, mrope_section=[0, 0, 0]
        ),
        "aclnnRopeWithSinCosCacheV2",
        "positions",
    )
