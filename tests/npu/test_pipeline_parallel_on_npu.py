"""Two stages on two devices: hidden states are sent from one to the other by HCCL."""

from __future__ import annotations

import dataclasses

import pytest

from ascend_vllm import LLM, SamplingParams
from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.errors import ConfigError
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import GREEDY, generate, make_prompt, started_worker

LENGTH = 12


def test_two_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sequence gets what one worker makes of it alone; the size of the cache is measured by both together."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model, prompts = tiny_model("qwen2-tied"), [make_prompt(40, seed=1), make_prompt(9, seed=2)]
    llm = LLM(
        model,
        pipeline_parallel_size=2,
        device="npu",
        dtype="float16",
        swap_space=0,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        gpu_memory_utilization=0.5,
    )
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    llm.shutdown()
    worker = started_worker(model, device="npu", dtype="float16", block_size=128, num_gpu_blocks_override=64)
    expected = [generate(worker, prompt, GREEDY, LENGTH) for prompt in prompts]
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """More stages than the simulator's two devices have room for, and graphs."""
    args = EngineArgs(model=tiny_model("qwen2"), device="npu", dtype="float16", pipeline_parallel_size=2)
    assert args.create_engine_config().parallel.stage_layers == (2, 1)
    with pytest.raises(
        ConfigError,
        match=r"--pipeline-parallel-size 2 with --tensor-parallel-size 2: 4 NPUs are needed and .* 2\. Lower it",
    ):
        dataclasses.replace(args, tensor_parallel_size=2).create_engine_config()
    monkeypatch.setenv("INFER_MODE", "PTA")
    with pytest.raises(ConfigError, match="INFER_MODE=PTA with --pipeline-parallel-size 2"):
        args.create_engine_config()
