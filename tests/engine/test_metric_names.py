"""Every metric that dashboards of vLLM 0.6 and of today look for: name, type, labels and buckets."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ascend_vllm.engine.metrics import EngineMetrics
from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.messages import FinishReason, SchedulerStats
from tests.engine.engine_for_tests import FakeEngine, make_config

_LENGTHS = "1 2 5 10 20 50"  # up to the model's length of 64
_N = "1 2 5 10 20"
# today's vLLM's
_TTFT = ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
_TOKEN = ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80"
_REQUEST = ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
# finer ones, for what takes milliseconds
_FINER = {
    _TTFT: ".0005 .0025 .15",
    _TOKEN: ".0005 .001 .002 .003 .004 .005 .0075",
    _REQUEST: ".0005 .001 .0025 .005 .01 .02 .03 .05 .075 .1 .15 .2",
}

# as scraped → its type
GAUGES = [
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_swapped",
    "gpu_cache_usage_perc",
    "cpu_cache_usage_perc",
    "cpu_prefix_cache_hit_rate",
    "gpu_prefix_cache_hit_rate",
    "avg_prompt_throughput_toks_per_s",
    "avg_generation_throughput_toks_per_s",
    "kv_cache_usage_perc",
]
COUNTERS = [
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "prompt_tokens_cached_total",
]
# (name, type) → label → its values
LABELLED: dict[tuple[str, str], tuple[str, str]] = {
    ("num_requests_waiting_by_reason", "gauge"): ("reason", "capacity deferred"),
    ("engine_sleep_state", "gauge"): ("sleep_state", "awake weights_offloaded discard_all"),
    ("request_success_total", "counter"): ("finished_reason", "stop length abort error repetition"),
    ("prompt_tokens_by_source_total", "counter"): ("source", "local_compute local_cache_hit external_kv_transfer"),
    ("prompt_tokens_cached_by_source_total", "counter"): ("source", "device host p2p disk external_unspecified"),
    ("admission_rejections_total", "counter"): ("reason", "max_num_queued_reqs max_num_queued_tokens queue_timeout"),
}
HISTOGRAMS = {
    "time_to_first_token_seconds": _TTFT,
    "time_per_output_token_seconds": _TOKEN,
    "inter_token_latency_seconds": _TOKEN,
    "request_time_per_output_token_seconds": _TOKEN,
    "e2e_request_latency_seconds": _REQUEST,
    "request_queue_time_seconds": _REQUEST,
    "request_inference_time_seconds": _REQUEST,
    "request_prefill_time_seconds": _REQUEST,
    "request_decode_time_seconds": _REQUEST,
    "request_prompt_tokens": _LENGTHS,
    "request_generation_tokens": _LENGTHS,
    "request_max_num_generation_tokens": _LENGTHS,
    "request_params_max_tokens": _LENGTHS,
    "request_prefill_kv_computed_tokens": _LENGTHS,
    "request_params_n": _N,
    "request_params_best_of": _N,
    "request_num_preemptions": "1 2 3 4 5 10 20",
    "iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
}
# 0.6.3's own, which is finer at its end today: those bounds are all there
BOUNDS_OF_0_6_3 = {
    "time_to_first_token_seconds": ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10",
    "time_per_output_token_seconds": ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5",
    "e2e_request_latency_seconds": "1 2.5 5 10 15 20 30 40 50 60",
}
CACHE_CONFIG_LABELS = [
    "block_size",
    "cache_dtype",
    "cpu_offload_gb",
    "enable_prefix_caching",
    "gpu_memory_utilization",
    "is_attention_free",
    "num_cpu_blocks",
    "num_gpu_blocks",
    "num_gpu_blocks_override",
    "sliding_window",
    "swap_space_bytes",
]

Row = tuple[str, dict[str, str], float]


def scrape(metrics: EngineMetrics) -> dict[str, tuple[str, list[Row]]]:
    """Name as written in the text → type, and samples with their labels but for the model's name and the engine."""
    found: dict[str, tuple[str, list[Row]]] = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        if not family.name.startswith("vllm:"):
            continue
        name = family.name.removeprefix("vllm:") + ("_total" if family.type == "counter" else "")
        rows = []
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("model_name"), labels.pop("engine")) == ("tiny", "0")
            rows.append((sample.name.removeprefix("vllm:"), labels, sample.value))
        found[name] = (family.type, rows)
    return found


