"""Turns the engine core's outputs into the callers' `RequestOutput`s.

One `OutputProcessor` holds the state of all requests of an engine. `process` handles each step's outputs, and either
puts `RequestOutput`s into the requests' queues (async engine) or returns them (sync engine).

In the async engine the output thread calls `process`, and the event loop everything else. One lock guards all
requests and their states. `process` acquires it anew for every core request of a step, so that the event loop, which
adds and aborts requests, waits for one request's detokenisation at most, not for a whole step's, as it would if the
output thread made additions and aborts, too.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Generic, TypeAlias, TypeVar, cast

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.engine.input_processor import ProcessedRequest
from ascend_vllm.engine.metrics import FinishedRequest, StepStats
from ascend_vllm.engine.pooling import PoolingState
from ascend_vllm.engine.sequence_state import BeamSearchState, PromptLogprobsState, SequenceState
from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.engine.tracing import RequestTracer
from ascend_vllm.errors import (
    DuplicateRequestError,
    EngineBusyError,
    EngineDeadError,
    ModelNotFoundError,
    RequestError,
)
from ascend_vllm.logger import init_logger
from ascend_vllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from ascend_vllm.sampling_params import RequestOutputKind
from ascend_vllm.types.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason, TokenLogprobs

logger = init_logger(__name__)

T = TypeVar("T")

# Unread outputs before they are merged, of a stream that gets each token of a multi-token step separately.
_MAX_TOKEN_OUTPUTS = 256

# Limit of log-probabilities of generated tokens kept for all requests that do not stream; each takes about 200 bytes.
MAX_KEPT_LOGPROBS = 1 << 23

# EngineCoreOutput.error_class → class of the error that the consumer gets; RequestError for any other name
_ERRORS: dict[str, type[RequestError] | type[EngineDeadError]] = {
    error.__name__: error for error in (RequestError, ModelNotFoundError, EngineBusyError, EngineDeadError)
}


# the state of one core request
AnySequence: TypeAlias = SequenceState | BeamSearchState | PoolingState


class FairLock:
    """A lock that a waiting thread gets before the one that releases it can acquire it again.

    A thread that releases a `threading.Lock` and acquires it at once nearly always wins against the waiting threads,
    which have to wake up first. Here a waiting thread holds a second lock, the turnstile, that others need first.

    Example::

        with lock:
            ...
    """

    def __init__(self) -> None:
        self._turnstile = threading.Lock()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._turnstile:
            self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()


@dataclasses.dataclass(slots=True)
class _Shaped(Generic[T]):
    """An output that is shaped already, and can no longer be merged with another one.

    Attributes:
        data: result of the shape function; None if it failed.
        finished: it is the request's last output.
        error: raised by the shape function.
    """

    data: T | None
    finished: bool
    error: Exception | None = None


class OutputQueue(Generic[T]):
    """Outputs of one request for its single consumer.

    Outputs that a slow consumer has not read are merged: it gets fewer and larger ones, and memory stays bounded.

    The output processor `put`s outputs in order; the consumer sees them once the event loop `publish`es them, so that
    metrics and engine core are updated before the consumer sees the end. `put` is called by one thread at a time
    (under the output processor's lock), everything else on the event loop. The deque between them needs no lock.

    `shape` is called in `put`, off the event loop, on each output in turn. Since a shaped output cannot be merged,
    this is done only while the consumer keeps up. Outputs for a slow consumer are queued unshaped, merged, and shaped
    in `get`.

    Args:
        kind: how outputs merge: DELTA outputs are concatenated, otherwise the latest one replaces the others.
        max_outputs: unread outputs beyond which they are merged.
        shape: makes the consumer's item from an output; None: the output itself.

    Attributes:
        has_ended: the consumer got the last output, or an error that ends the stream.
    """

    def __init__(
        self, kind: RequestOutputKind, max_outputs: int = 1, shape: Callable[[RequestOutput], T] | None = None
    ) -> None:
        self.has_ended = False
        self._kind = kind
        self._max_outputs = max_outputs
        self._shape = shape
        # put, but not yet published
        self._pending: collections.deque[RequestOutput | _Shaped[T] | Exception] = collections.deque()
        self._published: collections.deque[RequestOutput | _Shaped[T] | Exception] = collections.deque()
        # Outputs that were put unshaped, counted by `put`, and those of them that `get` has shaped since. While the
        # counts differ `put` must not shape later outputs, since `shape` is stateful and needs them in order.
        self._num_unshaped = 0
        self._num_shaped_late = 0
        # unshaped outputs in `_published`, before merging
        self._num_to_shape = 0
        self._has_failed = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        if self._has_failed:
            return  # the error of an earlier output ends the stream
        if self._shape is None:
            self._pending.append(output)
            return
        num_waiting = len(self._pending) + len(self._published)
        if num_waiting >= self._max_outputs or self._num_unshaped != self._num_shaped_late:
            self._num_unshaped += 1
            self._pending.append(output)
            return
        try:
            self._pending.append(_Shaped(self._shape(output), output.finished))
        except Exception as error:
            self._has_failed = True
            self._pending.append(_Shaped(None, output.finished, error))

    def put_error(self, error: Exception) -> None:
        """Ends the stream with an error, which `get` raises after the outputs before it."""
        self._pending.append(error)

    def publish(self) -> None:
        """Makes the next item that was put available to the consumer; does nothing if there is none."""
        if not self._pending:
            return
        item = self._pending.popleft()
        if isinstance(item, RequestOutput):
            self._num_to_shape += 1
            self._add(item)
        else:
            self._published.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def publish_all(self) -> None:
        while self._pending:
            self.publish()

    async def get(self) -> T:
        """The next output, shaped.

        Raises:
            RequestError: the engine refused the request.
            Exception: raised by `shape`, or the error that ended the stream.
        """
        while not self._published:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        item = self._published[0]
        if isinstance(item, Exception):
            self.has_ended = True
            raise item
        self._published.popleft()
        self.has_ended = item.finished
        if isinstance(item, RequestOutput):
            return self._shape_late(item)
        if item.error is not None:
            raise item.error
        return cast("T", item.data)

    def _add(self, output: RequestOutput) -> None:
        """Appends an output, or merges it into the last one if max_outputs are unread."""
        last = self._published[-1] if self._published else None
        if len(self._published) < self._max_outputs or not isinstance(last, RequestOutput):
            self._published.append(output)
        elif self._kind is RequestOutputKind.DELTA:
            _merge_deltas(last, output)
        else:
            self._published[-1] = output

    def _shape_late(self, output: RequestOutput) -> T:
        """Shapes an output that was put unshaped."""
        if self._shape is None:
            return cast("T", output)
        data = self._shape(output)
        if not self._published:
            self._num_shaped_late += self._num_to_shape
            self._num_to_shape = 0
        return data


def _merge_deltas(older: RequestOutput, newer: RequestOutput) -> None:
    """Appends the delta `newer` to `older`."""
    by_index: dict[int, CompletionOutput] = {output.index: output for output in older.outputs}
    for output in newer.outputs:
        known = by_index.get(output.index)
        if known is None:
            older.outputs.append(output)
            continue
        known.text += output.text
        known.token_ids += output.token_ids
        if output.logprobs is not None:
            known.logprobs = (known.logprobs or []) + output.logprobs
        known.cumulative_logprob = output.cumulative_logprob
        known.finish_reason, known.stop_reason = output.finish_reason, output.stop_reason
        known.num_drafts, known.num_accepted_drafts = output.num_drafts, output.num_accepted_drafts
    older.finished = newer.finished
    older.num_cached_tokens = newer.num_cached_tokens


@dataclasses.dataclass(slots=True)
class ProcessedOutputs:
    """A step while it is processed, and its results.

    Attributes:
        stats: filled in.
        now: seconds of time.monotonic().
        request_outputs: of requests without a queue.
        stopped_ids: core requests that a stop string ended; to be aborted in the core.
        queues: one entry per item that was put into a queue.
        changed: requests of several sequences of which some were updated, and no output was delivered yet.
    """

    stats: StepStats
    now: float
    request_outputs: list[RequestOutput] = dataclasses.field(default_factory=list)
    stopped_ids: list[str] = dataclasses.field(default_factory=list)
    queues: list[OutputQueue[Any]] = dataclasses.field(default_factory=list)
    changed: list[_RequestState] = dataclasses.field(default_factory=list)

    def publish(self) -> None:
        """Publishes the items put into the queues; called on the event loop."""
        for queue in self.queues:
            queue.publish()


class _RequestState:
    """One request: its sequences, or its beam search as if it were one, and its times."""

    def __init__(
        self, request: ProcessedRequest, tokenizer: Tokenizer | None, queue: OutputQueue[Any] | None, interval: int
    ) -> None:
        self.request = request
        self.queue = queue
        self.interval = interval
        params, prompt_token_ids = request.params, request.prompt_token_ids
        self.kind = params.output_kind
        self.num_returned = params.n
        self.sequences: Sequence[AnySequence]
        if request.core_requests[0].beam_search is not None:
            self.sequences = [BeamSearchState(params, prompt_token_ids, tokenizer)]
        elif request.core_requests[0].pooling_params is not None:
            self.sequences = [PoolingState()]
        else:
            is_scored = len(request.core_requests) > params.n
            self.sequences = [
                SequenceState(index, params, prompt_token_ids, tokenizer, is_scored)
                for index in range(len(request.core_requests))
            ]
        # of several sequences, those updated in the current step; their output is made at its end
        self.changed: list[AnySequence] = []
        self.core_ids = [core_request.request_id for core_request in request.core_requests]
        self.num_unfinished = len(self.sequences)
        self.max_tokens = request.core_requests[0].sampling_params.max_tokens or 0
        self.metrics = RequestMetrics(request.arrival_time)
        self.num_cached_tokens = 0
        # of generated tokens, until its last output
        self.num_kept_logprobs = 0
        # by core request id
        self.num_preemptions: dict[str, int] = {}
        # until they are emitted
        self.prompt_logprobs: PromptLogprobsState | None = None
        if params.prompt_logprobs is not None:
            texts = tokenizer if params.detokenize else None
            self.prompt_logprobs = PromptLogprobsState(prompt_token_ids, params.prompt_logprobs, texts)
        # sequences have unemitted tokens, since the prompt's log-probabilities must be emitted first
        self.holds_back = False

    def make_output(self, changed: Sequence[AnySequence]) -> RequestOutput | None:
        """The output that is due after an update of some sequences; None: none is."""
        finished = self.num_unfinished == 0
        # they come with the first sequence, which others may overtake if it is preempted
        of_prompt = self.prompt_logprobs
        is_awaited = of_prompt is not None and of_prompt.is_awaited
        if is_awaited and not finished and self.sequences[0].finish_reason is None:
            self.holds_back = True
            return None
        if self.holds_back:
            self.holds_back = False
            changed = [sequence for sequence in self.sequences if sequence.num_tokens]
        if self.interval > 1 and not finished:
            changed = [sequence for sequence in changed if self._is_due(sequence)]
            if not changed:
                return None
        if self.kind is RequestOutputKind.DELTA:
            outputs = [output for sequence in changed for output in sequence.make_outputs(self.kind)]
            if not outputs and not finished:
                return None
        elif self.kind is RequestOutputKind.FINAL_ONLY and not finished:
            return None
        else:
            outputs = [output for sequence in self.sequences for output in sequence.make_outputs(self.kind)]
            if len(self.sequences) > 1:
                outputs = self._choose(outputs, finished)
        if self.kind is RequestOutputKind.DELTA:
            self.prompt_logprobs = None
        first = self.sequences[0]
        return RequestOutput(
            self.request.request_id,
            self.request.prompt,
            self.request.prompt_token_ids,
            None if of_prompt is None or is_awaited else of_prompt.positions,
            outputs,
            finished,
            self.metrics,
            self.request.core_requests[0].lora,
            num_cached_tokens=self.num_cached_tokens,
            pooled=first.data if isinstance(first, PoolingState) else None,
        )

    def _is_due(self, sequence: AnySequence) -> bool:
        """Whether to emit now: the first token, the end, or `interval` tokens since the last output."""
        if not isinstance(sequence, SequenceState) or sequence.finish_reason is not None:
            return True
        return sequence.num_emitted == 0 or sequence.num_tokens - sequence.num_emitted >= self.interval

    def _choose(self, outputs: list[CompletionOutput], finished: bool) -> list[CompletionOutput]:
        """Sorts finished outputs best first; of best_of sequences it returns the best n, numbered by rank."""
        are_chosen = len(outputs) > self.num_returned
        if finished or are_chosen:
            # a stable sort, so that equal ones, and all without log-probabilities, keep the order of creation
            outputs.sort(key=lambda output: -(output.cumulative_logprob or 0.0))
        if are_chosen:
            del outputs[self.num_returned :]
            for rank, output in enumerate(outputs):
                output.index = rank
        return outputs


class OutputProcessor:
    """Holds the requests of an engine and makes their outputs from the core's.

    Args:
        tokenizer: None under --skip-tokenizer-init.
        stream_each_token: emit the tokens of a multi-token step one by one, except with FINAL_ONLY.
        stream_interval: tokens per output of a sequence, after its first one; a request may set a larger value.
        tracer: records requests that end; None: no traces.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stream_each_token: bool = False,
        stream_interval: int = 1,
        tracer: RequestTracer | None = None,
    ) -> None:
        self._tracer = tracer
        self._tokenizer = tokenizer
        self._stream_interval = stream_interval
        self._stream_each_token = stream_each_token
        self._requests: dict[str, _RequestState] = {}
        # core request id → its request and its sequence
        self._sequences: dict[str, tuple[_RequestState, AnySequence]] = {}
        self._lock = FairLock()
        # of all requests
        self._num_kept_logprobs = 0
        # with items of a step whose processing failed
        self._unpublished: list[OutputQueue[Any]] = []

    @classmethod
    def from_config(cls, config: EngineConfig, tokenizer: Tokenizer | None) -> OutputProcessor:
        """Makes one with the flags of multi-step streaming, stream interval and tracing."""
        scheduler = config.scheduler
        stream_each_token = scheduler.num_scheduler_steps > 1 and scheduler.multi_step_stream_outputs
        endpoint = config.observability.otlp_traces_endpoint
        tracer = None if endpoint is None else RequestTracer(endpoint)
        return cls(tokenizer, stream_each_token, scheduler.stream_interval, tracer)

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    @property
    def num_sequences(self) -> int:
        """Sequences that have not ended."""
        return len(self._sequences)

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens of requests without an output token yet; summed at each call."""
        # a copy, since the output thread may end requests meanwhile
        states = list(self._requests.values())
        waiting = (state for state in states if state.metrics.first_token_time is None)
        return sum(len(state.request.prompt_token_ids) for state in waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def request_ids(self) -> list[str]:
        return list(self._requests)

    def queue_of(self, request_id: str) -> OutputQueue[Any] | None:
        """Where a request's outputs go; None if it has ended or has no queue."""
        state = self._requests.get(request_id)
        return None if state is None else state.queue

    def make_queue(
        self, kind: RequestOutputKind, shape: Callable[[RequestOutput], T] | None = None
    ) -> OutputQueue[T]:
        """A queue for a request's outputs; with `shape` the consumer gets `shape(output)`."""
        return OutputQueue(kind, _MAX_TOKEN_OUTPUTS if self._stream_each_token else 1, shape)

    def add(self, request: ProcessedRequest, queue: OutputQueue[Any] | None = None) -> None:
        """Registers a request.

        Args:
            request: checked, and about to be sent to the core.
            queue: where its outputs go; None: `process` returns them.

        Raises:
            RequestError: a request with this id is running.
        """
        interval = max(self._stream_interval, request.params.stream_interval or 1)
        state = _RequestState(request, request.tokenizer or self._tokenizer, queue, interval)
        with self._lock:
            if request.request_id in self._requests:
                raise DuplicateRequestError(f"Request {request.request_id} already exists.", "request_id")
            self._requests[request.request_id] = state
            for core_id, sequence in zip(state.core_ids, state.sequences, strict=True):
                self._sequences[core_id] = (state, sequence)

    def process(self, outputs: EngineCoreOutputs, stats: StepStats, now: float | None = None) -> ProcessedOutputs:
        """Processes the outputs of a step.

        Args:
            outputs: from the core; those of unknown (aborted) requests are dropped.
            stats: filled in.
            now: seconds of time.monotonic(); None: now.
        """
        step = ProcessedOutputs(stats, time.monotonic() if now is None else now)
        try:
            self._process(outputs.outputs, step)
        except BaseException:
            # published by `fail_all`: requests that ended in this step still get their outputs
            self._unpublished += step.queues
            raise
        return step

    def _process(self, outputs: Sequence[EngineCoreOutput], step: ProcessedOutputs) -> None:
        # outputs of several tokens that are to be emitted one by one
        several: list[EngineCoreOutput] = []
        for output in outputs:
            if output.prompt_logprobs is not None:
                is_last = bool(output.new_token_ids) or output.finish_reason is not None
                self._take_prompt_logprobs(output.request_id, output.prompt_logprobs, is_last=is_last)
                if not is_last:
                    continue
            with self._lock:
                found = self._sequences.get(output.request_id)
                if found is not None and self._take_output(*found, output, step):
                    several.append(output)
        self._deliver_changed(step)
        if several:
            self._take_one_by_one(several, step)
        while self._num_kept_logprobs > MAX_KEPT_LOGPROBS:
            with self._lock:
                self._fail_largest(step)

    def _take_prompt_logprobs(self, core_id: str, entries: Sequence[TokenLogprobs], *, is_last: bool) -> None:
        """Stores those of a part of a prompt, without the lock: only the output thread accesses them."""
        with self._lock:
            state, _ = self._sequences.get(core_id, (None, None))
        if state is not None and state.prompt_logprobs is not None:
            state.prompt_logprobs.take(entries, is_last=is_last)

    def _take_output(
        self, state: _RequestState, sequence: AnySequence, output: EngineCoreOutput, step: ProcessedOutputs
    ) -> bool:
        """Updates a sequence; True: not done, since the caller is to emit its several tokens one by one."""
        if output.finish_reason is FinishReason.ERROR and state.queue is not None:
            self._fail(state, output, step)
            return False
        _record_tokens(state, sequence, output, step)
        if (
            self._stream_each_token
            and len(output.new_token_ids) > 1
            and state.kind is not RequestOutputKind.FINAL_ONLY
        ):
            return True
        self._take(state, sequence, output, step)
        return False

    def _take(
        self, state: _RequestState, sequence: AnySequence, output: EngineCoreOutput, step: ProcessedOutputs
    ) -> None:
        """Updates a sequence, finishes it if it has ended, and delivers or schedules its output."""
        if output.new_logprobs and state.queue is not None and state.kind is not RequestOutputKind.DELTA:
            num_kept = len(output.new_logprobs) * len(output.new_logprobs[0].token_ids)
            state.num_kept_logprobs += num_kept
            self._num_kept_logprobs += num_kept
        if sequence.update(output) and output.finish_reason is None:
            step.stopped_ids.append(output.request_id)
        if sequence.finish_reason is not None:
            if output.error is not None:
                logger.warning("Request %s failed: %s", state.request.request_id, output.error)
            del self._sequences[output.request_id]
            self._finish_sequence(state, sequence, step)
        if len(state.sequences) == 1:
            _deliver(state, (sequence,), step)
        else:
            if not state.changed:
                step.changed.append(state)
            state.changed.append(sequence)

    def _deliver_changed(self, step: ProcessedOutputs) -> None:
        """Delivers one output for each request of several sequences that changed in this step."""
        for state in step.changed:
            with self._lock:
                # empty: the request has failed, or was aborted, which delivered them
                if state.changed:
                    _deliver(state, state.changed, step)
                    state.changed = []
        step.changed.clear()

    def _take_one_by_one(self, outputs: list[EngineCoreOutput], step: ProcessedOutputs) -> None:
        """Adds the first token of each of the outputs, then the second, and so on, as steps of their own."""
        ends = {output.request_id for output in outputs if output.finish_reason is not None}
        stopped_ids = step.stopped_ids
        num_stopped = len(stopped_ids)
        for position in range(max(len(output.new_token_ids) for output in outputs)):
            for output in outputs:
                with self._lock:
                    found = self._sequences.get(output.request_id)
                    # it had fewer tokens, or a stop string ended it before its last one
                    if found is not None and position < len(output.new_token_ids):
                        self._take(*found, output.one_token(position), step)
            self._deliver_changed(step)
        # sequences that the core itself ended, at a later token than the stop string, need no abort
        stopped_ids[num_stopped:] = [id_ for id_ in stopped_ids[num_stopped:] if id_ not in ends]

    def abort(self, request_id: str, stats: StepStats) -> list[str]:
        """Ends a request early; its consumer gets an output with finish_reason "abort".

        Returns:
            Ids of core requests to abort in the core; [] if the request has ended already.
        """
        with self._lock:
            state = self._requests.get(request_id)
            if state is None:
                return []
            step = ProcessedOutputs(stats, time.monotonic())
            running = {
                core_id: self._sequences.pop(core_id)[1] for core_id in state.core_ids if core_id in self._sequences
            }
            for sequence in running.values():
                sequence.end(FinishReason.ABORT)
                self._finish_sequence(state, sequence, step)
            # with those whose output the current step has not delivered yet
            changed = [sequence for sequence in state.changed if sequence not in running.values()]
            state.changed = []
            _deliver(state, [*changed, *running.values()], step)
        if state.queue is not None:
            # after the items that were put before
            state.queue.publish_all()
        return list(running)

    def fail_all(self, error: Exception) -> None:
        with self._lock:
            states = list(self._requests.values())
            self._requests.clear()
            self._sequences.clear()
            self._num_kept_logprobs = 0
            for state in states:
                state.changed = []
                if state.queue is not None:
                    state.queue.put_error(error)
        for queue in [*self._unpublished, *(state.queue for state in states if state.queue is not None)]:
            queue.publish_all()
        self._unpublished.clear()

    def shutdown(self) -> None:
        """Sends buffered traces and stops tracing. May be called again."""
        with self._lock:
            tracer, self._tracer = self._tracer, None
        if tracer is not None:
            tracer.shutdown()

    def _fail_largest(self, step: ProcessedOutputs) -> None:
        """Ends the request that keeps the most log-probabilities."""
        state = max(self._requests.values(), key=lambda state: state.num_kept_logprobs)
        self._fail(
            state,
            EngineCoreOutput(
                "",
                [],
                error=f"The answer has {state.num_kept_logprobs} log-probabilities so far, and all answers together "
                f"may keep at most {MAX_KEPT_LOGPROBS}. Ask for fewer, or for a stream.",
                error_param="logprobs",
            ),
            step,
        )

    def _fail(self, state: _RequestState, output: EngineCoreOutput, step: ProcessedOutputs) -> None:
        """Ends a request, and all its sequences, with the core's error."""
        state.changed = []
        for core_id, sequence in zip(state.core_ids, state.sequences, strict=True):
            if self._sequences.pop(core_id, None) is None:
                continue
            sequence.end(FinishReason.ERROR)
            self._finish_sequence(state, sequence, step)
            if core_id != output.request_id:
                step.stopped_ids.append(core_id)
        if state.queue is not None:
            error = _ERRORS.get(output.error_class or "", RequestError)
            # the core sends EngineBusyError only for requests that waited for too long
            step.stats.num_queue_timeouts += error is EngineBusyError
            text = output.error or "the engine could not run the request"
            state.queue.put_error(error(text, output.error_param) if issubclass(error, RequestError) else error(text))
            step.queues.append(state.queue)

    def _finish_sequence(self, state: _RequestState, sequence: AnySequence, step: ProcessedOutputs) -> None:
        state.num_unfinished -= 1
        summaries = sequence.summaries()
        step.stats.finished_sequences += summaries
        if isinstance(sequence, BeamSearchState):
            # only now is it known which tokens are returned
            step.stats.num_generation_tokens += sum(summary.num_generation_tokens for summary in summaries)
        if state.num_unfinished == 0:
            state.metrics.finished_time = step.now
            del self._requests[state.request.request_id]
            self._num_kept_logprobs -= state.num_kept_logprobs
            finished = _summarize(state, step.now)
            step.stats.finished_requests.append(finished)
            if self._tracer is not None:
                request = state.request
                num_tokens = sum(ended.num_tokens for ended in state.sequences)
                self._tracer.record(request.request_id, request.params, finished, num_tokens, request.trace_headers)


