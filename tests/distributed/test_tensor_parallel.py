"""Workers in processes of their own generate what one worker generates, through `LLM`."""

from __future__ import annotations

import json
import os
import pathlib
import select
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from ascend_vllm import LLM, SamplingParams
from ascend_vllm.errors import EngineDeadError, RequestError
from ascend_vllm.sampling_params import BeamSearchParams
from ascend_vllm.structured_outputs import StructuredOutputsParams
from ascend_vllm.types.step import SchedulerOutput
from tests.distributed import worker_functions
from tests.distributed.conftest import (
    GREEDY,
    OPTIONS,
    PROMPTS,
    assert_greedy_tokens_are_equal,
    generate,
    ids_of,
)
from tests.server import ROOT, is_alive, wait_until
from tests.tiny_models import tiny_model

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def shared(odd_model: str) -> Iterator[LLM]:
    """Two ranks with a KV head each, a vocabulary that they do not divide, and every way of making steps."""
    llm = LLM(odd_model, tensor_parallel_size=2, **OPTIONS)
    processes = [psutil.Process(pid) for pid in llm.collective_rpc(worker_functions.process_id)]
    yield llm
    llm.shutdown()
    assert not any(map(is_alive, processes))
    with pytest.raises(RuntimeError):
        llm.collective_rpc(worker_functions.process_id)


def test_greedy_tokens_are_those_of_one_worker(alone: LLM, shared: LLM) -> None:
    assert_greedy_tokens_are_equal(alone, shared)


PARAMS = {
    "sampled": SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=5, n=2, max_tokens=20),
    "penalised": SamplingParams(
        temperature=0.0, presence_penalty=1.0, frequency_penalty=0.7, repetition_penalty=1.3, max_tokens=30
    ),
    "biased": SamplingParams(temperature=0.0, logit_bias={390: 3.0, 7: -5.0}, min_tokens=5, max_tokens=20),
    "constrained": SamplingParams(
        temperature=0.0, max_tokens=20, structured_outputs=StructuredOutputsParams(regex="(yes|no), [a-f]{3,9}!")
    ),
}


@pytest.mark.parametrize("name", PARAMS)
def test_parameters_do_the_same(name: str, alone: LLM, shared: LLM) -> None:
    params = PARAMS[name]
    assert ids_of(generate(shared, params)) == ids_of(generate(alone, params))


def test_logprobs_are_the_same(alone: LLM, shared: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=4, prompt_logprobs=2)
    for got, expected in zip(generate(shared, params), generate(alone, params), strict=True):
        for ours, theirs in (
            (got.outputs[0].logprobs, expected.outputs[0].logprobs),
            (got.prompt_logprobs, expected.prompt_logprobs),
        ):
            assert ours is not None
            assert theirs is not None
            for one, other in zip(ours, theirs, strict=True):
                values = {token: entry.logprob for token, entry in (one or {}).items()}
                assert values == pytest.approx(
                    {token: entry.logprob for token, entry in (other or {}).items()}, abs=1e-3
                )


def test_a_beam_search_is_the_same(alone: LLM, shared: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=10)
    prompts = [{"prompt": prompt} for prompt in PROMPTS]
    for got, expected in zip(shared.beam_search(prompts, params), alone.beam_search(prompts, params), strict=True):
        assert [sequence.tokens for sequence in got.sequences] == [sequence.tokens for sequence in expected.sequences]
        for ours, theirs in zip(got.sequences, expected.sequences, strict=True):
            assert ours.cum_logprob == pytest.approx(theirs.cum_logprob, abs=1e-3)


def test_no_rank_ever_has_another_token(shared: LLM) -> None:
    hot = SamplingParams(temperature=1.5, max_tokens=40, ignore_eos=True)
    generate(shared, hot, PROMPTS * 2)
    first, second = shared.collective_rpc(worker_functions.tokens_of_slots)
    assert np.count_nonzero(first) > 6 * 40
    assert np.array_equal(first, second)


def test_each_rank_holds_a_part(alone: LLM, shared: LLM) -> None:
    parts = shared.collective_rpc(worker_functions.table_size)
    assert sum(parts) == alone.collective_rpc(worker_functions.table_size)[0]
    assert max(parts) < 0.55 * sum(parts)


