"""Functions that tests have called in workers; these import the module by its name."""

from __future__ import annotations

import os
import pathlib
import time

import numpy as np
import numpy.typing as npt

from ascend_vllm.worker.worker import Worker


def tokens_of_slots(worker: Worker) -> npt.NDArray[np.int32]:
    """[M, L+1]: what the worker remembers of the rows that were in its slots."""
    tokens: npt.NDArray[np.int32] = worker._runner._batch.token_ids  # type: ignore[union-attr]
    return tokens


def weight_bytes(worker: Worker) -> int:
    """Bytes of the vocabulary's table that this rank holds."""
    return int(worker.get_model().embed_tokens.weight.nbytes)  # type: ignore[attr-defined]


def process_id(_worker: Worker) -> int:
    """Of the worker's process."""
    return os.getpid()


def wait_for_file(_worker: Worker, path: str) -> None:
    """Answers once the file exists."""
    deadline = time.monotonic() + 60
    while not pathlib.Path(path).exists() and time.monotonic() < deadline:
        time.sleep(0.001)


def fail(worker: Worker) -> None:
    """Fails on the second rank alone."""
    if worker._parallel.tp_rank == 1:
        raise ValueError("the second one does not")
