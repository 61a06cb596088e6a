"""The output thread: reads what an engine core sends, and makes of it what the event loop only has to hand on."""

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

    Whatever a message takes is done in this thread: decoding it, detokenising, shaping answers. What then belongs to
    the event loop goes there as one call for each message.

    The socket belongs to whoever made the receiver until `start`, and to the thread from then on. There it ends when
    the socket's context ends, which wakes it: `zmq.Context.term` returns once the thread has closed the socket.

    Args:
        socket: the one to read; bound.
        take: called in the thread with each message; returns what the event loop is to do.
        refuse: makes what the event loop is to do of an exception of decoding or of `take`.

    Attributes:
        num_received: messages so far.
        is_busy: a message has come that the event loop has not been told of.
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
        """Starts the thread, which hands over to this event loop."""
        # A daemon: an engine that nobody shuts down must not keep the interpreter from ending.
        self._thread = threading.Thread(target=self._run, args=(loop,), name="engine-core-outputs", daemon=True)
        self._thread.start()

    def close(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Ends the thread and the socket's context, whose other sockets are closed.

        The message that the thread has is still processed; it can wait for nothing but the end of a few instructions
        of another thread.
        """
        if self._thread is None:
            self._socket.close(linger=0)
        context.term()
        if self._thread is not None:
            self._thread.join()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        # the context's end, or that of the event loop: then nobody waits for anything any more
        with contextlib.suppress(zmq.ContextTerminated, _LoopClosedError):
            while True:
                self._handle(self._socket.recv(), loop)
        self.is_busy = False
        self._socket.close(linger=0)

    def _handle(self, frame: bytes, loop: asyncio.AbstractEventLoop) -> None:
        # in this order: one of both tells of the message at any time
        self.is_busy = True
        self.num_received += 1
        try:
            task = self._take(self._decoder.decode(frame))
        except Exception as error:
            task = self._refuse(error)
        try:
            loop.call_soon_threadsafe(task)
        except RuntimeError:
            raise _LoopClosedError from None
        self.is_busy = False


class _LoopClosedError(Exception):
    """The event loop that messages are handed to is closed."""
