"""The in-process executor on a real worker, and the engine core it is built into."""

from __future__ import annotations

import pytest

from ascend_vllm.core.engine_core import build
from ascend_vllm.errors import EngineDeadError
from ascend_vllm.executor.base import UniProcExecutor, create_executor
from ascend_vllm.types.step import KVCacheSize, SchedulerOutput
from tests.core.memory_executor import assert_all_free, make_request, run
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import make_config


def test_life_of_the_in_process_executor() -> None:
    # 12 KiB a block
    config = make_config(tiny_model("qwen2-tied"), num_gpu_blocks_override=32, swap_space_gib=12 * 50 / 2**20)
    executor = create_executor(config)
    assert isinstance(executor, UniProcExecutor)
    assert executor.initialize() == KVCacheSize(32, 50)
    executor.check_health()
    future = executor.execute_model(SchedulerOutput(0, [], [], [3], [1], []))
    assert future.done()
    with pytest.raises(ValueError, match="the step does not fit its rows"):
        future.result()
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        executor.check_health()
    with pytest.raises(EngineDeadError, match="shut down"):
        executor.execute_model(SchedulerOutput(1, [], [], [3], [1], [])).result()


@pytest.mark.parametrize("chunked", [False, True])
def test_preemption_changes_no_token_of_a_real_model(chunked: bool) -> None:
    def outputs(num_blocks: int, max_num_seqs: int) -> tuple[dict[str, list[int]], int]:
        core = build(
            make_config(
                tiny_model("qwen2-tied"),
                num_gpu_blocks_override=num_blocks,
                max_num_seqs=max_num_seqs,
                max_model_len=96,
                max_num_batched_tokens=96,
                enable_chunked_prefill=chunked,
            )
        )
        for index in range(8):
            sampling = {"temperature": 0.0} if index % 2 else {"temperature": 1.0, "seed": index}
            core.add_request(make_request(f"r{index}", 10 + 3 * index, max_tokens=40, **sampling))
        results = run(core)
        assert_all_free(core)
        preemptions = core.stats()["num_preemptions"]
        core.shutdown()
        return {name: result.token_ids for name, result in results.items()}, preemptions

    alone, none = outputs(num_blocks=64, max_num_seqs=1)
    crowded, some = outputs(num_blocks=9, max_num_seqs=8)
    assert none == 0 < some
    assert crowded == alone
