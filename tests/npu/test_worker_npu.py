"""A worker on a simulated NPU computes what one on the CPU does, and does not wait for the device while it does."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch_npu
from torch.utils._python_dispatch import TorchDispatchMode

from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.config.model import PoolerConfig
from ascend_vllm.pooling_params import PoolingParams
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.step import NewRow, SchedulerOutput
from ascend_vllm.worker.worker import Worker
from tests.npu.processes import last_line, run
from tests.tiny_models import VOCAB_SIZE, tiny_model
from tests.worker.worker_driver import BUSY, GREEDY, Driver, generate, make_config, make_prompt, started_worker

OPTIONS: dict[str, Any] = {"dtype": "float16", "block_size": 64}
LONG, SHORT = make_prompt(150), make_prompt(9, seed=1)
# the default of --swap-space
SWAP_SPACE_GIB = EngineArgs.swap_space
# float16 has 11 bits, and sums are added up in another order
TOLERANCE = 0.06


def worker_on(device: str, model: str = "qwen2", **options: Any) -> Worker:
    return started_worker(tiny_model(model), device=device, **OPTIONS, **options)


def together(worker: Worker, params: SamplingParams, num_steps: int, **row: Any) -> list[list[int]]:
    """What two rows generate side by side."""
    with Driver(worker) as driver:
        driver.add("long", LONG, params, **row)
        driver.add("short", SHORT, params, **row)
        driver.step()
        driver.step(num_steps=num_steps)
        return [driver.output(name) for name in ("long", "short")]


def in_chunks(worker: Worker) -> list[int]:
    with Driver(worker) as driver:
        driver.add("other", SHORT)
        driver.step()
        driver.add("row", LONG)
        for count in (70, 1, 79):
            driver.step({"row": count, "other": 1})
        driver.steps(4)
        return driver.output("row")


def behind_a_cached_prefix(worker: Worker) -> list[int]:
    """A row whose first two blocks another row has computed."""
    with Driver(worker) as driver:
        driver.add("first", LONG)
        driver.step()
        shared = driver.rows["first"].blocks[:2]
        driver.add("second", LONG[:128] + SHORT)
        row = driver.rows["second"]
        row.blocks[:2], row.computed = shared, 128
        new = driver.pending.new_rows[-1]
        new.block_ids[:2], new.num_computed_tokens = shared, 128
        driver.steps(4)
        return driver.output("second")


def forked(worker: Worker) -> list[list[int]]:
    with Driver(worker) as driver:
        driver.add("row", LONG)
        driver.steps(2)
        driver.fork("copy", "row", 17)
        driver.fork("row", "row", 18)
        driver.steps(3)
        return [driver.output(name) for name in ("row", "copy")]


def swapped(worker: Worker) -> list[int]:
    assert worker._cache_size is not None
    last = worker._cache_size.num_cpu_blocks - 1
    cpu_blocks = [last, 0, last // 2]
    with Driver(worker) as driver:
        driver.add("row", LONG)
        driver.step()
        gone = driver.swap_out("row", cpu_blocks)
        driver.add("other", make_prompt(100, seed=3))
        driver.step()
        driver.swap_in("row", gone, GREEDY, cpu_blocks)
        driver.steps(3)
        return driver.output("row")


def constrained(worker: Worker) -> list[int]:
    with Driver(worker) as driver:
        driver.add("row", LONG)
        driver.add("free", SHORT)
        driver.step()
        for number in range(3):
            bits = np.zeros((1, VOCAB_SIZE), np.uint8)
            bits[:, [5 + number, 300]] = 1
            driver.pending.constrained_slots = [driver.rows["row"].slot]
            driver.pending.bitmask = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
            driver.step()
        return driver.output("row") + driver.output("free")


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, **options)


SCENARIOS: dict[str, Callable[[Worker], Any]] = {
    "alone": lambda worker: generate(worker, LONG, GREEDY, 12),
    "several steps at once": lambda worker: together(worker, GREEDY, 8),
    "several steps with a stop id": lambda worker: together(worker, GREEDY, 8, stop_token_ids=range(200)),
    "in chunks": in_chunks,
    "behind a cached prefix": behind_a_cached_prefix,
    "forked": forked,
    "swapped": swapped,
    "constrained": constrained,
    "penalties": lambda worker: together(
        worker, greedy(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2), 6
    ),
    "bias": lambda worker: generate(worker, LONG, greedy(logit_bias={5: 4.0, 6: -3.0}), 5),
    "allowed ids": lambda worker: generate(worker, LONG, greedy(allowed_token_ids=[5, 60, 300]), 5),
    "bad words": lambda worker: generate(worker, LONG, GREEDY, 5, bad_words=[[5], [6, 7]]),
    "min_tokens": lambda worker: generate(worker, LONG, greedy(min_tokens=4), 6, stop_token_ids=range(3, 380)),
    "another family": lambda worker: generate(worker_on(worker._device.type, "opt"), LONG, GREEDY, 4),
    "a window": lambda worker: generate(worker_on(worker._device.type, "qwen2-window"), LONG, GREEDY, 4),
}


@pytest.fixture(scope="module")
def npu() -> Worker:
    """With a swap pool of the size that it has where no flag says another."""
    worker = Worker(make_config(tiny_model("qwen2"), device="npu", swap_space_gib=SWAP_SPACE_GIB, **OPTIONS))
    worker.load_model()
    worker.initialize_cache(256, worker.determine_num_cpu_blocks())
    return worker


@pytest.fixture(scope="module")
def cpu() -> Worker:
    worker = Worker(make_config(tiny_model("qwen2"), **OPTIONS))
    worker.load_model()
    worker.initialize_cache(256, 8)
    return worker


@pytest.mark.parametrize("name", SCENARIOS)
def test_tokens_are_the_cpus(name: str, npu: Worker, cpu: Worker) -> None:
    assert SCENARIOS[name](npu) == SCENARIOS[name](cpu)


def test_the_swap_pool_takes_memory_as_it_is_written(npu: Worker) -> None:
    swapped(npu)
    assert npu._cache_size is not None
    # 3 layers, keys and values of 2 heads of 16 elements in float16
    pool_bytes = npu._cache_size.num_cpu_blocks * 3 * 2 * 2 * 16 * 2 * 64
    assert pool_bytes > 0.99 * SWAP_SPACE_GIB * 2**30
    # with all of it this process would have more than the pool alone
    assert psutil.Process().memory_info().rss < pool_bytes


def test_probabilities_are_the_cpus(npu: Worker, cpu: Worker) -> None:
    found = []
    for worker in (npu, cpu):
        with Driver(worker) as driver:
            driver.add("row", LONG, greedy(logprobs=VOCAB_SIZE, prompt_logprobs=3))
            found.append(driver.step())
    first, second = found
    assert first.logprobs is not None and second.logprobs is not None
    logprobs = [np.zeros(VOCAB_SIZE), np.zeros(VOCAB_SIZE)]
    for output, target in zip(found, logprobs, strict=True):
        target[output.logprobs.token_ids[0, 0, 1:]] = output.logprobs.logprobs[0, 0, 1:]
    np.testing.assert_allclose(*logprobs, atol=TOLERANCE)
    assert first.logprobs.ranks.tolist() == second.logprobs.ranks.tolist()
    prompts = [output.prompt_logprobs[0] for output in found]
    np.testing.assert_allclose(*[prompt.logprobs[:, 0] for prompt in prompts], atol=TOLERANCE)
    assert prompts[0].token_ids[:, 0].tolist() == prompts[1].token_ids[:, 0].tolist() == LONG[1:]


def test_random_tokens_repeat_by_seed_whatever_else_is_in_the_batch(npu: Worker) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.95, top_k=200)
    alone = generate(npu, LONG, params, 8, seed=5)
    assert alone == generate(npu, LONG, params, 8, seed=5)
    assert alone != generate(npu, LONG, params, 8, seed=6)
    with Driver(npu) as driver:
        driver.add("other", SHORT, SamplingParams(temperature=2.0), seed=7)
        driver.step()
        driver.add("row", LONG, params, seed=5)
        driver.step()
        driver.step(num_steps=7)
        assert driver.output("row") == alone


class Copies(TorchDispatchMode):
    """Counts copies from the device to the host; "embedding" stands for a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.embedding.default:
            self.events.append("forward")
        on_host = isinstance(result, torch.Tensor) and result.device.type == "cpu"
        if on_host and any(isinstance(arg, torch.Tensor) and arg.device.type == "npu" for arg in args):
            self.events.append("fetch")
        return result


