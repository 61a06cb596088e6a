"""The in-process executor on a real worker, and the engine core it is built into."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.core.engine_core import build
from ascend_vllm.errors import ConfigError, EngineDeadError
from ascend_vllm.executor.base import create_executor
from ascend_vllm.executor.uniproc import UniProcExecutor
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.step import KVCacheSize, NewRow, SchedulerOutput, StepOutput
from ascend_vllm.worker import worker as worker_module
from ascend_vllm.worker.worker import Worker
from tests.core.memory_executor import make_request, run
from tests.server import ROOT
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import make_config

TIMEOUT_S = 60.0


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


def test_life_of_the_executor_with_a_thread_of_its_own() -> None:
    config = make_config(tiny_model("qwen2-tied"), num_gpu_blocks_override=32, async_scheduling=True)
    executor = create_executor(config)
    assert executor.initialize().num_blocks == 32
    executor.check_health()
    prompt = NewRow(3, "r", [5, 6, 7], 3, 0, [0], SamplingParams(temperature=0.0), seed=0, stop_token_ids=[])
    steps = [SchedulerOutput(0, [], [prompt], [3], [3], [])]
    steps += [SchedulerOutput(number, [], [], [3], [1], []) for number in range(1, 6)]
    # all are on their way before the first is looked at
    futures = [executor.execute_model(step) for step in steps]
    wrong = executor.execute_model(SchedulerOutput(6, [], [], [2], [1], []))
    outputs = [future.result(TIMEOUT_S) for future in futures]
    assert [output.step_id for output in outputs] == list(range(6))
    with pytest.raises(ValueError, match="the step does not fit its rows"):
        wrong.result(TIMEOUT_S)
    in_this_thread = create_executor(make_config(tiny_model("qwen2-tied"), num_gpu_blocks_override=32))
    in_this_thread.initialize()
    expected = [in_this_thread.execute_model(step).result() for step in steps]
    in_this_thread.shutdown()
    assert [o.sampled_token_ids.tolist() for o in outputs] == [o.sampled_token_ids.tolist() for o in expected]
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        executor.check_health()
    with pytest.raises(EngineDeadError, match="shut down"):
        executor.execute_model(steps[0]).result(TIMEOUT_S)
    assert not [thread for thread in threading.enumerate() if thread.name == "device"]


LEFT_IN_A_STEP = """
import sys

from ascend_vllm.executor.base import create_executor
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.step import NewRow, SchedulerOutput
from tests.worker.worker_driver import make_config

executor = create_executor(make_config(sys.argv[1], num_gpu_blocks_override=32, async_scheduling=True))
executor.initialize()
row = NewRow(3, "r", [5], 1, 0, list(range(20)), SamplingParams(temperature=0.0), seed=0, stop_token_ids=[])
executor.execute_model(SchedulerOutput(0, [], [row], [3], [1], [])).result()
for number in range(1, 300):
    executor.execute_model(SchedulerOutput(number, [], [], [3], [1], []))
raise ValueError("an error of the caller")
"""


def test_an_error_of_the_caller_during_a_step_does_not_crash_the_process() -> None:
    command = [sys.executable, "-c", LEFT_IN_A_STEP, tiny_model("qwen2-tied")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3 * TIMEOUT_S, check=False)
    assert ended.stderr.endswith("ValueError: an error of the caller\n")
    assert ended.returncode == 1


def test_everything_a_worker_does_happens_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP keeps threads for every thread that computes: two of them would fight for the cores."""
    idents: dict[str, int] = {}

    class Recording(Worker):
        """A worker that notes in which thread it is asked to do what."""

        def __init__(self, config: EngineConfig, **options: Any) -> None:
            idents["made"] = threading.get_ident()
            super().__init__(config, **options)

        def load_model(self) -> None:
            idents["loaded"] = threading.get_ident()
            super().load_model()

        def initialize_cache(self, num_blocks: int, num_cpu_blocks: int = 0) -> None:
            idents["initialised"] = threading.get_ident()
            super().initialize_cache(num_blocks, num_cpu_blocks)

        def execute_model(self, step: SchedulerOutput) -> StepOutput:
            idents["executed"] = threading.get_ident()
            return super().execute_model(step)

        def shutdown(self) -> None:
            idents["shut down"] = threading.get_ident()
            super().shutdown()

    monkeypatch.setattr(worker_module, "Worker", Recording)
    executor = create_executor(make_config(tiny_model("qwen2-tied"), async_scheduling=True))
    executor.initialize()
    executor.execute_model(SchedulerOutput(0, [], [], [], [], [])).result(TIMEOUT_S)
    executor.shutdown()
    assert set(idents) == {"made", "loaded", "initialised", "executed", "shut down"}
    assert len(set(idents.values())) == 1
    assert threading.get_ident() not in idents.values()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_what_is_wrong_at_start_up_is_raised_to_the_caller(async_scheduling: bool) -> None:
    options = {"async_scheduling": async_scheduling}
    with pytest.raises(ConfigError, match="--dtype float64"):
        create_executor(make_config(tiny_model("qwen2-tied"), dtype="float64", **options))
    executor = create_executor(make_config(tiny_model("qwen2-tied"), num_gpu_blocks_override=2, **options))
    with pytest.raises(ConfigError, match="larger than the maximum number of tokens"):
        executor.initialize()
    executor.shutdown()
    assert not [thread for thread in threading.enumerate() if thread.name == "device"]


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
        preemptions = core.stats()["num_preemptions"]
        core.shutdown()
        return {name: result.token_ids for name, result in results.items()}, preemptions

    alone, none = outputs(num_blocks=64, max_num_seqs=1)
    crowded, some = outputs(num_blocks=9, max_num_seqs=8)
    assert none == 0 < some
    assert crowded == alone
