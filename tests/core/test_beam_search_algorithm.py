"""The beam search against exhaustive search, a plain implementation and transformers' own."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_vllm.core.beam.search import beam_score
from ascend_vllm.types.messages import BeamSequence, FinishReason
from tests.beam_search_reference import (
    EOS,
    NextLogprobs,
    Problem,
    Sequences,
    found,
    model_logprobs,
    run,
    step,
    transformers_search,
)

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def table(seed: int, vocab_size: int) -> NextLogprobs:
    """A toy language model: random distributions, one for each output so far."""

    @functools.cache
    def next_logprobs(output: tuple[int, ...]) -> np.ndarray:
        logits = np.random.default_rng([seed, *(token + 1 for token in output)]).normal(0.0, 2.0, vocab_size)
        return logits - np.log(np.exp(logits).sum())

    return next_logprobs


def plain_search(
    problem: Problem, next_logprobs: NextLogprobs, *, only_high_ranks_end: bool = False, stops: bool = True
) -> tuple[Sequences, int]:
    """A simple implementation of the search; returns the best sequences and the number of steps.

    Args:
        only_high_ranks_end: transformers' rule: a candidate ends only if it is among the `width` best of a step.
        stops: obey early_stopping's rule, or only its choice of candidates.
    """
    width, prompt, rule = problem.width, problem.num_prompt_tokens, problem.early_stopping
    limit = max(2, 1 + len(problem.end_ids)) * width

    def total(output: tuple[int, ...]) -> float:
        return math.fsum(float(next_logprobs(output[:i])[token]) for i, token in enumerate(output))

    def score(output: tuple[int, ...], ended: bool) -> float:
        length = prompt + len(output) - int(ended and output[-1] == problem.eos_id)
        return total(output) / length**problem.length_penalty

    live: list[tuple[int, ...]] = [()]
    done: dict[tuple[int, ...], float] = {}
    for count in range(1, problem.max_tokens + 1):
        # none of a beam's candidates beyond its `limit` best is among the `limit` best of all
        children = [
            (*output, token) for output in live for token in np.argsort(-next_logprobs(output))[:limit].tolist()
        ]
        if count < problem.min_tokens:
            children = [child for child in children if child[-1] not in problem.end_ids]
        children.sort(key=lambda child: -total(child))
        if rule is not None:
            children = children[:limit]
        for rank, child in enumerate(children):
            if child[-1] in problem.end_ids and not (only_high_ranks_end and rank >= width):
                done[child] = score(child, True)
        live = [child for child in children if child[-1] not in problem.end_ids][:width]
        best = sorted(done.values(), reverse=True)
        if not live:
            break
        if stops and count < problem.max_tokens and rule is not None and len(best) >= width:
            length = prompt + count
            if rule == "never" and problem.length_penalty > 0:
                length = max(prompt + problem.max_tokens, problem.max_model_len)
            if rule is True or best[width - 1] >= total(live[0]) / length**problem.length_penalty:
                live = []
                break
    done |= {output: score(output, False) for output in live}
    ranked = sorted(done, key=lambda output: -done[output])[: problem.num_returned]
    return [(output, total(output)) for output in ranked], count


def assert_same(one: Sequences, other: Sequences, tolerance: float = 1e-9) -> None:
    assert [output for output, _ in one] == [output for output, _ in other]
    assert [logprob for _, logprob in one] == pytest.approx([logprob for _, logprob in other], abs=tolerance)


# ---- toy models ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -0.7, 2.0])
def test_a_wide_enough_search_finds_the_best_of_all_sequences(length_penalty: float) -> None:
    vocab_size, max_tokens = 4, 4
    next_logprobs = table(7, vocab_size)
    outputs = [
        output
        for length in range(1, max_tokens + 1)
        for output in itertools.product(range(vocab_size), repeat=length)
        if EOS not in output[:-1] and (output[-1] == EOS or length == max_tokens)
    ]

    def logprob(output: tuple[int, ...]) -> float:
        return sum(float(next_logprobs(output[:i])[token]) for i, token in enumerate(output))

    def score(output: tuple[int, ...]) -> float:
        return logprob(output) / (3 + len(output) - (output[-1] == EOS)) ** length_penalty

    expected = sorted(outputs, key=score, reverse=True)[:10]
    # 3 tokens do not end: 27 live beams are all outputs
    problem = Problem(width=81, num_returned=10, length_penalty=length_penalty, max_tokens=4, early_stopping=None)
    assert_same(found(run(problem, next_logprobs)), [(output, logprob(output)) for output in expected])


@st.composite
def problems(draw: st.DrawFn) -> tuple[Problem, NextLogprobs]:
    vocab_size = draw(st.integers(2, 9))
    width = draw(st.integers(1, 5))
    eos_id = draw(st.sampled_from([None, EOS]))
    stop_ids = draw(st.sets(st.integers(1, vocab_size - 1), max_size=2))
    max_tokens = draw(st.integers(1, 6))
    problem = Problem(
        width=width,
        num_returned=draw(st.integers(1, width)),
        length_penalty=draw(st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0])),
        early_stopping=draw(st.sampled_from([True, False, "never", None])),
        num_prompt_tokens=draw(st.integers(1, 4)),
        max_tokens=max_tokens,
        end_ids=frozenset(stop_ids) | (frozenset() if eos_id is None else frozenset({eos_id})),
        eos_id=eos_id,
        min_tokens=draw(st.integers(0, max_tokens)),
        max_model_len=draw(st.sampled_from([10, 64])),
    )
    return problem, table(draw(st.integers(0, 1000)), vocab_size)


@given(problems())
@settings(max_examples=150, deadline=None)
def test_equals_a_plain_implementation(case: tuple[Problem, NextLogprobs]) -> None:
    problem, next_logprobs = case
    search = run(problem, next_logprobs)
    expected, num_steps = plain_search(problem, next_logprobs)
    can_go_on = len(next_logprobs(())) > len(problem.end_ids)
    if can_go_on or problem.min_tokens <= 1:
        assert_same(found(search), expected)
        assert search.num_output_tokens == num_steps
    else:
        # no token is allowed: all of them end the sequence, which min_tokens forbids
        assert [(sequence.token_ids, sequence.finish_reason) for sequence in search.best()] == [([], LENGTH)]


@given(problems())
@settings(max_examples=100, deadline=None)
def test_rules_of_early_stopping(case: tuple[Problem, NextLogprobs]) -> None:
    problem, next_logprobs = case
    runs = {
        rule: run(dataclasses.replace(problem, early_stopping=rule), next_logprobs)
        for rule in (True, False, "never", None)
    }
    steps = [runs[rule].num_output_tokens for rule in (True, False, "never", None)]
    assert steps == sorted(steps)
    if problem.length_penalty <= 0.0:
        assert found(runs["never"]) == found(runs[False])
    # "never" drops only beams that could not be returned: the result is that of continuing to the end
    if len(next_logprobs(())) > len(problem.end_ids):
        patient = dataclasses.replace(problem, early_stopping="never")
        assert_same(found(runs["never"]), plain_search(patient, next_logprobs, stops=False)[0])
    # as soon as `width` sequences have ended, True is satisfied
    eager = dataclasses.replace(problem, early_stopping=True, num_returned=problem.width).make()
    while not eager.is_done:
        step(eager, next_logprobs)
        if not eager.is_done:
            assert sum(sequence.finish_reason is not None for sequence in eager.best()) < problem.width


@given(problems())
@settings(max_examples=100, deadline=None)
def test_best_sequences_before_the_end(case: tuple[Problem, NextLogprobs]) -> None:
    problem, next_logprobs = case
    search = problem.make()
    assert search.best() == [BeamSequence([], 0.0)]
    while not search.is_done:
        step(search, next_logprobs)
        best = search.best()
        assert 1 <= len(best) <= problem.num_returned
        assert len({tuple(sequence.token_ids) for sequence in best}) == len(best)
        scores = []
        for sequence in best:
            check_sequence(problem, sequence, search.num_output_tokens, search.is_done)
            at_eos = sequence.finish_reason is STOP and sequence.stop_reason is None
            length = problem.num_prompt_tokens + len(sequence.token_ids) - at_eos
            scores.append(beam_score(sequence.cumulative_logprob, length, problem.length_penalty))
        assert scores == sorted(scores, reverse=True)


def check_sequence(problem: Problem, sequence: BeamSequence, num_steps: int, is_done: bool) -> None:
    output = sequence.token_ids
    assert not problem.end_ids & set(output[:-1])
    match sequence.finish_reason:
        case FinishReason.STOP:
            assert max(1, problem.min_tokens) <= len(output) <= num_steps
            assert output[-1] in problem.end_ids
            assert sequence.stop_reason == (None if output[-1] == problem.eos_id else output[-1])
        case FinishReason.LENGTH:
            assert len(output) in (problem.max_tokens, num_steps)
            assert is_done
            assert sequence.stop_reason is None
        case None:
            assert not is_done
            assert len(output) == num_steps
        case _:
            raise AssertionError(sequence)


# ---- examples ------------------------------------------------------------------------------------------------


def logs(**probabilities: float) -> tuple[list[int], list[float]]:
    """Candidates: `_3=0.5` is token 3 with probability 0.5."""
    return [int(name[1:]) for name in probabilities], [math.log(value) for value in probabilities.values()]


@pytest.mark.parametrize(("rule", "num_steps"), [(True, 1), (False, 2), ("never", 3), (None, 5)])
def test_when_each_rule_stops(rule: bool | str | None, num_steps: int) -> None:
    """The penalty divides by the third power of the length, so that unlikely but long beams may still win."""
    problem = Problem(1, 1, 3.0, rule, num_prompt_tokens=1, max_tokens=5, max_model_len=6)
    search = problem.make()
    steps = [
        # [0] ends with log(0.5) / 1 = -0.69; the live beam is at log(0.3) / 8 = -0.15
        logs(_0=0.5, _1=0.3),
        # at -19.6 / 27 = -0.73, and at the greatest length of 6 -19.6 / 216 = -0.09
        logs(_0=0.01, _2=1e-8),
        # at the greatest length -157.8 / 216 = -0.73
        logs(_0=0.01, _3=1e-60),
        logs(_0=0.01, _4=0.9),
        logs(_0=0.01, _5=0.9),
    ]
    for count, candidates in enumerate(steps, 1):
        live = search.advance([candidates])
        assert live == ([] if count == num_steps else [(0, count)])
        if search.is_done:
            break
    assert search.num_output_tokens == num_steps
    assert search.best() == [BeamSequence([0], math.log(0.5), STOP)]


@pytest.mark.parametrize(("rule", "best"), [(False, [1, 3]), ("never", [1, 3]), (None, [2, 0])])
def test_which_candidates_may_end(rule: bool | str | None, best: list[int]) -> None:
    """The end is the least likely of 8 candidates: not among the 4 best of all beams, but among its beam's own."""
    # the shortest sequence is the best by far
    search = Problem(2, 1, -32.0, rule).make()
    assert search.num_candidates == 4
    assert search.advance([logs(_1=0.55, _2=0.45)]) == [(0, 1), (0, 2)]
    second = [logs(_3=0.4, _4=0.3, _5=0.2, _6=0.1), logs(_3=0.4, _4=0.3, _5=0.25, _0=0.05)]
    assert search.advance(second) == [(0, 3), (1, 3)]
    assert search.best()[0].token_ids == best


