"""Traces of a worker's steps, for chrome://tracing, Perfetto or TensorBoard."""

from __future__ import annotations

import os
import pathlib

import torch

from ascend_vllm.logger import init_logger

logger = init_logger(__name__)


class WorkerProfiler:
    """PyTorch's profiler around the steps of one worker.

    It traces the thread that calls `start`, which must be the one that computes.

    Args:
        directory: of the traces, one file for each pair of start and stop.
        rank: of the worker, for the file names.
    """

    def __init__(self, directory: str, rank: int) -> None:
        self._directory = directory
        self._rank = rank
        self._profile: torch.profiler.profile | None = None
        self._num_traces = 0

    def start(self) -> None:
        """Starts a trace; does nothing if one is running."""
        if self._profile is None:
            self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self._profile.start()

    def stop(self) -> None:
        """Ends the trace and writes its file; does nothing if none is running.

        Raises:
            OSError: the file cannot be written.
        """
        if self._profile is None:
            return
        profile, self._profile = self._profile, None
        profile.stop()
        directory = pathlib.Path(self._directory)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"rank{self._rank}.{os.getpid()}.{self._num_traces}.pt.trace.json.gz"
        self._num_traces += 1
        profile.export_chrome_trace(str(path))
        logger.info("Trace written to %s", path)
