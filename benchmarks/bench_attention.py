"""Paged attention against torch's scaled_dot_product_attention on contiguous tensors.

    python benchmarks/bench_attention.py --heads 14 --kv-heads 2 --head-size 64 --dtype bfloat16 --json out.json

Decoding is limited by reading keys and values, so it is given in GB/s beside the read bandwidth of this machine
measured in the same run; every call reads other memory than the one before, as the layers of a model do. Prompts
are limited by arithmetic, so they are given in GFLOP/s of what a causal mask leaves, beside torch's matrix product
in the same dtype. Both candidates take turns within each measurement, and the median counts (--best: the shortest
time, for machines that others use as well). torch gets the better of its two ways with grouped heads: `enable_gqa`,
or keys and values repeated beforehand at no cost.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from bandwidth import read_bandwidth

from ascend_vllm.ops.native import cpu_isa
from ascend_vllm.ops.paged import paged_attention

# Keys and values of all calls together: several times any last-level cache of a small machine.
POOL_BYTES = 256 * 2**20
Run = Callable[[int], object]


@dataclasses.dataclass(frozen=True)
class Clock:
    """How long to measure, and which of the times counts."""

    budget_s: float
    statistic: Callable[[list[float]], float]


def time_of(runs: dict[str, Run], clock: Clock) -> dict[str, float]:
    """Seconds of each, called in turn with 0, 1, 2, … until the time is used up (at least five times)."""
    for run in runs.values():
        run(0)
    times: dict[str, list[float]] = {name: [] for name in runs}
    deadline = time.perf_counter() + clock.budget_s
    call = 1
    while call <= 5 or time.perf_counter() < deadline:
        for name, run in runs.items():
            start = time.perf_counter()
            run(call)
            times[name].append(time.perf_counter() - start)
        call += 1
    return {name: clock.statistic(values) for name, values in times.items()}


def sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: bool) -> torch.Tensor:
    """Of [batch, heads, tokens, D]."""
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)


class Shape:
    """Heads and dtype of the layers that are measured."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.heads: int = args.heads
        self.kv_heads: int = args.kv_heads
        self.head_size: int = args.head_size
        self.block_size: int = args.block_size
        self.dtype: torch.dtype = getattr(torch, args.dtype)
        self.window: int = args.sliding_window

    def paged(self, batch: int, query_len: int, length: int, copies: int) -> list[tuple[Any, ...]]:
        """Arguments of paged_attention for each copy, all in one cache with blocks in random order."""
        width = -(-length // self.block_size)
        num_blocks = copies * batch * width
        cache = torch.empty(
            2, num_blocks, self.kv_heads, self.block_size, self.head_size, dtype=self.dtype
        ).uniform_()
        tables = torch.randperm(num_blocks).to(torch.int32).view(copies, batch, width)
        query = torch.randn(batch * query_len, self.heads, self.head_size).to(self.dtype)
        query_start = torch.arange(batch + 1, dtype=torch.int32) * query_len
        seq_lens = torch.full((batch,), length, dtype=torch.int32)
        scale = self.head_size**-0.5
        return [(query, *cache, table, query_start, seq_lens, scale, self.window) for table in tables]

    def kv_bytes(self, batch: int, length: int) -> int:
        return 2 * batch * length * self.kv_heads * self.head_size * self.dtype.itemsize


def bench_decode(shape: Shape, batch: int, length: int, clock: Clock) -> dict[str, Any]:
    """One token per sequence over `length` keys."""
    kv_bytes = shape.kv_bytes(batch, length)
    copies = max(2, min(64, POOL_BYTES // kv_bytes))
    problems = shape.paged(batch, 1, length, copies)
    group = shape.heads // shape.kv_heads
    # the copies for torch share one pool as well, but contiguous
    pool = torch.empty(copies, 2, batch, shape.kv_heads, length, shape.head_size, dtype=shape.dtype).uniform_()
    query = problems[0][0].view(batch, shape.heads, 1, shape.head_size)
    runs: dict[str, Run] = {
        "paged": lambda call: paged_attention(*problems[call % copies]),
        "sdpa_gqa": lambda call: sdpa(query, *pool[call % copies], enable_gqa=group > 1),
    }
    if group > 1 and kv_bytes * group <= 4 * POOL_BYTES:
        repeats = max(2, copies // group)
        repeated = pool[:repeats].repeat_interleave(group, 3)
        runs["sdpa_repeated"] = lambda call: sdpa(query, *repeated[call % repeats])
    seconds = time_of(runs, clock)
    best = min(value for name, value in seconds.items() if name != "paged")
    return {
        "batch": batch,
        "context": length,
        "paged_us": seconds["paged"] * 1e6,
        "sdpa_us": best * 1e6,
        "paged_gb_per_s": kv_bytes / seconds["paged"] / 1e9,
        "sdpa_gb_per_s": kv_bytes / best / 1e9,
        "speedup": best / seconds["paged"],
    }


def bench_prefill(shape: Shape, length: int, clock: Clock) -> dict[str, Any]:
    """A whole prompt of one sequence."""
    (problem,) = shape.paged(1, length, length, 1)
    group = shape.heads // shape.kv_heads
    query = problem[0].transpose(0, 1).contiguous()[None]
    key, value = torch.empty(2, 1, shape.kv_heads, length, shape.head_size, dtype=shape.dtype).uniform_()
    repeated = (key.repeat_interleave(group, 1), value.repeat_interleave(group, 1))
    runs: dict[str, Run] = {
        "paged": lambda _: paged_attention(*problem),
        "sdpa_gqa": lambda _: sdpa(query, key, value, is_causal=True, enable_gqa=group > 1),
        "sdpa_repeated": lambda _: sdpa(query, *repeated, is_causal=True),
    }
    seconds = time_of(runs, clock)
    best = min(value for name, value in seconds.items() if name != "paged")
    flop = 4 * shape.heads * shape.head_size * length * (length + 1) / 2
    return {
        "tokens": length,
        "paged_ms": seconds["paged"] * 1e3,
        "sdpa_ms": best * 1e3,
        "paged_gflop_per_s": flop / seconds["paged"] / 1e9,
        "sdpa_gflop_per_s": flop / best / 1e9,
        "speedup": best / seconds["paged"],
    }


def matmul_gflops(dtype: torch.dtype, clock: Clock, size: int = 512) -> float:
    """torch's matrix product, as a measure of the arithmetic this machine has."""
    left, right = torch.randn(2, size, size).to(dtype)
    seconds = time_of({"mm": lambda _: left @ right}, clock)["mm"]
    return 2 * size**3 / seconds / 1e9


def print_rows(title: str, rows: Sequence[dict[str, Any]]) -> None:
    print(f"\n{title}")
    print("  ".join(f"{name:>17}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{value:17.2f}" if isinstance(value, float) else f"{value:17}" for value in row.values()))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=14)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--sliding-window", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batches", type=int, nargs="*", default=(1, 8, 32))
    parser.add_argument("--contexts", type=int, nargs="*", default=(128, 1024, 8192))
    parser.add_argument("--prompts", type=int, nargs="*", default=(128, 512, 1024, 4096))
    parser.add_argument("--budget-s", type=float, default=1.0, help="time per measurement")
    parser.add_argument("--best", action="store_true", help="report shortest times instead of medians")
    parser.add_argument("--json", type=pathlib.Path, help="file to write the results to")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape = Shape(args)
    clock = Clock(args.budget_s, min if args.best else statistics.median)
    report: dict[str, Any] = {
        "arguments": {name: str(value) for name, value in vars(args).items()},
        "isa": cpu_isa(),
        "read_gb_per_s": read_bandwidth(args.threads),
        "matmul_gflop_per_s": matmul_gflops(shape.dtype, clock),
    }
    print(
        f"{args.heads} heads, {args.kv_heads} KV heads of {args.head_size}, {args.dtype}, {args.threads} threads, "
        f"{report['isa']}; read bandwidth {report['read_gb_per_s']:.1f} GB/s, "
        f"torch's matrix product {report['matmul_gflop_per_s']:.0f} GFLOP/s"
    )
    cases = [(batch, context) for batch in args.batches for context in args.contexts]
    report["decode"] = [bench_decode(shape, batch, context, clock) for batch, context in cases]
    report["prefill"] = [bench_prefill(shape, length, clock) for length in args.prompts]
    if report["decode"]:
        print_rows("decoding", report["decode"])
    if report["prefill"]:
        print_rows("prompts", report["prefill"])
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
