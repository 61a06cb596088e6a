"""Computes the figures of a run that vLLM's benchmark prints and saves, under the same names."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ascend_vllm.errors import ConfigError

# name of a metric → its heading and label in the table
_TITLES = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
    "client_queue_time": ("Client-side Queueing", "Client Queue Time"),
    "e2el_including_client_queue": ("End-to-end Latency with Queueing", "E2EL with Queue"),
}
METRIC_NAMES = tuple(_TITLES)
_GOODPUT_NAMES = ("ttft", "tpot", "e2el")
_WIDTH = 50


@dataclasses.dataclass
class Outcome:
    """The outcome of one request. Times are seconds of perf_counter.

    Attributes:
        start: when it was sent.
        queued_s: seconds that it waited in the client before (--max-concurrency).
        moments: arrival times of the events with output.
        event_chars: characters of text in each of them; empty: not known.
        prompt_len: tokens of the prompt, as counted by the server.
        output_len: tokens of the answer.
        text: the answer.
        error: why it failed; empty: it succeeded.
    """

    start: float
    prompt_len: int
    queued_s: float = 0.0
    moments: list[float] = dataclasses.field(default_factory=list)
    event_chars: list[int] = dataclasses.field(default_factory=list)
    output_len: int = 0
    text: str = ""
    error: str = ""

    @property
    def ttft(self) -> float:
        """Seconds to the first event; 0 without any."""
        return self.moments[0] - self.start if self.moments else 0.0

    @property
    def latency(self) -> float:
        """Seconds to the last event; 0 without any."""
        return self.moments[-1] - self.start if self.moments else 0.0

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 for a single one."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0

    @property
    def event_tokens(self) -> np.ndarray:
        """Tokens in each event, float64: the answer's tokens, divided by the lengths of the events' texts.

        Events do not say how many tokens they have: a server may send several at once, or an event without any.
        """
        chars = self.event_chars if any(self.event_chars) else [1] * len(self.moments)
        return np.asarray(chars, np.float64) * (self.output_len / sum(chars))

    @property
    def itls(self) -> list[float]:
        """Seconds between events."""
        return [later - earlier for earlier, later in zip(self.moments, self.moments[1:], strict=False)]


def parse_goodput(words: Sequence[str] | None) -> dict[str, float]:
    """--goodput: limits in milliseconds by metric.

    Raises:
        ConfigError: not NAME:MILLISECONDS, or a metric without limits.
    """
    limits: dict[str, float] = {}
    for word in words or ():
        name, _, value = word.partition(":")
        try:
            limits[name] = float(value)
        except ValueError as err:
            raise ConfigError(f"--goodput {word!r} is not NAME:MILLISECONDS.") from err
        if name not in _GOODPUT_NAMES or not limits[name] >= 0:
            raise ConfigError(f"--goodput {word!r}: the names are {', '.join(_GOODPUT_NAMES)}, limits at least 0.")
    return limits


def parse_percentiles(text: str) -> list[float]:
    """--metric-percentiles: numbers from 0 to 100, separated by commas.

    Raises:
        ConfigError: anything else.
    """
    try:
        percentiles = [float(word) for word in text.split(",")]
    except ValueError as err:
        raise ConfigError(f"--metric-percentiles takes numbers separated by commas, got {text!r}.") from err
    if not all(0 <= percentile <= 100 for percentile in percentiles):
        raise ConfigError(f"--metric-percentiles must be between 0 and 100, got {text!r}.")
    return percentiles


def parse_metric_names(text: str) -> list[str]:
    """--percentile-metrics: names separated by commas.

    Raises:
        ConfigError: an unknown name.
    """
    names = text.split(",")
    if unknown := [name for name in names if name not in _TITLES]:
        raise ConfigError(f"--percentile-metrics: {unknown[0]!r} is none of {', '.join(METRIC_NAMES)}.")
    return names


def _percentile_key(percentile: float) -> str:
    return str(int(percentile) if int(percentile) == percentile else percentile)


def _summary(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Mean, median, deviation and percentiles in milliseconds; zeros without values."""
    array = np.asarray(values or [0.0]) * 1e3
    found = {"mean": np.mean(array), "median": np.median(array), "std": np.std(array)}
    found |= {"p" + _percentile_key(p): np.percentile(array, p) for p in percentiles}
    return {f"{key}_{name}_ms": float(value) for key, value in found.items()}


def _peaks(good: Sequence[Outcome]) -> tuple[float, int]:
    """The largest number of tokens in one second, and of requests running in one second."""
    if not good:
        return 0.0, 0
    begin = min(outcome.start for outcome in good)
    seconds = math.ceil(max(outcome.moments[-1] for outcome in good) - begin) + 1
    tokens, open_requests = np.zeros(seconds), np.zeros(seconds, np.int64)
    for outcome in good:
        np.add.at(tokens, (np.asarray(outcome.moments) - begin).astype(np.int64), outcome.event_tokens)
        open_requests[int(outcome.start - begin) : int(outcome.moments[-1] - begin) + 1] += 1
    return float(tokens.max()), int(open_requests.max())