@contextlib.contextmanager
def watched() -> Iterator[Copies]:
    """Nothing may ask the device for a number (`item`, `nonzero`); fetched tensors are counted."""
    torch_npu.npu.set_sync_debug_mode("error")
    try:
        with Copies() as copies:
            yield copies
    finally:
        torch_npu.npu.set_sync_debug_mode("default")


@pytest.mark.parametrize("params", [GREEDY, BUSY], ids=["greedy", "busy"])
def test_steps_wait_for_nothing_but_the_ids(npu: Worker, params: SamplingParams) -> None:
    with Driver(npu) as driver:
        driver.add("long", LONG, params, stop_token_ids=[3])
        driver.add("short", SHORT, params, bad_words=[[5], [6, 7]])
        with watched() as copies:
            driver.steps(2)
        assert copies.events == ["forward", "fetch"] * 2
        with watched() as copies:
            driver.step(num_steps=4)
        # once for all passes
        assert copies.events == ["forward"] * 4 + ["fetch"]


def test_weights_and_cache_are_on_the_device(npu: Worker) -> None:
    tensors = [value for layer in npu.get_model().layers() for value in vars(layer).values()]
    devices = {value.device.type for value in tensors if isinstance(value, torch.Tensor)}
    assert devices == {"npu"}


def test_the_profiled_cache_leaves_room_for_the_largest_step() -> None:
    """The whole share is given out, and a step that uses all of its budget finds memory beside it.

    The worker has a process of its own, as behind a server: in this one, tensors of other tests may lie in the
    segments that the step wants.
    """
    done = run(sys.executable, "-m", "tests.npu.largest_step")
    assert json.loads(last_line(done)) == {"tokens": 1}


