"""Start-up of a worker: memory, backend, logs, refusals."""

from __future__ import annotations

import logging

import psutil
import pytest
import torch

from ascend_vllm.attention.backend import AttentionSpec, LatentSpec
from ascend_vllm.errors import ConfigError
from ascend_vllm.layers.attention import Attention
from ascend_vllm.platforms import cpu
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.kv_cache import LATENT, KVCachePlan
from ascend_vllm.types.step import MoveKind, SchedulerOutput
from ascend_vllm.worker.plugins import ATTENTION_BACKENDS, select_attention_backend
from ascend_vllm.worker.worker import Worker
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import GREEDY, Driver, generate, make_config, make_prompt

# keys and values of 3 layers of 2 KV heads of 16 float32 each, 16 tokens a block
BLOCK_BYTES = 2 * 3 * 2 * 16 * 4 * 16


def loaded_with(**options: object) -> Worker:
    worker = Worker(make_config(tiny_model("qwen2"), **{"num_gpu_blocks_override": None, **options}))
    worker.load_model()
    return worker


@pytest.fixture
def loaded() -> Worker:
    return loaded_with()


def test_blocks_fill_the_size_asked_for() -> None:
    assert loaded_with(kv_cache_memory_bytes=100 * BLOCK_BYTES - 1).determine_num_blocks() == 99


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_a_block_costs_what_its_tokens_cost(block_size: int) -> None:
    options = {
        "block_size": block_size,
        "kv_cache_memory_bytes": 64 * BLOCK_BYTES,
        "swap_space_gib": BLOCK_BYTES / 2**24,
    }
    worker = loaded_with(**options)
    assert worker.determine_num_blocks() == worker.determine_num_cpu_blocks() == 64 * 16 // block_size


def test_an_override_decides() -> None:
    assert loaded_with(num_gpu_blocks_override=7, kv_cache_memory_bytes=BLOCK_BYTES).determine_num_blocks() == 7


def test_a_tiny_model_takes_no_more_than_its_slots_can_fill(loaded: Worker) -> None:
    assert loaded.determine_num_blocks() == 16 * 25


def test_kept_prefixes_may_use_all_of_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "available_memory_bytes", lambda: 4 * 10_000 * BLOCK_BYTES)
    assert loaded_with(enable_prefix_caching=True).determine_num_blocks() == 10_000


def test_the_swap_pool_has_the_blocks_that_fit_its_size() -> None:
    assert loaded_with(swap_space_gib=100 * BLOCK_BYTES / 2**30).determine_num_cpu_blocks() == 100
    assert loaded_with(swap_space_gib=(100 * BLOCK_BYTES - 1) / 2**30).determine_num_cpu_blocks() == 99


@pytest.mark.parametrize("mode", [None, "swap"])
def test_without_swap_space_there_is_no_pool(mode: str | None) -> None:
    assert loaded_with(swap_space_gib=0.0, preemption_mode=mode).determine_num_cpu_blocks() == 0


def test_a_pool_that_nothing_can_be_swapped_to_is_not_made() -> None:
    assert loaded_with(swap_space_gib=4.0, preemption_mode="recompute").determine_num_cpu_blocks() == 0


def test_a_swap_pool_takes_memory_when_it_is_written() -> None:
    worker = loaded_with(num_gpu_blocks_override=4, swap_space_gib=2.0)
    before = resident_bytes()
    num_cpu_blocks = worker.determine_num_cpu_blocks()
    worker.initialize_cache(4, num_cpu_blocks)
    last = num_cpu_blocks - 1
    worker.execute_model(SchedulerOutput(0, [], [], [], [], [], block_moves=[(MoveKind.SWAP_OUT, 1, last)]))
    assert resident_bytes() - before < 1 << 28


def test_more_swap_space_than_memory_names_the_flag(loaded: Worker) -> None:
    with pytest.raises(ConfigError, match=r"swap pool .*--swap-space"):
        loaded.initialize_cache(4, (1 << 46) // BLOCK_BYTES)


def test_a_row_comes_back_from_the_pool_as_it_went() -> None:
    """Its blocks are others' in between, and it returns to blocks and a slot that were not its own."""
    worker = loaded_with(num_gpu_blocks_override=8, swap_space_gib=10 * BLOCK_BYTES / 2**30)
    worker.initialize_cache(8, worker.determine_num_cpu_blocks())
    params = SamplingParams(temperature=1.0, repetition_penalty=1.2)
    prompt = make_prompt(40)
    with Driver(worker) as driver:
        driver.free_blocks = list(range(8))
        driver.add("row", prompt, params, seed=6)
        driver.steps(20)
        expected = driver.output("row")
    with Driver(worker) as driver:
        driver.free_blocks = list(range(8))
        driver.add("row", prompt, params, seed=6)
        driver.steps(5)
        gone = driver.swap_out("row", cpu_blocks=[9, 2, 5])
        driver.add("other", make_prompt(100), GREEDY)
        driver.step()
        driver.free("other")
        driver.add("newcomer", make_prompt(3), GREEDY)
        driver.swap_in("row", gone, params, cpu_blocks=[9, 2, 5], seed=6)
        driver.steps(15)
        assert driver.output("row") == expected


def test_no_room_for_a_block_names_the_flags(monkeypatch: pytest.MonkeyPatch, loaded: Worker) -> None:
    monkeypatch.setattr(cpu, "available_memory_bytes", lambda: BLOCK_BYTES)
    with pytest.raises(ConfigError, match=r"--kv-cache-memory-bytes or VLLM_CPU_KVCACHE_SPACE higher"):
        loaded.determine_num_blocks()


def test_a_dtype_the_device_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="--dtype float64 is not available on --device cpu"):
        Worker(make_config(tiny_model("qwen2"), dtype="float64"))


