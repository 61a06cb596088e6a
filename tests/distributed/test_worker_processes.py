"""Workers start, fail to start and die without leaving anything behind."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading

import msgspec
import numpy as np
import psutil
import pytest
import zmq

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.core.proc import CoreLoop
from ascend_vllm.distributed.rendezvous import Rendezvous
from ascend_vllm.distributed.shm_ring import RingEnds
from ascend_vllm.errors import ConfigError, EngineDeadError, ModelLoadError, RequestError
from ascend_vllm.executor import wire
from ascend_vllm.executor.base import create_executor
from ascend_vllm.executor.wire import Failure, RecordKind, WorkerSetup
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.messages import CoreOutbound, EngineFailed
from ascend_vllm.types.step import NewRow, SchedulerOutput, StepLogprobs, StepOutput
from tests.core.memory_executor import MemoryExecutor, make_core
from tests.server import ROOT, is_alive
from tests.worker.worker_driver import make_config

TIMEOUT_S = 60.0


def _config(directory: str, **options: object) -> EngineConfig:
    return make_config(directory, tensor_parallel_size=2, distributed_executor_backend="mp", **options)


def test_a_worker_that_fails_to_start_tells_its_traceback(
    odd_model: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("ascend_vllm"), "propagate", True)
    # servers of other tests may be this process's children too
    before = set(psutil.Process().children())
    with pytest.raises(AttributeError, match="no attribute 'no_such_dtype'"):
        create_executor(_config(odd_model, dtype="no_such_dtype"))
    (trace,) = {record.exc_text for record in caplog.records if "failed to start" in record.message}
    assert trace is not None and "Traceback (most recent call last)" in trace
    assert "getattr(torch, config.model.dtype)" in trace
    assert not [child for child in set(psutil.Process().children()) - before if is_alive(child)]


def test_a_worker_ends_with_its_parent(odd_model: str) -> None:
    """At any time: here before it has loaded its libraries."""
    setup = WorkerSetup(_config(odd_model), 0, Rendezvous(1), RingEnds.create(1), RingEnds.create(1), [])
    rings = [*setup.orders.descriptors, *setup.answers.descriptors]
    worker = subprocess.Popen(
        [sys.executable, "-m", "ascend_vllm.executor.worker_process"], stdin=subprocess.PIPE, cwd=ROOT, pass_fds=rings
    )
    payload = msgspec.msgpack.encode(setup)
    worker.communicate(len(payload).to_bytes(4) + payload, timeout=TIMEOUT_S)
    assert worker.returncode == 1
    setup.orders.close()
    setup.answers.close()


def test_an_idle_core_ends_with_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    death = os.eventfd(0)
    monkeypatch.setattr(MemoryExecutor, "death_descriptor", death)
    core, executor = make_core(num_blocks=16, max_num_seqs=2)
    codes = []
    with zmq.Context() as context:
        sockets = [context.socket(kind) for kind in (zmq.PUSH, zmq.PULL, zmq.PUSH, zmq.PULL)]
        for index, name in ((0, "in"), (3, "out")):
            sockets[index].bind(f"inproc://{name}")
        for index, name in ((1, "in"), (2, "out")):
            sockets[index].connect(f"inproc://{name}")
        thread = threading.Thread(target=lambda: codes.append(CoreLoop(core, sockets[1], sockets[2]).run()))
        thread.start()

        def gone() -> None:
            raise EngineDeadError("worker 1 was killed")

        monkeypatch.setattr(executor, "check_health", gone)
        os.eventfd_write(death, 1)
        thread.join(TIMEOUT_S)
        sockets[3].recv()
        message = msgspec.msgpack.decode(sockets[3].recv(), type=CoreOutbound)
        for socket in sockets:
            socket.close(linger=0)
    os.close(death)
    assert codes == [1]
    assert message == EngineFailed("EngineDeadError", "The engine core failed: EngineDeadError: worker 1 was killed")


# ---- records ----------------------------------------------------------------------------------------------


def test_steps_and_outputs_arrive_as_they_were() -> None:
    row = NewRow(3, "r", [5, 6], 2, 0, [1], SamplingParams(temperature=0.5, seed=3), 2**62, [2], bad_words=[[1, 2]])
    mask = np.arange(6, dtype=np.int32).reshape(2, 3)
    step = SchedulerOutput(7, [1], [row], [3], [2], [(4, [9])], constrained_slots=[3, 4], bitmask=mask)
    got = wire.decode(wire.encode(RecordKind.STEP, step))
    assert (got.new_rows, got.slots, got.new_blocks) == ([row], [3], [(4, [9])])
    assert got.bitmask is not None
    assert np.array_equal(got.bitmask, mask)
    assert got.bitmask.flags.writeable
    logprobs = StepLogprobs(*(np.ones((1, 2, 3), kind) for kind in (np.int32, np.float32)), np.ones((1, 2), np.int32))
    output = StepOutput(7, np.array([3], np.int32), np.array([[11, -1]]), logprobs)
    back = wire.decode(wire.encode(RecordKind.STEP_OUTPUT, output))
    assert back.sampled_token_ids.tolist() == [[11, -1]]
    assert back.logprobs is not None
    assert back.logprobs.logprobs.dtype == np.float32
    assert back.logprobs.token_ids.shape == (1, 2, 3)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("ConfigError", ConfigError),
        ("UnsupportedFlagError", ConfigError),
        ("ModelLoadError", ModelLoadError),
        ("RequestError", RequestError),
        ("MemoryError", MemoryError),
        ("UnicodeDecodeError", RuntimeError),
        ("SomebodysError", RuntimeError),
        ("SystemExit", RuntimeError),
    ],
)
def test_errors_keep_their_class_where_it_is_known(kind: str, expected: type[Exception]) -> None:
    error = wire.decode(wire.encode(RecordKind.FAILURE, Failure(None, kind, "no room", "the trace"))).error()
    assert type(error) is expected
    assert "no room" in str(error)
    assert error.__notes__ == ["the trace"]