def test_more_ends_need_more_candidates() -> None:
    assert Problem(3, 1, end_ids=frozenset()).make().num_candidates == 6
    search = Problem(2, 2, end_ids=frozenset({0, 8, 9}), early_stopping="never").make()
    assert search.num_candidates == 8
    assert search.advance([logs(_8=0.4, _0=0.3, _9=0.2, _1=0.06, _2=0.03)]) == [(0, 1), (0, 2)]
    assert [(sequence.token_ids, sequence.stop_reason) for sequence in search.best()] == [([8], 8), ([0], None)]


def test_steps_of_wide_searches_with_many_ends_are_fast() -> None:
    """Sorting candidates as Python tuples took 2 s for a thousand beams, and ends were added one by one."""
    vocab_size = 20_000
    generator = np.random.default_rng(0)
    for width, num_ends in ((1024, 1), (16, 2048)):
        search = Problem(width, width, end_ids=frozenset(range(num_ends)), early_stopping=None).make()
        for _ in range(2):
            size = min(search.num_candidates, vocab_size)
            token_ids = generator.permutation(vocab_size)[:size]
            candidates = [(token_ids, np.sort(generator.normal(-8, 1, size))[::-1]) for _ in range(search.num_live)]
            start = time.thread_time()
            search.advance(candidates)
        assert search.num_live == width
        # CPU time
        assert time.thread_time() - start < 1.0


