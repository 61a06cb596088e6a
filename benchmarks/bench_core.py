"""Measures the host time of the engine core per decode step, with an executor that computes nothing.

    python benchmarks/bench_core.py [--rows 1 64 256] [--calls 300] [--num-scheduler-steps 1 8] [--json FILE]
    python benchmarks/bench_core.py --ngrams

Everything between two forward passes is real (schedule, diff, update, stop checks, messages, and with
--encode also the msgpack encoding of outputs for the API server); the forward pass is replaced by one that
returns a fixed token, whose time is subtracted. The target is 150 µs + 3 µs per row and scheduler call; with
--num-scheduler-steps K, a call generates K tokens per row.

--ngrams measures the lookup of n-gram drafts instead, of rows with 32k tokens that grow by one token a step. The
target is 20 µs per row.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import time
from concurrent.futures import Future

import msgspec
import numpy as np
from null_device.null_device import NullExecutor

from ascend_vllm.config.arch import ArchConfig
from ascend_vllm.config.cache import CacheConfig
from ascend_vllm.config.engine import DeviceConfig, EngineConfig, ObservabilityConfig, ParallelConfig
from ascend_vllm.config.model import LoadConfig, ModelConfig
from ascend_vllm.config.scheduler import SchedulerConfig
from ascend_vllm.core.engine_core import EngineCore
from ascend_vllm.ops.ngrams import NgramTables
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.messages import EngineCoreRequest
from ascend_vllm.types.step import SchedulerOutput, StepOutput

BLOCK_SIZE = 16
PROMPT_LEN = 128
NGRAM_TOKENS, NGRAM_LENGTHS, NGRAM_DRAFTS, NGRAM_TARGET_US = 32_768, (1, 4), 4, 20


class TimedExecutor(NullExecutor):
    """Adds up how long its own part of a step takes.

    Attributes:
        seconds: the sum since it was last set to 0.
    """

    seconds = 0.0

    def execute_model(self, step: SchedulerOutput) -> Future[StepOutput]:
        start = time.perf_counter()
        future = super().execute_model(step)
        self.seconds += time.perf_counter() - start
        return future


def make_config(
    max_num_seqs: int, max_model_len: int, num_scheduler_steps: int, prefix_caching: bool, overlap: bool
) -> EngineConfig:
    """A configuration; its model is never loaded."""
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    arch = ArchConfig.from_hf(dict.fromkeys(sizes, 1))
    return EngineConfig(
        model=ModelConfig("null", ("null",), "null", "Null", arch, {}, "float32", max_model_len),
        load=LoadConfig(),
        cache=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=prefix_caching),
        scheduler=SchedulerConfig(
            max(max_model_len, max_num_seqs * PROMPT_LEN),
            max_num_seqs,
            max_model_len,
            num_scheduler_steps=num_scheduler_steps,
            async_scheduling=overlap,
        ),
        parallel=ParallelConfig(),
        device=DeviceConfig(),
        observability=ObservabilityConfig(),
    )


def call_times_us(
    num_rows: int, num_calls: int, num_scheduler_steps: int, prefix_caching: bool, overlap: bool, encode: bool
) -> list[float]:
    """Host µs of each of `num_calls` scheduler calls in which `num_rows` rows decode."""
    num_tokens = (num_calls + 4) * num_scheduler_steps
    max_model_len = PROMPT_LEN + num_tokens + 16
    config = make_config(num_rows, max_model_len, num_scheduler_steps, prefix_caching, overlap)
    executor = TimedExecutor(config, num_rows * (max_model_len // BLOCK_SIZE + 1) * 2)
    core = EngineCore(config, executor)
    params = SamplingParams(max_tokens=num_tokens + 8, ignore_eos=True, temperature=0.0)
    for index in range(num_rows):
        prompt = [index] * PROMPT_LEN
        core.add_request(EngineCoreRequest(f"request-{index}", prompt, params, 2, time.monotonic()))
    core.step()
    core.step()
    encoder = msgspec.msgpack.Encoder()
    times = []
    for _ in range(num_calls):
        executor.seconds = 0.0
        start = time.perf_counter()
        outputs = core.step()
        if encode:
            encoder.encode(outputs)
        times.append((time.perf_counter() - start - executor.seconds) * 1e6)
    if len(outputs.outputs) != num_rows:
        raise RuntimeError(f"{len(outputs.outputs)} rows answered, not {num_rows}")
    return times


def ngram_times_us(num_rows: int, num_calls: int) -> list[float]:
    """µs per row of each of `num_calls` lookups; those of whole prompts, which come first, are left out."""
    rng = np.random.default_rng(0)
    token_ids = rng.integers(0, 50_000, (num_rows, NGRAM_TOKENS + num_calls)).astype(np.int32)
    num_tokens, slots = np.full(num_rows, NGRAM_TOKENS), np.arange(num_rows)
    tables = NgramTables(token_ids, num_tokens, *NGRAM_LENGTHS, pads=False)
    tables.drafts(slots, NGRAM_DRAFTS)
    times = []
    for _ in range(num_calls):
        num_tokens += 1
        start = time.perf_counter()
        tables.drafts(slots, NGRAM_DRAFTS)
        times.append((time.perf_counter() - start) * 1e6 / num_rows)
    return times


def print_ngrams(num_rows: list[int], num_calls: int) -> None:
    """Prints a table of `ngram_times_us`."""
    print(f"{'rows':>6} {'median µs/row':>14} {'p90 µs/row':>11} {'target µs':>10}")
    for count in num_rows:
        times = ngram_times_us(count, num_calls)
        median, p90 = statistics.median(times), statistics.quantiles(times, n=10)[-1]
        print(f"{count:>6} {median:>14.1f} {p90:>11.1f} {NGRAM_TARGET_US:>10}")


def main() -> None:
    """Prints a table; writes JSON with --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256], help="running requests")
    parser.add_argument("--calls", type=int, default=300, help="scheduler calls measured for each")
    parser.add_argument("--num-scheduler-steps", type=int, nargs="+", default=[1], help="steps of a scheduler call")
    parser.add_argument("--enable-prefix-caching", action="store_true", help="full blocks are hashed")
    parser.add_argument("--async-scheduling", action="store_true", help="a step is made ahead")
    parser.add_argument("--encode", action="store_true", help="with encoding the outputs as msgpack")
    parser.add_argument("--ngrams", action="store_true", help="measure the lookup of n-gram drafts")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file")
    args = parser.parse_args()
    if args.ngrams:
        print_ngrams(args.rows, args.calls)
        return
    results = []
    print(f"{'rows':>6} {'K':>3} {'median µs':>10} {'p90 µs':>8} {'µs/token':>9} {'target µs':>10}")
    for num_rows in args.rows:
        for steps in args.num_scheduler_steps:
            times = call_times_us(
                num_rows, args.calls, steps, args.enable_prefix_caching, args.async_scheduling, args.encode
            )
            median, p90 = statistics.median(times), statistics.quantiles(times, n=10)[-1]
            target, per_token = 150 + 3 * num_rows, median / num_rows / steps
            print(f"{num_rows:>6} {steps:>3} {median:>10.1f} {p90:>8.1f} {per_token:>9.3f} {target:>10}")
            results.append(
                {
                    "rows": num_rows,
                    "num_scheduler_steps": steps,
                    "median_us": median,
                    "p90_us": p90,
                    "us_per_token": per_token,
                    "target_us": target,
                }
            )
    if args.json:
        settings = {key: value for key, value in vars(args).items() if key != "json"}
        args.json.write_text(json.dumps({"bench": "core", "settings": settings, "results": results}, indent=2))


if __name__ == "__main__":
    main()
