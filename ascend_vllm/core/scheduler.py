"""The scheduler: which rows compute how many tokens in a step.

There are no prefill and decode phases: each step schedules some of the tokens between `num_computed_tokens` and
`num_tokens` of its rows, at most max_num_batched_tokens together. A decoding row misses one token, and so does one
that is swapped in or shares a computed prompt; a new one misses all that the prefix cache does not hold.

Without chunked prefill steps compute either whole prompts or decoding rows: prompts come first (vLLM 0.6.3's order)
until no waiting one can be admitted, or rows have waited long to decode. With it running rows come first, and prompts
get the rest of the step, in chunks if they must. With mixed_steps that is the order of whole prompts, too, while
steps take long: one step of both is shorter than two, and rows decode in every step. When all rows of a step decode,
it may be several forward passes (--num-scheduler-steps).

Admission allocates blocks for all tokens of a request at once, so that a prompt never stalls half way. Decoding rows
grow block by block; when none is free, the running request that came last (or, with priorities, is the least urgent)
is preempted: its blocks are freed and recomputed later, or swapped to CPU memory.

Steps may be made before the outputs of earlier ones are known: a row whose sampled tokens are not known yet has
`num_pending_tokens`. Workers compute steps in order, so blocks may be freed and allocated again while a step that
uses them is under way; but a row with pending tokens is not preempted, since the tokens to recompute are not known.
With pipeline stages a row with pending tokens does not decode either: the first stage does not know its next token.
"""

from __future__ import annotations

import collections
import random
import time
from collections.abc import Iterable, Sequence
from typing import Any

from ascend_vllm.config.scheduler import SchedulerConfig
from ascend_vllm.core.admission import Admission
from ascend_vllm.core.connectors import Connectors
from ascend_vllm.core.drafting import Drafting
from ascend_vllm.core.kv.manager import KVCacheManager, NoFreeBlocksError
from ascend_vllm.core.preemption import Preemption
from ascend_vllm.core.prompt_chunks import ChunkSizeController
from ascend_vllm.core.request import NO_SLOT, GroupStep, Request, RequestStatus, RowKind
from ascend_vllm.core.request_queue import RequestQueue
from ascend_vllm.core.row_kinds import ROW_KINDS
from ascend_vllm.core.rows import Rows, rows_of
from ascend_vllm.core.scheduler_audit import audit
from ascend_vllm.core.step_builder import StepBuilder, StepInFlight, row_logprobs, take_back_rejected
from ascend_vllm.errors import EngineBusyError, RequestError
from ascend_vllm.logger import init_logger
from ascend_vllm.types.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    SchedulerStats,
)
from ascend_vllm.types.step import NO_TOKEN, RowResult, SchedulerOutput, StepOutput

logger = init_logger(__name__)

# how often waiting requests are checked for --queue-timeout-s
_EXPIRY_INTERVAL_S = 0.05


