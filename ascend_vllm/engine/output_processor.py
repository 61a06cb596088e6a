"""From what the engine core sends to what callers get.

One `OutputProcessor` holds the state of all requests of an engine. Each step's outputs pass through `process`, which
either puts `RequestOutput`s into the requests' own queues (async engine) or returns them (sync engine).
"""

from __future__ import annotations

import asyncio
import dataclasses
import time

from ascend_vllm.engine.input_processor import ProcessedRequest
from ascend_vllm.engine.request_stats import FinishedRequest, FinishedSequence, StepStats
from ascend_vllm.engine.sequence_state import SequenceState
from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.errors import RequestError
from ascend_vllm.logger import init_logger
from ascend_vllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from ascend_vllm.sampling_params import RequestOutputKind
from ascend_vllm.types.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason

logger = init_logger(__name__)


class OutputQueue:
    """Outputs of one request on their way to its consumer; holds at most one.

    Outputs that arrive while the consumer is busy are merged, so that a slow consumer costs neither memory nor
    tokens: it gets fewer, larger pieces.

    Args:
        kind: how outputs merge: DELTA pieces are joined, otherwise the latest one stays.
    """

    def __init__(self, kind: RequestOutputKind) -> None:
        self._kind = kind
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._ready = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Adds an output."""
        if self._output is None or self._kind is not RequestOutputKind.DELTA:
            self._output = output
        else:
            _merge_deltas(self._output, output)
        self._ready.set()

    def put_error(self, error: Exception) -> None:
        """Ends the stream; `get` raises the error after what is still there."""
        self._error = error
        self._ready.set()

    async def get(self) -> RequestOutput:
        """The next output.

        Raises:
            RequestError: the engine refused the request.
            EngineDeadError: the engine died.
        """
        await self._ready.wait()
        output = self._output
        if output is not None:
            self._output = None
            if self._error is None:
                self._ready.clear()
            return output
        if self._error is None:
            raise RuntimeError("an output queue was woken without an output")
        raise self._error


@dataclasses.dataclass
class ProcessedOutputs:
    """What a step came to.

    Attributes:
        request_outputs: of requests without a queue.
        stopped_ids: core requests that a stop string ended; the core must be told.
    """

    request_outputs: list[RequestOutput] = dataclasses.field(default_factory=list)
    stopped_ids: list[str] = dataclasses.field(default_factory=list)


class _RequestState:
    """One request: its sequences and its times."""

    __slots__ = (
        "core_ids",
        "kind",
        "max_tokens",
        "metrics",
        "num_cached_tokens",
        "num_unfinished",
        "queue",
        "request",
        "sequences",
    )

    def __init__(self, request: ProcessedRequest, tokenizer: Tokenizer | None, queue: OutputQueue | None) -> None:
        self.request = request
        self.queue = queue
        self.kind = request.params.output_kind
        self.sequences = [
            SequenceState(index, request.params, request.prompt_token_ids, tokenizer)
            for index in range(len(request.core_requests))
        ]
        self.core_ids = [core_request.request_id for core_request in request.core_requests]
        self.num_unfinished = len(self.sequences)
        self.max_tokens = request.core_requests[0].sampling_params.max_tokens or 0
        self.metrics = RequestMetrics(request.arrival_time)
        self.num_cached_tokens = 0

    def make_output(self, changed: list[SequenceState]) -> RequestOutput | None:
        """The output due after a change of some sequences, if one is."""
        finished = self.num_unfinished == 0
        if self.kind is RequestOutputKind.DELTA:
            outputs = [sequence.make_output(self.kind) for sequence in changed]
        elif self.kind is RequestOutputKind.FINAL_ONLY and not finished:
            return None
        else:
            outputs = [sequence.make_output(self.kind) for sequence in self.sequences]
            if finished and len(outputs) > 1:
                # best first; a stable sort, so without log-probabilities the order of creation
                outputs.sort(key=lambda output: -(output.cumulative_logprob or 0.0))
        return RequestOutput(
            self.request.request_id,
            self.request.prompt,
            self.request.prompt_token_ids,
            None,
            outputs,
            finished,
            self.metrics,
            self.num_cached_tokens,
        )


class OutputProcessor:
    """Holds the requests of an engine and turns core outputs into theirs.

    Args:
        tokenizer: None under --skip-tokenizer-init.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, _RequestState] = {}
        # core request id → its request and its sequence
        self._sequences: dict[str, tuple[_RequestState, SequenceState]] = {}

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    @property
    def num_sequences(self) -> int:
        """Their sequences that have not ended."""
        return len(self._sequences)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def request_ids(self) -> list[str]:
        """Ids of all requests that have not ended."""
        return list(self._requests)

    def queue_of(self, request_id: str) -> OutputQueue | None:
        """Where a request's outputs go; None if it has ended or has no queue."""
        state = self._requests.get(request_id)
        return None if state is None else state.queue

    def add(self, request: ProcessedRequest, queue: OutputQueue | None = None) -> None:
        """Opens the state of a request.

        Args:
            request: checked, and about to be sent to the core.
            queue: where its outputs go; None: `process` returns them.

        Raises:
            RequestError: a request with this id is running.
        """
        if request.request_id in self._requests:
            raise RequestError(f"Request {request.request_id} already exists.", "request_id")
        state = _RequestState(request, self._tokenizer, queue)
        self._requests[request.request_id] = state
        for core_id, sequence in zip(state.core_ids, state.sequences, strict=True):
            self._sequences[core_id] = (state, sequence)

    def process(self, outputs: EngineCoreOutputs, stats: StepStats, now: float | None = None) -> ProcessedOutputs:
        """Takes the outputs of a step.

        Args:
            outputs: from the core; those of unknown (aborted) requests are dropped.
            stats: filled.
            now: seconds of time.monotonic(); None: now.
        """
        now = time.monotonic() if now is None else now
        processed = ProcessedOutputs()
        sequences = self._sequences
        # requests of several sequences: one output a step, whatever number of them got something
        changed: dict[str, tuple[_RequestState, list[SequenceState]]] = {}
        for output in outputs.outputs:
            found = sequences.get(output.request_id)
            if found is None:
                continue
            state, sequence = found
            if output.finish_reason is FinishReason.ERROR and state.queue is not None:
                self._fail(state, output, stats, now, processed)
                changed.pop(state.request.request_id, None)
                continue
            _record_tokens(state, sequence, output, stats, now)
            if sequence.update(output) and output.finish_reason is None:
                processed.stopped_ids.append(output.request_id)
            if sequence.finish_reason is not None:
                if output.error is not None:
                    logger.warning("Request %s failed: %s", state.request.request_id, output.error)
                del sequences[output.request_id]
                self._finish_sequence(state, sequence, stats, now)
            if len(state.sequences) == 1:
                _deliver(state, [sequence], processed)
            else:
                changed.setdefault(state.request.request_id, (state, []))[1].append(sequence)
        for state, changed_sequences in changed.values():
            _deliver(state, changed_sequences, processed)
        return processed

    def abort(self, request_id: str, stats: StepStats) -> list[str]:
        """Ends a request early; its consumer gets an output with finish_reason "abort".

        Returns:
            Ids of core requests that the core must be told of; [] if the request has ended already.
        """
        state = self._requests.get(request_id)
        if state is None:
            return []
        now = time.monotonic()
        running = {
            core_id: self._sequences.pop(core_id)[1] for core_id in state.core_ids if core_id in self._sequences
        }
        for sequence in running.values():
            sequence.abort()
            self._finish_sequence(state, sequence, stats, now)
        _deliver(state, list(running.values()), ProcessedOutputs())
        return list(running)

    def fail_all(self, error: Exception) -> None:
        """Ends all requests with an error: the engine is gone."""
        for state in self._requests.values():
            if state.queue is not None:
                state.queue.put_error(error)
        self._requests.clear()
        self._sequences.clear()

    def _fail(
        self,
        state: _RequestState,
        output: EngineCoreOutput,
        stats: StepStats,
        now: float,
        processed: ProcessedOutputs,
    ) -> None:
        """Ends a request, and all its sequences, with the core's words."""
        for core_id, sequence in zip(state.core_ids, state.sequences, strict=True):
            if self._sequences.pop(core_id, None) is None:
                continue
            sequence.finish_reason = FinishReason.ERROR
            self._finish_sequence(state, sequence, stats, now)
            if core_id != output.request_id:
                processed.stopped_ids.append(core_id)
        if state.queue is not None:
            state.queue.put_error(RequestError(output.error or "the engine could not run the request"))

    def _finish_sequence(self, state: _RequestState, sequence: SequenceState, stats: StepStats, now: float) -> None:
        state.num_unfinished -= 1
        stats.finished_sequences.append(FinishedSequence(str(sequence.finish_reason), len(sequence.token_ids)))
        if state.num_unfinished == 0:
            state.metrics.finished_time = now
            del self._requests[state.request.request_id]
            stats.finished_requests.append(_summarize(state, now))


