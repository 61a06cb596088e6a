"""Measures each kernel's share of the machine's limit: memory bandwidth or arithmetic.

The limits are measured alternately with the kernels, so that both see the same other load. A layer's weights
are read from memory, as in decoding: calls rotate among copies that together exceed the caches.

    python benchmarks/roofline.py --json roofline.json
    python benchmarks/roofline.py --layers gate_up down --rows 1 64 --budget 1
    python benchmarks/roofline.py --weights uint4 int8 --rows 1 8

A kernel's limit is the time to read its operands once or for its multiplications and additions, whichever
is longer; for 8-bit inputs, too, the peak is that of floats, so that their share of it may exceed 100%. The share
compares medians; at the end the fastest calls are compared with the highest limits of the run.
With other load on the machine, the limits are measured too low and the calls too long: shares then mean little.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from comparison import machine, report
from comparison.clock import seconds_of
from comparison.peaks import Peaks, Reading, best_reading, median_reading

from ascend_vllm.ops import native
from ascend_vllm.ops.gemm import pack_weight
from ascend_vllm.ops.paged import make_paged_problem
from ascend_vllm.ops.quantized_gemm import CODES, Int8Panels, QuantizedPanels, quantize_tokens
from ascend_vllm.platforms.host_memory import weight_memory

# the linear layers of Qwen2-0.5B's shape: inputs, outputs
LAYERS = {
    "qkv": (896, 1152),
    "o": (896, 896),
    "gate_up": (896, 9728),
    "down": (4864, 896),
    "lm_head": (896, 151_936),
}
ROWS = (1, 4, 8, 16, 32, 64, 256, 1024)
# weights in codes with groups of 128 inputs, the same with inputs rounded to 8 bits, and 8-bit numbers by others
_ROUNDED = {"uint4-int8": "uint4", "uint8-int8": "uint8"}
WEIGHTS = (*CODES, *_ROUNDED, "int8")
GROUP_SIZE = 128
HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 14, 2, 64, 32
# (query tokens, tokens in the cache) of each sequence
BATCHES = {
    "1 decode at 1024": [(1, 1024)],
    "8 decodes at 1024": [(1, 1024)] * 8,
    "32 decodes at 1024": [(1, 1024)] * 32,
    "32 decodes at 4096": [(1, 4096)] * 32,
    "1 decode at 8192": [(1, 8192)],
    "prompt of 1024": [(1024, 1024)],
    "prompt of 4096": [(4096, 4096)],
}
_MIN_ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel with its operands.

    Attributes:
        kernel: its name.
        label: describes the operands.
        calls: the same call on copies of the operands.
        num_bytes: fewest bytes that a call reads and writes.
        flops: multiplications and additions of a call.
    """

    kernel: str
    label: str
    calls: Sequence[Callable[[], object]]
    num_bytes: int
    flops: int


@dataclasses.dataclass(frozen=True)
class Result:
    """A kernel's measurements and limits.

    Attributes:
        kernel: its name.
        label: what it is given.
        num_bytes: that a call reads and writes at least.
        flops: multiplications and additions of a call.
        calls: number of calls.
        median_us: median of the calls' times.
        best_us: shortest of the calls' times.
        limits: medians of the limits, measured between the calls.
    """

    kernel: str
    label: str
    num_bytes: int
    flops: int
    calls: int
    median_us: float
    best_us: float
    limits: Reading

    @property
    def limited_by(self) -> str:
        """The limit that is reached first: "bandwidth" or "peak"."""
        return _limit_us(self, self.limits)[1]

    @property
    def share(self) -> float:
        """The shortest possible time by the limits' medians, over the median time."""
        return _limit_us(self, self.limits)[0] / self.median_us

    def best_share(self, highest: Reading) -> float:
        """The shortest possible time by the run's highest limits, over the shortest time."""
        return _limit_us(self, highest)[0] / self.best_us

    def as_dict(self, highest: Reading) -> dict[str, Any]:
        """The result for JSON, with derived figures."""
        derived = {
            "gb_s": self.num_bytes / self.median_us / 1e3,
            "gflop_s": self.flops / self.median_us / 1e3,
            "limited_by": self.limited_by,
            "share": self.share,
            "best_share": self.best_share(highest),
        }
        return dataclasses.asdict(self) | derived


def _copies(num_bytes: int, mib: float) -> int:
    """Number of copies of `num_bytes` that together exceed the caches."""
    return max(1, math.ceil(mib * 2**20 / num_bytes))


