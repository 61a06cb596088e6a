"""Admission of waiting requests: which ones, with which blocks, and how many tokens of them the step computes."""

from __future__ import annotations

from collections.abc import Mapping

from ascend_vllm.config.scheduler import SchedulerConfig
from ascend_vllm.core.drafting import Drafting
from ascend_vllm.core.kv.manager import KVCacheManager
from ascend_vllm.core.preemption import Preemption
from ascend_vllm.core.prompt_chunks import ChunkSizeController
from ascend_vllm.core.request import Request, RequestStatus
from ascend_vllm.core.request_queue import RequestQueue
from ascend_vllm.core.rows import Rows
from ascend_vllm.core.step_builder import StepBuilder

# A step carries all tokens of the rows that it admits, cached and shared ones too; those of hundreds of long rows
# would delay it. After so many tokens other rows are admitted with the next step.
_MAX_ENTERING_TOKENS = 1 << 18
# most requests that others overtake in a step: each of them is checked again in every step
_MAX_OVERTAKEN = 64


class Admission:
    """Admits requests, in the order of their queue, to slots and blocks.

    Args:
        config: limits.
        kv_cache: of the blocks.
        rows: of the slots.
        waiting: the queue.
        requests: all unfinished ones, by id.
        preemption: swaps requests in.
        chunk_size: has the duration of the last step with prompts.
        drafting: decides whether requests have drafts.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        rows: Rows,
        waiting: RequestQueue,
        requests: Mapping[str, Request],
        preemption: Preemption,
        chunk_size: ChunkSizeController,
        drafting: Drafting,
    ) -> None:
        self._config = config
        self._cuts_prompts = config.enable_chunked_prefill
        self._kv_cache = kv_cache
        self._rows = rows
        self._waiting = waiting
        self._requests = requests
        self._preemption = preemption
        self._chunk_size = chunk_size
        self._drafting = drafting

    def schedule_waiting(self, builder: StepBuilder, budget: int, now: float) -> None:
        """Admits waiting requests in order until one does not fit the free slots, blocks or the budget.

        Without mixed steps those that miss only one token are admitted, but decode later with the running rows.
        """
        waiting = self._waiting
        if not waiting or budget <= 0 or self._delays_prompts(now):
            return
        overtaken: list[Request] = []
        num_entering = 0
        passes_further = self._rows.passes_further
        while budget > 0 and num_entering < _MAX_ENTERING_TOKENS:
            request = waiting.next(passes_further=passes_further or self._rows.passes_further)
            if request is None:
                break
            if self._rows.num_available < request.kind.width:
                break
            if request.status is RequestStatus.SWAPPED:
                if not self._preemption.swap_in(builder, request):
                    break
                continue
            if self._is_overtaken(builder, request):
                if len(overtaken) == _MAX_OVERTAKEN:
                    break
                waiting.remove(request)
                overtaken.append(request)
                continue
            if self._awaits_parent(builder, request):
                # blocks are copied before a step: an earlier one must have computed the parent's prompt
                if passes_further or not request.is_further:
                    break
                passes_further = True
                continue
            count = self._admit(builder, request, budget, now)
            if count is None:
                break
            budget -= count
            num_entering += request.num_tokens
        for request in reversed(overtaken):
            waiting.put_back(request)

    def _delays_prompts(self, now: float) -> bool:
        """Whether prompts wait for more of them (--scheduler-delay-factor)."""
        factor = self._config.delay_factor
        if factor <= 0 or not self._rows.running:
            return False
        earliest = min(request.arrival_time for request in self._waiting)
        return now - earliest <= factor * self._chunk_size.last_prompt_latency_s

    def _is_overtaken(self, builder: StepBuilder, request: Request) -> bool:
        """Whether other prompts go first, since enough long or scored ones are being computed."""
        if request.is_scored and not builder.limits().allows_scored:
            return True
        if not self._cuts_prompts or not self._config.long_prefill_token_threshold:
            return False
        limits = builder.limits()
        return limits.is_long(request.num_tokens) and not limits.allows_another_long()

    def _admit(self, builder: StepBuilder, request: Request, budget: int, now: float) -> int | None:
        """Admits a request without blocks.

        Returns:
            The number of its tokens that the step computes; None if it does not fit now.
        """
        # if nothing runs, a sequence may take the whole cache
        num_reserved = self._kv_cache.watermark_blocks if self._rows.running else 0
        parent = self._parent(request)
        if parent is None:
            return self._admit_prompt(builder, request, budget, num_reserved, now)
        num_shared = request.num_prompt_tokens - 1
        if not self._kv_cache.can_fork(parent, num_shared):
            return self._admit_prompt(builder, request, budget, num_reserved, now)
        if not self._kv_cache.fork(request, parent, num_shared, request.num_tokens, num_reserved):
            return None
        request.num_computed_tokens = num_shared
        return self._enter(builder, request, request, 1, now)

    def _awaits_parent(self, builder: StepBuilder, request: Request) -> bool:
        """Whether the prompt that a request shares is still being computed."""
        parent = self._parent(request)
        return parent is not None and builder.num_computed_before(parent) < request.num_prompt_tokens - 1

    def _parent(self, request: Request) -> Request | None:
        """The running sequence whose prompt blocks a waiting one can fork, now or soon.

        A parent that waits does not count: it may be later in the queue, and the two would wait for each other.
        """
        parent_id = request.parent_id
        if parent_id is None or request.num_output_tokens:
            return None
        parent = self._requests.get(parent_id)
        if parent is not None and parent.status is RequestStatus.RUNNING:
            return parent
        # the parent has ended or is preempted: use a sibling, unless sequences end with their first output token
        if request.max_num_tokens == request.num_prompt_tokens + 1:
            return None
        return next((row for row in reversed(self._rows.running) if row.parent_id == parent_id), None)

    def _admit_prompt(
        self, builder: StepBuilder, request: Request, budget: int, num_reserved: int, now: float
    ) -> int | None:
        """`_admit` for a request that forks no other, with its cached blocks."""
        kv_cache = self._kv_cache
        reads_cache = not request.needs_whole_prompt
        cached = kv_cache.find_cached_blocks(request) if reads_cache else []
        num_cached = len(cached) * kv_cache.block_size
        count = request.num_tokens - num_cached
        count = builder.limits().take(count, budget, is_scored=request.is_scored)
        if not 0 < count <= budget:
            return None
        row = request.kind.first_row(request)
        if kv_cache.allocate_slots(row, row.num_tokens, num_reserved, cached) is None:
            return None
        row.num_computed_tokens = num_cached
        if request.first_scheduled_time is None:
            request.num_cached_tokens = num_cached
            if kv_cache.enable_prefix_caching and reads_cache:
                kv_cache.count_lookup(request.num_tokens, num_cached)
        return self._enter(builder, request, row, count, now)

    def _enter(self, builder: StepBuilder, request: Request, row: Request, count: int, now: float) -> int:
        """Gives an admitted request's row a slot; returns the number of its tokens that the step computes."""
        self._waiting.remove(request)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
            if self._drafting.max_drafts:
                num_rows = min(len(self._rows.running) + len(self._waiting) + 1, self._config.max_num_seqs)
                self._drafting.begin(request, num_rows)
        # cached tokens do not count as computed prompt tokens
        row.num_counted_prompt_tokens = max(row.num_counted_prompt_tokens, row.num_computed_tokens)
        request.transition(RequestStatus.RUNNING)
        if row is not request:
            row.transition(RequestStatus.RUNNING)
        self._rows.reserve(request.kind, request.kind.width - 1)
        self._rows.enter(row)
        builder.enter(row)
        if count == 1 == row.num_missing_tokens and not (builder.is_mixed or builder.step.slots):
            # it decodes later, with the running rows
            return 0
        builder.add(row, count)
        return count
