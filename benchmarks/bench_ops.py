"""Compares every op's kernel with plain torch, at the sizes of a 0.5B-parameter model.

Kernel and plain torch take turns, call by call, so that both see the same disturbances; medians are compared.
"Plain torch" is the op's reference, except for linear layers, where it is torch's own `linear`, and for attention,
where it is `scaled_dot_product_attention` of contiguous keys and values.

    python benchmarks/bench_ops.py [--op NAME ...] [--dtype bfloat16] [--isa avx2] [--threads 2] [--json FILE]
    python benchmarks/bench_ops.py --kernel-probe [--dtype bfloat16]

A ratio above 1 means that the kernel is faster. --kernel-probe prints what a server measures at its first start on a
machine to choose instruction sets, and the choice; nothing is kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from comparison.clock import seconds_of
from tqdm import tqdm

from ascend_vllm.ops import kernel_choice, native, registry
from ascend_vllm.ops.experts import pack_experts, route_tokens
from ascend_vllm.ops.gemm import pack_weight
from ascend_vllm.ops.latent import latent_bytes, make_latent_problem, pack_heads
from ascend_vllm.ops.paged import make_paged_problem, with_byte_cache
from ascend_vllm.ops.quantized_gemm import Int8Panels, QuantizedPanels, quantize_tokens

# latent attention as DeepSeek-V2-Lite's: heads, widths of latents, rotary parts, other parts of queries, values
MLA_HEADS, LATENT, ROTARY, NOPE, VALUE = 16, 512, 64, 128, 128
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_SIZE, VOCAB = 896, 4864, 14, 2, 64, 151_936
# seconds of calls in a turn, and of those at its begin that do not count
_TURN_S, _SETTLE_S = 0.03, 0.01

Arguments = tuple[Any, ...]
# label, the op's arguments, and the torch function to compare with if it is not the reference
Case = tuple[str, Arguments, Callable[[], object] | None]


@dataclasses.dataclass(frozen=True)
class Result:
    """One line of the table; times are medians in microseconds."""

    op: str
    case: str
    dtype: str
    isa: str
    threads: int
    kernel_us: float
    torch_us: float
    ratio: float


def _norm(dtype: torch.dtype) -> Iterator[Case]:
    for rows in (1, 32, 1024):
        yield f"{rows}x{HIDDEN}", (torch.randn(rows, HIDDEN).to(dtype), torch.ones(HIDDEN, dtype=dtype), 1e-6), None


def _fused_add_rms_norm(dtype: torch.dtype) -> Iterator[Case]:
    for rows in (1, 32, 1024):
        x, residual = torch.randn(2, rows, HIDDEN).to(dtype).unbind(0)
        yield f"{rows}x{HIDDEN}", (x, residual, torch.ones(HIDDEN, dtype=dtype), 1e-6), None


def _layer_norm(dtype: torch.dtype) -> Iterator[Case]:
    ones = torch.ones(HIDDEN, dtype=dtype)
    for rows in (1, 32, 1024):
        yield f"{rows}x{HIDDEN}", (torch.randn(rows, HIDDEN).to(dtype), ones, ones, 1e-5), None


def _rotary(dtype: torch.dtype) -> Iterator[Case]:
    table = torch.randn(4096, HEAD_SIZE)
    for tokens in (1, 32, 1024):
        for is_neox in (True, False):
            qkv = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * HEAD_SIZE).to(dtype)
            query, key = qkv[:, : HEADS * HEAD_SIZE], qkv[:, HEADS * HEAD_SIZE : (HEADS + KV_HEADS) * HEAD_SIZE]
            arguments = (torch.arange(tokens), query, key, HEAD_SIZE, table, is_neox)
            yield f"{tokens} tokens, {'neox' if is_neox else 'gptj'}", arguments, None


def _silu(dtype: torch.dtype) -> Iterator[Case]:
    for rows in (1, 32, 1024):
        yield f"{rows}x{INTERMEDIATE}", (torch.randn(rows, 2 * INTERMEDIATE).to(dtype),), None


def _gelu(dtype: torch.dtype) -> Iterator[Case]:
    for rows in (1, 32, 1024):
        for approximate in ("none", "tanh"):
            x = torch.randn(rows, 2 * INTERMEDIATE).to(dtype)
            yield f"{rows}x{INTERMEDIATE}, {approximate}", (x, approximate), None


def _linear(dtype: torch.dtype) -> Iterator[Case]:
    for inputs, outputs in ((896, 896), (896, 9728), (4864, 896), (896, VOCAB)):
        weight = torch.randn(outputs, inputs).to(dtype)
        packed = pack_weight(weight)
        for rows in (1, 8, 32, 256) if outputs < VOCAB else (1, 8):
            x = torch.randn(rows, inputs).to(dtype)
            plain = functools.partial(torch.nn.functional.linear, x, weight)
            yield f"{rows} rows, {inputs}->{outputs}", (x, packed, None, outputs), plain


def _quantized_linear(dtype: torch.dtype) -> Iterator[Case]:
    """Compared with torch's product with the weight in the dtype; as in `_linear`, caches may hold the weights."""
    inputs, outputs = HIDDEN, 2 * INTERMEDIATE
    kinds = [("uint4", 128, False), ("uint4", 32, False), ("uint8", inputs, False), ("float8_e4m3", 128, False)]
    kinds += [("uint4", 128, True), ("uint8", inputs, True)]
    for code, group_size, rounds_inputs in kinds:
        panels = QuantizedPanels(outputs, inputs, group_size, code, scale_dtype=torch.float16)
        panels.codes.random_(0, 2**26)
        panels.scales.fill_(0.01)
        weight = panels.dequantized().to(dtype)
        sizes = f"{inputs}->{outputs}, {code} in groups of {group_size}, {panels.num_bytes / 1e6:.1f} MB"
        sizes += ", inputs rounded" if rounds_inputs else ""
        for rows in (1, 8, 32, 256):
            x = torch.randn(rows, inputs).to(dtype)
            plain = functools.partial(torch.nn.functional.linear, x, weight)
            arguments = (panels.codes, panels.scales, None, None, None, outputs, group_size, code, rounds_inputs)
            yield f"{rows} rows, {sizes}", (x, *arguments), plain


