"""An executor without workers: every step is done at once, so that only the engine and the front end take time.

A server whose PYTHONPATH has this directory runs on it with `--distributed-executor-backend null`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.executor.base import Executor
from ascend_vllm.types.step import KVCacheSize, SchedulerOutput, StepOutput

# what every row samples
TOKEN = 7


class NullExecutor(Executor):
    """Returns `TOKEN` for every row that samples. There are no log-probabilities, drafts, forks or pooled results.

    Args:
        config: of the engine; the model is not read.
        num_blocks: of the KV cache; None: as many as all sequences of full length take.
    """

    def __init__(self, config: EngineConfig, num_blocks: int | None = None) -> None:
        super().__init__(config)
        scheduler, block_size = config.scheduler, config.cache.block_size
        per_sequence = -(-scheduler.max_model_len // block_size)
        self._num_blocks = num_blocks or scheduler.max_num_seqs * per_sequence
        # slot → tokens that the row lacks before it samples
        self._missing: dict[int, int] = {}

    def initialize(self) -> KVCacheSize:
        return KVCacheSize(self._num_blocks)

    def execute_model(self, step: SchedulerOutput) -> Future[StepOutput]:
        missing = self._missing
        for row in step.new_rows:
            missing[row.slot] = len(row.token_ids) - row.num_computed_tokens
        sampling = []
        for slot, count in zip(step.slots, step.num_scheduled_tokens, strict=True):
            missing[slot] -= count
            if missing[slot] <= 0:
                # the token that it samples now
                missing[slot] = 1
                sampling.append(slot)
        future: Future[StepOutput] = Future()
        tokens = np.full((len(sampling), step.num_steps), TOKEN, np.int64)
        future.set_result(StepOutput(step.step_id, np.array(sampling, np.int32), tokens))
        return future

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """There are no workers."""
        del method, args, kwargs, timeout
        return []

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        pass