def _is_good(outcome: Outcome, limits: Mapping[str, float]) -> bool:
    seen = {"ttft": outcome.ttft, "tpot": outcome.tpot, "e2el": outcome.latency}
    return all(seen[name] * 1e3 <= limit for name, limit in limits.items())


def figures(
    outcomes: Sequence[Outcome],
    duration_s: float,
    *,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    goodput: Mapping[str, float],
) -> dict[str, Any]:
    """All figures of a run.

    Args:
        outcomes: of the requests, in order.
        duration_s: duration of the run.
        metrics: names of the metrics to summarise.
        percentiles: to compute of these metrics.
        goodput: limits in milliseconds for good requests; empty: these are not counted.
    """
    good = [outcome for outcome in outcomes if not outcome.error]
    num_input = sum(outcome.prompt_len for outcome in good)
    num_output = sum(outcome.output_len for outcome in good)
    peak_tokens, concurrent = _peaks(good)
    values: dict[str, list[float]] = {
        "ttft": [outcome.ttft for outcome in good],
        "tpot": [outcome.tpot for outcome in good if outcome.output_len > 1],
        "itl": [gap for outcome in good for gap in outcome.itls],
        "e2el": [outcome.latency for outcome in good],
        "client_queue_time": [outcome.queued_s for outcome in good],
        "e2el_including_client_queue": [outcome.queued_s + outcome.latency for outcome in good],
    }
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration_s,
        "request_goodput": sum(_is_good(outcome, goodput) for outcome in good) / duration_s if goodput else None,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "input_lens": [outcome.prompt_len for outcome in outcomes],
        "output_lens": [outcome.output_len for outcome in outcomes],
        "ttfts": [outcome.ttft for outcome in outcomes],
        "itls": [outcome.itls for outcome in outcomes],
        "latencies": [outcome.latency for outcome in outcomes],
        "start_times": [outcome.start for outcome in outcomes],
        "queue_times": [outcome.queued_s for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": concurrent,
        # vLLM's speed of transcription relative to the audio; there is no audio here
        "rtfx": 0.0,
    }
    for name in metrics:
        result |= _summary(name, values[name], percentiles)
    return result


# per-request results that are saved only with --save-detailed
DETAILS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors")


def probe_figures(latencies_s: Sequence[float], failed: int) -> dict[str, Any]:
    """The figures of --probe-request-rate's requests."""
    array = np.asarray(latencies_s or [0.0]) * 1e3
    return {
        "probe_completed": len(latencies_s),
        "probe_failed": failed,
        "probe_median_e2el_ms": float(np.median(array)),
        "probe_p99_e2el_ms": float(np.percentile(array, 99)),
        "probe_max_e2el_ms": float(array.max()),
    }


def _line(title: str, value: float) -> str:
    return f"{title:<40} {value:<10.2f}" if isinstance(value, float) else f"{title:<40} {value:<10}"


def table(
    result: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float], request_rate: float
) -> Iterator[str]:
    """The figures as lines of text, in vLLM's layout."""
    yield f"{' Serving Benchmark Result ':=^{_WIDTH}}"
    yield _line("Successful requests:", result["completed"])
    yield _line("Failed requests:", result["failed"])
    if result["max_concurrency"] is not None:
        yield _line("Maximum request concurrency:", result["max_concurrency"])
    if request_rate != math.inf:
        yield _line("Request rate configured (RPS):", float(request_rate))
    yield _line("Benchmark duration (s):", result["duration"])
    yield _line("Total input tokens:", result["total_input_tokens"])
    yield _line("Total generated tokens:", result["total_output_tokens"])
    yield _line("Request throughput (req/s):", result["request_throughput"])
    if result["request_goodput"] is not None:
        yield _line("Request goodput (req/s):", float(result["request_goodput"]))
    yield _line("Output token throughput (tok/s):", result["output_throughput"])
    yield _line("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"])
    yield _line("Peak concurrent requests:", float(result["max_concurrent_requests"]))
    yield _line("Total token throughput (tok/s):", result["total_token_throughput"])
    if "probe_completed" in result:
        yield f"{'Probe Requests':-^{_WIDTH}}"
        yield _line("Probe requests completed:", result["probe_completed"])
        yield _line("Probe requests failed:", result["probe_failed"])
        yield _line("Median probe E2EL (ms):", result["probe_median_e2el_ms"])
        yield _line("P99 probe E2EL (ms):", result["probe_p99_e2el_ms"])
        yield _line("Max probe E2EL (ms):", result["probe_max_e2el_ms"])
    for name in metrics:
        heading, label = _TITLES[name]
        yield f"{heading:-^{_WIDTH}}"
        yield _line(f"Mean {label} (ms):", result[f"mean_{name}_ms"])
        yield _line(f"Median {label} (ms):", result[f"median_{name}_ms"])
        for percentile in percentiles:
            key = _percentile_key(percentile)
            yield _line(f"P{key} {label} (ms):", result[f"p{key}_{name}_ms"])
    yield "=" * _WIDTH
