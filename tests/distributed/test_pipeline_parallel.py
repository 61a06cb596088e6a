"""Pipeline stages generate the same tokens as a single worker, through `LLM`."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import psutil
import pytest

from ascend_vllm import LLM, SamplingParams
from ascend_vllm.errors import EngineDeadError, RequestError
from ascend_vllm.sampling_params import BeamSearchParams
from ascend_vllm.structured_outputs import StructuredOutputsParams
from tests.distributed import worker_functions
from tests.distributed.conftest import (
    GREEDY,
    OPTIONS,
    PROMPTS,
    SYSTEM,
    assert_greedy_tokens_are_equal,
    generate,
    ids_of,
)
from tests.server import is_alive, wait_until
from tests.tiny_models import tiny_model

# a cache that eight of the prompts below outgrow together; stages make steps one at a time
STAGED = OPTIONS | {
    "num_gpu_blocks_override": 24,
    "swap_space": 0.01,
    "enable_sleep_mode": True,
    "num_scheduler_steps": 1,
}
WHOLE_PROMPTS = STAGED | {"enable_chunked_prefill": False, "max_num_batched_tokens": 256}


@pytest.fixture(scope="module")
def staged(odd_model: str) -> Iterator[LLM]:
    """Two stages of one layer each, with a tied table."""
    llm = LLM(odd_model, pipeline_parallel_size=2, **STAGED)
    processes = [psutil.Process(pid) for pid in llm.collective_rpc(worker_functions.process_id)]
    yield llm
    llm.shutdown()
    assert not any(map(is_alive, processes))


def test_greedy_tokens_are_those_of_one_worker(alone: LLM, staged: LLM) -> None:
    assert_greedy_tokens_are_equal(alone, staged)


PARAMS = {
    "sampled": SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=5, n=2, max_tokens=20),
    "penalised": SamplingParams(
        temperature=0.0, presence_penalty=1.0, frequency_penalty=0.7, repetition_penalty=1.3, max_tokens=30
    ),
    "constrained": SamplingParams(
        temperature=0.0, max_tokens=20, structured_outputs=StructuredOutputsParams(regex="(yes|no), [a-f]{3,9}!")
    ),
}


@pytest.mark.parametrize("name", PARAMS)
def test_parameters_do_the_same(name: str, alone: LLM, staged: LLM) -> None:
    assert ids_of(generate(staged, PARAMS[name])) == ids_of(generate(alone, PARAMS[name]))


def test_logprobs_are_the_same(alone: LLM, staged: LLM) -> None:
    """Bitwise, including those of prompts."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=4, prompt_logprobs=2)
    for got, expected in zip(generate(staged, params), generate(alone, params), strict=True):
        assert got.outputs[0].logprobs == expected.outputs[0].logprobs
        assert got.prompt_logprobs == expected.prompt_logprobs
        assert got.prompt_logprobs is not None
        assert len(got.prompt_logprobs) > 20


def test_a_beam_search_is_the_same(alone: LLM, staged: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=10)
    found = [
        [
            [(sequence.tokens, sequence.cum_logprob) for sequence in output.sequences]
            for output in llm.beam_search([{"prompt": prompt} for prompt in PROMPTS], params)
        ]
        for llm in (staged, alone)
    ]
    assert found[0] == found[1]


def test_preempted_rows_go_on(alone: LLM, staged: LLM) -> None:
    prompts = [f"{number} {SYSTEM}" for number in range(8)]
    params = SamplingParams(temperature=0.7, seed=11, max_tokens=60, ignore_eos=True)
    core = staged.llm_engine.core
    before = core.stats()["num_preemptions"]
    assert ids_of(generate(staged, params, prompts)) == ids_of(generate(alone, params, prompts))
    assert core.stats()["num_preemptions"] > before
    assert core.audit()["violations"] == []


def test_a_stage_holds_its_layers(staged: LLM) -> None:
    assert staged.collective_rpc(worker_functions.stage_facts) == [(1, 1, True, False), (1, 1, False, True)]
    assert staged.get_world_size() == 2


def test_both_stages_work_at_the_same_time(staged: LLM, tmp_path: pathlib.Path) -> None:
    """The last one delays each step until the first has begun the next, which must not need its outputs."""
    staged.collective_rpc(worker_functions.overlap_steps, args=(str(tmp_path), 8))
    outputs = generate(staged, GREEDY, PROMPTS[:2])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [24, 24]
    assert staged.collective_rpc(worker_functions.num_overlapped) == [0, 8]


def test_stages_sleep_and_wake_up(alone: LLM, staged: LLM) -> None:
    staged.sleep(level=2)
    staged.wake_up()
    assert ids_of(generate(staged)) == ids_of(generate(alone))


def test_functions_of_requests_are_refused(staged: LLM) -> None:
    with pytest.raises(RequestError, match="logits_processors"):
        generate(staged, SamplingParams(max_tokens=2, logits_processors=[lambda _ids, logits: logits]))


def test_a_stage_that_dies_in_a_step_is_noticed(staged: LLM) -> None:
    """The last test that uses these workers: the other stage waits for the dead one forever."""
    processes = [psutil.Process(pid) for pid in staged.collective_rpc(worker_functions.process_id)]
    staged.collective_rpc(worker_functions.die_in_a_step, args=(0,))
    with pytest.raises(EngineDeadError, match=rf"worker 0 \(process {processes[0].pid}\) was killed by signal 9"):
        generate(staged)
    assert wait_until(lambda: not any(map(is_alive, processes)), 20.0)


def test_stages_of_several_workers_each() -> None:
    """Four workers: stages of two layers and of one, two workers each, which share the experts of its layers."""
    model = tiny_model("qwen2-moe")
    options = WHOLE_PROMPTS | {"num_scheduler_steps": 3, "num_gpu_blocks_override": 64}
    llm = LLM(model, tensor_parallel_size=2, pipeline_parallel_size=2, enable_expert_parallel=True, **options)
    got = [ids_of(generate(llm, params)) for params in (GREEDY, PARAMS["sampled"])]
    facts = llm.collective_rpc(worker_functions.stage_facts)
    held = llm.collective_rpc(worker_functions.experts_held)
    llm.shutdown()
    # of 8; the first layer is dense
    assert held == [[4]] * 4
    assert facts == [(2, 2, True, False)] * 2 + [(1, 1, False, True)] * 2
    alone = LLM(model, **options)
    assert got == [ids_of(generate(alone, params)) for params in (GREEDY, PARAMS["sampled"])]
    alone.shutdown()


def test_the_last_stage_pools(odd_model: str) -> None:
    options = WHOLE_PROMPTS | {"runner": "pooling", "enable_sleep_mode": False}
    llm = LLM(odd_model, pipeline_parallel_size=2, **options)
    got = [output.outputs.embedding for output in llm.embed(PROMPTS, use_tqdm=False)]
    llm.shutdown()
    alone = LLM(odd_model, **options)
    assert got == [output.outputs.embedding for output in alone.embed(PROMPTS, use_tqdm=False)]
    alone.shutdown()