class Scheduler:
    """Holds all unfinished requests, and makes steps of them.

    Args:
        config: limits and policy.
        kv_cache: of the blocks.
        waiting: an empty queue, which decides the order of admission.
        seed: of the generator of seeds for requests without one.
        connectors: what requests wait for before they are queued.
        num_stages: pipeline stages that compute different steps at the same time.
        drafting: None: rows have drafts only if their kinds have.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        waiting: RequestQueue,
        seed: int,
        connectors: Connectors,
        num_stages: int = 1,
        drafting: Drafting | None = None,
    ) -> None:
        self.config = config
        self._drafting = drafting or Drafting(None)
        self.connectors = connectors
        self.kv_cache = kv_cache
        self.waiting = waiting
        self._cuts_prompts = config.enable_chunked_prefill
        # most tokens of a sequence that can be computed: without chunked prefill all of them must fit a step
        self._max_model_len = (
            config.max_model_len if self._cuts_prompts else min(config.max_model_len, config.max_num_batched_tokens)
        )
        self._seeds = random.Random(seed)
        # by id, without beam searches' rows
        self.requests: dict[str, Request] = {}
        self.rows = Rows(config.max_num_seqs, waiting, num_stages)
        # with pipeline stages a step is one forward pass, and overlaps others
        self._lookahead = config.num_scheduler_steps - 1 if num_stages == 1 else 0
        self._preemption = Preemption(config, kv_cache, self.rows, waiting)
        self._chunk_size = ChunkSizeController(config.max_decode_pause_s, kv_cache.block_size)
        self._admission = Admission(
            config, kv_cache, self.rows, waiting, self.requests, self._preemption, self._chunk_size, self._drafting
        )
        # oldest first
        self._in_flight: collections.deque[StepInFlight] = collections.deque()
        # of requests that ended outside of a step
        self._early_outputs: list[EngineCoreOutput] = []
        self._step_id = 0
        # prompt tokens of the step that `update` took last, or 0
        self._num_step_prompt_tokens = 0
        self._next_expiry = 0.0
        # with stages steps are always single, which is logged at the start
        self._logged_single_steps = num_stages > 1

    # ---- adding and ending requests ------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is unfinished, or has an output that is not emitted yet."""
        return bool(self.requests or self._early_outputs)

    @property
    def has_early_outputs(self) -> bool:
        """Whether `update` has outputs to emit without a step."""
        return bool(self._early_outputs)

    def add_request(self, message: EngineCoreRequest) -> None:
        """Queues a request. One that can never be served ends at once, with an output of the next `update`.

        Raises:
            RequestError: there is an unfinished request with this id.
        """
        if message.request_id in self.requests:
            raise RequestError(f"Request {message.request_id} already exists.")
        request = Request(message, self._max_model_len, self._seeds.getrandbits(63))
        self.requests[request.request_id] = request
        if request.parent_id is not None:
            self._preemption.num_children[request.parent_id] += 1
        for field, make_kind in ROW_KINDS.items():
            if (value := getattr(message, field)) is not None:
                request.kind = make_kind(request, value, self._max_model_len)
        if self._drafting.max_drafts:
            self._drafting.enrol(request, len(self.rows.running))
        try:
            if any(field(request) for field in self.connectors.fields) and not self.connectors.begin(request):
                request.transition(RequestStatus.WAITING_FOR_CONNECTOR)
            else:
                self.waiting.add(request)
        except RequestError as error:
            self.waiting.add(request)
            self._end_early(request, RequestStatus.FINISHED_ERROR, error)
            return
        self._refuse_unservable(request)

    def _take_ready(self) -> None:
        """Queues the requests whose connectors are ready, and ends those whose connector failed."""
        for request, error in self.connectors.take_ready():
            request.transition(RequestStatus.WAITING)
            self.waiting.add(request)
            if error is not None:
                self._end_early(request, RequestStatus.FINISHED_ERROR, error)

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

    def free_kv_cache(self) -> None:
        """Preempts all requests, and empties the prefix cache. No step may be under way."""
        self._preemption.preempt_all()

    def _refuse_unservable(self, request: Request) -> None:
        """Ends a new request that could never be admitted."""
        count = request.num_tokens
        if count == 0:
            self._end_early(request, RequestStatus.FINISHED_ERROR, "Prompt cannot be empty")
        elif count > self._max_model_len:
            limit = f"limit of {self._max_model_len}"
            self._end_too_long(request, f"Input prompt ({count} tokens) is too long and exceeds {limit}")
        elif count > self.kv_cache.num_tokens:
            limit = f"the capacity of the KV cache, {self.kv_cache.num_tokens} tokens"
            self._end_too_long(request, f"Input prompt ({count} tokens) is too long and exceeds {limit}")
        elif (reason := request.kind.unsupported_reason(self.config.max_num_seqs)) is not None:
            self._end_early(request, RequestStatus.FINISHED_ERROR, reason)

    def _end_too_long(self, request: Request, why: str) -> None:
        """Ends a request as vLLM does with too long ones: "length", its output so far, and a warning."""
        logger.warning("Request %s ends: %s", request.request_id, why)
        self._end_early(request, RequestStatus.FINISHED_LENGTH)

    def _end_outgrown(self, request: Request, num_tokens: int) -> None:
        """Ends a request whose sequence does not fit the cache even alone."""
        limit = f"the capacity of the KV cache, {self.kv_cache.num_tokens} tokens"
        self._end_too_long(request, f"its {num_tokens} tokens exceed {limit}")

    def _end_early(self, request: Request, status: RequestStatus, error: str | RequestError | None = None) -> None:
        """Ends a request outside of a step; the next `update` returns its last output."""
        beams = request.kind.finish(status)
        self._end(request, status)
        self._early_outputs.append(
            EngineCoreOutput(
                request.request_id,
                [],
                finish_reason=request.finish_reason,
                error=None if error is None else str(error),
                error_class=type(error).__name__ if isinstance(error, RequestError) else None,
                error_param=error.param if isinstance(error, RequestError) else None,
                beams=beams,
            )
        )

    def _end(self, request: Request, status: RequestStatus) -> None:
        if request.status is RequestStatus.WAITING_FOR_CONNECTOR:
            self.connectors.remove(request)
        elif request.status is not RequestStatus.RUNNING:
            self.waiting.remove(request)
        elif request.slot != NO_SLOT:
            self.rows.running.remove(request)
        if request.status is RequestStatus.SWAPPED:
            self._preemption.num_swapped -= 1
        request.transition(status)
        self._free_request(request)

    def _free_request(self, request: Request) -> None:
        """Frees slots and blocks of a finished request; `rows.running` may still have rows of a beam search."""
        del self.requests[request.request_id]
        self._drafting.end(request)
        if request.parent_id is not None:
            children = self._preemption.num_children
            children[request.parent_id] -= 1
            if not children[request.parent_id]:
                del children[request.parent_id]
        self.rows.reserve(request.kind, 0)
        for row in request.kind.drop_rows(request):
            if row is request:
                self.rows.vacate(row)
                self.kv_cache.free(row)
            else:
                self._end_row(row)

    def _end_row(self, row: Request) -> None:
        """Ends one row of a beam search."""
        if row.status is RequestStatus.RUNNING:
            self.rows.leave(row)
        row.transition(RequestStatus.FINISHED_ABORTED)
        self.kv_cache.free(row)

    def _end_expired(self, now: float) -> None:
        """Ends requests that have waited longer than --queue-timeout-s for their first step."""
        timeout_s = self.config.queue_timeout_s
        if timeout_s is None or now < self._next_expiry:
            return
        self._next_expiry = now + _EXPIRY_INTERVAL_S
        for request in [*self.waiting, *self.connectors.waiting]:
            if request.first_scheduled_time is None and now - request.arrival_time > timeout_s:
                self._end_early(
                    request,
                    RequestStatus.FINISHED_ERROR,
                    EngineBusyError(
                        f"The request waited longer than the limit of {timeout_s:g} s (--queue-timeout-s) to be "
                        "served. Please try again later."
                    ),
                )

    @property
    def steps_are_long(self) -> bool:
        """Whether the time to schedule a step hardly matters beside the step's own."""
        return self._chunk_size.steps_are_long

    # ---- making a step -------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None if no row can compute. Its tokens count as computed from now on."""
        drafting = self._drafting
        if self._in_flight and drafting.looks and drafting.is_drafting:
            # the rows' next tokens are not known, and apart from them new ones would stay in steps of their own
            return None
        now = time.monotonic()
        self._end_expired(now)
        if self.connectors.waiting:
            self._take_ready()
        was_idle = not (self.rows.running or self._in_flight)
        num_held = self._preemption.preempt_outranked() if self.waiting.has_ranks else 0
        budget = self.config.max_num_batched_tokens
        is_mixed = self._cuts_prompts or self._mixes_whole_prompts(budget)
        builder = StepBuilder(self.config, self.kv_cache, self._step_id, len(self.waiting), now, is_mixed=is_mixed)
        if is_mixed:
            self._chunk_size.note_order(now, rows_wait=False)
            budget = self._schedule_running(builder, budget, num_held)
            # a request that was just preempted is not admitted again: another row has got at least one of its blocks
            self._admission.schedule_waiting(builder, budget, now)
        else:
            prompts_first, is_idle = self._chunk_size.prompts_come_first(now), not self.rows.running
            if prompts_first:
                self._admission.schedule_waiting(builder, budget, now)
            self._chunk_size.note_order(now, rows_wait=bool(builder.step.slots) and not is_idle)
            if not builder.step.slots:
                budget = self._schedule_running(builder, budget, num_held)
            if not (builder.step.slots or prompts_first):
                self._admission.schedule_waiting(builder, budget, now)
        if builder.is_empty:
            if was_idle and (first := self.waiting.next()) is not None:
                # with a sliding window a preempted sequence may have more tokens than the cache has room for
                self._end_outgrown(first, first.num_tokens)
            return None
        self._step_id += 1
        step = builder.finish()
        if self._drafting.looks:
            self._drafting.ask(step, builder.in_flight)
        self.rows.add_updates(step)
        self._in_flight.append(builder.in_flight)
        return step

    def _mixes_whole_prompts(self, budget: int) -> bool:
        """Whether the step computes decoding rows and, of its `budget` tokens, whole prompts beside them."""
        if not (self.config.mixed_steps and self._chunk_size.steps_are_long):
            return False
        first = self.waiting.next()
        # one that needs nearly all of the budget gets a step of its own
        return first is None or first.num_tokens + len(self.rows.running) <= budget

    def _schedule_running(self, builder: StepBuilder, budget: int, num_held: int) -> int:
        """Schedules running rows: first a token of each decoding row, then chunks of prompts.

        Args:
            builder: of the step.
            budget: tokens the step may still compute.
            num_held: how many of the last rows are left out.

        Returns:
            The remaining budget; 0 if rows lack blocks, so that no request is admitted.
        """
        step, rows = builder.step, builder.in_flight.rows
        running, kv_cache = self.rows.running, self.kv_cache
        is_windowed = kv_cache.sliding_window is not None
        lookahead, waits, max_decoding = self._lookahead, self.rows.num_stages > 1, self.rows.max_decoding
        prompts: list[Request] = []
        index = 0
        num_drafts, drafts_fit = 0, True
        # one iteration per running row: this loop and the one in `update` dominate the host's time per step
        while index < len(running) - num_held and budget > 0:
            request = running[index]
            pending, computed = request.num_pending_tokens, request.num_computed_tokens
            end = request.num_tokens + pending
            if end - computed != 1:
                if end > computed:
                    prompts.append(request)
                index += 1
                continue
            may_run_ahead = request.may_run_ahead
            if not may_run_ahead:
                lookahead = self._single_step(request.kind)
            is_blocked = pending and (waits or not may_run_ahead or end >= request.max_num_tokens)
            if is_blocked or len(rows) == max_decoding:
                # its next token is not known yet, or it has none; or enough rows decode in this step
                index += 1
                continue
            wanted = end + lookahead
            if not may_run_ahead:
                num_drafts, wanted = 0, end
                if drafts_fit:
                    # each of the rows behind it gets a token
                    most = min(budget + index + 1 - len(running), request.max_num_tokens - end)
                    num_drafts = request.kind.tokens_wanted(request, max(most, 1)) - 1
                    wanted = end + num_drafts
                    if end <= request.drafts_up_to:
                        # others would share blocks that they have not reached, or lack them for nothing
                        wanted += self._drafting.num_lookahead_tokens
                if not self._make_writable(step, request, num_drafts + 1):
                    if not self._make_room(builder):
                        return 0
                    continue
            if is_windowed:
                kv_cache.free_out_of_window(request)
            if wanted >= request.max_num_tokens:
                wanted = request.max_num_tokens - 1
            block_ids = kv_cache.allocate_slots(request, wanted)
            if block_ids is None:
                if lookahead:
                    lookahead = 0
                elif not may_run_ahead and wanted > end:
                    # they are not worth a preemption
                    drafts_fit = False
                elif not self._make_room(builder):
                    return 0
                continue
            if block_ids:
                step.new_blocks.append((request.slot, block_ids))
            step.slots.append(request.slot)
            step.num_scheduled_tokens.append(1)
            rows.append(request)
            request.num_computed_tokens = end
            request.num_pending_tokens = pending + 1
            if not may_run_ahead:
                drafts: list[int] = []
                if num_drafts:
                    drafts = request.kind.drafts(request, num_drafts)
                    builder.add_drafts(request, drafts)
                    budget -= num_drafts
                if request.kind.is_masked:
                    builder.masked.append((request, drafts))
                drafts_fit = True
            budget -= 1
            index += 1
        if index > len(prompts):
            num_computed = max((request.num_computed_tokens for request in prompts), default=0)
            most = self._chunk_size.most_tokens(budget, num_computed)
            if self._cuts_prompts:
                budget = most
            else:
                builder.limits(len(prompts)).most_whole = most
        if prompts:
            return self._continue_prompts(builder, prompts, budget)
        if rows:
            step.num_steps = lookahead + 1
        return budget

    def _continue_prompts(self, builder: StepBuilder, prompts: Sequence[Request], budget: int) -> int:
        """Schedules the next chunks of running prompts; returns the remaining budget."""
        limits = builder.limits(len(prompts))
        for request in prompts:
            # it may have been preempted for a decoding row
            if request.status is RequestStatus.RUNNING:
                count = limits.take(request.num_missing_tokens, budget, is_scored=request.is_scored)
                builder.add(request, count)
                budget -= count
        return budget

    def _single_step(self, kind: RowKind) -> int:
        """The lookahead of a step with a row that may not run ahead: 0, the host must see each of its tokens."""
        if self.config.num_scheduler_steps > 1 and not self._logged_single_steps:
            self._logged_single_steps = True
            logger.info(
                "%s runs: meanwhile steps are made one at a time, not %d (--num-scheduler-steps).",
                kind.title,
                self.config.num_scheduler_steps,
            )
        return 0

    def _make_writable(self, step: SchedulerOutput, row: Request, count: int) -> bool:
        """Replaces shared blocks that a row is about to write by copies; False: no block is free."""
        for index in row.kind.blocks_to_write(row, count, self.kv_cache.block_size):
            try:
                replaced = self.kv_cache.make_writable(row, index)
            except NoFreeBlocksError:
                return False
            if replaced is not None:
                step.replaced_blocks.append((row.slot, *replaced))
        return True

    def _make_room(self, builder: StepBuilder) -> bool:
        """Preempts the last running request; if it is the only one, it is longer than the cache and ends.

        Returns:
            False if that is not possible before the outputs of steps under way have arrived.
        """
        rows = rows_of(self.rows.running[-1])
        if any(row.num_pending_tokens or builder.has_entered(row) for row in rows):
            return False
        if len(rows) == len(self.rows.running):
            self._end_outgrown(rows[0].kind.root_of(rows[0]), rows[0].num_tokens)
        else:
            self._preemption.preempt(rows)
        return True

    # ---- outputs of a step ---------------------------------------------------------------------------------

    def update(self, output: StepOutput | None) -> EngineCoreOutputs:
        """Appends the tokens that the oldest step under way sampled, ends requests, and returns all outputs.

        Args:
            output: of that step; None if there was none.
        """
        outputs, self._early_outputs = self._early_outputs, []
        self._num_step_prompt_tokens = 0
        num_generated = 0 if output is None else self._take_samples(output, outputs)
        return EngineCoreOutputs(outputs, self.stats(num_generated))

    def _take_samples(self, output: StepOutput, outputs: list[EngineCoreOutput]) -> int:
        """Appends sampled tokens to their requests; returns their number."""
        made = self._in_flight.popleft()
        self._num_step_prompt_tokens = made.num_prompt_tokens
        self._chunk_size.note(made.made_at, time.monotonic(), made.num_chunk_tokens, made.num_chunk_pairs)
        if output.prompt_logprobs:
            outputs += made.take_prompt_logprobs(output.prompt_logprobs)
        num_generated = 0
        any_finished = bool(output.results)
        if output.results:
            self._end_with_results(made, output.results, outputs)
        logprobs = output.logprobs
        caches_prefixes, block_size = self.kv_cache.enable_prefix_caching, self.kv_cache.block_size
        # requests of several rows that have sampled, by id
        roots: dict[str, Request] = {}
        # one iteration per sampling row, over lists: element by element these are read faster than small arrays
        sampled = output.sampled_token_ids.tolist()
        num_columns = output.sampled_token_ids.shape[1]
        # rows whose drafts were rejected, or beside rows with drafts
        has_shorter = num_columns > 1 and bool((output.sampled_token_ids[:, -1] < NO_TOKEN).any())
        sampling_rows = made.sampling_rows(output.slots.tolist())
        for index, request in enumerate(sampling_rows):
            if request.slot == NO_SLOT:
                # aborted, or ended by an earlier step
                continue
            token_ids = sampled[index]
            if has_shorter and token_ids[-1] < NO_TOKEN:
                token_ids = take_back_rejected(request, token_ids)
            else:
                request.num_pending_tokens -= num_columns
            is_first = request.num_tokens == request.num_prompt_tokens
            if request.may_run_ahead:
                count = request.append_output(token_ids)
            else:
                taken = request.kind.take(request, token_ids, logprobs, index)
                if taken is None:
                    root = request.kind.root_of(request)
                    roots[root.request_id] = root
                    continue
                count = taken
            num_generated += count
            result = EngineCoreOutput(request.request_id, token_ids if count == num_columns else token_ids[:count])
            if request.num_drafts:
                self._count_drafts(request, result)
            if is_first:
                result.first_scheduled_time = request.first_scheduled_time
                result.num_cached_tokens = request.num_cached_tokens
                result.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
            if logprobs is not None and request.sampling_params.logprobs is not None:
                result.new_logprobs = row_logprobs(logprobs, index, count, request.sampling_params.logprobs)
            if caches_prefixes and request.num_tokens > (request.num_cached_blocks + 1) * block_size:
                # not the last token: its KV may never be computed
                self.kv_cache.cache_full_blocks(request, request.num_tokens - 1)
            if request.num_preemptions:
                result.num_preemptions = request.num_preemptions
            if request.is_finished:
                result.finish_reason = request.finish_reason
                result.stop_reason = request.stop_reason
                if request.status is RequestStatus.FINISHED_ERROR:
                    result.error = request.kind.failure(token_ids)
                self._free_request(request)
                any_finished = True
            elif self.rows.num_stages > 1:
                self.rows.send_sampled(request, token_ids)
            outputs.append(result)
        if self._drafting.max_drafts:
            self._drafting.take(made, sampling_rows, output, self._chunk_size)
        if any_finished:
            self.rows.drop_finished()
        for root in roots.values():
            group_step = root.kind.advance()
            if group_step is not None:
                num_generated += self._advance(root, group_step, outputs)
        return num_generated

    def _count_drafts(self, request: Request, result: EngineCoreOutput) -> None:
        """Counts the drafts of a row's last step, all that come before its last new token as right ones."""
        result.num_drafts, request.num_drafts = request.num_drafts, 0
        result.num_accepted_drafts = max(0, len(result.new_token_ids) - 1)
        self._drafting.count(request, result.num_drafts, result.num_accepted_drafts)

    def _end_with_results(
        self, made: StepInFlight, results: Sequence[RowResult], outputs: list[EngineCoreOutput]
    ) -> None:
        """Ends the requests for which a step has a result in place of tokens, such as an embedding."""
        by_slot = dict(zip(made.slots, made.rows, strict=True))
        for result in results:
            request = by_slot[result.slot]
            if request.slot == NO_SLOT:
                # aborted
                continue
            request.transition(RequestStatus.FINISHED_STOPPED)
            self._free_request(request)
            outputs.append(request.kind.output_of(request, result))

    def _advance(self, root: Request, group_step: GroupStep, outputs: list[EngineCoreOutput]) -> int:
        """Applies a beam search's step to rows and blocks; returns the number of new tokens."""
        for row in group_step.dead:
            self._end_row(row)
        for row in group_step.rows:
            row.num_pending_tokens = 0
        for row in group_step.rows:
            if row.slot != NO_SLOT:
                self.rows.extend(row)
        for row, parent in group_step.forks:
            self.rows.fork(row, parent)
            self.kv_cache.share_all(row, parent)
        for row in group_step.rows:
            self.kv_cache.cache_full_blocks(row, row.num_tokens - 1)
        if group_step.beams is not None:
            outputs.append(
                EngineCoreOutput(
                    root.request_id,
                    [],
                    first_scheduled_time=root.first_scheduled_time,
                    num_cached_tokens=root.num_cached_tokens,
                    beams=group_step.beams,
                )
            )
        if group_step.end is not None:
            root.transition(group_step.end)
            outputs[-1].finish_reason = root.finish_reason
            self._free_request(root)
        else:
            self.rows.reserve(root.kind, root.kind.width - len(group_step.rows))
        return len(group_step.rows)

    # ---- statistics and audit ------------------------------------------------------------------------------

    def stats(self, num_generation_tokens: int = 0) -> SchedulerStats:
        """Statistics after the last step, which generated `num_generation_tokens`."""
        kv_cache = self.kv_cache
        return SchedulerStats(
            num_running=len(self.rows.running),
            num_waiting=len(self.waiting) + len(self.connectors.waiting),
            kv_cache_usage=kv_cache.pool.usage,
            num_preemptions=self._preemption.num_preemptions,
            num_prompt_tokens=self._num_step_prompt_tokens,
            num_generation_tokens=num_generation_tokens,
            num_swapped=self._preemption.num_swapped,
            cpu_cache_usage=kv_cache.cpu_pool.usage,
            num_prefix_queries=kv_cache.num_prefix_queries,
            num_prefix_hits=kv_cache.num_prefix_hits,
            drafts=self._drafting.stats,
            **self.connectors.stats(),
        )

    def is_clean(self) -> bool:
        """Whether all blocks and slots are free, as they must be without requests; takes little time."""
        return (
            self.kv_cache.pool.usage == 0
            and self.kv_cache.cpu_pool.usage == 0
            and self.rows.num_available == self.config.max_num_seqs
            and not (self.rows.by_slot or self.rows.running or self.waiting or self._preemption.num_swapped)
            and not self.connectors.waiting
        )

    def audit(self) -> dict[str, Any]:
        """State of blocks and slots, see core/scheduler_audit.py; "violations" is empty if it is consistent."""
        return audit(self.kv_cache, self.rows, [*self.waiting, *self.connectors.waiting], self.requests.values())
