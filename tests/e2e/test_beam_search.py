"""Beam search by `LLM` has the results of transformers; tests/entrypoints/test_beam_search_http.py asks servers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ascend_vllm import LLM, BeamSearchParams, SamplingParams
from ascend_vllm.errors import RequestError
from ascend_vllm.outputs import CompletionOutput
from tests.beam_search_reference import (
    Problem,
    Sequences,
    found,
    model_logprobs,
    reference_mode,
    reference_model,
    run,
    transformers_search,
)
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.slow

MODEL = "qwen2-tied"
MAX_MODEL_LEN = 256
# of several lengths; two share a prefix of more than a block
PROMPTS = [
    [17, 5, 44, 8],
    [200, 100, 50],
    [7],
    [30 + i % 200 for i in range(40)],
    [30 + i % 200 for i in range(37)] + [9, 9],
    [260, 3, 260, 3, 260],
]
OTHERS = [[99, 98], [i % 300 + 3 for i in range(70)], [5] * 20]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models are slower on several threads, and far slower on a busy machine."""
    num_threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(num_threads)


def expected(name: str, prompt: list[int], problem: Problem) -> Sequences:
    """Result of a search with transformers' log-probabilities; of its own search if nothing ends early."""
    whole = dataclasses.replace(problem, num_prompt_tokens=len(prompt), max_model_len=MAX_MODEL_LEN)
    if not problem.end_ids and problem.width > 1:
        return transformers_search(name, prompt, whole)
    return found(run(whole, functools.partial(model_logprobs, name, tuple(prompt))))


@functools.cache
def greedy(name: str, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    output: list[int] = []
    for _ in range(max_tokens):
        output.append(int(model_logprobs(name, prompt, tuple(output)).argmax()))
    return output


def endless(width: int, num_returned: int, max_tokens: int) -> Problem:
    return Problem(width, num_returned, max_tokens=max_tokens, end_ids=frozenset(), eos_id=None)


def assert_found(outputs: list[CompletionOutput], sequences: Sequences) -> None:
    assert [tuple(output.token_ids) for output in outputs] == [tokens for tokens, _ in sequences]
    logprobs = [logprob for _, logprob in sequences]
    assert [output.cumulative_logprob for output in outputs] == pytest.approx(logprobs, abs=1e-3)
    assert [output.index for output in outputs] == list(range(len(outputs)))


def make_llm(name: str = MODEL, **options: Any) -> LLM:
    defaults = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "num_gpu_blocks_override": 256, "block_size": 16}
    return LLM(tiny_model(name), **(defaults | options))


def assert_idle(llm: LLM, num_blocks: int) -> None:
    audit = llm.llm_engine.call_utility("audit")
    assert audit["violations"] == []
    assert audit["num_free_blocks"] == num_blocks


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = make_llm()
    yield llm
    assert_idle(llm, 256)
    llm.shutdown()


# ---- offline -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 6])
def test_offline_beam_search(llm: LLM, width: int) -> None:
    outputs = llm.beam_search(PROMPTS, BeamSearchParams(width, 10, ignore_eos=True))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        sequences = expected(MODEL, prompt, endless(width, width, 10))
        assert [tuple(one.tokens) for one in output.sequences] == [(*prompt, *tokens) for tokens, _ in sequences]
        logprobs = [one.cum_logprob for one in output.sequences]
        assert logprobs == pytest.approx([logprob for _, logprob in sequences], abs=1e-3)
        assert {one.finish_reason for one in output.sequences} == {"length"}


@pytest.mark.parametrize("name", ["llama", "opt", "qwen3", "mistral", "deepseek-v2-lite"])
def test_every_family(name: str) -> None:
    """Mistral's window is 40: blocks leave it in some beams while others still use them."""
    llm = make_llm(name)
    prompts = [PROMPTS[0], [i % 300 + 3 for i in range(36)]]
    for prompt, output in zip(prompts, llm.beam_search(prompts, BeamSearchParams(3, 20, True)), strict=True):
        sequences = expected(name, prompt, endless(3, 3, 20))
        assert [tuple(one.tokens[len(prompt) :]) for one in output.sequences] == [tokens for tokens, _ in sequences]
    assert_idle(llm, 256)
    llm.shutdown()


