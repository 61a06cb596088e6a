"""The engine core: utilities, audits, failures, the size of the KV cache."""

from __future__ import annotations

import inspect
import logging

import msgspec
import pytest

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.core.engine_core import EngineCore
from ascend_vllm.errors import ConfigError, RequestError
from ascend_vllm.executor.base import EXECUTORS, check_kv_cache_size, create_executor
from ascend_vllm.types.controls import CONTROLS
from ascend_vllm.types.messages import FinishReason
from tests.core.memory_executor import MemoryExecutor, assert_all_free, make_config, make_core, make_request, run


def test_idle_core_has_nothing_to_do() -> None:
    core, executor = make_core()
    assert not core.has_unfinished()
    assert core.step().outputs == []
    assert executor.steps == []


def test_start_logs_blocks_and_concurrency(package_log: pytest.LogCaptureFixture) -> None:
    package_log.set_level(logging.DEBUG, "ascend_vllm")
    make_core(num_blocks=24, block_size=4, max_model_len=64)
    assert "24 blocks of 4 tokens. Maximum concurrency for 64 tokens per request: 1.50x" in package_log.text


def test_utilities() -> None:
    core, _ = make_core(num_blocks=8, block_size=4, max_num_seqs=2)
    core.add_request(make_request("a", 6))
    core.add_request(make_request("b", 3))
    core.add_request(make_request("c", 3))
    core.step()
    assert core.call_utility("audit", []) == {
        "num_blocks": 8,
        "num_free_blocks": 5,
        "num_slots": 2,
        "num_free_slots": 0,
        "num_running": 2,
        "num_waiting": 1,
        "blocks_by_request": {"a": 2, "b": 1},
        "violations": [],
    }
    assert core.call_utility("stats", []) == {
        "num_running": 2,
        "num_waiting": 1,
        "kv_cache_usage": 0.375,
        "num_preemptions": 0,
        "num_prompt_tokens": 9,
        "num_generation_tokens": 0,
        "num_swapped": 0,
        "cpu_cache_usage": 0.0,
        "num_prefix_queries": 0,
        "num_prefix_hits": 0,
        "drafts": None,
        "running_adapters": [],
        "waiting_adapters": [],
    }
    assert core.call_utility("check_health", []) is None
    msgspec.msgpack.encode([core.audit(), core.stats()])
    with pytest.raises(RequestError, match=r"unknown utility 'shutdown'; there are audit, stats, check_health"):
        core.call_utility("shutdown", [])


def test_controls_take_the_arguments_that_their_table_names() -> None:
    core, _ = make_core()
    for name, control in CONTROLS.items():
        assert tuple(inspect.signature(core._controls[name]).parameters) == control.arguments, name


def test_audit_finds_lost_slots_and_strays() -> None:
    core, _ = make_core()
    core.add_request(make_request("a", 3))
    core.step()
    scheduler = core._scheduler
    slot = scheduler.rows.free_slots.pop()
    assert core.audit()["violations"] == ["a slot is lost or taken twice"]
    scheduler.rows.free_slots.append(slot)
    running = scheduler.rows.running.pop()
    violations = core.audit()["violations"]
    assert violations == [
        "the running requests are not those in slots",
        "a request neither runs nor waits, or does both",
    ]
    scheduler.rows.running.append(running)
    assert core.audit()["violations"] == []


def test_lost_blocks_are_noticed_when_idle(package_log: pytest.LogCaptureFixture) -> None:
    core, _ = make_core()
    core.add_request(make_request("a", 3))
    run(core)
    assert "lost" not in package_log.text
    core._scheduler.kv_cache.pool.allocate(1)
    core.add_request(make_request("b", 3))
    while core.has_unfinished():
        core.step()
    assert "Blocks or slots are lost" in package_log.text
    assert "block 0 has 1 references and 0 owners" in package_log.text


def test_failing_step_raises_and_all_requests_can_be_failed() -> None:
    core, executor = make_core(max_num_seqs=2)
    for name in "abc":
        core.add_request(make_request(name, 3))
    core.step()
    executor.fail_next = RuntimeError("the device is gone")
    with pytest.raises(RuntimeError, match="the device is gone"):
        core.step()
    outputs = core.fail_requests("sorry").outputs
    assert {(output.request_id, output.finish_reason, output.error) for output in outputs} == {
        (name, FinishReason.ERROR, "sorry") for name in "abc"
    }
    assert not core.has_unfinished()
    assert_all_free(core)


def test_shutdown_reaches_the_executor() -> None:
    core, executor = make_core()
    core.shutdown()
    assert executor.is_shut_down


def test_kv_cache_without_blocks() -> None:
    with pytest.raises(ConfigError, match="No available memory for the cache blocks"):
        check_kv_cache_size(0, make_config())


def test_kv_cache_smaller_than_a_sequence() -> None:
    config = make_config(block_size=4, max_model_len=64)
    check_kv_cache_size(16, config)
    text = (
        r"The model's max seq len \(64\) is larger than the maximum number of tokens that can be stored in KV "
        r"cache \(60\). Try increasing `gpu_memory_utilization` or decreasing `max_model_len`.*VLLM_CPU_KVCACHE_SPACE"
    )
    with pytest.raises(ConfigError, match=text):
        check_kv_cache_size(15, config)


def test_unknown_executor_is_named() -> None:
    config = make_config()
    config = msgspec.structs.replace(
        config, parallel=msgspec.structs.replace(config.parallel, distributed_executor_backend="x")
    )
    with pytest.raises(
        ConfigError, match=r"Unrecognized distributed executor backend x\. Supported values are 'uni'"
    ):
        create_executor(config)


class TwentyBlocks(MemoryExecutor):
    """An executor that is made from the configuration alone, as the table requires."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, num_blocks=20)


def test_executor_table_names_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXECUTORS, "hash", "tests.core.test_engine_core:TwentyBlocks")
    config = make_config()
    config = msgspec.structs.replace(
        config, parallel=msgspec.structs.replace(config.parallel, distributed_executor_backend="hash")
    )
    core = EngineCore(config, create_executor(config))
    assert core.num_blocks == 20
