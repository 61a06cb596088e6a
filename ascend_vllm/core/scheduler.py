"""The scheduler: which rows compute how many tokens in a step.

There are no phases. A request's `num_computed_tokens` chases its `num_tokens`; a step gives rows some of the
tokens they miss, at most max_num_batched_tokens together. A decoding row misses one token, a new or resumed
one its whole sequence.

Without chunked prefill prompts are never cut and come first, alone: rows decode in the steps in which no
waiting prompt can be taken in (vLLM 0.6.3's order). With it rows that run come first, and prompts share what
is left of the step, cut if they must be.

Admission gives a request blocks for all its tokens at once, so that a prompt once begun never stalls half
way. Decoding rows grow block by block; when none is left, the running request that came last gives up its
blocks and waits, at the front, to be computed again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from typing import Any

from ascend_vllm.config.scheduler import SchedulerConfig
from ascend_vllm.core.kv_cache_manager import KVCacheManager
from ascend_vllm.core.request import NO_SLOT, Request, RequestStatus
from ascend_vllm.core.request_queue import RequestQueue
from ascend_vllm.errors import RequestError
from ascend_vllm.logger import init_logger
from ascend_vllm.types.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    SchedulerStats,
    TokenLogprobs,
)
from ascend_vllm.types.step import NewRow, SchedulerOutput, StepLogprobs, StepOutput

logger = init_logger(__name__)

_PREEMPTIONS_PER_WARNING = 50


class Scheduler:
    """Holds all requests that live, and makes steps of them.

    Between `schedule` and the `update` with its output no request may be added or aborted.

    Args:
        config: limits and policy.
        kv_cache: where requests get their blocks.
        waiting: an empty queue, which decides the order of admission.
        seed: of the seeds drawn for requests that bring none.
    """

    def __init__(self, config: SchedulerConfig, kv_cache: KVCacheManager, waiting: RequestQueue, seed: int) -> None:
        self._config = config
        self._kv_cache = kv_cache
        self._waiting = waiting
        self._cuts_prompts = config.enable_chunked_prefill
        # most tokens of a sequence that can be computed: a whole one must fit a step where prompts stay whole
        self._max_model_len = (
            config.max_model_len if self._cuts_prompts else min(config.max_model_len, config.max_num_batched_tokens)
        )
        self._seeds = random.Random(seed)
        self._requests: dict[str, Request] = {}
        # in the order of admission, so the last is the one that came last
        self._running: list[Request] = []
        self._rows: dict[int, Request] = {}
        # a stack; slot 0 lies on top at first
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        # freed since the last step that was handed out
        self._freed_slots: list[int] = []
        # of requests that ended without a step
        self._early_outputs: list[EngineCoreOutput] = []
        self._step_id = 0
        self._num_preemptions = 0
        self._num_step_prompt_tokens = 0

    # ---- requests come and go ------------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        """Whether a request lives, or the end of one is still to be told."""
        return bool(self._requests or self._early_outputs)

    def add_request(self, message: EngineCoreRequest) -> None:
        """Lets a request wait. One that can never be served ends here; the next step's outputs say so.

        Raises:
            RequestError: a request of that id lives.
        """
        if message.request_id in self._requests:
            raise RequestError(f"Request {message.request_id} already exists.")
        request = Request(message, self._max_model_len, self._seeds.getrandbits(63))
        self._requests[request.request_id] = request
        self._waiting.add(request)
        self._refuse_unservable(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Ends requests without an output; unknown ids are ignored. Their blocks are free at once."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._end(request, RequestStatus.FINISHED_ABORTED)

    def fail_requests(self, error: str) -> EngineCoreOutputs:
        """Ends all requests with an ERROR output that carries a sentence for the client."""
        for request in list(self._requests.values()):
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
        elif count > self._kv_cache.num_tokens:
            limit = f"the capacity of the KV cache, {self._kv_cache.num_tokens} tokens"
            self._end_too_long(request, f"Input prompt ({count} tokens) is too long and exceeds {limit}")

    def _end_too_long(self, request: Request, why: str) -> None:
        """Ends a request as vLLM does for over-long ones: "length", with what it has, and a line in the log."""
        logger.warning("Request %s ends: %s", request.request_id, why)
        self._end_early(request, RequestStatus.FINISHED_LENGTH)

    def _end_early(self, request: Request, status: RequestStatus, error: str | None = None) -> None:
        """Ends a request outside a step; the next `update` gives its last output."""
        self._end(request, status)
        self._early_outputs.append(
            EngineCoreOutput(request.request_id, [], finish_reason=request.finish_reason, error=error)
        )

    def _end(self, request: Request, status: RequestStatus) -> None:
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        request.transition(status)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        del self._requests[request.request_id]
        self._vacate(request)

    def _vacate(self, request: Request) -> None:
        """Takes a request's slot and blocks back."""
        self._kv_cache.free(request)
        if request.slot != NO_SLOT:
            del self._rows[request.slot]
            self._free_slots.append(request.slot)
            self._freed_slots.append(request.slot)
            request.slot = NO_SLOT

    # ---- a step is made ------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None if no row can compute. A step handed out counts as computed."""
        step = SchedulerOutput(self._step_id, [], [], [], [], [])
        budget = self._config.max_num_batched_tokens
        self._num_step_prompt_tokens = 0
        if self._cuts_prompts:
            budget = self._schedule_running(step, budget)
            # what has just been preempted does not come back at once: its blocks were short by one already
            self._schedule_waiting(step, budget)
        else:
            self._schedule_waiting(step, budget)
            if not step.slots:
                self._schedule_running(step, budget)
        if not step.slots:
            return None
        self._step_id += 1
        step.freed_slots, self._freed_slots = self._freed_slots, []
        return step

    def _schedule_running(self, step: SchedulerOutput, budget: int) -> int:
        """Gives running rows the tokens they miss, in the order they came. Returns what is left of the budget.

        A cut prompt is always the row that came last (it used up its step's budget), so decoding rows come
        before it; max_num_batched_tokens is at least max_num_seqs, so none goes without.
        """
        running = self._running
        index = 0
        # one turn per running row: what a step costs the host grows with this loop and the one in `update`
        while index < len(running) and budget > 0:
            request = running[index]
            block_ids = self._kv_cache.allocate_slots(request, request.num_tokens)
            if block_ids is None:
                self._make_room()
                continue
            if block_ids:
                step.new_blocks.append((request.slot, block_ids))
            budget -= self._schedule_row(step, request, budget)
            index += 1
        return budget

    def _schedule_waiting(self, step: SchedulerOutput, budget: int) -> None:
        """Admits waiting requests while slots, blocks and budget last; the first that does not fit stops it."""
        now = time.monotonic()
        while self._waiting and self._free_slots and budget > 0:
            request = self._waiting.peek()
            if request.num_tokens > budget and not self._cuts_prompts:
                return
            # nothing to reserve for when nothing runs: a sequence may then take the whole cache
            reserved = self._kv_cache.watermark_blocks if self._running else 0
            block_ids = self._kv_cache.allocate_slots(request, request.num_tokens, reserved)
            if block_ids is None:
                return
            self._waiting.pop()
            self._admit(request, now)
            step.new_rows.append(_new_row(request))
            budget -= self._schedule_row(step, request, budget)

    def _schedule_row(self, step: SchedulerOutput, request: Request, budget: int) -> int:
        """Puts a row into the step, with as many of its missing tokens as the budget allows; returns those."""
        count = request.num_tokens - request.num_computed_tokens
        if count > budget:
            count = budget
        step.slots.append(request.slot)
        step.num_scheduled_tokens.append(count)
        request.num_computed_tokens += count
        if request.num_counted_prompt_tokens < request.num_prompt_tokens:
            self._count_prompt_tokens(request)
        return count

    def _count_prompt_tokens(self, request: Request) -> None:
        """Statistics: each prompt token counts once, however often preemption makes it be computed."""
        end = min(request.num_computed_tokens, request.num_prompt_tokens)
        if end > request.num_counted_prompt_tokens:
            self._num_step_prompt_tokens += end - request.num_counted_prompt_tokens
            request.num_counted_prompt_tokens = end

    def _admit(self, request: Request, now: float) -> None:
        request.transition(RequestStatus.RUNNING)
        request.slot = self._free_slots.pop()
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
        self._rows[request.slot] = request
        self._running.append(request)

    def _make_room(self) -> None:
        """Preempts the running request that came last; if it runs alone, it has outgrown the cache and ends."""
        request = self._running[-1]
        if len(self._running) == 1:
            limit = f"the capacity of the KV cache, {self._kv_cache.num_tokens} tokens"
            self._end_too_long(request, f"its {request.num_tokens} tokens exceed {limit}")
            return
        self._running.pop()
        request.transition(RequestStatus.PREEMPTED)
        self._vacate(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._waiting.put_back(request)
        self._num_preemptions += 1
        if self._num_preemptions % _PREEMPTIONS_PER_WARNING == 1:
            logger.warning(
                "The KV cache is full: request %s gives up its blocks and will be computed again (%d preemptions "
                "so far). More memory for the KV cache or a smaller --max-num-seqs avoids this.",
                request.request_id,
                self._num_preemptions,
            )

    # ---- a step has been computed --------------------------------------------------------------------------

    def update(self, output: StepOutput | None) -> EngineCoreOutputs:
        """Takes in what the last step sampled, ends requests that are done, and tells all that is new.

        Args:
            output: of the step of the last `schedule`; None if there was none.
        """
        outputs, self._early_outputs = self._early_outputs, []
        num_generated = 0 if output is None else self._take_samples(output, outputs)
        return EngineCoreOutputs(outputs, self.stats(num_generated))

    def _take_samples(self, output: StepOutput, outputs: list[EngineCoreOutput]) -> int:
        """Appends sampled tokens to their requests; returns their number."""
        rows = self._rows
        num_generated = 0
        any_finished = False
        # one turn per sampling row, over lists: turning two small host arrays into lists once is the fastest
        # way to read them element by element
        slots, sampled = output.slots.tolist(), output.sampled_token_ids.tolist()
        for index, slot in enumerate(slots):
            request = rows[slot]
            token_ids = sampled[index]
            is_first = request.num_tokens == request.num_prompt_tokens
            count = request.append_output(token_ids)
            num_generated += count
            result = EngineCoreOutput(request.request_id, token_ids if count == len(token_ids) else token_ids[:count])
            if is_first:
                result.first_scheduled_time = request.first_scheduled_time
            if output.logprobs is not None and request.sampling_params.logprobs is not None:
                result.new_logprobs = [_row_logprobs(output.logprobs, index, request.sampling_params.logprobs)]
            if request.is_finished:
                result.finish_reason = request.finish_reason
                result.stop_reason = request.stop_reason
                self._forget(request)
                any_finished = True
            outputs.append(result)
        if any_finished:
            self._running = [request for request in self._running if not request.is_finished]
        return num_generated

    # ---- looking in ----------------------------------------------------------------------------------------

    def stats(self, num_generation_tokens: int = 0) -> SchedulerStats:
        """State after the last step, which generated so many tokens."""
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv_cache_usage=self._kv_cache.usage,
            num_preemptions=self._num_preemptions,
            num_prompt_tokens=self._num_step_prompt_tokens,
            num_generation_tokens=num_generation_tokens,
        )

    def is_clean(self) -> bool:
        """Whether everything is free, as it must be when no request lives; costs next to nothing."""
        return (
            self._kv_cache.pool.num_free == self._kv_cache.num_blocks
            and len(self._free_slots) == self._config.max_num_seqs
            and not (self._rows or self._running or self._waiting)
        )

    def audit(self) -> dict[str, Any]:
        """The accounts of blocks and slots; "violations" is empty if they are consistent.

        Returns:
            num_blocks, num_free_blocks, num_slots, num_free_slots, num_running, num_waiting: counts;
            blocks_by_request: number of blocks of each request that has some; violations: sentences.
        """
        return {
            "num_blocks": self._kv_cache.num_blocks,
            "num_free_blocks": self._kv_cache.pool.num_free,
            "num_slots": self._config.max_num_seqs,
            "num_free_slots": len(self._free_slots),
            "num_running": len(self._running),
            "num_waiting": len(self._waiting),
            "blocks_by_request": {
                request.request_id: len(request.block_ids) for request in self._requests.values() if request.block_ids
            },
            "violations": self._kv_cache.violations(self._requests.values()) + self._slot_violations(),
        }

    def _slot_violations(self) -> list[str]:
        wrong = [f"{request} is not in its slot" for slot, request in self._rows.items() if request.slot != slot]
        if sorted([*self._rows, *self._free_slots]) != list(range(self._config.max_num_seqs)):
            wrong.append("a slot is lost or taken twice")
        if sorted(map(id, self._running)) != sorted(map(id, self._rows.values())):
            wrong.append("the running requests are not those in slots")
        wrong += [f"{r} is among the running" for r in self._running if r.status is not RequestStatus.RUNNING]
        wrong += [
            f"{r} is among the waiting"
            for r in self._waiting
            if r.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED) or r.slot != NO_SLOT or r.block_ids
        ]
        if {*map(id, self._running), *map(id, self._waiting)} != set(map(id, self._requests.values())):
            wrong.append("a request neither runs nor waits")
        return wrong


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
    )


def _row_logprobs(logprobs: StepLogprobs, index: int, num_logprobs: int) -> TokenLogprobs:
    """One row's log-probabilities: the sampled token's and those of the `num_logprobs` most likely."""
    width = 1 + num_logprobs
    return TokenLogprobs(
        token_ids=logprobs.token_ids[index, 0, :width].tolist(),
        logprobs=logprobs.logprobs[index, 0, :width].tolist(),
        rank=int(logprobs.ranks[index, 0]),
    )
