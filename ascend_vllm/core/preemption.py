"""Preemption of running requests, by recomputation or by swapping to CPU memory."""

from __future__ import annotations

import collections

from ascend_vllm.config.scheduler import SchedulerConfig
from ascend_vllm.core.kv.manager import KVCacheManager
from ascend_vllm.core.request import Request, RequestStatus
from ascend_vllm.core.request_queue import RequestQueue
from ascend_vllm.core.rows import Rows, rows_of
from ascend_vllm.core.step_builder import StepBuilder
from ascend_vllm.logger import init_logger

logger = init_logger(__name__)

_PREEMPTIONS_PER_WARNING = 50


class Preemption:
    """Preempts requests, and swaps them in again.

    Args:
        config: mode of preemption.
        kv_cache: of the blocks.
        rows: of the slots.
        waiting: where preempted requests go.

    Attributes:
        num_preemptions: since the start.
        num_swapped: requests whose blocks are in CPU memory.
        num_children: parent request → its unfinished children; the scheduler updates it.
    """

    def __init__(self, config: SchedulerConfig, kv_cache: KVCacheManager, rows: Rows, waiting: RequestQueue) -> None:
        self._mode = config.preemption_mode
        self._kv_cache = kv_cache
        self._rows = rows
        self._waiting = waiting
        self.num_preemptions = 0
        self.num_swapped = 0
        self.num_children: collections.Counter[str] = collections.Counter()

    def preempt_outranked(self) -> int:
        """Preempts running requests until the next waiting one, if it outranks them, fits.

        Returns:
            How many of the last running rows must not compute in this step: they will be preempted, but have pending
            tokens.
        """
        while self._rows.running:
            first, last = self._waiting.next(passes_further=self._rows.passes_further), self._rows.running[-1]
            if first is None or not self._waiting.outranks(first, last) or self._has_room(first):
                return 0
            rows = rows_of(last)
            if any(row.num_pending_tokens for row in rows):
                return len(rows)
            self.preempt(rows)
        return 0

    def preempt(self, rows: list[Request]) -> None:
        """Preempts a request, given by all its rows; it then waits at the front of the queue.

        A request of several rows that is not swapped starts again.
        """
        request = rows[0].kind.root_of(rows[0])
        swaps = self._prefers_swapping(request) and self._kv_cache.can_swap_out(rows)
        self._remove(rows, swaps=swaps)
        self._count(request, swaps)

    def preempt_all(self) -> None:
        """Preempts all requests with blocks, swapped ones too, to be recomputed; empties the prefix cache."""
        while self._rows.running:
            self._remove(rows_of(self._rows.running[-1]), swaps=False)
        for request in [request for request in self._waiting if request.status is RequestStatus.SWAPPED]:
            rows = rows_of(request)
            for row in rows:
                row.transition(RequestStatus.PREEMPTED)
            self._drop_blocks(rows)
            self.num_swapped -= 1
        # copies of blocks that are free now
        self._kv_cache.take_moves()
        self._kv_cache.reset_prefix_cache()

    def _remove(self, rows: list[Request], *, swaps: bool) -> None:
        """Frees the slots of all rows of a request, and frees their blocks or swaps them out."""
        request = rows[0].kind.root_of(rows[0])
        for row in rows:
            self._rows.leave(row)
            row.transition(RequestStatus.SWAPPED if swaps else RequestStatus.PREEMPTED)
        if request is not rows[0]:
            request.transition(rows[0].status)
        self._rows.reserve(request.kind, 0)
        if swaps:
            self._kv_cache.swap_out(rows)
            self.num_swapped += 1
        else:
            self._drop_blocks(rows)
        request.num_preemptions += 1
        self._waiting.put_back(request)

    def _drop_blocks(self, rows: list[Request]) -> None:
        """Frees the blocks of all rows of a request."""
        for row in rows:
            self._kv_cache.free(row)
            row.num_computed_tokens = 0
        rows[0].kind.drop_rows(rows[0])

    def swap_in(self, builder: StepBuilder, request: Request) -> bool:
        """Swaps in the first waiting request; its rows run again.

        Returns:
            False if too few blocks are free: then nothing has changed.
        """
        rows = rows_of(request)
        # each row may soon need one more block; if nothing else runs, nothing is kept free
        spare = self._kv_cache.watermark_blocks + len(rows) if self._rows.running else 0
        if not self._kv_cache.swap_in(rows, spare):
            return False
        self._waiting.remove(request)
        self.num_swapped -= 1
        request.transition(RequestStatus.RUNNING)
        self._rows.reserve(request.kind, request.kind.width - len(rows))
        for row in rows:
            if row is not request:
                row.transition(RequestStatus.RUNNING)
            self._rows.enter(row)
            builder.enter(row)
        return True

    def _has_room(self, request: Request) -> bool:
        """Whether there are slots and blocks for a waiting request."""
        if self._rows.num_available < request.kind.width:
            return False
        num_blocks = -(-request.num_tokens // self._kv_cache.block_size) + self._kv_cache.watermark_blocks
        return num_blocks <= self._kv_cache.pool.num_free

    def _prefers_swapping(self, request: Request) -> bool:
        """vLLM 0.6.3's default: requests of several sequences are swapped, others recomputed."""
        if self._mode is None:
            is_one_of_several = request.parent_id is not None or request.request_id in self.num_children
            return request.kind.prefers_swapping or is_one_of_several
        return self._mode == "swap"

    def _count(self, request: Request, swaps: bool) -> None:
        self.num_preemptions += 1
        if self.num_preemptions % _PREEMPTIONS_PER_WARNING == 1:
            logger.warning(
                "The KV cache is full: request %s gives up its blocks and %s (%d preemptions so far). More memory "
                "for the KV cache or a smaller --max-num-seqs avoids this.",
                request.request_id,
                "goes to CPU memory" if swaps else "will be computed again",
                self.num_preemptions,
            )