@pytest.mark.parametrize("rule", [True, False, "never", None])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -1.0, 2.0])
def test_ends_penalties_and_rules(llm: LLM, rule: bool | str | None, length_penalty: float) -> None:
    """Stop tokens are taken from the likeliest sequences, so that searches end at several lengths."""
    stop_ids = [expected(MODEL, prompt, endless(4, 1, 12))[0][0][index] for index, prompt in enumerate(PROMPTS)]
    common: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "min_tokens": 2, "ignore_eos": True}
    beams = common | {"use_beam_search": True, "best_of": 4, "n": 3, "length_penalty": length_penalty}
    params = [SamplingParams(**beams, early_stopping=rule, stop_token_ids=[stop_id, 11]) for stop_id in stop_ids]
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    reasons = set()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, stop_id, output in zip(PROMPTS, stop_ids, outputs, strict=True):
        problem = Problem(4, 3, length_penalty, rule, 0, 12, frozenset({stop_id, 11}), None, min_tokens=2)
        assert_found(output.outputs, expected(MODEL, prompt, problem))
        for sequence in output.outputs:
            reasons.add(sequence.finish_reason)
            assert (sequence.stop_reason in (stop_id, 11)) == (sequence.finish_reason == "stop")
    assert "stop" in reasons


def test_the_end_of_sequence_token(llm: LLM) -> None:
    """It is token 2, in the width 60 some beam finds it; its text is not part of the text, the token is one."""
    problem = Problem(60, 60, max_tokens=4, end_ids=frozenset({2}), eos_id=2, early_stopping=None)
    (output,) = llm.beam_search([PROMPTS[0]], BeamSearchParams(60, 4))
    sequences = expected(MODEL, PROMPTS[0], problem)
    assert [tuple(one.tokens[4:]) for one in output.sequences] == [tokens for tokens, _ in sequences]
    ended = [one for one in output.sequences if one.finish_reason == "stop"]
    assert ended
    for one in ended:
        assert (one.tokens[-1], one.stop_reason) == (2, None)
        assert one.text == llm.get_tokenizer().decode(one.tokens)
        assert one.text.endswith("<|im_end|>")
    params = BeamSearchParams(60, 4).to_sampling_params()
    (same,) = llm.generate({"prompt_token_ids": PROMPTS[0]}, params, use_tqdm=False)
    assert_found(same.outputs, sequences)
    assert not any("<|im_end|>" in one.text for one in same.outputs)


def test_more_candidates_than_the_vocabulary_has_tokens() -> None:
    llm = make_llm(max_num_seqs=200, max_model_len=64, num_gpu_blocks_override=512)
    (output,) = llm.beam_search([PROMPTS[0]], BeamSearchParams(200, 3, ignore_eos=True))
    sequences = expected(MODEL, PROMPTS[0], endless(200, 200, 3))
    assert [tuple(one.tokens[4:]) for one in output.sequences] == [tokens for tokens, _ in sequences]
    with pytest.raises(RequestError, match=r"beams of a search must be at most 200 \(--max-num-seqs\), got 201"):
        llm.beam_search([PROMPTS[0]], BeamSearchParams(201, 3))
    assert_idle(llm, 512)
    llm.shutdown()


ENGINES = [
    {"block_size": 16},
    {"block_size": 128},
    {"enable_prefix_caching": True},
    {"enable_prefix_caching": True, "block_size": 128, "enable_chunked_prefill": True},
    {"enable_chunked_prefill": True, "max_num_batched_tokens": 64, "max_num_seqs": 32},
    {"num_scheduler_steps": 4},
]
# name → flags, and which requests are swapped
PRESSURES: dict[str, tuple[dict[str, Any], bool]] = {
    "roomy": ({}, False),
    "swap": ({"num_gpu_blocks_override": 18, "preemption_mode": "swap"}, True),
    "recompute": ({"num_gpu_blocks_override": 18, "preemption_mode": "recompute"}, False),
    "default": ({"num_gpu_blocks_override": 18}, True),
    "no-cpu-blocks": ({"num_gpu_blocks_override": 18, "swap_space": 0}, False),
}


def under_pressure() -> Iterator[Any]:
    """Every engine under every pressure; what a mode of preemption is chosen by is the same for all engines."""
    for pressure in PRESSURES:
        for engine in ENGINES:
            name = "-".join(f"{key}_{value}" for key, value in engine.items())
            is_repeated = pressure in ("default", "no-cpu-blocks") and engine is not ENGINES[0]
            marks = [pytest.mark.exhaustive] * is_repeated
            yield pytest.param(engine, pressure, id=f"{name}-{pressure}", marks=marks)