def linear_cases(names: Sequence[str], rows: Sequence[int], dtype: torch.dtype, mib: float) -> Iterator[Case]:
    """The linear layers, with weights packed as in the engine."""
    linear = torch.ops.ascend_vllm.packed_linear.default
    for name in names:
        inputs, outputs = LAYERS[name]
        weight = torch.randn(outputs, inputs, dtype=dtype)
        packed = [pack_weight(weight) for _ in range(_copies(weight.nbytes, mib))]
        for count in rows:
            x = torch.randn(count, inputs, dtype=dtype)
            calls = [functools.partial(linear, x, copy, None, outputs) for copy in packed]
            num_bytes = weight.nbytes + (x.numel() + count * outputs) * dtype.itemsize
            yield Case(
                "linear", f"{name} {inputs}x{outputs}, {count} rows", calls, num_bytes, 2 * count * weight.numel()
            )


def quantized_cases(
    names: Sequence[str], rows: Sequence[int], dtype: torch.dtype, weights: Sequence[str], mib: float
) -> Iterator[Case]:
    """The linear layers with weights of 8 or 4 bits; the time of 8-bit inputs does not include their rounding."""
    for name, code in itertools.product(names, weights):
        inputs, outputs = LAYERS[name]

        def panels(code: str = code, inputs: int = inputs, outputs: int = outputs) -> QuantizedPanels:
            if code == "int8":
                made: QuantizedPanels = Int8Panels(outputs, inputs)
            else:
                made = QuantizedPanels(outputs, inputs, GROUP_SIZE, _ROUNDED.get(code, code))
                made.rounds_inputs = code in _ROUNDED
            made.codes.random_()
            made.scales.fill_(1e-3)
            return made

        first = panels()
        copies = [first, *(panels() for _ in range(_copies(first.num_bytes, mib) - 1))]
        for count in rows:
            x = torch.randn(count, inputs).to(dtype)
            q, scales, _ = quantize_tokens(x, False)
            calls: list[Callable[[], object]] = [
                functools.partial(copy.product, q, scales, None, None, dtype)
                if isinstance(copy, Int8Panels)
                else functools.partial(copy, x, None)
                for copy in copies
            ]
            num_bytes = first.num_bytes + x.numel() * (1 if code == "int8" else dtype.itemsize)
            yield Case(
                code, f"{name} {inputs}x{outputs}, {count} rows", calls,
                num_bytes + count * outputs * dtype.itemsize, 2 * count * inputs * outputs,
            )  # fmt: skip


def _as_in_server(problem: Sequence[Any]) -> list[Any]:
    """Arguments of attention with the cache in pages like those of a server's."""
    query, key_cache, value_cache, *rest = problem
    caches = [weight_memory(cache.shape, cache.dtype).copy_(cache) for cache in (key_cache, value_cache)]
    return [query, *caches, *rest]


