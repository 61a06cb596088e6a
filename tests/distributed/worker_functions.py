"""Functions that tests call in workers, which import this module by its name."""

from __future__ import annotations

import itertools
import os
import pathlib
import re
import signal
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from ascend_vllm.layers.experts import Experts
from ascend_vllm.ops.gemm import PackedLinear
from ascend_vllm.types.step import SchedulerOutput, StepOutput
from ascend_vllm.worker.worker import Worker


def tokens_of_slots(worker: Worker) -> npt.NDArray[np.int32]:
    """[M, L+1]: the contents of the worker's batch slots."""
    tokens: npt.NDArray[np.int32] = worker._runner._batch.token_ids  # type: ignore[union-attr]
    return tokens


def table_size(worker: Worker) -> int:
    """Number of elements of this rank's embedding table."""
    table: PackedLinear = worker.get_model().embed_tokens._method._packed  # type: ignore[attr-defined]
    return table.out_features * table.in_features


def experts_held(worker: Worker) -> list[int]:
    """Number of whole or split experts that each mixture has on this rank."""
    return [layer._own.size for layer in worker.get_model().layers() if isinstance(layer, Experts)]


def process_id(_worker: Worker) -> int:
    """Of the worker's process."""
    return os.getpid()


def peak_memory(_worker: Worker) -> int:
    """Peak memory of the worker's process in bytes, including mapped files."""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", pathlib.Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def wait_for_file(_worker: Worker, path: str) -> None:
    """Returns when the file exists."""
    deadline = time.monotonic() + 60
    while not pathlib.Path(path).exists() and time.monotonic() < deadline:
        time.sleep(0.001)


def fail(worker: Worker) -> None:
    """Fails on the second rank only."""
    if worker._parallel.tp_rank == 1:
        raise ValueError("the second one does not")


def stage_facts(worker: Worker) -> tuple[int, int, bool, bool]:
    """Layers that the worker holds, their KV caches, and whether it has the embedding and the last norm."""
    model, runner = worker.get_model(), worker._runner
    forward = runner.forward  # type: ignore[union-attr]
    layers, table, norm = (getattr(model, name) for name in ("decoder_layers", "embed_tokens", "norm"))
    return len(layers), len(forward._kv_caches), table is not None, norm is not None


def overlap_steps(worker: Worker, directory: str, count: int) -> None:
    """Makes the last stage begin its next `count` decoding steps only when the first has begun the following one."""
    runner: Any = worker._runner
    execute = runner.execute
    worker.num_overlapped = 0  # type: ignore[attr-defined]

    def overlapping(step: SchedulerOutput) -> StepOutput:
        if worker._parallel.is_first_stage:
            pathlib.Path(directory, str(step.step_id)).touch()
        elif worker.num_overlapped < count and step.slots and max(step.num_scheduled_tokens) == 1:  # type: ignore[attr-defined]
            wait_for_file(worker, f"{directory}/{step.step_id + 1}")
            if not pathlib.Path(directory, str(step.step_id + 1)).exists():
                raise RuntimeError("the first stage does not work while the last one does")
            worker.num_overlapped += 1  # type: ignore[attr-defined]
        output: StepOutput = execute(step)
        return output

    runner.execute = overlapping


def num_overlapped(worker: Worker) -> int:
    """How often the worker has begun a step while the first stage was at the next one."""
    return int(worker.num_overlapped)  # type: ignore[attr-defined]


def die_in_a_step(worker: Worker, pp_rank: int) -> None:
    """A stage's workers kill themselves at the second step from now."""
    if worker._parallel.pp_rank != pp_rank:
        return
    runner: Any = worker._runner
    execute = runner.execute
    steps = itertools.count()

    def deadly(step: SchedulerOutput) -> StepOutput:
        if next(steps) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        output: StepOutput = execute(step)
        return output

    runner.execute = deadly


def device(worker: Worker) -> str:
    """Torch's name of the worker's device."""
    return str(worker._device)


def visible_devices(_worker: Worker) -> str | None:
    """The NPUs that the worker's process may use."""
    return os.environ.get("ASCEND_RT_VISIBLE_DEVICES")


def echo(_worker: Worker, value: Any) -> Any:
    """Returns its argument."""
    return value


def unsendable(_worker: Worker) -> object:
    """Returns a value of a type that is not supported between machines."""
    return object()
