"""Metrics: names, numbers, and the log line."""

from __future__ import annotations

import logging
import time

import msgspec
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ascend_vllm.config.cache import kv_cache_specs
from ascend_vllm.config.lora import LoRAConfig
from ascend_vllm.engine.metrics import EngineMetrics, Histogram
from ascend_vllm.engine.output_processor import OutputQueue
from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.sampling_params import RequestOutputKind, SamplingParams
from ascend_vllm.types.messages import FinishReason, SchedulerStats
from tests.engine.engine_for_tests import FakeEngine, make_config

LABELS = {"model_name": "tiny", "engine": "0"}


def samples(metrics: EngineMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Everything a scraper sees: (name, labels other than the constant ones) → value."""
    text = generate_latest(metrics.registry).decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert not sample.name.startswith("vllm:") or LABELS.items() <= sample.labels.items()
            rest = tuple(sorted(item for item in sample.labels.items() if item not in LABELS.items()))
            found[sample.name, rest] = sample.value
    return found


@pytest.fixture
def metrics(byte_level: Tokenizer) -> EngineMetrics:
    """After three requests: one of two tokens, one aborted, one stopped in its first token."""
    engine = FakeEngine(byte_level)
    for request_id in ("a", "b", "c"):
        engine.add(SamplingParams(max_tokens=5), request_id, {"prompt_token_ids": [5, 6, 7]}, arrival_time=10.0)
    engine.give([8], "a", now=10.03, first_scheduled_time=10.02)
    engine.give([9], "a", now=10.05, finish_reason=FinishReason.LENGTH)
    engine.output.abort("b", engine.stats)
    engine.give([8], "c", now=13.0, first_scheduled_time=12.0, finish_reason=FinishReason.STOP)
    metrics = EngineMetrics(make_config(max_model_len=64))
    metrics.set_num_blocks(17, 5)
    scheduler = SchedulerStats(2, 3, 0.25, 3, num_prompt_tokens=6, num_generation_tokens=3)
    scheduler.num_swapped, scheduler.cpu_cache_usage = 2, 0.4
    scheduler.num_prefix_queries, scheduler.num_prefix_hits = 200, 50
    metrics.record(scheduler, engine.stats)
    metrics.count_rejection()
    return metrics


def test_numbers(metrics: EngineMetrics) -> None:
    found = samples(metrics)
    expected = {
        "num_requests_running": 2,
        "num_requests_waiting": 1,
        "num_requests_swapped": 2,
        "gpu_cache_usage_perc": 0.25,
        "kv_cache_usage_perc": 0.25,
        "cpu_cache_usage_perc": 0.4,
        "gpu_prefix_cache_hit_rate": -1,
        "cpu_prefix_cache_hit_rate": -1,
        "prefix_cache_queries_total": 200,
        "prefix_cache_hits_total": 50,
        "num_preemptions_total": 3,
        "prompt_tokens_total": 6,
        "generation_tokens_total": 3,
        "time_to_first_token_seconds_count": 2,
        "time_per_output_token_seconds_count": 1,
        "inter_token_latency_seconds_count": 1,
        "e2e_request_latency_seconds_count": 3,
        "request_queue_time_seconds_count": 2,
        "request_prompt_tokens_sum": 9,
        "request_generation_tokens_sum": 3,
        "request_params_n_count": 3,
        "request_params_max_tokens_sum": 15,
        "iteration_tokens_total_sum": 9,
    }
    assert {name: found[f"vllm:{name}", ()] for name in expected} == expected
    assert found["vllm:time_to_first_token_seconds_sum", ()] == pytest.approx(3.03)
    assert found["vllm:request_queue_time_seconds_sum", ()] == pytest.approx(2.02)
    assert found["vllm:inter_token_latency_seconds_sum", ()] == pytest.approx(0.02)
    for reason, count in (("length", 1), ("abort", 1), ("stop", 1), ("error", 0)):
        assert found["vllm:request_success_total", (("finished_reason", reason),)] == count
    assert found["vllm:admission_rejections_total", (("reason", "max_num_queued_reqs"),)] == 1
    assert found["vllm:admission_rejections_total", (("reason", "queue_timeout"),)] == 0


def test_requests_that_waited_too_long_are_rejections(byte_level: Tokenizer) -> None:
    engine = FakeEngine(byte_level)
    for request_id in ("late", "wrong"):
        engine.add(SamplingParams(n=2), request_id, queue=OutputQueue(RequestOutputKind.DELTA))
    engine.give([], "late", finish_reason=FinishReason.ERROR, error="late", error_class="EngineBusyError")
    # its second sequence is gone with the first: the request counts once
    engine.give([], "late", 1, finish_reason=FinishReason.ERROR, error="late", error_class="EngineBusyError")
    engine.give([], "wrong", finish_reason=FinishReason.ERROR, error="wrong")
    metrics = EngineMetrics(make_config())
    metrics.record(None, engine.stats)
    found = samples(metrics)
    assert found["vllm:admission_rejections_total", (("reason", "queue_timeout"),)] == 1
    assert found["vllm:admission_rejections_total", (("reason", "max_num_queued_reqs"),)] == 0
    assert found["vllm:request_success_total", (("finished_reason", "error"),)] == 4


def test_nobody_waits_beside_a_swapped_beam_search(byte_level: Tokenizer) -> None:
    metrics = EngineMetrics(make_config())
    metrics.record(SchedulerStats(1, 1, 0.5, 1, num_swapped=4), FakeEngine(byte_level).stats)
    found = samples(metrics)
    assert (found["vllm:num_requests_waiting", ()], found["vllm:num_requests_swapped", ()]) == (0, 4)


def test_the_hit_rate_of_the_prefix_cache(byte_level: Tokenizer, log: pytest.LogCaptureFixture) -> None:
    config = make_config()
    cache = msgspec.structs.replace(config.cache, enable_prefix_caching=True)
    metrics = EngineMetrics(msgspec.structs.replace(config, cache=cache))
    assert samples(metrics)["vllm:gpu_prefix_cache_hit_rate", ()] == 0
    stats = SchedulerStats(1, 0, 0.5, 0, num_prefix_queries=160, num_prefix_hits=90)
    metrics.log_if_due(100.0)
    metrics.record(stats, FakeEngine(byte_level).stats)
    found = samples(metrics)
    assert found["vllm:gpu_prefix_cache_hit_rate", ()] == 0.5625
    assert found["vllm:cpu_prefix_cache_hit_rate", ()] == -1
    metrics.log_if_due(105.0)
    assert log.messages[0].endswith(
        "CPU KV cache usage: 0.0%. Prefix cache hit rate: GPU: 56.25%, CPU: 0.00%",
    )
    metrics.set_idle()
    assert samples(metrics)["vllm:gpu_prefix_cache_hit_rate", ()] == 0.5625


def test_buckets(metrics: EngineMetrics) -> None:
    found = samples(metrics)

    def bucket(name: str, bound: str) -> float:
        return found[f"vllm:{name}_bucket", (("le", bound),)]

    assert [bucket("time_to_first_token_seconds", b) for b in ("0.02", "0.04", "2.5", "5.0", "+Inf")] == [
        0,
        1,
        1,
        2,
        2,
    ]
    assert bucket("time_per_output_token_seconds", "0.01") == 0
    assert bucket("time_per_output_token_seconds", "0.025") == 1
    assert [bucket("request_prompt_tokens", b) for b in ("2.0", "5.0", "50.0")] == [0, 3, 3]
    assert ("vllm:request_prompt_tokens_bucket", (("le", "100.0"),)) not in found  # longer than the model


def test_a_value_on_a_bound_belongs_below_it() -> None:
    histogram = Histogram("h", "", [1, 2])
    for value in (1, 1.5, 2, 3):
        histogram.observe(value)
    histogram.observe(0.5, count=3)
    assert histogram.samples() == ([("1.0", 4.0), ("2.0", 6.0), ("+Inf", 7.0)], 9.0)


def test_cache_config_info(metrics: EngineMetrics) -> None:
    (labels,) = [dict(rest) for name, rest in samples(metrics) if name == "vllm:cache_config_info"]
    assert labels["num_gpu_blocks"] == "17"
    assert labels["num_cpu_blocks"] == "5"
    assert labels["block_size"] == "16"
    assert labels["num_gpu_blocks_override"] == "None"
    assert labels["swap_space_bytes"] == str(4 * 2**30)
    config = make_config(max_model_len=64)
    specs = kv_cache_specs(config.model, config.cache)
    assert int(labels["bytes_per_token"]) == sum(spec.block_bytes for spec in specs) // 16 > 0


def test_the_process_is_measured_too(metrics: EngineMetrics) -> None:
    names = {name for name, _ in samples(metrics)}
    assert {"process_resident_memory_bytes", "python_gc_collections_total", "python_info"} <= names
    assert not any(name.endswith("_created") and name.startswith("vllm:") for name in names)


def test_engines_have_registries_of_their_own(metrics: EngineMetrics) -> None:
    assert samples(EngineMetrics(make_config()))["vllm:generation_tokens_total", ()] == 0


def test_an_idle_engine_runs_nothing(metrics: EngineMetrics) -> None:
    metrics.set_idle()
    found = samples(metrics)
    assert found["vllm:num_requests_running", ()] == found["vllm:kv_cache_usage_perc", ()] == 0
    assert found["vllm:num_requests_waiting", ()] == found["vllm:num_requests_swapped", ()] == 0
    assert found["vllm:cpu_cache_usage_perc", ()] == 0
    assert found["vllm:num_preemptions_total", ()] == 3
    assert found["vllm:prefix_cache_hits_total", ()] == 50


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    # the package's logger does not propagate
    logging.getLogger("ascend_vllm").addHandler(caplog.handler)
    caplog.set_level(logging.INFO)
    yield caplog
    logging.getLogger("ascend_vllm").removeHandler(caplog.handler)


def test_the_log_line(byte_level: Tokenizer, log: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(byte_level)
    engine.add(SamplingParams(), prompt={"prompt_token_ids": [5] * 20})
    metrics = EngineMetrics(make_config())
    metrics.log_if_due(100.0)
    engine.give([5] * 30, now=11.0)
    metrics.record(SchedulerStats(1, 5, 0.125, 0, num_swapped=3, cpu_cache_usage=0.5), engine.stats)
    for now in (104.9, 105.0, 109.0):
        metrics.log_if_due(now)
    assert log.messages == [
        "Avg prompt throughput: 4.0 tokens/s, Avg generation throughput: 6.0 tokens/s, Running: 1 reqs, "
        "Swapped: 3 reqs, Pending: 2 reqs, GPU KV cache usage: 12.5%, CPU KV cache usage: 50.0%."
    ]
    found = samples(metrics)
    assert found["vllm:avg_generation_throughput_toks_per_s", ()] == 6.0
    assert found["vllm:avg_prompt_throughput_toks_per_s", ()] == 4.0
    metrics.set_idle()
    for now in (111.0, 117.0, 123.0):
        metrics.log_if_due(now)
    assert len(log.messages) == 2  # one line of zeros, then silence
    assert "Running: 0 reqs" in log.messages[1]


def test_lora_adapters(byte_level: Tokenizer, log: pytest.LogCaptureFixture) -> None:
    assert not [name for name, _ in samples(EngineMetrics(make_config())) if "lora" in name]
    metrics = EngineMetrics(msgspec.structs.replace(make_config(), lora=LoRAConfig(max_loras=4)))
    metrics.log_if_due(100.0)
    before = time.time()
    stats = SchedulerStats(2, 1, 0.5, 0, running_adapters=["sql", "poems"], waiting_adapters=["jokes"])
    metrics.record(stats, FakeEngine(byte_level).stats)
    (found,) = [(dict(rest), value) for (name, rest), value in samples(metrics).items() if "lora" in name]
    assert found[0] == {
        "max_lora": "4",
        "running_lora_adapters": "sql,poems",
        "waiting_lora_adapters": "jokes",
    }
    assert before <= found[1] <= time.time()
    metrics.log_if_due(105.0)
    assert log.messages[0].endswith(" LoRA adapters running: sql, poems, waiting: jokes.")
    metrics.set_idle()
    (labels,) = [dict(rest) for name, rest in samples(metrics) if "lora" in name]
    assert labels["running_lora_adapters"] == labels["waiting_lora_adapters"] == ""


def test_statistics_can_be_turned_off(byte_level: Tokenizer, log: pytest.LogCaptureFixture) -> None:
    metrics = EngineMetrics(make_config(log_stats=False))
    metrics.record(SchedulerStats(1, 2, 0.125, 0), FakeEngine(byte_level).stats)
    for now in (100.0, 110.0, 120.0):
        metrics.log_if_due(now)
    assert log.messages == []
    names = {name for name, _ in samples(metrics)}
    assert not any(name.startswith("vllm:") for name in names)
    assert "python_info" in names
