"""How many requests may wait: beyond --max-num-queued-reqs, or its like for tokens, another one is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.engine.metrics import BACKLOG_FULL, EngineMetrics
from ascend_vllm.engine.output_processor import OutputProcessor
from ascend_vllm.errors import EngineBusyError

_BUSY = (
    "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
)
_BACKLOG = (
    "The engine has reached its prefill token backlog limit. Please try again later or on a different instance."
)


class QueueLimits:
    """Counts the requests that are there, from the moment they come.

    Args:
        config: of the engine.
        output: knows the requests that the engine cores have.
        metrics: count refusals.

    Attributes:
        num_waiting: requests that wait, as each of the cores counts them.
    """

    def __init__(self, config: EngineConfig, output: OutputProcessor, metrics: EngineMetrics) -> None:
        self._config = config
        self._output = output
        self._metrics = metrics
        # request id → sequences of requests that are being checked and tokenised
        self._admitted: dict[str, int] = {}
        self.num_waiting = [0] * config.parallel.data_parallel_size

    def __contains__(self, request_id: str) -> bool:
        """Whether a request of this id is being checked and tokenised."""
        return request_id in self._admitted

    @contextlib.contextmanager
    def admit(self, request_id: str, num_sequences: int) -> Iterator[None]:
        """Counts a request while it is checked and tokenised.

        Raises:
            EngineBusyError: too many requests wait, or too many of their tokens.
        """
        self._check()
        self._admitted[request_id] = num_sequences
        try:
            yield
        finally:
            del self._admitted[request_id]

    def _check(self) -> None:
        """Refuses a request if too many wait: beyond those that can run, or by the core's own count."""
        scheduler = self._config.scheduler
        most_tokens = scheduler.max_num_queued_tokens
        if most_tokens is not None and self._output.num_prefill_tokens >= most_tokens:
            self._metrics.count_rejection(BACKLOG_FULL)
            raise EngineBusyError(_BACKLOG)
        limit = scheduler.max_num_queued_reqs
        if limit is None:
            return
        in_flight = self._output.num_sequences + sum(self._admitted.values())
        beyond_running = in_flight - scheduler.max_num_seqs * self._config.parallel.data_parallel_size
        num_waiting = sum(self.num_waiting)
        if beyond_running >= limit or (num_waiting > 0 and num_waiting >= limit):
            self._metrics.count_rejection()
            raise EngineBusyError(_BUSY)
