"""Measures the cost of sending a step to all workers of this machine by the shared-memory ring, without a model.

    python benchmarks/bench_ring.py --workers 4 --requests 256

A step with --requests decoding rows is sent repeatedly to --workers processes, which read and decode it as workers
do. Two kinds of steps are measured: one without and one with a new block for every row.
For comparison the same step is sent through a pipe to each worker, pickled as by `multiprocessing`.

send_us   time in the engine core's thread: encoding and writing.
all_us    from the start of encoding until the last worker has decoded the step.

Medians over --steps. With more processes than cores, all_us includes context switches between them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from ascend_vllm.distributed.shm_ring import RingEnds, RingReader, RingWriter
from ascend_vllm.executor import wire
from ascend_vllm.types.step import SchedulerOutput

_TIME_BYTES = 8


class ReaderSetup(msgspec.Struct):
    """The argument of a reader's process."""

    steps: RingEnds
    answers: RingEnds


def make_step(step_id: int, num_requests: int, *, grows: bool) -> SchedulerOutput:
    """A step in which every row decodes a token and, if `grows`, gets a new block."""
    new_blocks = [(slot, [7 * slot + step_id % 7]) for slot in range(num_requests)] if grows else []
    return SchedulerOutput(step_id, [], [], list(range(num_requests)), [1] * num_requests, new_blocks)


# ---- through the ring ----------------------------------------------------------------------------------------


def read_from_ring(setup: ReaderSetup) -> None:
    """A worker: reports the time at which it has each step. Ends with a record that is not a step."""
    steps, answers = RingReader(setup.steps), RingWriter(setup.answers)
    while (record := steps.read())[0] == wire.RecordKind.STEP:
        wire.decode(record)
        answers.write(time.perf_counter_ns().to_bytes(_TIME_BYTES, "little"))


class RingWorkers:
    """Workers in processes that read from a ring."""

    def __init__(self, count: int) -> None:
        self._ends = [RingEnds.create(count), *(RingEnds.create(1) for _ in range(count))]
        self._writer = RingWriter(self._ends[0])
        self._answers = [RingReader(ends) for ends in self._ends[1:]]
        self._processes = []
        for index, answers in enumerate(self._ends[1:]):
            setup = ReaderSetup(self._ends[0].of_reader(index), answers)
            command = [
                sys.executable,
                str(pathlib.Path(__file__).resolve()),
                "--reader",
                msgspec.json.encode(setup).decode(),
            ]
            descriptors = [*setup.steps.descriptors, *setup.answers.descriptors]
            self._processes.append(subprocess.Popen(command, pass_fds=descriptors))

    def send(self, step: SchedulerOutput) -> None:
        """Tells the step to all."""
        self._writer.write(wire.encode(wire.RecordKind.STEP, step))

    def times(self) -> list[int]:
        """When each of them had it, in nanoseconds."""
        return [int.from_bytes(answers.read(), "little") for answers in self._answers]

    def close(self) -> None:
        """Ends them."""
        self._writer.write(wire.STOP)
        for process in self._processes:
            process.wait()
        for ends in self._ends:
            ends.close()


# ---- through pipes -------------------------------------------------------------------------------------------


def read_from_pipe(connection: Connection) -> None:
    """A worker: as `read_from_ring`."""
    while connection.recv() is not None:
        connection.send(time.perf_counter_ns())


class PipeWorkers:
    """Workers in processes that read from one pipe each."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(count)]
        self._ours = [ours for ours, _ in pairs]
        self._processes = [context.Process(target=read_from_pipe, args=(theirs,)) for _, theirs in pairs]
        for process in self._processes:
            process.start()

    def send(self, step: SchedulerOutput) -> None:
        """Tells the step to all."""
        for connection in self._ours:
            connection.send(step)

    def times(self) -> list[int]:
        """When each of them had it, in nanoseconds."""
        return [connection.recv() for connection in self._ours]

    def close(self) -> None:
        """Ends them."""
        for connection in self._ours:
            connection.send(None)
        for process in self._processes:
            process.join()


# ---- both ----------------------------------------------------------------------------------------------------


def measure(
    workers: RingWorkers | PipeWorkers, step_of: Callable[[int], SchedulerOutput], count: int
) -> dict[str, float]:
    """Medians over `count` steps, in microseconds, after warm-up steps."""
    send, all_have = [], []
    for number in range(count + count // 10):
        step = step_of(number)
        start = time.perf_counter_ns()
        workers.send(step)
        sent = time.perf_counter_ns()
        last = max(workers.times())
        if number >= count // 10:
            send.append((sent - start) / 1e3)
            all_have.append((last - start) / 1e3)
    return {"send_us": statistics.median(send), "all_us": statistics.median(all_have)}


def main() -> None:
    """Prints the medians as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4, help="processes that read each step")
    parser.add_argument("--requests", type=int, default=256, help="rows that decode in a step")
    parser.add_argument("--steps", type=int, default=2000, help="steps of each kind")
    parser.add_argument("--reader", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.reader is not None:
        read_from_ring(msgspec.json.decode(args.reader, type=ReaderSetup))
        return
    kinds = {"decode": False, "decode_and_grow": True}
    result: dict[str, Any] = {"workers": args.workers, "requests": args.requests, "cores": os.cpu_count()}
    for name, make in (("ring", RingWorkers), ("pickle_and_pipes", PipeWorkers)):
        workers = make(args.workers)
        try:
            result[name] = {
                kind: measure(
                    workers, lambda number, grows=grows: make_step(number, args.requests, grows=grows), args.steps
                )
                for kind, grows in kinds.items()
            }
        finally:
            workers.close()
    for kind, grows in kinds.items():
        result[f"{kind}_bytes"] = len(wire.encode(wire.RecordKind.STEP, make_step(0, args.requests, grows=grows)))
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
