"""Prints, as JSON, which calls this process's release of CANN takes; run by test_generations.py."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
import torch_npu

MASK = torch.triu(torch.ones(2048, 2048, dtype=torch.int8), 1)


def attends(
    head_size: int, block_size: int, num_kv_heads: int = 1, sparse_mode: int = 3, dtype: torch.dtype = torch.float16
) -> None:
    """Two sequences of two heads over a paged cache."""
    query = torch.zeros(3, 2, head_size, dtype=dtype).npu()
    cache = torch.zeros(2, block_size, num_kv_heads * head_size, dtype=dtype).npu()
    torch_npu.npu_fused_infer_attention_score(
        query,
        cache,
        cache,
        atten_mask=MASK.npu(),
        block_table=torch.tensor([[0], [1]], dtype=torch.int32).npu(),
        block_size=block_size,
        input_layout="TND",
        num_heads=2,
        num_key_value_heads=num_kv_heads,
        actual_seq_lengths=[1, 3],
        actual_seq_lengths_kv=[5, 7],
        sparse_mode=sparse_mode,
        pre_tokens=4,
        next_tokens=0,
    )


def rotates(*shape: int, layout: str) -> None:
    """Query and key of one shape."""
    angles = torch.zeros(*shape[:-2], 1, shape[-1], dtype=torch.float16).npu()
    query, key = (torch.zeros(*shape, dtype=torch.float16).npu() for _ in range(2))
    torch_npu.npu_apply_rotary_pos_emb(query, key, angles, angles, layout)


def samples(k: int) -> None:
    """One row of 4000 logits."""
    with torch.npu.stream(torch.npu.SyncLaunchStream()):
        torch_npu.npu_top_k_top_p(torch.zeros(1, 4000).npu(), None, torch.tensor([k], dtype=torch.int32).npu())


CALLS: dict[str, Callable[[], None]] = {
    "heads of 128, blocks of 128": lambda: attends(128, 128),
    "heads of 64, blocks of 64": lambda: attends(64, 64),
    "heads of 96, blocks of 128": lambda: attends(96, 128),
    "heads of 96, blocks of 64": lambda: attends(96, 64),
    "heads of 96, blocks of 256": lambda: attends(96, 256),
    "heads of 96, blocks of 528": lambda: attends(96, 528),
    "heads of 96, a window": lambda: attends(96, 128, sparse_mode=4),
    "heads of 64, a window": lambda: attends(64, 128, sparse_mode=4),
    "single heads of 96": lambda: attends(96, 128, num_kv_heads=2),
    "single heads of 128 in bfloat16": lambda: attends(128, 128, num_kv_heads=2, dtype=torch.bfloat16),
    "rope TND 128": lambda: rotates(3, 2, 128, layout="TND"),
    "rope BSND 128": lambda: rotates(1, 3, 2, 128, layout="BSND"),
    "rope BSND 64": lambda: rotates(1, 3, 2, 64, layout="BSND"),
    "top-k 1024": lambda: samples(1024),
    "top-k 1025": lambda: samples(1025),
    "top-k 0": lambda: samples(0),
    "cast to FRACTAL_NZ": lambda: torch_npu.npu_format_cast(torch.zeros(32, 32, dtype=torch.float16).npu(), 29),
}


def taken(call: Callable[[], None]) -> bool:
    """Whether a call is made without an error."""
    try:
        call()
        torch.npu.synchronize()
    except RuntimeError:
        return False
    return True


if __name__ == "__main__":
    torch.npu.config.allow_internal_format = True
    print(json.dumps([name for name, call in CALLS.items() if taken(call)]))
