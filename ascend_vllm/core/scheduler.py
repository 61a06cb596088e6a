"""The scheduler: which rows compute how many tokens in a step.

There are no phases. A request's `num_computed_tokens` chases its `num_tokens`; a step gives rows some of the
tokens they miss, at most max_num_batched_tokens together. A decoding row misses one token, and so does one that
comes back from CPU memory or shares a prompt that another has computed; a new one misses its sequence, less what the
prefix cache holds of it.

Without chunked prefill prompts are never cut and come first, alone: rows decode in the steps in which no
waiting prompt can be taken in (vLLM 0.6.3's order). With it rows that run come first, and prompts share what
is left of the step, cut if they must be. When all rows of a step decode, one call may stand for several forward
steps (--num-scheduler-steps).

Admission gives a request blocks for all its tokens at once, so that a prompt once begun never stalls half
way. Decoding rows grow block by block; when none is left, the running request that came last (or, with priorities,
matters least) makes room: it gives up its blocks and waits to be computed again, or takes them to CPU memory.

Steps may be made ahead of the outputs of those before: a row whose sampled tokens are still to come has
`num_pending_tokens`. Workers compute steps in the order they were made, so blocks may change hands while a step that
uses them is under way; only a row with pending tokens is not preempted, since what it will have to compute again is
not known.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import time
from collections.abc import Iterable, Sequence
from typing import Any

from ascend_vllm.config.scheduler import SchedulerConfig
from ascend_vllm.core.beam_group import BeamGroup
from ascend_vllm.core.kv_cache_manager import KVCacheManager, NoFreeBlocksError
from ascend_vllm.core.prompt_limits import PromptLimits
from ascend_vllm.core.request import NO_SLOT, Request, RequestStatus
from ascend_vllm.core.request_queue import RequestQueue
from ascend_vllm.core.scheduler_audit import audit_scheduler
from ascend_vllm.errors import EngineBusyError, RequestError
from ascend_vllm.logger import init_logger
from ascend_vllm.types.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    SchedulerStats,
    TokenLogprobs,
)
from ascend_vllm.types.step import NewRow, SchedulerOutput, StepLogprobs, StepOutput

logger = init_logger(__name__)

_PREEMPTIONS_PER_WARNING = 50
# how often waiting requests are looked through for those that have waited too long
_EXPIRY_INTERVAL_S = 0.05


@dataclasses.dataclass(slots=True)
class _StepInFlight:
    """A step that has been handed out.

    Attributes:
        slots: of its rows.
        rows: the requests in them then.
        made_at: seconds of time.monotonic().
        has_prompts: whether a row computes more than one token.
    """

    slots: list[int]
    rows: list[Request]
    made_at: float
    has_prompts: bool

    def sampling_rows(self, slots: list[int]) -> list[Request]:
        """The requests that were in some of its slots."""
        if len(slots) == len(self.slots):
            return self.rows
        by_slot = dict(zip(self.slots, self.rows, strict=True))
        return [by_slot[slot] for slot in slots]


class Scheduler:
    """Holds all requests that live, and makes steps of them.

    Args:
        config: limits and policy.
        kv_cache: where requests get their blocks.
        waiting: an empty queue, which decides the order of admission.
        seed: of the seeds drawn for requests that bring none.
    """

    def __init__(self, config: SchedulerConfig, kv_cache: KVCacheManager, waiting: RequestQueue, seed: int) -> None:
        self.config = config
        self.kv_cache = kv_cache
        self.waiting = waiting
        self._cuts_prompts = config.enable_chunked_prefill
        # most tokens of a sequence that can be computed: a whole one must fit a step where prompts stay whole
        self._max_model_len = (
            config.max_model_len if self._cuts_prompts else min(config.max_model_len, config.max_num_batched_tokens)
        )
        self._seeds = random.Random(seed)
        # without the rows of beam searches, which stand for them
        self.requests: dict[str, Request] = {}
        # rows; the last is the first to be preempted
        self.running: list[Request] = []
        self.rows: dict[int, Request] = {}
        # a stack; slot 0 lies on top at first
        self.free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        # of the free slots, those that beam searches will come to need
        self.num_reserved_slots = 0
        # freed since the last step that was handed out
        self._freed_slots: list[int] = []
        # slot → (source slot, token), for the next step
        self._forks: dict[int, tuple[int, int]] = {}
        # oldest first
        self._in_flight: collections.deque[_StepInFlight] = collections.deque()
        # of requests that ended without a step
        self._early_outputs: list[EngineCoreOutput] = []
        # requests whose prompt others may share → how many of those live
        self._num_children: collections.Counter[str] = collections.Counter()
        self._step_id = 0
        self._step_rows: list[Request] = []
        self._step_has_prompts = False
        self._limits: PromptLimits | None = None
        self._num_preemptions = 0
        self._num_swapped = 0
        self._num_step_prompt_tokens = 0
        self._last_prompt_latency_s = 0.0
        self._next_expiry = 0.0
        self._told_of_single_steps = False

    # ---- requests come and go ------------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        """Whether a request lives, or the end of one is still to be told."""
        return bool(self.requests or self._early_outputs)

    def add_request(self, message: EngineCoreRequest) -> None:
        """Lets a request wait. One that can never be served ends here; the next step's outputs say so.

        Raises:
            RequestError: a request of that id lives.
        """
        if message.request_id in self.requests:
            raise RequestError(f"Request {message.request_id} already exists.")
        request = Request(message, self._max_model_len, self._seeds.getrandbits(63))
        self.requests[request.request_id] = request
        self.waiting.add(request)
        if request.parent_id is not None:
            self._num_children[request.parent_id] += 1
        if message.beam_search is not None and request.num_tokens:
            request.beam_group = BeamGroup(request, message.beam_search, self._max_model_len)
        self._refuse_unservable(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Ends requests without an output; unknown ids are ignored. Their blocks are free at once."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                self._end(request, RequestStatus.FINISHED_ABORTED)

    def fail_requests(self, error: str) -> EngineCoreOutputs:
        """Ends all requests with an ERROR output that carries a sentence for the client."""
        for request in list(self.requests.values()):
            self._end_early(request, RequestStatus.FINISHED_ERROR, error)
        return self.update(None)

    def _refuse_unservable(self, request: Request) -> None:
        """Ends a new request that could wait forever."""
        count = request.num_tokens
        if count == 0:
            self._end_early(request, RequestStatus.FINISHED_ERROR, "Prompt cannot be empty")
        elif count > self._max_model_len:
            limit = f"limit of {self._max_model_len}"
            self._end_too_long(request, f"Input prompt ({count} tokens) is too long and exceeds {limit}")
        elif count > self.kv_cache.num_tokens:
            limit = f"the capacity of the KV cache, {self.kv_cache.num_tokens} tokens"
            self._end_too_long(request, f"Input prompt ({count} tokens) is too long and exceeds {limit}")
        elif request.beam_group is not None and request.beam_group.width > self.config.max_num_seqs:
            self._end_early(
                request,
                RequestStatus.FINISHED_ERROR,
                f"a beam search of width {request.beam_group.width} needs more sequences than --max-num-seqs "
                f"({self.config.max_num_seqs}) allows to run",
            )

    def _end_too_long(self, request: Request, why: str) -> None:
        """Ends a request as vLLM does for over-long ones: "length", with what it has, and a line in the log."""
        logger.warning("Request %s ends: %s", request.request_id, why)
        self._end_early(request, RequestStatus.FINISHED_LENGTH)

    def _end_early(
        self, request: Request, status: RequestStatus, error: str | None = None, error_class: str | None = None
    ) -> None:
        """Ends a request outside a step; the next `update` gives its last output."""
        group = request.beam_group
        if group is not None and status is RequestStatus.FINISHED_LENGTH and group.rows:
            group.finish()
        beams = group.news() if group is not None and group.is_done else None
        self._end(request, status)
        self._early_outputs.append(
            EngineCoreOutput(
                request.request_id,
                [],
                finish_reason=request.finish_reason,
                error=error,
                error_class=error_class,
                beams=beams,
            )
        )

    def _end(self, request: Request, status: RequestStatus) -> None:
        if request.status is not RequestStatus.RUNNING:
            self.waiting.remove(request)
        elif request.beam_group is None:
            self.running.remove(request)
        if request.status is RequestStatus.SWAPPED:
            self._num_swapped -= len(_rows_of(request))
        request.transition(status)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        """Lets go of a request that has ended and is not among the running ones; rows of a search still may be."""
        del self.requests[request.request_id]
        parent_id = request.parent_id
        if parent_id is not None:
            self._num_children[parent_id] -= 1
            if not self._num_children[parent_id]:
                del self._num_children[parent_id]
        if request.beam_group is None:
            self._vacate(request)
            self.kv_cache.free(request)
        else:
            self._drop_rows(request.beam_group)

    def _drop_rows(self, group: BeamGroup) -> None:
        """Ends all rows of a beam search."""
        self._reserve_slots(group, 0)
        for row in group.drop_rows():
            self._end_row(row)

    def _reserve_slots(self, group: BeamGroup, count: int) -> None:
        """Keeps so many free slots, and no more, for a beam search."""
        self.num_reserved_slots += count - group.num_reserved_slots
        group.num_reserved_slots = count

    def _end_row(self, row: Request) -> None:
        if row.status is RequestStatus.RUNNING:
            self.running.remove(row)
        row.transition(RequestStatus.FINISHED_ABORTED)
        self._vacate(row)
        self.kv_cache.free(row)

    def _vacate(self, row: Request) -> None:
        """Takes a row's slot back."""
        if row.slot != NO_SLOT:
            del self.rows[row.slot]
            source, _ = self._forks.pop(row.slot, (row.slot, 0))
            self.free_slots.append(row.slot)
            # the workers have not been told of a fork that was still to come
            if source == row.slot:
                self._freed_slots.append(row.slot)
            row.slot = NO_SLOT

    def _end_expired(self, now: float) -> None:
        """Ends requests that have waited too long for their first step."""
        timeout_s = self.config.queue_timeout_s
        if timeout_s is None or now < self._next_expiry:
            return
        self._next_expiry = now + _EXPIRY_INTERVAL_S
        for request in list(self.waiting):
            if request.first_scheduled_time is None and now - request.arrival_time > timeout_s:
                self._end_early(
                    request,
                    RequestStatus.FINISHED_ERROR,
                    f"The request waited longer than the limit of {timeout_s:g} s (--queue-timeout-s) to be served. "
                    "Please try again later.",
                    EngineBusyError.__name__,
                )

    # ---- a step is made ------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None if no row can compute. A step handed out counts as computed."""
        now = time.monotonic()
        self._end_expired(now)
        step = SchedulerOutput(self._step_id, [], [], [], [], [])
        self._step_rows, self._step_has_prompts, self._limits = [], False, None
        self._num_step_prompt_tokens = 0
        num_held = self._make_way_for_urgent()
        budget = self.config.max_num_batched_tokens
        if self._cuts_prompts:
            budget = self._schedule_running(step, budget, num_held)
            # what has just been preempted does not come back at once: its blocks were short by one already
            self._schedule_waiting(step, budget, now)
        else:
            self._schedule_waiting(step, budget, now)
            if not step.slots:
                self._schedule_running(step, budget, num_held)
        if not (step.slots or step.new_rows or step.replaced_blocks):
            return None
        self._hand_out(step, now)
        return step

    def _hand_out(self, step: SchedulerOutput, now: float) -> None:
        self._step_id += 1
        step.freed_slots, self._freed_slots = self._freed_slots, []
        step.block_moves = self.kv_cache.take_moves()
        if self._forks:
            step.forks = [(slot, source, token) for slot, (source, token) in self._forks.items()]
            self._forks.clear()
        if step.num_steps > 1:
            for row in self._step_rows:
                # a row that reaches its last token on the way stops there
                further = min(step.num_steps - 1, row.max_num_tokens - 1 - row.num_computed_tokens)
                row.num_computed_tokens += further
                row.num_pending_tokens += further
        self._in_flight.append(_StepInFlight(step.slots, self._step_rows, now, self._step_has_prompts))

    def _schedule_running(self, step: SchedulerOutput, budget: int, num_held: int) -> int:
        """Gives running rows the tokens they miss: decoding rows one each, then prompts what is left.

        Args:
            step: grows.
            budget: tokens the step may still compute.
            num_held: so many of the last rows are left out.

        Returns:
            What is left of the budget; 0 if rows lack blocks, so that nobody else is let in.
        """
        running, kv_cache = self.running, self.kv_cache
        is_windowed = kv_cache.sliding_window is not None
        lookahead = self.config.num_scheduler_steps - 1
        prompts: list[Request] = []
        slots, counts, rows = step.slots, step.num_scheduled_tokens, self._step_rows
        index = 0
        # one turn per running row: what a step costs the host grows with this loop and the one in `update`
        while index < len(running) - num_held and budget > 0:
            request = running[index]
            pending, computed = request.num_pending_tokens, request.num_computed_tokens
            end = request.num_tokens + pending
            if end - computed != 1:
                if end > computed:
                    prompts.append(request)
                index += 1
                continue
            group = request.beam_group
            if pending and (group is not None or end >= request.max_num_tokens):
                # its next token is not known before its outputs are here, or there will be none
                index += 1
                continue
            if group is not None:
                lookahead = self._single_step()
                if not self._make_writable(step, request):
                    if not self._make_room(step):
                        return 0
                    continue
            if is_windowed:
                kv_cache.free_out_of_window(request)
            wanted = end + lookahead
            if wanted >= request.max_num_tokens:
                wanted = request.max_num_tokens - 1
            block_ids = kv_cache.allocate_slots(request, wanted)
            if block_ids is None:
                if lookahead:
                    lookahead = 0
                elif not self._make_room(step):
                    return 0
                continue
            if block_ids:
                step.new_blocks.append((request.slot, block_ids))
            slots.append(request.slot)
            counts.append(1)
            rows.append(request)
            request.num_computed_tokens = end
            request.num_pending_tokens = pending + 1
            budget -= 1
            index += 1
        if prompts:
            return self._continue_prompts(step, prompts, budget)
        if rows:
            step.num_steps = lookahead + 1
        return budget

    def _continue_prompts(self, step: SchedulerOutput, prompts: Sequence[Request], budget: int) -> int:
        """Gives rows whose prompts were cut more of them; returns what is left of the budget."""
        limits = self._prompt_limits(len(prompts))
        for request in prompts:
            # making room for a decoding row may have preempted it
            if request.status is RequestStatus.RUNNING:
                count = limits.take(request.num_missing_tokens, budget)
                self._add_row(step, request, count)
                budget -= count
        return budget

    def _prompt_limits(self, num_running_prompts: int = 0) -> PromptLimits:
        """The limits of this step's prompts; the first call says how many of them run already."""
        if self._limits is None:
            self._limits = PromptLimits(self.config, num_running_prompts + len(self.waiting))
        return self._limits

    def _add_row(self, step: SchedulerOutput, request: Request, count: int) -> None:
        """Puts a row into the step with `count` of its missing tokens; with 0 nothing happens."""
        if count == 0:
            return
        step.slots.append(request.slot)
        step.num_scheduled_tokens.append(count)
        self._step_rows.append(request)
        # rows that have no room for more than one step
        step.num_steps = 1
        request.num_computed_tokens += count
        if request.num_missing_tokens == 0:
            request.num_pending_tokens += 1
        if count > 1:
            self._step_has_prompts = True
            self.kv_cache.cache_full_blocks(request, min(request.num_computed_tokens, request.num_tokens))
        if request.num_counted_prompt_tokens < request.num_prompt_tokens:
            self._count_prompt_tokens(request)

    def _count_prompt_tokens(self, request: Request) -> None:
        """Statistics: each prompt token counts once, however often preemption makes it be computed."""
        end = min(request.num_computed_tokens, request.num_prompt_tokens)
        if end > request.num_counted_prompt_tokens:
            self._num_step_prompt_tokens += end - request.num_counted_prompt_tokens
            request.num_counted_prompt_tokens = end

    def _single_step(self) -> int:
        """A beam search needs the host after every step: the others go one step at a time with it."""
        if self.config.num_scheduler_steps > 1 and not self._told_of_single_steps:
            self._told_of_single_steps = True
            logger.info(
                "A beam search runs: while it does, steps are made one at a time, not %d (--num-scheduler-steps).",
                self.config.num_scheduler_steps,
            )
        return 0

    def _make_writable(self, step: SchedulerOutput, row: Request) -> bool:
        """Gives a row its own copy of the block it is about to write; False: there is no free block."""
        try:
            replaced = self.kv_cache.make_writable(row, row.num_computed_tokens)
        except NoFreeBlocksError:
            return False
        if replaced is not None:
            step.replaced_blocks.append((row.slot, *replaced))
        return True

    # ---- waiting requests are let in ------------------------------------------------------------------------

    def _schedule_waiting(self, step: SchedulerOutput, budget: int, now: float) -> None:
        """Admits waiting requests while slots, blocks and budget last; the first that does not fit stops it.

        Those that miss one token only are let in but, without chunked prefill, not computed here: they decode with
        the others.
        """
        if not self.waiting or budget <= 0 or self._holds_prompts_back(now):
            return
        overtaken: list[Request] = []
        while self.waiting and budget > 0:
            request = self.waiting.peek()
            group = request.beam_group
            if len(self.free_slots) - self.num_reserved_slots < (1 if group is None else group.width):
                break
            if request.status is RequestStatus.SWAPPED:
                if not self._swap_in(step, request):
                    break
                continue
            if self._is_overtaken(request):
                overtaken.append(self.waiting.pop())
                continue
            count = self._begin(step, request, budget, now)
            if count is None:
                break
            budget -= count
        for request in reversed(overtaken):
            self.waiting.put_back(request)

    def _holds_prompts_back(self, now: float) -> bool:
        """--scheduler-delay-factor: whether waiting prompts should gather for a while."""
        factor = self.config.delay_factor
        if factor <= 0 or not self.running:
            return False
        earliest = min(request.arrival_time for request in self.waiting)
        return now - earliest <= factor * self._last_prompt_latency_s

    def _is_overtaken(self, request: Request) -> bool:
        """Whether shorter prompts pass this one, since enough long ones are under way."""
        if not self._cuts_prompts or not self.config.long_prefill_token_threshold:
            return False
        limits = self._prompt_limits()
        return limits.is_long(request.num_tokens) and not limits.allows_another_long()

    def _begin(self, step: SchedulerOutput, request: Request, budget: int, now: float) -> int | None:
        """Admits a request that holds no blocks.

        Returns:
            Tokens of it that the step computes; None if it does not fit now.
        """
        reserved = self.kv_cache.watermark_blocks if self.running else 0
        parent = self.requests.get(request.parent_id) if request.parent_id is not None else None
        num_shared = request.num_prompt_tokens - 1
        if parent is not None and request.num_tokens == request.num_prompt_tokens:
            if parent.status is RequestStatus.WAITING or (
                parent.status is RequestStatus.RUNNING and _num_computed_before(step, parent) < num_shared
            ):
                # its turn comes when an earlier step has computed the parent's prompt: copies precede a step
                return None
            if parent.status is RequestStatus.RUNNING and self.kv_cache.can_fork(parent, num_shared):
                if not self.kv_cache.fork(request, parent, num_shared, request.num_tokens, reserved):
                    return None
                request.num_computed_tokens = num_shared
                return self._enter(step, request, request, 1, now)
        cached = self.kv_cache.find_cached_blocks(request)
        num_cached = len(cached) * self.kv_cache.block_size
        count = request.num_tokens - num_cached
        if self._cuts_prompts:
            count = self._prompt_limits().take(count, budget)
        if not 0 < count <= budget:
            return None
        row = request if request.beam_group is None else request.beam_group.begin()
        if self.kv_cache.allocate_slots(row, row.num_tokens, reserved, cached) is None:
            return None
        row.num_computed_tokens = num_cached
        if request.first_scheduled_time is None:
            request.num_cached_tokens = num_cached
            if self.kv_cache.enable_prefix_caching:
                self.kv_cache.count_lookup(request.num_tokens, num_cached)
        return self._enter(step, request, row, count, now)

    def _enter(self, step: SchedulerOutput, request: Request, row: Request, count: int, now: float) -> int:
        """Gives an admitted request's row its slot; returns the tokens of it that the step computes."""
        self.waiting.pop()
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
        # cached tokens are no work
        row.num_counted_prompt_tokens = max(row.num_counted_prompt_tokens, row.num_computed_tokens)
        request.transition(RequestStatus.RUNNING)
        if row is not request:
            row.transition(RequestStatus.RUNNING)
        if request.beam_group is not None:
            self._reserve_slots(request.beam_group, request.beam_group.width - 1)
        self._place(step, row)
        if count == 1 == row.num_missing_tokens and not (self._cuts_prompts or step.slots):
            # it decodes with the others, unless prompts compute in this step
            return 0
        self._add_row(step, row, count)
        return count

    def _place(self, step: SchedulerOutput, row: Request) -> None:
        """Puts a row that has its blocks into a slot and among the running ones."""
        row.slot = self.free_slots.pop()
        self.rows[row.slot] = row
        self.waiting.place(row, self.running)
        step.new_rows.append(_new_row(row))

    def _swap_in(self, step: SchedulerOutput, request: Request) -> bool:
        """Brings a request's blocks back; its rows run with the others from the next step that decodes on."""
        rows = _rows_of(request)
        # each row may soon need one more block; what runs alone gets what there is
        spare = self.kv_cache.watermark_blocks + len(rows) if self.running else 0
        if not self.kv_cache.swap_in(rows, spare):
            return False
        self.waiting.pop()
        self._num_swapped -= len(rows)
        request.transition(RequestStatus.RUNNING)
        if request.beam_group is not None:
            self._reserve_slots(request.beam_group, request.beam_group.width - len(rows))
        for row in rows:
            if row is not request:
                row.transition(RequestStatus.RUNNING)
            self._place(step, row)
        return True

    # ---- running requests make room --------------------------------------------------------------------------

    def _make_way_for_urgent(self) -> int:
        """Preempts running requests that a waiting one outranks and whose room it needs.

        Returns:
            Rows at the end of the running ones that must not compute in this step: they are to make room, but have
            tokens pending.
        """
        while self.waiting and self.running:
            urgent, last = self.waiting.peek(), self.running[-1]
            if not self.waiting.outranks(urgent, last) or self._has_room(urgent):
                return 0
            rows = _rows_of(last)
            if any(row.num_pending_tokens for row in rows):
                return len(rows)
            self._preempt(rows)
        return 0

    def _has_room(self, request: Request) -> bool:
        """Whether a waiting request could be admitted now, whatever else waits."""
        group = request.beam_group
        if len(self.free_slots) - self.num_reserved_slots < (1 if group is None else group.width):
            return False
        num_blocks = -(-request.num_tokens // self.kv_cache.block_size) + self.kv_cache.watermark_blocks
        return num_blocks <= self.kv_cache.num_free_blocks

    def _make_room(self, step: SchedulerOutput) -> bool:
        """Preempts the last running request; if it runs alone, it has outgrown the cache and ends.

        Returns:
            False if that is not possible before the steps under way have come back.
        """
        rows = _rows_of(self.running[-1])
        entered = {row.slot for row in step.new_rows}
        if any(row.num_pending_tokens or row.slot in entered for row in rows):
            return False
        if len(rows) == len(self.running):
            request = rows[0] if rows[0].beam_group is None else rows[0].beam_group.root
            limit = f"the capacity of the KV cache, {self.kv_cache.num_tokens} tokens"
            self._end_too_long(request, f"its {rows[0].num_tokens} tokens exceed {limit}")
        else:
            self._preempt(rows)
        return True

    def _preempt(self, rows: list[Request]) -> None:
        """Makes a request, given by its rows, give up slots and blocks; it waits, at the front."""
        group = rows[0].beam_group
        request = rows[0] if group is None else group.root
        swaps = self._prefers_swapping(request) and self.kv_cache.can_swap_out(rows)
        for row in rows:
            self.running.remove(row)
            row.transition(RequestStatus.SWAPPED if swaps else RequestStatus.PREEMPTED)
            self._vacate(row)
        if group is not None:
            request.transition(rows[0].status)
            self._reserve_slots(group, 0)
        if swaps:
            self.kv_cache.swap_out(rows)
            self._num_swapped += len(rows)
        else:
            for row in rows:
                self.kv_cache.free(row)
                row.num_computed_tokens = 0
            if group is not None:
                group.drop_rows()
        request.num_preemptions += 1
        self.waiting.put_back(request)
        self._warn_of_preemption(request, swaps)

    def _prefers_swapping(self, request: Request) -> bool:
        """vLLM 0.6.3's rule: unless told otherwise, requests of several sequences are swapped, others recomputed."""
        mode = self.config.preemption_mode
        if mode is None:
            is_one_of_several = request.parent_id is not None or request.request_id in self._num_children
            return request.beam_group is not None or is_one_of_several
        return mode == "swap"

    def _warn_of_preemption(self, request: Request, swaps: bool) -> None:
        self._num_preemptions += 1
        if self._num_preemptions % _PREEMPTIONS_PER_WARNING == 1:
            logger.warning(
                "The KV cache is full: request %s gives up its blocks and %s (%d preemptions so far). More memory "
                "for the KV cache or a smaller --max-num-seqs avoids this.",
                request.request_id,
                "goes to CPU memory" if swaps else "will be computed again",
                self._num_preemptions,
            )

    # ---- a step has been computed --------------------------------------------------------------------------

    def update(self, output: StepOutput | None) -> EngineCoreOutputs:
        """Takes in what the oldest step under way sampled, ends requests that are done, and tells all that is new.

        Args:
            output: of that step; None if there was none.
        """
        outputs, self._early_outputs = self._early_outputs, []
        num_generated = 0 if output is None else self._take_samples(output, outputs)
        return EngineCoreOutputs(outputs, self.stats(num_generated))

    def _take_samples(self, output: StepOutput, outputs: list[EngineCoreOutput]) -> int:
        """Appends sampled tokens to their requests; returns their number."""
        made = self._in_flight.popleft()
        if made.has_prompts:
            self._last_prompt_latency_s = time.monotonic() - made.made_at
        num_generated = 0
        any_finished = False
        logprobs = output.logprobs
        caches_prefixes, block_size = self.kv_cache.enable_prefix_caching, self.kv_cache.block_size
        groups: dict[str, BeamGroup] = {}
        # one turn per sampling row, over lists: turning small host arrays into lists once is the fastest way to
        # read them element by element
        sampled = output.sampled_token_ids.tolist()
        num_columns = output.sampled_token_ids.shape[1]
        for index, request in enumerate(made.sampling_rows(output.slots.tolist())):
            if request.slot == NO_SLOT:
                # aborted, or ended by the step before
                continue
            request.num_pending_tokens -= num_columns
            group = request.beam_group
            if group is not None:
                if logprobs is not None:
                    group.collect(request, logprobs, index)
                groups[group.root.request_id] = group
                continue
            token_ids = sampled[index]
            is_first = request.num_tokens == request.num_prompt_tokens
            count = request.append_output(token_ids)
            num_generated += count
            result = EngineCoreOutput(request.request_id, token_ids if count == num_columns else token_ids[:count])
            if is_first:
                result.first_scheduled_time = request.first_scheduled_time
                result.num_cached_tokens = request.num_cached_tokens
            if logprobs is not None and request.sampling_params.logprobs is not None:
                result.new_logprobs = _row_logprobs(logprobs, index, count, request.sampling_params.logprobs)
            if caches_prefixes and request.num_tokens > (request.num_cached_blocks + 1) * block_size:
                # without the last token, whose KV may never be computed
                self.kv_cache.cache_full_blocks(request, request.num_tokens - 1)
            if request.is_finished:
                result.finish_reason = request.finish_reason
                result.stop_reason = request.stop_reason
                self._forget(request)
                any_finished = True
            outputs.append(result)
        if any_finished:
            self.running = [request for request in self.running if not request.is_finished]
        for group in groups.values():
            if group.is_complete:
                num_generated += self._advance(group, outputs)
        return num_generated

    def _advance(self, group: BeamGroup, outputs: list[EngineCoreOutput]) -> int:
        """Makes the step of a beam search all of whose rows have sampled; returns the tokens it grew by."""
        advance = group.advance()
        for row in advance.dead:
            self._end_row(row)
        for row in advance.rows:
            row.num_pending_tokens = 0
        for row, parent in advance.forks:
            row.slot = self.free_slots.pop()
            self.rows[row.slot] = row
            # beside its parent, so that the rows of a search are preempted together
            self.running.insert(self.running.index(parent) + 1, row)
            self.kv_cache.share_all(row, parent)
            self._forks[row.slot] = (parent.slot, row.token_ids[-1])
        new_rows = {row.request_id for row, _ in advance.forks}
        for row in advance.rows:
            if row.request_id not in new_rows:
                self._forks[row.slot] = (row.slot, row.token_ids[-1])
            self.kv_cache.cache_full_blocks(row, row.num_tokens - 1)
        root = group.root
        news = group.news()
        if news is not None:
            outputs.append(
                EngineCoreOutput(
                    root.request_id,
                    [],
                    first_scheduled_time=root.first_scheduled_time,
                    num_cached_tokens=root.num_cached_tokens,
                    beams=news,
                )
            )
        if group.is_done:
            has_stopped = news is not None and bool(news) and news[0].finish_reason is FinishReason.STOP
            root.transition(RequestStatus.FINISHED_STOPPED if has_stopped else RequestStatus.FINISHED_LENGTH)
            outputs[-1].finish_reason = root.finish_reason
            self._forget(root)
        else:
            self._reserve_slots(group, group.width - len(group.rows))
        return len(advance.rows)

    # ---- looking in ----------------------------------------------------------------------------------------

    def stats(self, num_generation_tokens: int = 0) -> SchedulerStats:
        """State after the last step, which generated so many tokens."""
        kv_cache = self.kv_cache
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            kv_cache_usage=kv_cache.usage,
            num_preemptions=self._num_preemptions,
            num_prompt_tokens=self._num_step_prompt_tokens,
            num_generation_tokens=num_generation_tokens,
            num_swapped=self._num_swapped,
            cpu_cache_usage=kv_cache.cpu_usage,
            num_prefix_queries=kv_cache.num_prefix_queries,
            num_prefix_hits=kv_cache.num_prefix_hits,
        )

    def is_clean(self) -> bool:
        """Whether everything is free, as it must be when no request lives; costs next to nothing."""
        return (
            self.kv_cache.num_free_blocks == self.kv_cache.num_blocks
            and self.kv_cache.cpu_usage == 0
            and len(self.free_slots) == self.config.max_num_seqs
            and not (self.rows or self.running or self.waiting or self.num_reserved_slots or self._num_swapped)
        )

    def audit(self) -> dict[str, Any]:
        """The accounts of blocks and slots, see core/scheduler_audit.py; "violations" is empty if they agree."""
        return audit_scheduler(self)


