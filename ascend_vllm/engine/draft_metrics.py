"""What became of drafts, under the names of vLLM 0.6.3 and of today's, as metrics and as log lines.

Both versions count accepted tokens under one name, which counts those that were emitted here, as today's does; 0.6.3
counted right drafts behind a wrong one, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

from ascend_vllm.types.messages import DraftStats

# a family, its name, documentation and value, and the label by which a value of several parts is divided
DraftRow = tuple[
    type[GaugeMetricFamily] | type[CounterMetricFamily], str, str, float | Mapping[str, float], str | None
]


class DraftMetrics:
    """Totals of one engine core.

    Args:
        num_speculative_tokens: most drafts of a sequence in a step.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        self._num_speculative_tokens = num_speculative_tokens
        self._stats = self._last = DraftStats(num_accepted_at=[0] * num_speculative_tokens)

    def record(self, stats: DraftStats | None) -> None:
        """Sets the totals; None: unchanged. A core in this process goes on counting in what it gave."""
        if stats is not None:
            self._stats = stats

    def rows(self) -> Iterator[DraftRow]:
        """The metric families, always the same in the same order."""
        stats = self._stats
        num_emitted = _num_emitted(stats)
        at = {str(position): float(count) for position, count in enumerate(stats.num_accepted_at)}
        rate, efficiency = _acceptance_rate(stats), _efficiency(stats)
        yield GaugeMetricFamily, "spec_decode_draft_acceptance_rate", "Share of drafts that were right.", rate, None
        yield (
            GaugeMetricFamily,
            "spec_decode_efficiency",
            "Tokens of steps with drafts, as a share of those if all drafts were right.",
            efficiency,
            None,
        )
        for name, documentation, value, label in (
            ("drafts", "Steps of sequences with drafts.", stats.num_drafts, None),
            ("draft_tokens", "Drafts that were verified.", stats.num_draft_tokens, None),
            (
                "accepted_tokens",
                "Drafts before the first wrong one.",
                stats.num_accepted_tokens,
                None,
            ),
            ("accepted_tokens_per_pos", "Drafts that were right, by their position in a step.", at, "position"),
            ("emitted_tokens", "Tokens of steps with drafts.", num_emitted, None),
        ):
            yield CounterMetricFamily, f"spec_decode_num_{name}", documentation, value, label

    def log_lines(self, elapsed: float) -> list[str]:
        """0.6.3's line, of all steps, and today's, of those since the last call; none if there were none since.

        Args:
            elapsed: seconds since the last call, above 0.
        """
        stats, last = self._stats, self._last
        num_drafts = stats.num_drafts - last.num_drafts
        if num_drafts == 0:
            return []
        self._last = DraftStats(
            stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens, stats.num_accepted_at.copy()
        )
        num_drafted = stats.num_draft_tokens - last.num_draft_tokens
        num_accepted = stats.num_accepted_tokens - last.num_accepted_tokens
        counts = zip(stats.num_accepted_at, last.num_accepted_at, strict=True)
        rates = ", ".join(f"{(now - before) / num_drafts:.3f}" for now, before in counts)
        return [
            f"Speculative metrics: Draft acceptance rate: {_acceptance_rate(stats):.3f}, "
            f"System efficiency: {_efficiency(stats):.3f}, "
            f"Number of speculative tokens: {self._num_speculative_tokens}, "
            f"Number of accepted tokens: {stats.num_accepted_tokens}, "
            f"Number of draft tokens: {stats.num_draft_tokens}, "
            f"Number of emitted tokens: {_num_emitted(stats)}.",
            f"SpecDecoding metrics: Mean acceptance length: {1 + num_accepted / num_drafts:.2f}, "
            f"Accepted throughput: {num_accepted / elapsed:.2f} tokens/s, "
            f"Drafted throughput: {num_drafted / elapsed:.2f} tokens/s, "
            f"Accepted: {num_accepted} tokens, Drafted: {num_drafted} tokens, "
            f"Per-position acceptance rate: {rates}, "
            f"Avg Draft acceptance rate: {100 * num_accepted / max(num_drafted, 1):.1f}%",
        ]


def _num_emitted(stats: DraftStats) -> int:
    """Each step emits the token behind the accepted drafts, too."""
    return stats.num_accepted_tokens + stats.num_drafts


def _acceptance_rate(stats: DraftStats) -> float:
    return stats.num_accepted_tokens / max(stats.num_draft_tokens, 1)


def _efficiency(stats: DraftStats) -> float:
    return _num_emitted(stats) / max(stats.num_draft_tokens + stats.num_drafts, 1)
