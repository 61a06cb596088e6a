"""The output thread: reads and processes an engine core's messages, and passes the results to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeAlias

import msgspec
import zmq

from ascend_vllm.types.messages import CoreOutbound

# what the event loop does with a message
LoopTask: TypeAlias = Callable[[], None]


class CoreReceiver:
    """A thread that reads the messages of one engine core.

    The thread decodes messages, detokenises and serialises answers; the event loop gets one callback per message.

    From `start` on the socket belongs to the thread. Terminating its context ends the thread's `recv`, and
    `zmq.Context.term` returns once the thread has closed the socket.

    Args:
        socket: the one to read; bound.
        take: called in the thread with each message; returns the callback for the event loop.
        refuse: called with an exception of decoding or of `take`; returns the callback for the event loop.

    Attributes:
        num_received: messages so far.
        is_busy: a message is being processed whose callback is not yet scheduled.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        take: Callable[[CoreOutbound], LoopTask],
        refuse: Callable[[Exception], LoopTask],
    ) -> None:
        self.num_received = 0
        self.is_busy = False
        self._socket = socket
        self._take = take
        self._refuse = refuse
        self._decoder = msgspec.msgpack.Decoder(CoreOutbound)
        self._thread: threading.Thread | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the thread, whose callbacks run on this event loop."""
        # a daemon, so that an engine which is not shut down does not keep the interpreter from exiting
        self._thread = threading.Thread(target=self._run, args=(loop,), name="engine-core-outputs", daemon=True)
        self._thread.start()

    def close(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Terminates the socket's context, whose other sockets must be closed, and joins the thread.

        The thread finishes the message that it is processing.
        """
        if self._thread is None:
            self._socket.close(linger=0)
        context.term()
        if self._thread is not None:
            self._thread.join()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(zmq.ContextTerminated):
            while self._handle(self._socket.recv(), loop):
                pass
        self.is_busy = False
        self._socket.close(linger=0)

    def _handle(self, frame: bytes, loop: asyncio.AbstractEventLoop) -> bool:
        """Processes a message; False: the event loop is closed."""
        # in this order, so that `_Core.has_activity` sees the message at any time
        self.is_busy = True
        self.num_received += 1
        try:
            task = self._take(self._decoder.decode(frame))
        except Exception as error:
            task = self._refuse(error)
        try:
            loop.call_soon_threadsafe(task)
        except RuntimeError:
            return False
        self.is_busy = False
        return True
