"""A worker in a process of its own: ``python -m ascend_vllm.executor.worker_process``.

Started by `LocalWorkers`, which writes the length of the WorkerSetup (four bytes, big-endian) and the WorkerSetup in
msgpack to its stdin. stdin stays open: its end means that the parent is gone, and this process exits at once. Steps,
calls and answers go through two rings of shared memory. SIGINT and SIGTERM, which a terminal sends to the whole
process group, are ignored: the engine ends its workers.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
from typing import TYPE_CHECKING

import msgspec

from ascend_vllm.distributed.shm_ring import RingReader, RingWriter
from ascend_vllm.executor import wire
from ascend_vllm.executor.call import call_worker
from ascend_vllm.executor.wire import Failure, RecordKind, WorkerSetup
from ascend_vllm.logger import init_logger

if TYPE_CHECKING:
    from ascend_vllm.worker.worker import Worker

logger = init_logger("ascend_vllm.executor.worker_process")

# call id of the answer that a worker sends unasked when it has been made
START_CALL = 0


class WorkerLoop:
    """Executes the records of one ring, and writes the results to another.

    Args:
        worker: that executes them.
        rank: of the worker.
        orders: ring of steps and calls.
        answers: ring of outputs, results and failures.
    """

    def __init__(self, worker: Worker, rank: int, orders: RingReader, answers: RingWriter) -> None:
        self._worker = worker
        self._rank = rank
        self._orders = orders
        self._answers = answers

    def run(self) -> None:
        """Returns at a record of kind STOP."""
        while (record := self._orders.read())[0] != RecordKind.STOP:
            answer = answer_record(self._worker, self._rank, record)
            if answer is not None:
                self._answers.write(answer)


def answer_record(worker: Worker, rank: int, record: bytes) -> bytes | None:
    """Executes a record of kind STEP, CALL or PLAIN_CALL.

    Args:
        worker: that executes it.
        rank: of the worker.
        record: the step or call.

    Returns:
        A record with the output, result or failure; None if another worker sends it.
    """
    if record[0] in (RecordKind.CALL, RecordKind.PLAIN_CALL):
        return _call(worker, record)
    try:
        output = worker.execute_model(wire.decode_step(record))
    except Exception as error:
        return wire.encode_failure(describe(error, None))
    # the other workers of the last stage have computed the same output
    return wire.encode_output(output) if rank == worker.output_rank else None


def _call(worker: Worker, record: bytes) -> bytes:
    try:
        return wire.encode_result(record, call_worker(worker, *wire.decode_call(record)))
    except Exception as error:
        return wire.encode_failure(describe(error, wire.call_id_of(record)))


def describe(error: BaseException, call_id: int | None) -> Failure:
    """An exception with its traceback, for another process."""
    return Failure(call_id, type(error).__name__, str(error), "".join(traceback.format_exception(error)))


def quieten(rank: int) -> None:
    """Limits all workers but the first to warnings: their other log lines would repeat those of the first."""
    if rank and logger.isEnabledFor(logging.INFO) and not logger.isEnabledFor(logging.DEBUG):
        logging.getLogger("ascend_vllm").setLevel(logging.WARNING)


def read_setup(descriptor: int) -> WorkerSetup:
    """Reads the length-prefixed setup.

    Raises:
        EOFError: the stream ends early.
        msgspec.MsgspecError: it is no WorkerSetup.
    """
    length = int.from_bytes(_read_exactly(descriptor, 4), "big")
    return msgspec.msgpack.decode(_read_exactly(descriptor, length), type=WorkerSetup)


def _read_exactly(descriptor: int, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = os.read(descriptor, count - len(data))
        if not part:
            raise EOFError("the setup on stdin ends early")
        data += part
    return bytes(data)


def _end_with_parent(descriptor: int) -> None:
    while os.read(descriptor, 4096):
        pass
    # without cleaning up: the other workers end, too, and a step that waits for them would never return
    os._exit(1)


def _make_worker(setup: WorkerSetup) -> Worker:
    # imported here, where a failure is sent to the parent
    from ascend_vllm.worker.worker import Worker

    return Worker(setup.config, setup.rank, setup.rendezvous)


def main() -> int:
    """Runs the process; returns its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        setup = read_setup(sys.stdin.fileno())
    except EOFError as error:
        logger.info("The worker does not start: %s", error)
        return 1
    threading.Thread(target=_end_with_parent, args=(sys.stdin.fileno(),), name="watch-parent", daemon=True).start()
    sys.path.extend(path for path in setup.search_path if path not in sys.path)
    quieten(setup.rank)
    orders, answers = RingReader(setup.orders), RingWriter(setup.answers)
    try:
        worker = _make_worker(setup)
    except BaseException as error:
        answers.write(wire.encode_failure(describe(error, START_CALL)))
        return 1
    answers.write(wire.encode_start(START_CALL))
    WorkerLoop(worker, setup.rank, orders, answers).run()
    worker.shutdown()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # without joining the libraries' threads
    os._exit(code)
