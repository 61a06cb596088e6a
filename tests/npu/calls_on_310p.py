"""A program for `ascend-vllm sim-run --soc Ascend310P3`: makes calls and prints their errors as one JSON object."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch_npu
from torch import Tensor

from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.platforms.npu import NpuPlatform
from tests.npu.attention_reference import Sequences

TRIANGLE = torch.triu(torch.ones(16, 16, dtype=torch.bool), 1)


def half(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float16)


def prompt(dtype: torch.dtype = torch.float16, **changes: Any) -> None:
    tensors = [half(1, 16, 256).to(dtype).npu() for _ in range(3)]
    options: dict[str, Any] = {"num_heads": 4, "atten_mask": TRIANGLE.npu(), "next_tokens": 0, **changes}
    torch_npu.npu_prompt_flash_attention(*tensors, **options)


def incremental(
    form: str, inner_precise: int = 1, dtype: torch.dtype = torch.float16, kv_heads: int = 4, **changes: Any
) -> None:
    sequences = Sequences([1, 1], [40, 130], (4, kv_heads), 64, dtype)
    key, value, table = (tensor.npu() for tensor in sequences.paged(128, form))
    query = sequences.query.unsqueeze(2) if form == "BNBD" else sequences.query.flatten(1).unsqueeze(1)
    out = torch_npu.npu_incre_flash_attention(
        query.npu(),
        key,
        value,
        block_table=table,
        block_size=128,
        actual_seq_lengths=[40, 130],
        num_heads=4,
        scale_value=sequences.scale,
        input_layout="BNSD" if form == "BNBD" else "BSH",
        inner_precise=inner_precise,
        **changes,
    )
    sequences.check(out.cpu().reshape(2, 4, 64))


def scatter() -> None:
    key = half(2, 2, 64).npu()
    caches = [half(3, 8, 16, 16).npu() for _ in range(2)]
    torch_npu.npu_scatter_pa_kv_cache(key, key, *caches, torch.tensor([4, 9]).npu())


def fused() -> None:
    x = half(2, 4, 64).npu()
    torch_npu.npu_fused_infer_attention_score(
        x, x, x, num_heads=4, input_layout="TND", actual_seq_lengths=[2], actual_seq_lengths_kv=[2]
    )


CALLS: dict[str, Callable[[], Any]] = {
    "prompt": prompt,
    "prompt in bfloat16": lambda: prompt(torch.bfloat16),
    "prompt with key heads": lambda: prompt(num_key_value_heads=2),
    "prompt with lengths": lambda: prompt(actual_seq_lengths=[16]),
    "prompt with a compressed mask": lambda: prompt(sparse_mode=3),
    "prompt with a window": lambda: prompt(pre_tokens=5),
    "incremental": lambda: incremental("BBH"),
    "incremental, fractal cache": lambda: incremental("NZ"),
    "incremental, precise": lambda: incremental("BBH", inner_precise=0),
    "incremental, heads apart": lambda: incremental("BNBD"),
    "incremental in bfloat16": lambda: incremental("BBH", dtype=torch.bfloat16),
    "incremental with key heads": lambda: incremental("BBH", kv_heads=2, num_key_value_heads=2),
    "scatter": scatter,
    "fused": fused,
    "norm in bfloat16": lambda: torch_npu.npu_rms_norm(half(2, 64).bfloat16().npu(), half(64).bfloat16().npu()),
    "worker": lambda: NpuPlatform().initialize(0),
    "engine": lambda: EngineArgs(model="/nowhere", device="npu", dtype="float16").create_engine_config(),
}


def outcome(call: Callable[[], Any]) -> str:
    try:
        with torch.npu.stream(torch.npu.SyncLaunchStream()):
            call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    print(json.dumps({name: outcome(call) for name, call in CALLS.items()}))
