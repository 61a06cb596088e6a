"""Host time of the engine core per decode step, with a device that takes no time.

    python benchmarks/bench_core.py [--rows 1 64 256] [--steps 500] [--json FILE]

Everything between two forward passes is real (schedule, diff, update, stop checks, messages, and with
--encode also the msgpack encoding of what goes to the API server); the forward pass is replaced by one that
answers with a fixed token, and its time is taken out. The target is 150 µs + 3 µs per row.
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

from ascend_vllm.config.cache import CacheConfig
from ascend_vllm.config.engine import DeviceConfig, EngineConfig, ObservabilityConfig, ParallelConfig
from ascend_vllm.config.model import LoadConfig, ModelConfig
from ascend_vllm.config.scheduler import SchedulerConfig
from ascend_vllm.core.engine_core import EngineCore
from ascend_vllm.executor.base import Executor
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.messages import EngineCoreRequest
from ascend_vllm.types.step import KVCacheSize, SchedulerOutput, StepOutput

BLOCK_SIZE = 16
PROMPT_LEN = 128


class NullExecutor(Executor):
    """A device that computes nothing; every row samples token 7. Rows must not be chunks of prompts."""

    def __init__(self, config: EngineConfig, num_blocks: int) -> None:
        super().__init__(config)
        self._num_blocks = num_blocks
        self.seconds = 0.0

    def initialize(self) -> KVCacheSize:
        return KVCacheSize(self._num_blocks)

    def execute_model(self, step: SchedulerOutput) -> Future[StepOutput]:
        start = time.perf_counter()
        future: Future[StepOutput] = Future()
        slots = np.array(step.slots, np.int32)
        future.set_result(StepOutput(step.step_id, slots, np.full((len(slots), 1), 7, np.int64)))
        self.seconds += time.perf_counter() - start
        return future

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


def make_config(max_num_seqs: int, max_model_len: int) -> EngineConfig:
    """A configuration whose model is never loaded."""
    return EngineConfig(
        model=ModelConfig("null", ("null",), "null", "Null", {}, {}, "float32", max_model_len),
        load=LoadConfig(),
        cache=CacheConfig(block_size=BLOCK_SIZE),
        scheduler=SchedulerConfig(max(max_model_len, max_num_seqs * PROMPT_LEN), max_num_seqs, max_model_len),
        parallel=ParallelConfig(),
        device=DeviceConfig(),
        observability=ObservabilityConfig(),
    )


def step_times_us(num_rows: int, num_steps: int, encode: bool) -> list[float]:
    """Host µs of each of `num_steps` steps in which `num_rows` rows decode."""
    max_model_len = PROMPT_LEN + num_steps + 16
    config = make_config(num_rows, max_model_len)
    executor = NullExecutor(config, num_rows * (max_model_len // BLOCK_SIZE + 1) * 2)
    core = EngineCore(config, executor)
    params = SamplingParams(max_tokens=num_steps + 8, ignore_eos=True, temperature=0.0)
    for index in range(num_rows):
        core.add_request(EngineCoreRequest(f"request-{index}", [1] * PROMPT_LEN, params, 2, time.monotonic()))
    core.step()
    encoder = msgspec.msgpack.Encoder()
    times = []
    for _ in range(num_steps):
        executor.seconds = 0.0
        start = time.perf_counter()
        outputs = core.step()
        if encode:
            encoder.encode(outputs)
        times.append((time.perf_counter() - start - executor.seconds) * 1e6)
    if len(outputs.outputs) != num_rows:
        raise RuntimeError(f"{len(outputs.outputs)} rows answered, not {num_rows}")
    return times


def main() -> None:
    """Prints a table, and writes JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256], help="running requests")
    parser.add_argument("--steps", type=int, default=500, help="steps measured for each")
    parser.add_argument("--encode", action="store_true", help="with encoding the outputs as msgpack")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file")
    args = parser.parse_args()
    results = []
    print(f"{'rows':>6} {'median µs':>10} {'p90 µs':>8} {'µs/row':>8} {'target µs':>10}")
    for num_rows in args.rows:
        times = step_times_us(num_rows, args.steps, args.encode)
        median, p90 = statistics.median(times), statistics.quantiles(times, n=10)[-1]
        target = 150 + 3 * num_rows
        print(f"{num_rows:>6} {median:>10.1f} {p90:>8.1f} {median / num_rows:>8.2f} {target:>10}")
        results.append({"rows": num_rows, "median_us": median, "p90_us": p90, "target_us": target})
    if args.json:
        args.json.write_text(json.dumps({"bench": "core", "encode": args.encode, "results": results}, indent=2))


if __name__ == "__main__":
    main()