def _deliver(state: _RequestState, changed: list[SequenceState], processed: ProcessedOutputs) -> None:
    """Sends the output that is due, if one is, to the request's queue or to the caller of `process`."""
    output = state.make_output(changed)
    if output is None:
        return
    if state.queue is not None:
        state.queue.put(output)
    else:
        processed.request_outputs.append(output)


def _record_tokens(
    state: _RequestState, sequence: SequenceState, output: EngineCoreOutput, stats: StepStats, now: float
) -> None:
    """Times and counts of a sequence's new tokens."""
    metrics = state.metrics
    if output.first_scheduled_time is not None and metrics.first_scheduled_time is None:
        metrics.first_scheduled_time = output.first_scheduled_time
        state.num_cached_tokens = output.num_cached_tokens
        stats.num_cached_tokens += output.num_cached_tokens
    num_tokens = len(output.new_token_ids)
    if num_tokens == 0:
        return
    stats.num_generation_tokens += num_tokens
    if metrics.first_token_time is None:
        metrics.first_token_time = now
        stats.num_prompt_tokens += len(state.request.prompt_token_ids)
        stats.first_token_s.append(now - metrics.arrival_time)
    if sequence.last_token_time is not None:
        stats.inter_token_s.append(((now - sequence.last_token_time) / num_tokens, num_tokens))
    elif num_tokens > 1:  # several tokens in the first step: they came at once
        stats.inter_token_s.append((0.0, num_tokens - 1))
    sequence.last_token_time = metrics.last_token_time = now


def _summarize(state: _RequestState, now: float) -> FinishedRequest:
    metrics = state.metrics
    scheduled, first, last = metrics.first_scheduled_time, metrics.first_token_time, metrics.last_token_time
    num_tokens = max(len(sequence.token_ids) for sequence in state.sequences)
    decode_s = None if first is None or last is None else last - first
    return FinishedRequest(
        num_prompt_tokens=len(state.request.prompt_token_ids),
        n=len(state.sequences),
        max_tokens=state.max_tokens,
        e2e_s=now - metrics.arrival_time,
        queue_s=None if scheduled is None else scheduled - metrics.arrival_time,
        prefill_s=None if scheduled is None or first is None else first - scheduled,
        decode_s=decode_s,
        inference_s=None if scheduled is None or last is None else last - scheduled,
        mean_token_s=None if decode_s is None or num_tokens < 2 else decode_s / (num_tokens - 1),
    )


def _merge_deltas(older: RequestOutput, newer: RequestOutput) -> None:
    """Joins two pieces of a request; `older` becomes both."""
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
    older.finished = newer.finished
    older.num_cached_tokens = newer.num_cached_tokens