def attention_cases(names: Sequence[str], dtype: torch.dtype, mib: float) -> Iterator[Case]:
    """Attention to a paged cache."""
    attention = torch.ops.ascend_vllm.paged_attention.default
    shape = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": HEAD_SIZE, "block_size": BLOCK_SIZE}
    for name in names:
        batch = BATCHES[name]
        cached = sum(length for _, length in batch)
        num_bytes = (
            (2 * cached * KV_HEADS + 2 * sum(query for query, _ in batch) * HEADS) * HEAD_SIZE * dtype.itemsize
        )
        # a token attends to itself and all before it, with two products of head_size each
        pairs = sum(query * length - query * (query - 1) // 2 for query, length in batch)
        copies = min(_copies(num_bytes, mib), 64)
        seeds = range(copies)
        problems = [_as_in_server(make_paged_problem(dtype, batch, **shape, seed=seed)) for seed in seeds]
        calls = [functools.partial(attention, *problem) for problem in problems]
        yield Case("attention", name, calls, num_bytes, 4 * pairs * HEADS * HEAD_SIZE)


def _limit_us(work: Case | Result, limits: Reading) -> tuple[float, str]:
    """The shortest possible time of a call in microseconds, and the limit that determines it."""
    reading = work.num_bytes / (limits.bandwidth_gb_s * 1e3)
    computing = work.flops / (limits.peak_gflop_s * 1e3)
    return (reading, "bandwidth") if reading > computing else (computing, "peak")


def measure(case: Case, peaks: Peaks, budget_s: float) -> tuple[Result, Reading]:
    """Calls the kernel for about `budget_s` seconds, alternately with measurements of the limits.

    Returns:
        the result, and the highest limits measured.
    """
    times: list[float] = []
    limits: list[Reading] = []
    case.calls[0]()
    while len(limits) < _MIN_ROUNDS or sum(times) < budget_s:
        limits.append(peaks.read(torch.get_num_threads()))
        deadline = time.perf_counter() + budget_s / _MIN_ROUNDS
        while True:
            times.append(seconds_of(case.calls[len(times) % len(case.calls)]))
            if time.perf_counter() >= deadline:
                break
    result = Result(
        case.kernel, case.label, case.num_bytes, case.flops, len(times), 1e6 * statistics.median(times),
        1e6 * min(times), median_reading(limits),
    )  # fmt: skip
    return result, best_reading(limits)


def _line(result: Result) -> str:
    return (
        f"{result.kernel:11} {result.label:30} {result.median_us:10.1f} us"
        f" {result.num_bytes / result.median_us / 1e3:7.1f} GB/s {result.flops / result.median_us / 1e3:7.1f} GFLOP/s"
        f"  {result.share:6.1%} of {result.limited_by}"
    )


def _limits_alone(peaks: Peaks) -> dict[str, Reading]:
    """The best of several measurements, with one thread and with all."""
    counts = dict.fromkeys((1, torch.get_num_threads()))
    return {str(count): best_reading([peaks.read(count) for _ in range(5)]) for count in counts}


def _parse_args() -> argparse.Namespace:
    parser = report.parser_of(__doc__, "at the end")
    parser.add_argument("--layers", nargs="*", choices=LAYERS, default=list(LAYERS), help="default: all")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS), help="default: %(default)s")
    parser.add_argument("--weights", nargs="*", choices=WEIGHTS, default=[], help="of further linear layers")
    parser.add_argument("--attention", nargs="*", choices=BATCHES, default=list(BATCHES), help="default: all")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--isa", help="the kernels' instruction set; default: as a server chooses")
    parser.add_argument("--threads", type=int, help="default: as torch chooses")
    parser.add_argument("--budget", type=float, default=0.3, help="seconds of calls per case (default: %(default)s)")
    parser.add_argument("--gib", type=float, default=0.5, help="read in a measurement of the bandwidth, in GiB")
    parser.add_argument("--copies-mib", type=float, default=256, help="MiB that copies of operands have together")
    return parser.parse_args()


def main() -> None:
    """Prints a line for each kernel."""
    args = _parse_args()
    native.import_op_modules()
    if args.isa:
        native.set_cpu_isa(args.isa)
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    description = machine.describe(args.isa)
    print(machine.one_line(description))
    with Peaks(args.gib) as peaks, torch.inference_mode():
        alone = _limits_alone(peaks)
        for count, limit in alone.items():
            print(
                f"{count} thread(s): {limit.bandwidth_gb_s:.1f} GB/s read, {limit.fp32_gflop_s:.0f} GFLOP/s fp32 FMA,"
                f" {limit.bf16_gflop_s:.0f} GFLOP/s bf16 dot products"
            )
        print(f"The peak is that of {limit.peak_name}.")
        results, highest = _measure_all(args, peaks, dtype, limit)
    content = {
        **report.heading("roofline", "roofline.py", args, description),
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
        "peak": limit.peak_name,
        "limits": {count: reading.as_dict() for count, reading in alone.items()},
        "highest_limits": highest.as_dict(),
        "results": [result.as_dict(highest) for result in results],
    }
    report.save(args.json, content)


def _measure_all(
    args: argparse.Namespace, peaks: Peaks, dtype: torch.dtype, highest: Reading
) -> tuple[list[Result], Reading]:
    """All kernels, and the highest limits."""
    results = []
    linear = linear_cases(args.layers, args.rows, dtype, args.copies_mib)
    quantized = quantized_cases(args.layers, args.rows, dtype, args.weights, args.copies_mib)
    for case in itertools.chain(linear, quantized, attention_cases(args.attention, dtype, args.copies_mib)):
        result, limits = measure(case, peaks, args.budget)
        highest = best_reading([highest, limits])
        results.append(result)
        print(_line(result), flush=True)
    print("Fastest calls against the highest limits of the run:")
    for result in results:
        print(f"{result.kernel:11} {result.label:30} {result.best_us:10.1f} us  {result.best_share(highest):6.1%}")
    return results, highest


if __name__ == "__main__":
    main()