def test_a_cache_dtype_of_its_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-dtype bfloat16 differs"):
        Worker(make_config(tiny_model("qwen2"), cache_dtype="bfloat16"))
    Worker(make_config(tiny_model("qwen2"), cache_dtype="float32"))


def test_an_npu_is_refused_with_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="--device npu"):
        Worker(make_config(tiny_model("qwen2"), device="npu", dtype="bfloat16"))


def test_order_of_calls_is_explained(loaded: Worker) -> None:
    with pytest.raises(RuntimeError, match="initialize_cache first"):
        loaded.execute_model(SchedulerOutput(0, [], [], [], [], []))
    with pytest.raises(RuntimeError, match="load_model first"):
        Worker(make_config(tiny_model("qwen2"), num_gpu_blocks_override=None)).determine_num_blocks()


def test_the_log_says_what_runs_on_references(package_log: pytest.LogCaptureFixture) -> None:
    package_log.set_level(logging.DEBUG, "ascend_vllm")
    worker = loaded_with(num_gpu_blocks_override=4)
    worker.initialize_cache(4)
    assert "ops run on their reference on cpu" in package_log.text
    assert "attention backend cpu" in package_log.text
    # keys and values of two heads of 16 numbers in float32
    assert "KV cache: 4 blocks of 16 tokens, 768 bytes per token in 3 layers, 0.00 GiB; " in package_log.text
    assert "Warmed up" in package_log.text


@pytest.mark.parametrize("num_blocks", [1, 5])
def test_warming_up_leaves_no_trace(num_blocks: int) -> None:
    """Also when the cache is smaller than what one would like to warm up with."""
    worker = loaded_with(num_gpu_blocks_override=num_blocks)
    worker.initialize_cache(num_blocks)
    with Driver(worker) as driver:
        driver.free_blocks = list(range(num_blocks))
        driver.add("row", make_prompt(9), SamplingParams(temperature=0.0))
        driver.steps(5)
        found = driver.output("row")
    big = loaded_with(num_gpu_blocks_override=256)
    big.initialize_cache(256)
    assert found == generate(big, make_prompt(9), GREEDY, 5)


def test_after_shutdown_the_worker_holds_nothing(loaded: Worker) -> None:
    loaded.initialize_cache(4)
    loaded.shutdown()
    with pytest.raises(RuntimeError):
        loaded.execute_model(SchedulerOutput(0, [], [], [], [], []))


def test_all_backends_in_the_table_can_be_imported() -> None:
    layer = Attention(AttentionSpec(4, 2, 64, 0.125), 0, torch.float16)
    for device, paths in ATTENTION_BACKENDS.items():
        if paths:
            select_attention_backend(device, [layer], torch.float16, 64)


def test_a_refusal_carries_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    fine, odd = (Attention(AttentionSpec(4, 2, size, 0.125), 0, torch.float32) for size in (64, 63))
    with pytest.raises(ConfigError, match=r"no attention backend of device 'cpu' .*\(cpu: head size 63"):
        select_attention_backend("cpu", [fine, odd], torch.float32, 64)
    with pytest.raises(ConfigError, match=r"\(ascend: dtype torch.float32 is not one of"):
        select_attention_backend("npu", [fine], torch.float32, 128)
    monkeypatch.setitem(ATTENTION_BACKENDS, "npu", ())
    with pytest.raises(ConfigError, match="it has none"):
        select_attention_backend("npu", [fine], torch.float16, 128)


def test_latent_attention_has_a_backend_of_its_own_on_npus() -> None:
    def layer(width: int) -> Attention:
        spec = AttentionSpec(16, 1, width + 64, 0.125, latent=LatentSpec(width, 64, 128, 128))
        plan = KVCachePlan(LATENT, num_vectors=1, num_heads=1, width=width + 64)
        return Attention(spec, 0, torch.float16, plan)

    assert select_attention_backend("npu", [layer(512)], torch.float16, 128).name == "ascend_latent"
    with pytest.raises(ConfigError, match=r"\(ascend_latent: its operators need kv_lora_rank 512.* has 256, 64, 128"):
        select_attention_backend("npu", [layer(256)], torch.float16, 128)


def resident_bytes() -> int:
    """Memory of this process that is really there."""
    return psutil.Process().memory_info().rss


def test_the_cache_is_memory_the_machine_has_not_given_yet() -> None:
    """A big cache costs only what is written to it."""
    before = resident_bytes()
    buffer = cpu.CpuPlatform().allocate(1 << 30, torch.device("cpu"))
    buffer[:100] = 1
    assert buffer[: 1 << 20].sum() == 100
    assert resident_bytes() - before < 1 << 28


def test_more_blocks_than_memory_names_the_flag(loaded: Worker) -> None:
    with pytest.raises(ConfigError, match="--num-gpu-blocks-override"):
        loaded.initialize_cache((1 << 46) // BLOCK_BYTES)