def _int8_linear(dtype: torch.dtype) -> Iterator[Case]:
    """Compared with torch's product with the weight in the dtype."""
    inputs, outputs = HIDDEN, 2 * INTERMEDIATE
    panels = Int8Panels(outputs, inputs)
    panels.codes.random_()
    panels.scales.fill_(0.01)
    weight = panels.dequantized().to(dtype)
    for rows in (1, 8, 32, 256):
        x = torch.randn(rows, inputs).to(dtype)
        q, scales, _ = quantize_tokens(x, False)
        plain = functools.partial(torch.nn.functional.linear, x, weight)
        arguments = (q, scales, None, panels.codes, panels.scales, None, None, outputs, dtype)
        yield f"{rows} rows, {inputs}->{outputs}, {panels.num_bytes / 1e6:.1f} MB", arguments, plain


def _experts(dtype: torch.dtype) -> Iterator[Case]:
    """Compared with one product of `linear` per chosen expert."""
    count, choices, hidden, inner = 60, 4, HIDDEN, 512
    gate, up = torch.randn(2, count, inner, hidden).to(dtype) / hidden**0.5
    down = torch.randn(count, hidden, inner).to(dtype) / inner**0.5
    packed = pack_experts(gate, up, down)
    gate_up = torch.cat((gate, up), dim=1)
    linear, silu = torch.nn.functional.linear, torch.nn.functional.silu

    def loop(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(x)
        for expert in ids.unique().tolist():
            tokens, places = torch.nonzero(ids == expert, as_tuple=True)
            gates, ups = linear(x[tokens], gate_up[expert]).chunk(2, dim=-1)
            rows = linear(silu(gates) * ups, down[expert]) * weights[tokens, places, None].to(dtype)
            result.index_add_(0, tokens, rows)
        return result

    for tokens in (1, 8, 32, 256):
        x = torch.randn(tokens, hidden).to(dtype)
        ids, weights = route_tokens(torch.randn(tokens, count), None, choices, "softmax", True, 1, 1, 1.0)
        plain = functools.partial(loop, x, ids, weights)
        yield f"{tokens} tokens, {choices} of {count} experts", (x, ids, weights, *packed, "silu"), plain


def _penalties(_dtype: torch.dtype) -> Iterator[Case]:
    for rows in (1, 32):
        lengths = torch.full((rows,), 512, dtype=torch.int32)
        tokens = torch.randint(0, VOCAB, (64, 2048), dtype=torch.int32)
        penalties = [torch.full((rows,), value) for value in (1.1, 0.1, 0.1)]
        arguments = (torch.randn(rows, VOCAB), tokens, torch.arange(rows), lengths // 2, lengths, *penalties)
        yield f"{rows} rows, 512 tokens each", arguments, None


def _sample(dtype: torch.dtype) -> Iterator[Case]:
    settings = {
        "greedy": (0.0, 0, 1.0, 0.0),
        "temperature": (1.0, 0, 1.0, 0.0),
        "top_k 50": (1.0, 50, 1.0, 0.0),
        "top_p 0.9": (1.0, 0, 0.9, 0.0),
        "top_k, top_p, min_p": (0.8, 50, 0.9, 0.05),
    }
    for rows in (1, 32):
        logits = (torch.randn(rows, VOCAB) * 3).to(dtype)
        for label, (temperature, top_k, top_p, min_p) in settings.items():
            arguments = (
                logits,
                torch.full((rows,), temperature),
                torch.full((rows,), top_k, dtype=torch.int32),
                torch.full((rows,), top_p),
                torch.full((rows,), min_p),
                torch.arange(rows),
                torch.arange(rows),
            )
            yield f"{rows} rows, {label}", arguments, None


def _attention(dtype: torch.dtype) -> Iterator[Case]:
    batches = {
        "1 decode at 1024": [(1, 1024)],
        "1 decode at 8192": [(1, 8192)],
        "8 decodes at 512": [(1, 512)] * 8,
        "prompt of 512": [(512, 512)],
        "prompt of 4096": [(4096, 4096)],
        "256 after a prefix of 768": [(256, 1024)],
    }
    for label, rows in batches.items():
        shape = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": HEAD_SIZE, "block_size": 16}
        query_len, length = rows[0]
        query = torch.randn(len(rows), HEADS, query_len, HEAD_SIZE).to(dtype)
        key, value = torch.randn(2, len(rows), KV_HEADS, length, HEAD_SIZE).to(dtype)
        # the last token attends to every key; torch is faster for whole prompts with `is_causal`
        is_whole, is_chunk = query_len == length, 1 < query_len < length
        mask = torch.ones(query_len, length, dtype=torch.bool).tril(length - query_len) if is_chunk else None
        sdpa = torch.nn.functional.scaled_dot_product_attention
        plain = functools.partial(sdpa, query, key, value, mask, is_causal=is_whole, enable_gqa=True)
        problem = make_paged_problem(dtype, rows, **shape)
        yield label, problem, plain
        if query_len == 1:
            yield f"{label}, int8 cache", with_byte_cache(problem, torch.int8, has_scales=True), plain


def _store_kv(dtype: torch.dtype) -> Iterator[Case]:
    cache = torch.zeros(2, 128, KV_HEADS, 16, HEAD_SIZE, dtype=dtype)
    for tokens in (1, 32, 1024):
        key, value = torch.randn(2, tokens, KV_HEADS, HEAD_SIZE).to(dtype).unbind(0)
        yield f"{tokens} tokens", (key, value, cache[0], cache[1], torch.randperm(2048)[:tokens]), None


def _heads_linear(dtype: torch.dtype) -> Iterator[Case]:
    for inputs, outputs in ((NOPE, LATENT), (LATENT, VALUE)):
        weight = (torch.randn(MLA_HEADS, outputs, inputs) / inputs**0.5).to(dtype)
        packed = pack_heads(weight)
        for tokens in (1, 8, 32, 256):
            x = torch.randn(tokens, MLA_HEADS, inputs).to(dtype)
            plain = functools.partial(torch.bmm, x.transpose(0, 1), weight.transpose(1, 2))
            yield f"{tokens} tokens, {inputs}->{outputs}", (x, packed, inputs, outputs), plain


def _latent_attention(dtype: torch.dtype) -> Iterator[Case]:
    batches = {
        "1 decode at 128": [(1, 128)],
        "1 decode at 4096": [(1, 4096)],
        "1 decode at 8192": [(1, 8192)],
        "32 decodes at 512": [(1, 512)] * 32,
        "32 after a prefix of 992": [(32, 1024)],
    }
    width = LATENT + ROTARY
    for label, rows in batches.items():
        query_len, length = rows[0]
        mask = None if query_len == 1 else torch.ones(query_len, length, dtype=torch.bool).tril(length - query_len)
        for heads in (MLA_HEADS, 128):
            problem = make_latent_problem(
                dtype, rows, num_heads=heads, latent_width=LATENT, rotary_width=ROTARY, block_size=32
            )
            query = torch.randn(len(rows), heads, query_len, width).to(dtype)
            key = torch.randn(len(rows), 1, length, width).to(dtype)
            sdpa = torch.nn.functional.scaled_dot_product_attention
            plain = functools.partial(sdpa, query, key, key[..., :LATENT], mask, enable_gqa=True)
            scale = (NOPE + ROTARY) ** -0.5
            yield f"{label}, {heads} heads", (*problem, scale, LATENT), plain
            cache, *scales = latent_bytes(problem[1], LATENT, torch.int8, has_scales=True)
            in_bytes = (problem[0], cache, *problem[2:], scale, LATENT, *scales)
            yield f"{label}, {heads} heads, int8 cache", in_bytes, plain


def _expanded_attention(dtype: torch.dtype) -> Iterator[Case]:
    """Compared with `linear` and attention to its results."""
    weight = (torch.randn(MLA_HEADS, NOPE + VALUE, LATENT) / LATENT**0.5).to(dtype)
    packed = pack_heads(weight[:, :NOPE]), pack_heads(weight[:, NOPE:])

    def expand(query: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        both = torch.nn.functional.linear(rows[:, :LATENT], weight.flatten(0, 1)).view(len(rows), MLA_HEADS, -1)
        rotary = rows[:, None, LATENT:].expand(-1, MLA_HEADS, -1)
        keys, values = torch.cat([both[..., :NOPE], rotary], dim=-1), both[..., NOPE:]
        heads = [x.transpose(0, 1).unsqueeze(0) for x in (query, keys, values)]
        return torch.nn.functional.scaled_dot_product_attention(*heads, mask)

    for query_len, length in ((128, 128), (1024, 1024), (256, 2048)):
        query, cache, *step = make_latent_problem(
            dtype, [(query_len, length)], num_heads=MLA_HEADS, latent_width=LATENT, rotary_width=ROTARY,
            block_size=32, query_width=NOPE + ROTARY,
        )  # fmt: skip
        mask = torch.ones(query_len, length, dtype=torch.bool).tril(length - query_len)
        plain = functools.partial(expand, query, torch.randn(length, LATENT + ROTARY).to(dtype), mask)
        out = torch.empty(query_len, MLA_HEADS, VALUE, dtype=dtype)
        yield f"{query_len} tokens of {length}", (query, cache, *packed, *step, (NOPE + ROTARY) ** -0.5, out), plain


CASES: dict[str, Callable[[torch.dtype], Iterator[Case]]] = {
    "rms_norm": _norm,
    "fused_add_rms_norm": _fused_add_rms_norm,
    "layer_norm": _layer_norm,
    "rotary_embedding": _rotary,
    "silu_and_mul": _silu,
    "gelu_and_mul": _gelu,
    "packed_linear": _linear,
    "quantized_linear": _quantized_linear,
    "int8_linear": _int8_linear,
    "experts_mlp": _experts,
    "apply_penalties": _penalties,
    "sample_tokens": _sample,
    "paged_attention": _attention,
    "store_kv": _store_kv,
    "heads_linear": _heads_linear,
    "latent_attention": _latent_attention,
    "expanded_attention": _expanded_attention,
}


def _largest_input(spec: registry.OpSpec, dtype: torch.dtype) -> Iterator[Case]:
    """The largest sample of an op that has no cases here."""

    def size(arguments: Arguments) -> int:
        return sum(argument.numel() for argument in arguments if isinstance(argument, torch.Tensor))

    yield "largest test input", max(spec.inputs(dtype), key=size), None


def compare(kernel: Callable[[], object], plain: Callable[[], object], budget_s: float) -> tuple[float, float]:
    """Median seconds of both, in turns for about `budget_s`, at least five calls of each.

    A turn is several calls, and its first ones do not count: each uses threads of its own, and those of the other may
    still wait for work on the cores.
    """
    times: tuple[list[float], list[float]] = ([], [])
    deadline = time.perf_counter() + budget_s
    while len(times[0]) < 5 or time.perf_counter() < deadline:
        for call, taken in ((kernel, times[0]), (plain, times[1])):
            start = time.perf_counter()
            call()
            while time.perf_counter() < start + _SETTLE_S:
                call()
            taken.append(seconds_of(call))
            while time.perf_counter() < start + _TURN_S:
                taken.append(seconds_of(call))
    return statistics.median(times[0]), statistics.median(times[1])


def run(names: list[str], dtype: torch.dtype, budget_s: float, parts: Sequence[str] = ("",)) -> list[Result]:
    """Measures ops in `dtype`, or in the first dtype that an op supports; cases with one of `parts` in the name."""
    results = []
    progress = tqdm(names, unit="op", disable=not sys.stderr.isatty())
    for name in progress:
        progress.set_postfix_str(name)
        spec = registry.OPS[name]
        op = getattr(torch.ops.ascend_vllm, name).default
        used = dtype if dtype in spec.dtypes else spec.dtypes[0]
        cases = CASES[name](used) if name in CASES else _largest_input(spec, used)
        for label, arguments, rival in cases:
            if not any(part in label for part in parts):
                continue
            plain = rival or functools.partial(spec.reference, *arguments)
            kernel_s, torch_s = compare(functools.partial(op, *arguments), plain, budget_s)
            isa = native.cpu_isa() or "reference"
            row = Result(
                name, label, str(used).removeprefix("torch."), isa, torch.get_num_threads(), 1e6 * kernel_s,
                1e6 * torch_s, torch_s / kernel_s,
            )  # fmt: skip
            results.append(row)
            tqdm.write(
                f"{row.op:20} {row.case:28} {row.dtype:9} {row.kernel_us:10.1f} us  torch {row.torch_us:10.1f} us"
                f"  ratio {row.ratio:6.2f}"
            )
    return results


def probe_kernels(dtype: torch.dtype) -> None:
    """Prints the measurements by which a server chooses instruction sets, of plain and of all quantized products."""
    isas = [isa for isa in native.available_cpu_isas() if isa != "scalar"]
    print(
        f"{'us, best of several calls':26}" + "".join(f"{isa:>14}" for isa in isas) + "  chosen        by the table"
    )
    for product in (None, *native.QUANTIZED_PRODUCTS):
        possible = kernel_choice.families(dtype, product)
        used = kernel_choice.candidates(possible)
        start = time.perf_counter()
        timings = kernel_choice.measure(dtype, used, product)
        seconds = time.perf_counter() - start
        table = kernel_choice.by_table(used, product)
        choice = kernel_choice.choose(timings, table, possible)
        for name, calls in timings.items():
            times = "".join(f"{1e6 * min(calls[isa]):14.1f}" if isa in calls else f"{'':14}" for isa in isas)
            print(f"{name:26}{times}  {choice[name]:14}{table[name]}")
        print(f"measured in {1e3 * seconds:.0f} ms")


def main() -> None:
    """Parses the command line and prints the table."""
    native.import_op_modules()
    parser = argparse.ArgumentParser(description="Microbenchmark of the ops against plain torch.")
    parser.add_argument("--op", nargs="+", choices=sorted(registry.OPS), default=sorted(registry.OPS))
    parser.add_argument("--case", nargs="+", default=[""], help="only cases with one of these in their names")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--isa", help="instruction set; default: the best of the machine")
    parser.add_argument("--threads", type=int, help="default: as torch chooses")
    parser.add_argument("--budget", type=float, default=0.3, help="seconds per case; default %(default)s")
    parser.add_argument("--json", type=pathlib.Path, help="also write the results here")
    parser.add_argument("--kernel-probe", action="store_true", help="print the measurement of the kernels' choice")
    args = parser.parse_args()
    if args.kernel_probe:
        probe_kernels(getattr(torch, args.dtype))
        return
    if args.isa:
        native.set_cpu_isa(args.isa)
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    with torch.inference_mode():
        results = run(args.op, getattr(torch, args.dtype), args.budget, args.case)
    if args.json:
        args.json.write_text(json.dumps([dataclasses.asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