@pytest.mark.parametrize(("engine", "pressure"), list(under_pressure()))
def test_beside_other_requests_under_pressure(engine: dict[str, Any], pressure: str) -> None:
    flags, swaps = PRESSURES[pressure]
    options = {"max_num_seqs": 16, "swap_space": 0.01, "num_gpu_blocks_override": 256} | engine | flags
    if flags and engine.get("block_size") == 128:
        # a row needs one
        options["num_gpu_blocks_override"] = 8
    llm = make_llm(max_model_len=128, **options)
    beams = SamplingParams(
        use_beam_search=True, n=4, temperature=0, max_tokens=24, ignore_eos=True, early_stopping=None
    )
    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    max_num_swapped = 0
    for turn in range(2):
        params = {}
        for beam_prompt, other in zip(PROMPTS, OTHERS * 2, strict=True):
            for prompt, one in ((beam_prompt, beams), (other, sampling)):
                request_id = f"{turn}-{len(params)}"
                params[request_id] = one
                llm.llm_engine.add_request(request_id, {"prompt_token_ids": prompt}, one)
        outputs = {}
        while llm.llm_engine.has_unfinished_requests():
            outputs |= {output.request_id: output for output in llm.llm_engine.step()}
            max_num_swapped = max(max_num_swapped, llm.llm_engine.call_utility("stats")["num_swapped"])
        for request_id, one in params.items():
            output = outputs[request_id]
            if one is beams:
                assert_found(output.outputs, cached_beams(tuple(output.prompt_token_ids), 4, 24))
            else:
                assert output.outputs[0].token_ids == greedy(MODEL, tuple(output.prompt_token_ids), 40)
    assert (llm.llm_engine.call_utility("stats")["num_preemptions"] > 0) == bool(flags)
    assert (max_num_swapped > 0) == swaps
    assert_idle(llm, options["num_gpu_blocks_override"])
    llm.shutdown()


@functools.cache
def cached_beams(prompt: tuple[int, ...], width: int, max_tokens: int) -> Sequences:
    return expected(MODEL, list(prompt), endless(width, width, max_tokens))


def test_a_search_that_outgrows_the_cache_ends_with_length() -> None:
    llm = make_llm(max_model_len=128, num_gpu_blocks_override=8)
    (output,) = llm.beam_search([PROMPTS[3]], BeamSearchParams(6, 60, ignore_eos=True))
    lengths = {len(one.tokens) - 40 for one in output.sequences}
    assert {one.finish_reason for one in output.sequences} == {"length"}
    assert len(output.sequences) == 6
    (length,) = lengths
    assert 1 <= length < 60
    assert [tuple(one.tokens[40:]) for one in output.sequences] == [
        tokens for tokens, _ in expected(MODEL, PROMPTS[3], endless(6, 6, length))
    ]
    assert_idle(llm, 8)
    llm.shutdown()


def test_aborting_a_search_frees_everything(llm: LLM) -> None:
    engine = llm.llm_engine
    params = SamplingParams(use_beam_search=True, n=4, temperature=0, max_tokens=50, ignore_eos=True)
    engine.add_request("gone", {"prompt_token_ids": PROMPTS[3]}, params)
    engine.add_request("stays", {"prompt_token_ids": PROMPTS[0]}, params.clone(max_tokens=10))
    outputs = [output for _ in range(5) for output in engine.step()]
    assert {output.request_id for output in outputs} == {"gone", "stays"}
    engine.abort_request("gone")
    last = {}
    while engine.has_unfinished_requests():
        last |= {output.request_id: output for output in engine.step()}
    assert set(last) == {"stays"}
    assert_found(last["stays"].outputs, expected(MODEL, PROMPTS[0], endless(4, 4, 10)))
    assert_idle(llm, 256)


def test_the_reference_is_the_checkpoint() -> None:
    """The reference's greedy sequence equals that of transformers' `generate`."""
    ids = torch.tensor([PROMPTS[0]])
    with reference_mode():
        output = reference_model(MODEL).generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, pad_token_id=0
        )
    assert output[0, 4:].tolist() == greedy(MODEL, tuple(PROMPTS[0]), 12)
