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
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from ascend_vllm.distributed.shm_ring import RingReader, RingWriter
from ascend_vllm.executor import wire
from ascend_vllm.executor.base import call_worker
from ascend_vllm.executor.wire import RecordKind, WorkerSetup
from ascend_vllm.logger import init_logger
from ascend_vllm.platforms.weight_reserve import reserve_for

if TYPE_CHECKING:
    from ascend_vllm.worker.worker import Worker

logger = init_logger("ascend_vllm.executor.worker_process")


def answer_record(worker: Worker, rank: int, record: bytes) -> bytes | None:
    """Executes a record of kind STEP, CALL or PLAIN_CALL.

    Returns:
        A record with the output, result or failure; None if another worker sends it.
    """
    is_step = record[0] == RecordKind.STEP
    try:
        if not is_step:
            return wire.encode_result(record, call_worker(worker, *wire.decode_call(record)))
        output = worker.execute_model(wire.decode(record))
    except Exception as error:
        return wire.encode_failure(error, None if is_step else wire.call_id_of(record))
    # the other workers of the last stage have computed the same output
    return wire.encode(RecordKind.STEP_OUTPUT, output) if rank == worker.output_rank else None


def quieten(rank: int) -> None:
    """Limits all workers but the first to warnings: their other log lines would repeat those of the first."""
    if rank and logger.isEnabledFor(logging.INFO) and not logger.isEnabledFor(logging.DEBUG):
        logging.getLogger("ascend_vllm").setLevel(logging.WARNING)


def read_setup(stream: BinaryIO) -> WorkerSetup:
    """Reads the length-prefixed setup.

    Raises:
        EOFError: the stream ends early.
        msgspec.MsgspecError: it is no WorkerSetup.
    """
    length = int.from_bytes(stream.read(4), "big")
    payload = stream.read(length)
    if not payload or len(payload) < length:
        raise EOFError("the setup on stdin ends early")
    return msgspec.msgpack.decode(payload, type=WorkerSetup)


def _end_with_parent(descriptor: int) -> None:
    while os.read(descriptor, 4096):
        pass
    # without cleaning up: the other workers end, too, and a step that waits for them would never return
    os._exit(1)


def main() -> int:
    """Runs the process; returns its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        setup = read_setup(sys.stdin.buffer)
    except EOFError as error:
        logger.info("The worker does not start: %s", error)
        return 1
    threading.Thread(target=_end_with_parent, args=(sys.stdin.fileno(),), name="watch-parent", daemon=True).start()
    sys.path.extend(path for path in setup.search_path if path not in sys.path)
    quieten(setup.rank)
    orders, answers = RingReader(setup.orders), RingWriter(setup.answers)
    try:
        # before torch is imported
        reserve = reserve_for(setup.config)
        # imported here, where a failure is sent to the parent
        from ascend_vllm.worker.worker import Worker

        worker = Worker(setup.config, setup.rank, setup.rendezvous, reserve)
    except BaseException as error:
        answers.write(wire.encode_failure(error, wire.START_CALL))
        return 1
    answers.write(wire.STARTED)
    while (record := orders.read())[0] != RecordKind.STOP:
        answer = answer_record(worker, setup.rank, record)
        if answer is not None:
            answers.write(answer)
    worker.shutdown()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # without joining the libraries' threads
    os._exit(code)
