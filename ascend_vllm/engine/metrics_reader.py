"""An engine's metrics as plain records: what `LLM.get_metrics` returns. Names and fields are vLLM's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import prometheus_client
from prometheus_client import CollectorRegistry

_PREFIX = "vllm:"


@dataclasses.dataclass
class Metric:
    """Fields of all metrics.

    Attributes:
        name: for example "vllm:num_requests_running"; of a counter without "_total".
        labels: names and values.
    """

    name: str
    labels: dict[str, str]


@dataclasses.dataclass
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclasses.dataclass
class Vector(Metric):
    """Counters that differ in their `position` only, in its order."""

    values: list[int]


@dataclasses.dataclass
class Gauge(Metric):
    """A current value."""

    value: float


@dataclasses.dataclass
class Histogram(Metric):
    """Counts of observed values.

    Attributes:
        count: observations.
        sum: of their values.
        buckets: upper bound → observations up to it.
    """

    count: int
    sum: float
    buckets: dict[str, int]


def read_metrics(registry: CollectorRegistry) -> list[Metric]:
    """All metrics of the engine that a registry holds, as they are now.

    Example::

        for metric in read_metrics(engine.metrics.registry):
            print(metric.name, metric.labels)
    """
    found: list[Metric] = []
    for family in registry.collect():
        if not family.name.startswith(_PREFIX):
            continue
        if family.type == "gauge":
            found += [Gauge(family.name, dict(sample.labels), sample.value) for sample in family.samples]
        elif family.type == "counter":
            found += _counters(family)
        elif family.type == "histogram":
            found += _histograms(family)
    return found


def _counters(family: prometheus_client.Metric) -> Iterator[Metric]:
    samples = [sample for sample in family.samples if sample.name.endswith("_total")]
    if not any("position" in sample.labels for sample in samples):
        for sample in samples:
            yield Counter(family.name, dict(sample.labels), int(sample.value))
        return
    vectors: dict[tuple[tuple[str, str], ...], dict[int, int]] = {}
    for sample in samples:
        others = tuple(item for item in sample.labels.items() if item[0] != "position")
        vectors.setdefault(others, {})[int(sample.labels["position"])] = int(sample.value)
    for labels, by_position in vectors.items():
        yield Vector(family.name, dict(labels), [by_position[position] for position in sorted(by_position)])


def _histograms(family: prometheus_client.Metric) -> Iterator[Histogram]:
    by_labels: dict[tuple[tuple[str, str], ...], Histogram] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        histogram = by_labels.setdefault(tuple(labels.items()), Histogram(family.name, labels, 0, 0.0, {}))
        if sample.name.endswith("_bucket"):
            histogram.buckets[sample.labels["le"]] = int(sample.value)
        elif sample.name.endswith("_count"):
            histogram.count = int(sample.value)
        elif sample.name.endswith("_sum"):
            histogram.sum = sample.value
    yield from by_labels.values()