def test_ties_go_to_the_better_parent_then_the_lower_id() -> None:
    search = Problem(2, 2, 0.0, None).make()
    assert search.advance([logs(_5=0.25, _3=0.25, _4=0.25, _0=0.25)]) == [(0, 3), (0, 4)]
    even = logs(_9=0.25, _8=0.25, _0=0.25, _7=0.25)
    assert search.advance([even, even]) == [(0, 7), (0, 8)]
    # [0] ended first; [3, 0] and [4, 0] ended together
    search.finish_live()
    assert [sequence.token_ids for sequence in search.best()] == [[0], [3, 0]]


def test_finishing_the_live_beams() -> None:
    search = Problem(2, 2).make()
    search.advance([logs(_1=0.6, _2=0.4)])
    search.finish_live()
    assert (search.is_done, search.num_live) == (True, 0)
    assert search.best() == [
        BeamSequence([1], math.log(0.6), LENGTH),
        BeamSequence([2], math.log(0.4), LENGTH),
    ]
    with pytest.raises(ValueError, match="over"):
        search.advance([])


def test_wrong_and_impossible_candidates() -> None:
    search = Problem(2, 2).make()
    with pytest.raises(ValueError, match="candidates of 2 beams for 1 live ones"):
        search.advance([logs(_1=0.5)] * 2)
    assert search.advance([([1, 2, 3], [-1.0, -math.inf, math.nan])]) == [(0, 1)]
    assert search.advance([([1], [-math.inf])]) == []
    assert search.best() == [BeamSequence([1], -1.0, LENGTH)]