def _rows_of(row: Request) -> list[Request]:
    """All rows of the request that a row belongs to, or that is given by its root."""
    return [row] if row.beam_group is None else row.beam_group.rows


def _num_computed_before(step: SchedulerOutput, row: Request) -> int:
    """Tokens of a running row that steps before this one compute."""
    if row.slot not in step.slots:
        return row.num_computed_tokens
    return row.num_computed_tokens - step.num_scheduled_tokens[step.slots.index(row.slot)]


def _new_row(request: Request) -> NewRow:
    """The request as its slot gets it; lists are copied, since the request's own go on growing."""
    return NewRow(
        slot=request.slot,
        request_id=request.request_id,
        token_ids=request.token_ids.copy(),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens,
        block_ids=request.block_ids.copy(),
        sampling_params=request.sampling_params,
        seed=request.seed,
        stop_token_ids=request.end_token_ids,
        max_num_tokens=request.max_num_tokens,
    )


def _row_logprobs(logprobs: StepLogprobs, index: int, count: int, num_logprobs: int) -> list[TokenLogprobs]:
    """One row's log-probabilities of `count` tokens: each token's, and those of the `num_logprobs` most likely."""
    width = 1 + num_logprobs
    token_ids = logprobs.token_ids[index, :count, :width].tolist()
    values = logprobs.logprobs[index, :count, :width].tolist()
    ranks = logprobs.ranks[index, :count].tolist()
    return [TokenLogprobs(*entry) for entry in zip(token_ids, values, ranks, strict=True)]