def _deliver(state: _RequestState, changed: Sequence[AnySequence], step: ProcessedOutputs) -> None:
    """Puts the output that is due, if any, into the request's queue or `step.request_outputs`."""
    output = state.make_output(changed)
    if output is None:
        return
    if state.queue is not None:
        state.queue.put(output)
        step.queues.append(state.queue)
    else:
        step.request_outputs.append(output)


def _record_tokens(
    state: _RequestState, sequence: AnySequence, output: EngineCoreOutput, step: ProcessedOutputs
) -> None:
    """Updates times and counts for a sequence's new tokens, or for a step of a beam search."""
    metrics, stats, now = state.metrics, step.stats, step.now
    if output.first_scheduled_time is not None:
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = output.first_scheduled_time
            metrics.time_in_queue = output.first_scheduled_time - metrics.arrival_time
        # the other sequences of a request share the first one's prompt, which counts once
        if sequence is state.sequences[0]:
            state.num_cached_tokens = output.num_cached_tokens
            stats.num_cached_tokens += output.num_cached_tokens
    if output.num_preemptions:
        state.num_preemptions[output.request_id] = output.num_preemptions
    num_tokens = len(output.new_token_ids)
    if num_tokens == 0 and output.beams is None and output.pooled is None:
        return
    stats.num_generation_tokens += num_tokens
    if metrics.first_token_time is None:
        metrics.first_token_time = now
        stats.num_prompt_tokens += len(state.request.prompt_token_ids)
        stats.first_token_s.append(now - metrics.arrival_time)
    if sequence.last_token_time is not None:
        num_tokens = num_tokens or 1  # a beam search advances by one
        stats.inter_token_s.append(((now - sequence.last_token_time) / num_tokens, num_tokens))
    elif num_tokens > 1:  # several tokens in the first step: no time between them
        stats.inter_token_s.append((0.0, num_tokens - 1))
    sequence.last_token_time = metrics.last_token_time = now


def _summarize(state: _RequestState, now: float) -> FinishedRequest:
    metrics = state.metrics
    scheduled, first, last = metrics.first_scheduled_time, metrics.first_token_time, metrics.last_token_time
    num_tokens = max(sequence.num_tokens for sequence in state.sequences)
    if first == last and num_tokens > 1:
        first = None  # all came at once, as at the end of a beam search: the time of the first one is unknown
    decode_s = None if first is None or last is None else last - first
    return FinishedRequest(
        num_prompt_tokens=len(state.request.prompt_token_ids),
        n=state.num_returned,
        max_tokens=state.max_tokens,
        e2e_s=now - metrics.arrival_time,
        queue_s=None if scheduled is None else scheduled - metrics.arrival_time,
        prefill_s=None if scheduled is None or first is None else first - scheduled,
        decode_s=decode_s,
        inference_s=None if scheduled is None or last is None else last - scheduled,
        mean_token_s=None if decode_s is None or num_tokens < 2 else decode_s / (num_tokens - 1),
        best_of=len(state.core_ids),
        max_num_generation_tokens=num_tokens,
        num_computed_prompt_tokens=len(state.request.prompt_token_ids) - state.num_cached_tokens,
        num_preemptions=sum(state.num_preemptions.values()),
    )
