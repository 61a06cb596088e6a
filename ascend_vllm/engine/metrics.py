"""Prometheus metrics under vLLM's names, and the log line of the engine's state.

The event loop updates plain Python objects once a step; they are rendered when /metrics is scraped. Metrics that vLLM
renamed have their old and new names, for dashboards of any version. Metrics of features that do not exist here
(multimodal caches) are left out, those of drafts without speculative decoding (see engine/draft_metrics.py).
"""

from __future__ import annotations

import bisect
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ascend_vllm import envs
from ascend_vllm.config.cache import kv_cache_specs
from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.engine.api_group import Count, SharedCounts
from ascend_vllm.engine.draft_metrics import DraftMetrics
from ascend_vllm.logger import init_logger
from ascend_vllm.types.messages import SchedulerStats

logger = init_logger(__name__)

LOG_INTERVAL_S = 5.0

# Bounds in seconds: those of vLLM 0.6.3, those of today's, and finer ones: small models answer within milliseconds.
_TTFT_BUCKETS = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75]
_TTFT_BUCKETS += [1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560]
_TOKEN_BUCKETS = [0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2]
_TOKEN_BUCKETS += [0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
_REQUEST_BUCKETS = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.8]
_REQUEST_BUCKETS += [1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680]
_N_BUCKETS = [1, 2, 5, 10, 20]
_ITERATION_BUCKETS = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
_PREEMPTION_BUCKETS = [1, 2, 3, 4, 5, 10, 20]
# "repetition" never occurs here, but vLLM's dashboards have a row for it
_FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
# the flags that make the server refuse requests
QUEUE_FULL, BACKLOG_FULL, _QUEUE_TIMEOUT = _REJECTION_REASONS = (
    "max_num_queued_reqs",
    "max_num_queued_tokens",
    "queue_timeout",
)


@dataclasses.dataclass(slots=True)
class FinishedSequence:
    """A sequence that ended.

    Attributes:
        reason: "stop", "length", "abort" or "error".
        num_generation_tokens: tokens it got.
    """

    reason: str
    num_generation_tokens: int


@dataclasses.dataclass(slots=True)
class FinishedRequest:
    """A request whose last sequence ended. Times are in seconds; None: it never reached that state.

    Attributes:
        num_prompt_tokens: length of the prompt.
        n: requested sequences.
        max_tokens: requested limit, clamped to the model's.
        e2e_s: arrival to last token.
        queue_s: arrival to first being scheduled.
        prefill_s: scheduled to first token.
        decode_s: first to last token.
        inference_s: scheduled to last token.
        mean_token_s: decode time per token after the first; None below two tokens.
        best_of: sequences generated.
        max_num_generation_tokens: of its longest sequence.
        num_computed_prompt_tokens: prompt tokens that were not in the prefix cache.
        num_preemptions: of all its sequences.
    """

    num_prompt_tokens: int
    n: int
    max_tokens: int
    e2e_s: float
    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    inference_s: float | None
    mean_token_s: float | None
    best_of: int
    max_num_generation_tokens: int
    num_computed_prompt_tokens: int
    num_preemptions: int


_REQUEST_FIELDS = [field.name for field in dataclasses.fields(FinishedRequest)]


@dataclasses.dataclass(slots=True)
class StepStats:
    """Statistics of one step.

    Attributes:
        num_prompt_tokens: of requests whose first token came in this step; a prompt of n sequences counts once.
        num_generation_tokens: sampled tokens.
        num_cached_tokens: prompt tokens that came from the prefix cache.
        num_queue_timeouts: requests that waited for too long and were refused.
        first_token_s: per request, arrival to first token.
        inter_token_s: (seconds per token, tokens) per sequence that had a token before.
    """

    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_cached_tokens: int = 0
    num_queue_timeouts: int = 0
    first_token_s: list[float] = dataclasses.field(default_factory=list)
    inter_token_s: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    finished_sequences: list[FinishedSequence] = dataclasses.field(default_factory=list)
    finished_requests: list[FinishedRequest] = dataclasses.field(default_factory=list)


