"""LLMEngine, stepped by hand, with a real tiny model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client import generate_latest

from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.engine.llm_engine import LLMEngine
from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.errors import RequestError
from ascend_vllm.outputs import RequestOutput
from ascend_vllm.sampling_params import RequestOutputKind, SamplingParams
from tests.tiny_models import tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    args = EngineArgs(model=tiny_model("llama"), dtype="float32", max_model_len=128, num_gpu_blocks_override=32)
    engine = LLMEngine.from_engine_args(args)
    yield engine
    engine.shutdown()


@pytest.fixture(autouse=True)
def nothing_is_left(engine: LLMEngine) -> Iterator[None]:
    yield
    assert not engine.has_unfinished_requests()
    assert engine.get_num_unfinished_requests() == 0
    assert engine.call_utility("audit")["num_free_blocks"] == 32


def run(engine: LLMEngine) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def test_outputs_are_cumulative_by_default(engine: LLMEngine) -> None:
    engine.add_request("a", "Hello", GREEDY)
    outputs = run(engine)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3, 4, 5, 6]
    assert [output.finished for output in outputs] == [False] * 5 + [True]
    metrics = outputs[-1].metrics
    assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time <= metrics.finished_time


def test_requests_join_while_others_run(engine: LLMEngine) -> None:
    engine.add_request("alone", "Hello", GREEDY)
    expected = run(engine)[-1].outputs[0].token_ids
    engine.add_request("first", "The quick brown fox", GREEDY.clone(max_tokens=20))
    engine.step()
    engine.add_request("second", "Hello", GREEDY)
    finals = {output.request_id: output for output in run(engine) if output.finished}
    assert finals["second"].outputs[0].token_ids == expected
    assert len(finals["first"].outputs[0].token_ids) == 20


def test_a_sequence_of_several_gives_one_output_a_step(engine: LLMEngine) -> None:
    params = SamplingParams(n=3, temperature=1.0, max_tokens=4, ignore_eos=True, seed=1)
    engine.add_request("n", "Hello", params)
    while engine.has_unfinished_requests():
        (output,) = engine.step()
        assert len(output.outputs) == 3
    assert [part.finish_reason for part in output.outputs] == ["length"] * 3
    assert [len(part.token_ids) for part in output.outputs] == [4] * 3


def test_the_best_of_several(engine: LLMEngine) -> None:
    params = SamplingParams(n=4, temperature=1.0, max_tokens=5, ignore_eos=True, seed=3, logprobs=0)
    engine.add_request("all", "Hello", params)
    everything = run(engine)[-1].outputs
    engine.add_request("best", "Hello", params.clone(n=2, best_of=4, logprobs=None))
    outputs = run(engine)
    assert all(len(output.outputs) == 2 for output in outputs)
    found = [(part.index, part.token_ids, part.cumulative_logprob, part.logprobs) for part in outputs[-1].outputs]
    best = sorted(everything, key=lambda part: -part.cumulative_logprob)[:2]
    assert found == [
        (rank, part.token_ids, pytest.approx(part.cumulative_logprob), None) for rank, part in enumerate(best)
    ]


def test_beams_are_told_after_every_step(engine: LLMEngine) -> None:
    params = SamplingParams(use_beam_search=True, n=2, best_of=3, temperature=0.0, max_tokens=6, ignore_eos=True)
    engine.add_request("stream", "Hello", params)
    outputs = run(engine)
    assert [[len(part.token_ids) for part in output.outputs] for output in outputs] == [
        [length] * 2 for length in range(1, 7)
    ]
    engine.add_request("final", "Hello", params.clone(output_kind=RequestOutputKind.FINAL_ONLY))
    (final,) = run(engine)
    assert final.outputs == outputs[-1].outputs
    first, second = final.outputs
    assert (first.index, second.index) == (0, 1)
    assert first.cumulative_logprob > second.cumulative_logprob
    assert engine.tokenizer.hf.decode(first.token_ids, skip_special_tokens=True) == first.text
    engine.add_request("aborted", "Hello", params)
    engine.step()
    engine.abort_request("aborted")


def test_one_beam_is_greedy(engine: LLMEngine) -> None:
    engine.add_request("greedy", "Hello", GREEDY)
    expected = run(engine)[-1].outputs[0]
    beam = SamplingParams(use_beam_search=True, early_stopping=None, temperature=0.0, max_tokens=6, ignore_eos=True)
    engine.add_request("beam", "Hello", beam)
    found = run(engine)[-1].outputs[0]
    assert (found.token_ids, found.text) == (expected.token_ids, expected.text)


def test_stop_strings_free_the_sequence(engine: LLMEngine) -> None:
    engine.add_request("whole", "Hello", GREEDY.clone(max_tokens=40))
    text = run(engine)[-1].outputs[0].text
    stop = text[8:10]
    engine.add_request(
        "stopped", "Hello", SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, stop=stop)
    )
    last = run(engine)[-1].outputs[0]
    assert (last.text, last.finish_reason, last.stop_reason) == (text[: text.index(stop)], "stop", stop)


def test_aborted_requests_give_no_output(engine: LLMEngine) -> None:
    for request_id in ("x", "y", "z"):
        engine.add_request(request_id, "Hello", GREEDY)
    engine.step()
    engine.abort_request("x")
    engine.abort_request(["y", "unknown"])
    assert engine.get_num_unfinished_requests() == 1
    assert {output.request_id for output in run(engine)} == {"z"}


def test_ids_and_tokenizer_are_guarded_while_requests_run(engine: LLMEngine) -> None:
    engine.add_request("a", "Hello", GREEDY)
    with pytest.raises(RequestError, match=r"Request a already exists\."):
        engine.add_request("a", "Hello", GREEDY)
    with pytest.raises(RuntimeError, match="cannot be replaced while requests run"):
        engine.set_tokenizer(Tokenizer.from_directory(tiny_model("llama")))
    run(engine)


def test_the_end_of_sequence(engine: LLMEngine) -> None:
    bias = {engine.tokenizer.eos_token_id: 100.0}
    params = SamplingParams(temperature=0.0, max_tokens=9, logit_bias=bias, output_kind=RequestOutputKind.DELTA)
    engine.add_request("eos", "Hello", params)
    (output,) = run(engine)
    completion = output.outputs[0]
    assert (completion.text, completion.token_ids) == ("", [engine.tokenizer.eos_token_id])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    engine.add_request("min", "Hello", params.clone(min_tokens=4, output_kind=RequestOutputKind.FINAL_ONLY))
    (output,) = run(engine)
    assert len(output.outputs[0].token_ids) == 5


@pytest.mark.parametrize(("each", "sizes"), [(True, [1] * 10), (False, [1, 4, 4, 1])])
def test_several_steps_at_once(engine: LLMEngine, each: bool, sizes: list[int]) -> None:
    engine.add_request("single", "Hello", GREEDY.clone(max_tokens=10))
    expected = run(engine)[-1].outputs[0]
    args = EngineArgs(
        model=tiny_model("llama"),
        dtype="float32",
        max_model_len=128,
        num_gpu_blocks_override=32,
        num_scheduler_steps=4,
        multi_step_stream_outputs=each,
    )
    several = LLMEngine.from_engine_args(args)
    try:
        params = GREEDY.clone(max_tokens=10, output_kind=RequestOutputKind.DELTA)
        several.add_request("several", "Hello", params)
        pieces = [output.outputs[0] for output in run(several)]
    finally:
        several.shutdown()
    assert [len(piece.token_ids) for piece in pieces] == sizes
    assert [id_ for piece in pieces for id_ in piece.token_ids] == expected.token_ids
    assert "".join(piece.text for piece in pieces) == expected.text


def test_metrics_count(engine: LLMEngine) -> None:
    assert b'vllm:request_success_total{engine="0",finished_reason="length"' in generate_latest(
        engine.metrics.registry
    )