def test_calls_answer_for_every_rank(shared: LLM, tmp_path: pathlib.Path) -> None:
    assert len(set(shared.collective_rpc(worker_functions.process_id))) == 2
    with pytest.raises(ValueError, match="the second one does not"):
        shared.collective_rpc(worker_functions.fail)
    with pytest.raises(RequestError, match="no method 'nothing'"):
        shared.collective_rpc("nothing")
    with pytest.raises(RequestError, match="cannot be sent to workers"):
        shared.collective_rpc(lambda _: 1)
    with pytest.raises(TimeoutError):
        shared.collective_rpc(worker_functions.wait_for_file, timeout=0.01, args=(str(tmp_path / "go"),))
    (tmp_path / "go").touch()
    # the next call works
    assert len(shared.collective_rpc(worker_functions.process_id)) == 2


def test_functions_of_requests_are_refused(shared: LLM) -> None:
    params = SamplingParams(max_tokens=2, logits_processors=[lambda _ids, logits: logits])
    with pytest.raises(RequestError, match="logits_processors"):
        generate(shared, params, ["Hello"])
    assert generate(shared, GREEDY, ["Hello"])[0].outputs[0].token_ids


def test_a_worker_that_dies_while_nothing_happens_is_noticed(shared: LLM) -> None:
    """The last of the tests that share these workers."""
    executor = shared.llm_engine.core._executor
    processes = [psutil.Process(pid) for pid in executor.collective_rpc(worker_functions.process_id)]
    executor.check_health()
    processes[0].kill()
    assert wait_until(lambda: not any(map(is_alive, processes)))
    # told by the thread that ended the others
    assert select.select([executor.death_descriptor], [], [], TIMEOUT_S)[0]
    text = rf"worker 0 \(process {processes[0].pid}\) was killed by signal 9"
    for use in (
        executor.check_health,
        lambda: executor.execute_model(SchedulerOutput(0, [], [], [], [], [])).result(TIMEOUT_S),
        lambda: shared.collective_rpc(worker_functions.process_id),
        lambda: generate(shared, GREEDY, ["Hello"]),
    ):
        with pytest.raises(EngineDeadError, match=text):
            use()


# ---- a program ---------------------------------------------------------------------------------------------

PROGRAM = """
import json, sys
from ascend_vllm import LLM, SamplingParams

options, prompts = json.loads(sys.argv[1])
llm = LLM(**options)
outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True), use_tqdm=False)
print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""

# the engine is in a process of the program's own, which imports the program again, and is daemonic
SPAWNING_PROGRAM = """
import json, multiprocessing, sys
from ascend_vllm import LLM, SamplingParams
from tests.distributed import worker_functions

def generate(options, prompts):
    llm = LLM(**options)
    print(json.dumps(llm.collective_rpc(worker_functions.process_id)), flush=True)
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    with multiprocessing.Pool(1) as pool:
        tokens = pool.apply(generate, json.loads(sys.argv[1]))
    print(json.dumps(tokens))
"""


def run_program(source: str, directory: pathlib.Path, model: str, **options: object) -> list[Any]:
    """The JSON lines that a program prints.

    Args:
        source: of the program.
        directory: for its file.
        model: directory of the model.
        options: of its engine, beside `OPTIONS`.
    """
    script = directory / "program.py"
    script.write_text(source)
    arguments = json.dumps([{"model": model, **OPTIONS, **options}, PROMPTS])
    done = subprocess.run(
        [sys.executable, str(script), arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def test_a_program_needs_no_guard_and_leaves_nothing(tmp_path: pathlib.Path) -> None:
    """Two ranks share one KV head, untied; the program ends without closing the engine."""
    model = tiny_model("llama-biases")
    *_, tokens = run_program(PROGRAM, tmp_path, model, tensor_parallel_size=2)
    llm = LLM(model, **OPTIONS)
    assert [[choice] for choice in tokens] == ids_of(generate(llm))
    llm.shutdown()


def test_a_program_may_spawn_processes_of_its_own(tmp_path: pathlib.Path, odd_model: str, alone: LLM) -> None:
    *_, workers, tokens = run_program(SPAWNING_PROGRAM, tmp_path, odd_model, tensor_parallel_size=2)
    assert [[choice] for choice in tokens] == ids_of(generate(alone))
    assert len(workers) == 2
    # the pool ends its process by a signal
    assert wait_until(lambda: not any(map(psutil.pid_exists, workers)), TIMEOUT_S)
