"""Running requests make room: their blocks are dropped and computed again later, or wait in CPU memory."""

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
    """Takes requests off the device, and those it has swapped back.

    Args:
        config: mode of preemption.
        kv_cache: of the blocks.
        rows: of the slots.
        waiting: where preempted requests go.

    Attributes:
        num_preemptions: since the start.
        num_swapped: requests whose blocks are in CPU memory.
        num_children: requests whose prompt others may share → how many of those live; the scheduler keeps it.
    """

    def __init__(self, config: SchedulerConfig, kv_cache: KVCacheManager, rows: Rows, waiting: RequestQueue) -> None:
        self._mode = config.preemption_mode
        self._kv_cache = kv_cache
        self._rows = rows
        self._waiting = waiting
        self.num_preemptions = 0
        self.num_swapped = 0
        self.num_children: collections.Counter[str] = collections.Counter()

    def make_way_for_urgent(self) -> int:
        """Preempts running requests that a waiting one outranks and whose room it needs.

        Returns:
            Rows at the end of the running ones that must not compute in this step: they are to make room, but have
            tokens pending.
        """
        while self._rows.running:
            urgent, last = self._waiting.next(passes_further=self._rows.passes_further), self._rows.running[-1]
            if urgent is None or not self._waiting.outranks(urgent, last) or self._has_room(urgent):
                return 0
            rows = rows_of(last)
            if any(row.num_pending_tokens for row in rows):
                return len(rows)
            self.preempt(rows)
        return 0

    def preempt(self, rows: list[Request]) -> None:
        """Makes a request, given by all its rows, give up slots and blocks; it waits, at the front.

        A request of several rows that is not swapped begins anew.
        """
        request = rows[0].kind.root_of(rows[0])
        swaps = self._prefers_swapping(request) and self._kv_cache.can_swap_out(rows)
        self._take_off(rows, swaps=swaps)
        self._count(request, swaps)

    def give_up_all(self) -> None:
        """Makes all requests with blocks, also in CPU memory, wait to be computed again. Nothing stays cached."""
        while self._rows.running:
            self._take_off(rows_of(self._rows.running[-1]), swaps=False)
        for request in [request for request in self._waiting if request.status is RequestStatus.SWAPPED]:
            rows = rows_of(request)
            for row in rows:
                row.transition(RequestStatus.PREEMPTED)
            self._drop_blocks(rows)
            self.num_swapped -= 1
        # copies of blocks that nobody has any more
        self._kv_cache.take_moves()
        self._kv_cache.reset_prefix_cache()

    def _take_off(self, rows: list[Request], *, swaps: bool) -> None:
        """Takes all rows of a request out of their slots, their blocks to CPU memory or back."""
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
        """Takes the blocks of all rows of a request back."""
        for row in rows:
            self._kv_cache.free(row)
            row.num_computed_tokens = 0
        rows[0].kind.drop_rows(rows[0])

    def swap_in(self, builder: StepBuilder, request: Request) -> bool:
        """Brings the first of the waiting requests, a swapped one, back; its rows then run with the others.

        Returns:
            False if there are too few blocks; then nothing has changed.
        """
        rows = rows_of(request)
        # each row may soon need one more block; what runs alone gets what there is
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
        """Whether a waiting request could be admitted now, whatever else waits."""
        if self._rows.num_available < request.kind.width:
            return False
        num_blocks = -(-request.num_tokens // self._kv_cache.block_size) + self._kv_cache.watermark_blocks
        return num_blocks <= self._kv_cache.num_free_blocks

    def _prefers_swapping(self, request: Request) -> bool:
        """vLLM 0.6.3's rule: unless told otherwise, requests of several sequences are swapped, others recomputed."""
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
