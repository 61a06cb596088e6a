"""Outputs of one request on their way from the output thread to their consumer on the event loop."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from ascend_vllm.outputs import CompletionOutput, RequestOutput
from ascend_vllm.sampling_params import RequestOutputKind

T = TypeVar("T")


@dataclasses.dataclass(slots=True)
class _Shaped(Generic[T]):
    """An output that has its shape already; it cannot be merged with another any more.

    Attributes:
        data: what the shape made of it; None if it failed.
        finished: it was the request's last one.
        error: what the shape raised.
    """

    data: T | None
    finished: bool
    error: Exception | None = None


class OutputQueue(Generic[T]):
    """Outputs of one request on their way to its one consumer.

    Outputs that arrive while the consumer is busy are merged, so that a slow consumer costs neither memory nor
    tokens: it gets fewer, larger pieces.

    Whoever processes the outputs `put`s them, in the order in which they are made; for the consumer they are there
    once the event loop `publish`es them, so that it learns of an end no sooner than the metrics and the engine core
    do. `put` belongs to one thread at a time (the output processor's lock sees to it), everything else to the event
    loop. Both ends of the deque between them are safe without a lock.

    A `shape` is called where outputs are put, so that its work stays off the event loop. It is called for each
    output in turn, and an output that has its shape cannot be merged: only as long as the consumer keeps up do
    outputs get it at once. Those of a slow consumer wait without it, are merged, and get it when he comes for them.

    Args:
        kind: how outputs merge: DELTA pieces are joined, otherwise the latest one stays.
        max_outputs: as many wait apart; only those beyond are merged.
        shape: what the consumer gets of each output; None: the output itself.

    Attributes:
        has_ended: the consumer got the last output, or the engine's error.
    """

    def __init__(
        self, kind: RequestOutputKind, max_outputs: int = 1, shape: Callable[[RequestOutput], T] | None = None
    ) -> None:
        self.has_ended = False
        self._kind = kind
        self._max_outputs = max_outputs
        self._shape = shape
        # made, not yet there for the consumer
        self._pending: collections.deque[RequestOutput | _Shaped[T] | Exception] = collections.deque()
        self._published: collections.deque[RequestOutput | _Shaped[T] | Exception] = collections.deque()
        # Outputs that were put without their shape, counted by `put`, and those of them that have got it since,
        # counted by the event loop. While they differ no later output may get its shape, for shapes depend on those
        # before.
        self._num_unshaped = 0
        self._num_shaped_late = 0
        # of the former, those that are in `_published`, merged or not
        self._num_to_shape = 0
        self._has_failed = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        """Adds an output, to be published."""
        if self._has_failed:
            return  # its consumer gets the error of the one before
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
        """Ends the stream, once it is published; `get` raises the error after what is still there."""
        self._pending.append(error)

    def publish(self) -> None:
        """Lets the consumer have the next of what was put; nothing happens if it has all of that."""
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
        """Lets the consumer have all that was put."""
        while self._pending:
            self.publish()

    async def get(self) -> T:
        """The next output, in its shape.

        Raises:
            RequestError: the engine refused the request.
            EngineDeadError: the engine died.
            Exception: what the shape raised.
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
        """Lets an output wait, or joins it with the last one that does if enough of them wait."""
        last = self._published[-1] if self._published else None
        if len(self._published) < self._max_outputs or not isinstance(last, RequestOutput):
            self._published.append(output)
        elif self._kind is RequestOutputKind.DELTA:
            _merge_deltas(last, output)
        else:
            self._published[-1] = output

    def _shape_late(self, output: RequestOutput) -> T:
        """What the consumer gets of an output that was put without its shape."""
        if self._shape is None:
            return cast("T", output)
        data = self._shape(output)
        if not self._published:
            self._num_shaped_late += self._num_to_shape
            self._num_to_shape = 0
        return data


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
