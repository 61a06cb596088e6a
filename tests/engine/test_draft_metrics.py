"""Metrics and log lines of speculative decoding, under the names of vLLM 0.6.3 and of today's."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import msgspec
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.config.speculation import SpeculativeConfig, SpeculativeMethod
from ascend_vllm.engine.api_group import SharedCounts
from ascend_vllm.engine.metrics import EngineMetrics, StepStats
from ascend_vllm.engine.metrics_reader import Counter, Gauge, Vector, read_metrics
from ascend_vllm.types.messages import DraftStats, SchedulerStats
from tests.engine.engine_for_tests import make_config

NUM_DRAFTS = 3


def config(data_parallel_size: int = 1) -> EngineConfig:
    speculation = SpeculativeConfig(SpeculativeMethod.NGRAM, NUM_DRAFTS)
    parallel = msgspec.structs.replace(make_config().parallel, data_parallel_size=data_parallel_size)
    return msgspec.structs.replace(make_config(), speculation=speculation, parallel=parallel)


def record(metrics: EngineMetrics, stats: DraftStats | None, rank: int = 0) -> None:
    metrics.record(SchedulerStats(1, 0, 0.1, 0, drafts=stats), StepStats(num_generation_tokens=1), rank)


def scrape(metrics: EngineMetrics, rank: str = "0") -> dict[tuple[str, str], float]:
    """(name, further label's value) → value, of drafts."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            if "spec_decode" in sample.name and sample.labels["engine"] == rank:
                assert sample.labels["model_name"] == "tiny"
                found[sample.name.removeprefix("vllm:spec_decode_"), sample.labels.get("position", "")] = sample.value
    return found


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logger = logging.getLogger("ascend_vllm")
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, "ascend_vllm")
    yield caplog
    logger.removeHandler(caplog.handler)


def test_without_speculation_there_are_none() -> None:
    metrics = EngineMetrics(make_config())
    record(metrics, None)
    assert scrape(metrics) == {}


def test_the_variable_of_huaweis_guide_leaves_them_out(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ENABLE_SPEC_METRIC", "0")
    metrics = EngineMetrics(config())
    metrics.log_if_due(100.0)
    record(metrics, DraftStats(4, 10, 5, [3, 1, 1]))
    metrics.log_if_due(105.0)
    assert scrape(metrics) == {}
    assert len(log.messages) == 1
    assert "peculative" not in log.messages[0]


def test_numbers_of_both_generations() -> None:
    metrics = EngineMetrics(config())
    zeros = scrape(metrics)
    assert set(zeros.values()) == {0.0}
    # four steps: 3 of 3 right, 1 of 3, 0 of 3, 1 of 1
    record(metrics, DraftStats(4, 10, 5, [3, 1, 1]))
    expected = {
        ("draft_acceptance_rate", ""): 0.5,
        # 9 of 14 possible ones
        ("efficiency", ""): 9 / 14,
        ("num_drafts_total", ""): 4,
        ("num_draft_tokens_total", ""): 10,
        ("num_accepted_tokens_total", ""): 5,
        ("num_emitted_tokens_total", ""): 9,
        ("num_accepted_tokens_per_pos_total", "0"): 3,
        ("num_accepted_tokens_per_pos_total", "1"): 1,
        ("num_accepted_tokens_per_pos_total", "2"): 1,
    }
    assert scrape(metrics) == expected
    assert zeros.keys() == expected.keys()
    metrics.set_idle()
    assert scrape(metrics) == expected


def test_types_as_a_client_of_the_engine_reads_them() -> None:
    metrics = EngineMetrics(config())
    record(metrics, DraftStats(4, 10, 5, [3, 1, 1]))
    found = {one.name: one for one in read_metrics(metrics.registry) if "spec_decode" in one.name}
    for name in ("draft_acceptance_rate", "efficiency"):
        assert isinstance(found.pop(f"vllm:spec_decode_{name}"), Gauge)
    by_position = found.pop("vllm:spec_decode_num_accepted_tokens_per_pos")
    assert isinstance(by_position, Vector)
    assert by_position.values == [3, 1, 1]
    assert len(found) == 4
    assert all(isinstance(one, Counter) for one in found.values())


def test_each_core_has_its_own() -> None:
    metrics = EngineMetrics(config(2))
    record(metrics, DraftStats(1, 3, 2, [1, 1, 0]), rank=1)
    assert set(scrape(metrics).values()) == {0.0}
    assert scrape(metrics, "1")["num_accepted_tokens_total", ""] == 2


def test_of_several_api_servers_the_first_one_counts() -> None:
    counts = SharedCounts(2, 1)
    values = []
    for index in range(2):
        counts.index = index
        metrics = EngineMetrics(config(), counts)
        record(metrics, DraftStats(1, 3, 2, [1, 1, 0]))
        values.append(scrape(metrics)["num_draft_tokens_total", ""])
    assert values == [3, 0]


def test_log_lines(log: pytest.LogCaptureFixture) -> None:
    metrics = EngineMetrics(config())
    metrics.log_if_due(100.0)
    # the engine core of the same process goes on counting in the same object
    stats = DraftStats(4, 10, 5, [3, 1, 1])
    record(metrics, stats)
    metrics.log_if_due(105.0)
    stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens, stats.num_accepted_at = 6, 16, 8, [5, 2, 1]
    record(metrics, stats)
    metrics.log_if_due(110.0)
    record(metrics, stats)
    metrics.log_if_due(115.0)
    lines = [line for line in log.messages if not line.startswith("Avg prompt throughput")]
    assert len(log.messages) == len(lines) + 3
    assert lines == [
        "Speculative metrics: Draft acceptance rate: 0.500, System efficiency: 0.643, Number of speculative tokens: "
        "3, Number of accepted tokens: 5, Number of draft tokens: 10, Number of emitted tokens: 9.",
        "SpecDecoding metrics: Mean acceptance length: 2.25, Accepted throughput: 1.00 tokens/s, "
        "Drafted throughput: 2.00 tokens/s, Accepted: 5 tokens, Drafted: 10 tokens, "
        "Per-position acceptance rate: 0.750, 0.250, 0.250, Avg Draft acceptance rate: 50.0%",
        "Speculative metrics: Draft acceptance rate: 0.500, System efficiency: 0.636, Number of speculative tokens: "
        "3, Number of accepted tokens: 8, Number of draft tokens: 16, Number of emitted tokens: 14.",
        "SpecDecoding metrics: Mean acceptance length: 2.50, Accepted throughput: 0.60 tokens/s, "
        "Drafted throughput: 1.20 tokens/s, Accepted: 3 tokens, Drafted: 6 tokens, "
        "Per-position acceptance rate: 1.000, 0.500, 0.000, Avg Draft acceptance rate: 50.0%",
    ]