def test_sleep_gives_the_cache_back() -> None:
    options = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 200 << 20, "enable_prefix_caching": True}
    worker = Worker(make_config(tiny_model("qwen2"), device="npu", **(OPTIONS | options)))
    worker.load_model()
    worker.initialize_cache(worker.determine_num_blocks())
    expected = generate(worker, LONG, GREEDY, 4)
    awake = torch_npu.npu.mem_get_info(0)[0]
    worker.sleep(2)
    assert torch_npu.npu.mem_get_info(0)[0] - awake > 190 << 20
    worker.wake_up()
    assert generate(worker, LONG, GREEDY, 4) == expected
    worker.shutdown()


@pytest.mark.parametrize("kind", ["LAST", "CLS", "MEAN", "token"])
def test_pooled_states_are_the_cpus(kind: str) -> None:
    pooler = PoolerConfig(task="embed", convert="embed", seq_pooling_type=kind)
    if kind == "token":
        pooler = PoolerConfig(task="token_embed", convert="embed")
    found = []
    for device in ("npu", "cpu"):
        worker = Worker(make_config(tiny_model("qwen2"), device=device, pooler=pooler, **OPTIONS))
        worker.load_model()
        worker.initialize_cache(8)
        row = NewRow(3, "row", LONG, len(LONG), 0, [4, 2, 5], SamplingParams(), 0, [])
        row.pooling_params = PoolingParams(use_activation=True)
        first = worker.execute_model(SchedulerOutput(0, [], [row], [3], [100], []))
        second = worker.execute_model(SchedulerOutput(1, [], [], [3], [50], []))
        assert first.results == []
        found.append(second.results[0].data)
    np.testing.assert_allclose(*found, atol=TOLERANCE)