class Histogram:
    """Counts of observations in buckets.

    Args:
        name: without the prefix.
        documentation: a phrase for the HELP line.
        buckets: upper bounds, ascending; one without limit is added.
    """

    def __init__(self, name: str, documentation: str, buckets: Sequence[float]) -> None:
        self.name = name
        self.documentation = documentation
        self._bounds = list(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Adds a value that was observed `count` times."""
        self._counts[bisect.bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def samples(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative counts by upper bound, and the sum."""
        total, buckets = 0, []
        for bound, count in zip([*map(float, self._bounds), float("inf")], self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return buckets, self._sum


# by level
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


class EngineMetrics(Collector):
    """All metrics of an engine, for each of its cores.

    Of several API-server processes each counts its own requests, and only the first knows the state of the cores and
    logs it.

    Args:
        config: of the engine.
        counts: of all API-server processes; None: this is the only one.

    Attributes:
        registry: of this engine alone; holds the process's own metrics too.
    """

    def __init__(self, config: EngineConfig, counts: SharedCounts | None = None) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        # python_gc_*, python_info, process_*
        GCCollector(self.registry)
        PlatformCollector(self.registry)
        ProcessCollector(registry=self.registry)
        self._logs = config.observability.log_stats
        self._counts = counts
        self._cores = [_CoreMetrics(config, rank) for rank in range(config.parallel.data_parallel_size)]
        if self._logs:
            self.registry.register(self)

    def set_num_blocks(self, num_gpu_blocks: int, num_cpu_blocks: int, rank: int = 0) -> None:
        """Sets a core's numbers of KV blocks, on the device and for swapping; called once it has started."""
        self._cores[rank].num_gpu_blocks, self._cores[rank].num_cpu_blocks = num_gpu_blocks, num_cpu_blocks

    def set_sleep_level(self, level: int) -> None:
        """Sets the engine's sleep level; 0: awake."""
        for core in self._cores:
            core.sleep_level = level

    def count_rejection(self, reason: str = QUEUE_FULL) -> None:
        """Counts a refused request, for the first core; the reason is QUEUE_FULL or BACKLOG_FULL."""
        self._cores[0].num_rejections[reason] += 1

    def record(self, scheduler: SchedulerStats | None, step: StepStats, rank: int = 0) -> None:
        """Records a step.

        Args:
            scheduler: the core's state after it; None: unchanged.
            step: statistics of its requests.
            rank: number of the core.
        """
        core = self._cores[rank]
        if self._counts is None:
            core.record(scheduler, step)
            return
        core.record(scheduler if self._counts.index == 0 else None, step)
        self._counts.publish(Count.PROMPT_TOKENS, core.num_prompt_tokens, rank)
        self._counts.publish(Count.GENERATION_TOKENS, core.num_generation_tokens, rank)

    def set_idle(self, rank: int = 0) -> None:
        """Sets a core's running and waiting requests and used KV blocks to 0."""
        core = self._cores[rank]
        core.scheduler = msgspec.structs.replace(
            core.scheduler,
            num_running=0,
            num_waiting=0,
            num_swapped=0,
            kv_cache_usage=0.0,
            cpu_cache_usage=0.0,
            running_adapters=[],
            waiting_adapters=[],
        )

    def log_if_due(self, now: float | None = None) -> None:
        """Logs each core's state if the last line is at least five seconds old and the core was active since.

        Args:
            now: seconds of time.monotonic(); None: now.
        """
        if not self._logs or (self._counts is not None and self._counts.index > 0):
            return
        now = time.monotonic() if now is None else now
        for rank, core in enumerate(self._cores):
            for line in core.log_lines(now, self._tokens_of_others(rank)):
                logger.info("%s%s", f"Engine {rank:03}: " if len(self._cores) > 1 else "", line)

    def _tokens_of_others(self, rank: int) -> tuple[int, int]:
        """Prompt and generation tokens of the other API-server processes."""
        if self._counts is None:
            return 0, 0
        return self._counts.of_others(Count.PROMPT_TOKENS, rank), self._counts.of_others(
            Count.GENERATION_TOKENS, rank
        )

    def collect(self) -> Iterator[Metric]:
        """Makes the metric families, with the samples of all cores in each; called by the registry."""
        for family, *others in zip(*(core.collect() for core in self._cores), strict=True):
            for other in others:
                family.samples += other.samples
            yield family


class _CoreMetrics:
    """What is counted about one engine core.

    Args:
        config: of the engine.
        rank: number of the core, the label "engine".
    """

    def __init__(self, config: EngineConfig, rank: int) -> None:
        self._rank = str(rank)
        self._config = config
        self._model_name = config.model.served_model_names[0]
        self.num_gpu_blocks: int | None = None
        self.num_cpu_blocks: int | None = None
        self.scheduler = SchedulerStats(0, 0, 0.0, 0)
        speculation = config.speculation
        # None: not wanted
        self._drafts: DraftMetrics | None = None
        if speculation is not None and envs.enable_spec_metric():
            self._drafts = DraftMetrics(speculation.num_speculative_tokens)
        self._scheduler_time = time.time()
        self.num_rejections = dict.fromkeys(_REJECTION_REASONS, 0)
        self.sleep_level = 0
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self._num_cached_tokens = 0
        self._successes = dict.fromkeys(_FINISH_REASONS, 0)
        self._histograms = _make_histograms(config.scheduler.max_model_len)
        # of the last log line: prompt and generation tokens per second, and up to then
        self._throughput = (0.0, 0.0)
        self._last_counts = (0, 0)
        self._last_time: float | None = None
        self._was_busy = False

    def record(self, scheduler: SchedulerStats | None, step: StepStats) -> None:
        """See `EngineMetrics.record`."""
        histograms = self._histograms
        if scheduler is not None:
            self.scheduler = scheduler
            if self._drafts is not None:
                self._drafts.record(scheduler.drafts)
            self._scheduler_time = time.time()
            num_tokens = scheduler.num_prompt_tokens + scheduler.num_generation_tokens
            if num_tokens:
                histograms["step_tokens"].observe(num_tokens)
        self.num_prompt_tokens += step.num_prompt_tokens
        self.num_generation_tokens += step.num_generation_tokens
        self._num_cached_tokens += step.num_cached_tokens
        self.num_rejections[_QUEUE_TIMEOUT] += step.num_queue_timeouts
        for seconds in step.first_token_s:
            histograms["first_token_s"].observe(seconds)
        for seconds, count in step.inter_token_s:
            histograms["inter_token_s"].observe(seconds, count)
        for sequence in step.finished_sequences:
            self._successes[sequence.reason] += 1
            histograms["num_generation_tokens"].observe(sequence.num_generation_tokens)
        for request in step.finished_requests:
            for field in _REQUEST_FIELDS:
                value = getattr(request, field)
                if value is not None:
                    histograms[field].observe(value)

    def log_lines(self, now: float, tokens_of_others: tuple[int, int] = (0, 0)) -> list[str]:
        """The line about the throughput since the last one, and those of drafts; none if it is not due or idle.

        Args:
            now: seconds of time.monotonic().
            tokens_of_others: prompt and generation tokens that other API-server processes counted.
        """
        stats = self.scheduler
        if self._last_time is None:
            self._last_time = now
            return []
        elapsed = now - self._last_time
        if elapsed < LOG_INTERVAL_S:
            return []
        counts = self.num_prompt_tokens + tokens_of_others[0], self.num_generation_tokens + tokens_of_others[1]
        prompt, generation = counts[0] - self._last_counts[0], counts[1] - self._last_counts[1]
        busy = bool(prompt or generation or stats.num_running or stats.num_waiting)
        self._last_time, self._last_counts = now, counts
        self._throughput = (prompt / elapsed, generation / elapsed)
        # one more line after the last activity, which shows zeros
        due, self._was_busy = busy or self._was_busy, busy
        if not due:
            return []
        line = (
            f"Avg prompt throughput: {self._throughput[0]:.1f} tokens/s, "
            f"Avg generation throughput: {self._throughput[1]:.1f} tokens/s, "
            f"Running: {stats.num_running} reqs, Swapped: {stats.num_swapped} reqs, "
            f"Pending: {_num_pending(stats)} reqs, "
            f"GPU KV cache usage: {100 * stats.kv_cache_usage:.1f}%, "
            f"CPU KV cache usage: {100 * stats.cpu_cache_usage:.1f}%."
        )
        if self._config.cache.enable_prefix_caching:
            # swapped blocks are never looked up
            line += f" Prefix cache hit rate: GPU: {100 * _hit_rate(stats):.2f}%, CPU: 0.00%"
        if stats.running_adapters or stats.waiting_adapters:
            line += f" LoRA adapters running: {', '.join(stats.running_adapters) or 'none'}"
            line += f", waiting: {', '.join(stats.waiting_adapters) or 'none'}."
        return [line, *(() if self._drafts is None else self._drafts.log_lines(elapsed))]

    def collect(self) -> Iterator[Metric]:
        """Makes the metric families, always the same ones in the same order."""
        yield from self._collect_gauges()
        yield from self._collect_counters()
        if self._drafts is not None:
            for row in self._drafts.rows():
                yield self._family(*row)
        labels = [self._model_name, self._rank]
        for key, histogram in self._histograms.items():
            names = [histogram.name]
            if key == "inter_token_s":  # its name until 0.10
                names.append("time_per_output_token_seconds")
            for name in names:
                family = HistogramMetricFamily(
                    f"vllm:{name}", histogram.documentation, labels=["model_name", "engine"]
                )
                buckets, total = histogram.samples()
                family.add_metric(labels, buckets=buckets, sum_value=total)
                yield family

    def _collect_gauges(self) -> Iterator[Metric]:
        stats = self.scheduler
        prompt_throughput, generation_throughput = self._throughput
        is_caching = self._config.cache.enable_prefix_caching
        for name, documentation, value in (
            ("num_requests_running", "Sequences that are being computed.", stats.num_running),
            ("num_requests_waiting", "Sequences that wait to be computed.", _num_pending(stats)),
            ("num_requests_swapped", "Sequences swapped to CPU memory.", stats.num_swapped),
            ("kv_cache_usage_perc", "Share of KV cache blocks in use, 1 is all.", stats.kv_cache_usage),
            ("gpu_cache_usage_perc", "Share of KV cache blocks in use, 1 is all.", stats.kv_cache_usage),
            ("cpu_cache_usage_perc", "Share of CPU blocks for swapping in use, 1 is all.", stats.cpu_cache_usage),
            (
                "gpu_prefix_cache_hit_rate",
                "Share of looked-up prompt tokens found in the prefix cache; -1: it is off.",
                _hit_rate(stats) if is_caching else -1,
            ),
            ("cpu_prefix_cache_hit_rate", "There is no prefix cache in swap blocks: -1.", -1),
            ("avg_prompt_throughput_toks_per_s", "Prompt tokens per second of the last log line.", prompt_throughput),
            (
                "avg_generation_throughput_toks_per_s",
                "Generated tokens per second of the last log line.",
                generation_throughput,
            ),
        ):
            yield self._family(GaugeMetricFamily, name, documentation, value)
        yield self._family(
            GaugeMetricFamily,
            "engine_sleep_state",
            "Which of the states the engine is in: awake, asleep at level 1 (weights_offloaded) or 2 (discard_all).",
            {state: level == self.sleep_level for level, state in enumerate(_SLEEP_STATES)},
            "sleep_state",
        )
        yield self._cache_config_info()
        if self._config.lora is not None:
            yield self._lora_requests_info(self._config.lora.max_loras)
        waiting = {"capacity": _num_pending(stats), "deferred": 0}
        name, documentation = "num_requests_waiting_by_reason", "Sequences that wait, by what for."
        yield self._family(GaugeMetricFamily, name, documentation, waiting, "reason")

    def _cache_config_info(self) -> Metric:
        cache, tp_size = self._config.cache, self._config.parallel.tensor_parallel_size
        block_bytes = sum(spec.block_bytes for spec in kv_cache_specs(self._config.model, cache, tp_size))
        info = {
            "block_size": cache.block_size,
            # in all layers, on one of the workers that share them; vLLM has no such label
            "bytes_per_token": block_bytes // cache.block_size,
            "cache_dtype": cache.cache_dtype,
            "cpu_offload_gb": 0,
            "enable_prefix_caching": cache.enable_prefix_caching,
            "gpu_memory_utilization": cache.gpu_memory_utilization,
            "is_attention_free": False,
            "num_cpu_blocks": self.num_cpu_blocks,
            "num_gpu_blocks": self.num_gpu_blocks,
            "num_gpu_blocks_override": cache.num_gpu_blocks_override,
            "sliding_window": cache.sliding_window,
            "swap_space_bytes": int(cache.swap_space_gib * 2**30),
        }
        labels = ["model_name", "engine", *info]
        family = GaugeMetricFamily("vllm:cache_config_info", "The KV cache's configuration.", labels=labels)
        family.add_metric([self._model_name, self._rank, *map(str, info.values())], 1)
        return family

    def _lora_requests_info(self, max_loras: int) -> Metric:
        info = {
            "max_lora": str(max_loras),
            "waiting_lora_adapters": ",".join(self.scheduler.waiting_adapters),
            "running_lora_adapters": ",".join(self.scheduler.running_adapters),
        }
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "LoRA adapters of requests that run and that wait, and when that was so, in seconds of the Unix epoch.",
            labels=["model_name", "engine", *info],
        )
        family.add_metric([self._model_name, self._rank, *info.values()], self._scheduler_time)
        return family

    def _collect_counters(self) -> Iterator[Metric]:
        cached = self._num_cached_tokens
        # nothing comes from other engines or from a disk here
        sources = {
            "local_compute": max(0, self.num_prompt_tokens - cached),
            "local_cache_hit": cached,
            "external_kv_transfer": 0,
        }
        places = {"device": self.scheduler.num_prefix_hits}
        places |= dict.fromkeys(("host", "p2p", "disk", "external_unspecified"), 0)
        rejected = "Requests refused because the queue was full or they waited in it for too long."
        rows: tuple[tuple[str, str, float | Mapping[str, float], str | None], ...] = (
            ("num_preemptions", "Preemptions of sequences.", self.scheduler.num_preemptions, None),
            (
                "prefix_cache_queries",
                "Tokens looked up in the prefix cache.",
                self.scheduler.num_prefix_queries,
                None,
            ),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", self.scheduler.num_prefix_hits, None),
            ("prompt_tokens", "Prompt tokens.", self.num_prompt_tokens, None),
            ("generation_tokens", "Generated tokens.", self.num_generation_tokens, None),
            ("prompt_tokens_cached", "Prompt tokens found in the prefix cache.", cached, None),
            ("prompt_tokens_by_source", "Prompt tokens by how they were had.", sources, "source"),
            (
                "prompt_tokens_cached_by_source",
                "Tokens found in the prefix cache, by where it is.",
                places,
                "source",
            ),
            ("request_success", "Sequences that ended, by reason.", self._successes, "finished_reason"),
            ("admission_rejections", rejected, self.num_rejections, "reason"),
        )
        for row in rows:
            yield self._family(CounterMetricFamily, *row)

    def _family(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        documentation: str,
        value: float | Mapping[str, float],
        label: str | None = None,
    ) -> Metric:
        """A family labelled with the model's name and the core's number; several values by one more label."""
        labels = ["model_name", "engine"] if label is None else ["model_name", "engine", label]
        family = kind(f"vllm:{name}", documentation, labels=labels)
        if isinstance(value, Mapping):
            for one, count in value.items():
                family.add_metric([self._model_name, self._rank, one], count)
        else:
            family.add_metric([self._model_name, self._rank], value)
        return family


def _make_histograms(max_model_len: int) -> dict[str, Histogram]:
    """All histograms of one core, those of requests under the field of `FinishedRequest` that they count."""
    lengths = _one_two_five(max_model_len)
    rows: dict[str, tuple[str, str, Sequence[float]]] = {
        "first_token_s": ("time_to_first_token_seconds", "Time from arrival to the first token.", _TTFT_BUCKETS),
        "inter_token_s": ("inter_token_latency_seconds", "Time between two tokens of a sequence.", _TOKEN_BUCKETS),
        "mean_token_s": (
            "request_time_per_output_token_seconds",
            "Mean time per token after a request's first.",
            _TOKEN_BUCKETS,
        ),
        "e2e_s": ("e2e_request_latency_seconds", "Time from arrival to the end.", _REQUEST_BUCKETS),
        "queue_s": ("request_queue_time_seconds", "Time spent waiting.", _REQUEST_BUCKETS),
        "inference_s": (
            "request_inference_time_seconds",
            "Time from first being scheduled to the last token.",
            _REQUEST_BUCKETS,
        ),
        "prefill_s": (
            "request_prefill_time_seconds",
            "Time from first being scheduled to the first token.",
            _REQUEST_BUCKETS,
        ),
        "decode_s": ("request_decode_time_seconds", "Time from the first to the last token.", _REQUEST_BUCKETS),
        "num_prompt_tokens": ("request_prompt_tokens", "Prompt tokens of a request.", lengths),
        "num_generation_tokens": ("request_generation_tokens", "Generated tokens of a sequence.", lengths),
        "max_tokens": ("request_params_max_tokens", "max_tokens of a request.", lengths),
        "n": ("request_params_n", "n of a request.", _N_BUCKETS),
        "best_of": ("request_params_best_of", "best_of of a request.", _N_BUCKETS),
        "max_num_generation_tokens": (
            "request_max_num_generation_tokens",
            "Generated tokens of a request's longest sequence.",
            lengths,
        ),
        "num_preemptions": ("request_num_preemptions", "Preemptions of a request's sequences.", _PREEMPTION_BUCKETS),
        "num_computed_prompt_tokens": (
            "request_prefill_kv_computed_tokens",
            "Prompt tokens of a request that were not in the cache.",
            lengths,
        ),
        "step_tokens": ("iteration_tokens_total", "Tokens of a step.", _ITERATION_BUCKETS),
    }
    return {field: Histogram(*row) for field, row in rows.items()}


def _num_pending(stats: SchedulerStats) -> int:
    # a beam search waits as one and is swapped as several
    return max(0, stats.num_waiting - stats.num_swapped)


def _hit_rate(stats: SchedulerStats) -> float:
    return stats.num_prefix_hits / max(stats.num_prefix_queries, 1)


def _one_two_five(limit: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, … up to a limit."""
    buckets: list[float] = []
    scale = 1
    while True:
        for mantissa in (1, 2, 5):
            if mantissa * scale > limit:
                return buckets
            buckets.append(mantissa * scale)
        scale *= 10
