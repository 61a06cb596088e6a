"""The queue of a request's outputs, from the output thread to the consumer on the event loop."""

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
        """Adds an output, to be published."""
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
        """Publishes all items that were put."""
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
    older.finished = newer.finished
    older.num_cached_tokens = newer.num_cached_tokens