def test_extreme_length_penalties_only_rank_by_length() -> None:
    assert beam_score(-3.0, 1 << 20, 1e9) == beam_score(-3.0, 1 << 20, 32.0) < 0.0
    assert math.isfinite(beam_score(-1e6, (1 << 31) - 1, -1e9))
    long, short = beam_score(-9.0, 40, 1e300), beam_score(-1.0, 20, 1e300)
    assert long > short
    assert beam_score(-8.0, 4, 0.5) == -4.0


# ---- transformers --------------------------------------------------------------------------------------------

PROMPTS = [[17, 5, 44, 8], [200, 100, 50], [7], [31, 32, 33, 34, 35, 36, 37], [260, 3, 260, 3, 260], [99, 98]]


@pytest.mark.parametrize("name", ["qwen2-tied", "opt", "llama"])
@pytest.mark.parametrize("width", [2, 4, 6])
def test_equals_transformers_where_nothing_ends_early(name: str, width: int) -> None:
    for prompt in PROMPTS[:3]:
        problem = Problem(
            width, width, length_penalty=0.0, num_prompt_tokens=len(prompt), max_tokens=10, end_ids=frozenset(),
            eos_id=None,
        )  # fmt: skip
        next_logprobs = functools.partial(model_logprobs, name, tuple(prompt))
        expected = transformers_search(name, prompt, problem)
        assert_same(found(run(problem, next_logprobs)), expected, 1e-3)
        # of equal lengths a penalty changes no order
        penalised = dataclasses.replace(problem, length_penalty=2.0)
        assert_same(found(run(penalised, next_logprobs)), expected, 1e-3)


@pytest.mark.parametrize("rule", [True, False, "never"])
def test_equals_transformers_with_ends(rule: bool | str) -> None:
    """Only the `width` best candidates of a step may end in transformers; that rarely changes the best sequence."""
    name, width = "qwen2-tied", 4
    num_equal = num_equal_best = num_stopped = 0
    for prompt in PROMPTS:
        next_logprobs = functools.partial(model_logprobs, name, tuple(prompt))
        # a token of the likeliest sequence is the end token, so that sequences end at several lengths
        endless = Problem(width, 1, 0.0, False, len(prompt), 10, frozenset(), None)
        eos_id = run(endless, next_logprobs).best()[0].token_ids[2]
        problem = Problem(width, width, 0.0, rule, len(prompt), 10, frozenset({eos_id}), eos_id)
        search = run(problem, next_logprobs)
        ours, theirs = found(search), transformers_search(name, prompt, problem)
        assert_same(ours, plain_search(problem, next_logprobs)[0])
        assert_same(theirs, plain_search(problem, next_logprobs, only_high_ranks_end=True)[0], 1e-3)
        num_equal += [output for output, _ in ours] == [output for output, _ in theirs]
        num_equal_best += ours[0][0] == theirs[0][0]
        num_stopped += any(sequence.finish_reason is STOP for sequence in search.best())
    assert num_stopped == len(PROMPTS)
    assert num_equal_best >= 5
    assert num_equal >= 2