@pytest.fixture
def found() -> dict[str, tuple[str, list[Row]]]:
    return scrape(EngineMetrics(make_config(max_model_len=64)))


def test_no_metric_is_missing_and_none_is_unknown(found: dict[str, tuple[str, list[Row]]]) -> None:
    known = {*GAUGES, *COUNTERS, *HISTOGRAMS, *(name for name, _ in LABELLED), "cache_config_info"}
    assert set(found) == known


def test_gauges_and_counters(found: dict[str, tuple[str, list[Row]]]) -> None:
    for names, kind in ((GAUGES, "gauge"), (COUNTERS, "counter")):
        for name in names:
            ((_, labels, _),) = found[name][1]
            assert (found[name][0], labels) == (kind, {}), name
    for (name, kind), (label, values) in LABELLED.items():
        assert found[name][0] == kind
        assert [row[1] for row in found[name][1]] == [{label: value} for value in values.split()], name
    kind, ((_, labels, value),) = found["cache_config_info"]
    assert (kind, sorted(labels), value) == ("gauge", sorted([*CACHE_CONFIG_LABELS, "bytes_per_token"]), 1)


def test_buckets_of_histograms(found: dict[str, tuple[str, list[Row]]]) -> None:
    for name, bounds in HISTOGRAMS.items():
        kind, rows = found[name]
        assert kind == "histogram"
        buckets = [labels["le"] for sample, labels, _ in rows if sample.endswith("_bucket")]
        expected = sorted(map(float, f"{bounds} {_FINER.get(bounds, '')}".split()))
        assert buckets == [*map(str, expected), "+Inf"], name
    for name, bounds in BOUNDS_OF_0_6_3.items():
        assert set(bounds.split()) <= set(HISTOGRAMS[name].split())


def test_numbers_of_a_request_that_was_preempted(byte_level: Tokenizer) -> None:
    engine = FakeEngine(byte_level)
    engine.add(SamplingParams(n=2, best_of=3), "a", {"prompt_token_ids": [5, 6, 7, 8]})
    engine.give([8], "a", first_scheduled_time=1.0, num_cached_tokens=3)
    for index, (count, num_preemptions) in enumerate(((1, 2), (2, 0), (4, 1))):
        tokens = [9] * count
        engine.give(tokens, "a", index, num_preemptions=num_preemptions, finish_reason=FinishReason.LENGTH)
    metrics = EngineMetrics(make_config(max_model_len=64))
    metrics.record(SchedulerStats(0, 0, 0.0, 3, num_prefix_queries=4, num_prefix_hits=3), engine.stats)
    rows = {row[0]: row[2] for _, rows in scrape(metrics).values() for row in rows if not row[1]}
    assert rows["request_num_preemptions_sum"] == 3
    assert rows["request_prefill_kv_computed_tokens_sum"] == 1
    assert rows["request_max_num_generation_tokens_sum"] == 4
    assert (rows["request_params_n_sum"], rows["request_params_best_of_sum"]) == (2, 3)
    by_source = {row[1]["source"]: row[2] for row in scrape(metrics)["prompt_tokens_by_source_total"][1]}
    assert by_source == {"local_compute": 1, "local_cache_hit": 3, "external_kv_transfer": 0}
    cached = {row[1]["source"]: row[2] for row in scrape(metrics)["prompt_tokens_cached_by_source_total"][1]}
    assert cached["device"] == 3
