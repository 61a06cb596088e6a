"""Outputs: text, stop strings, log-probabilities, several sequences, and times; the test plays the core."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import threading
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ascend_vllm.engine import output_processor, sequence_state
from ascend_vllm.engine.output_processor import OutputQueue
from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.errors import EngineBusyError, EngineDeadError, RequestError
from ascend_vllm.outputs import RequestOutput
from ascend_vllm.sampling_params import RequestOutputKind, SamplingParams
from ascend_vllm.types.messages import BeamSequence, EngineCoreOutput, FinishReason, TokenLogprobs
from tests.engine.engine_for_tests import FakeEngine

DELTA, CUMULATIVE, FINAL = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY


def run(engine: FakeEngine, ids: list[int], params: SamplingParams, step: int = 1) -> list[RequestOutput]:
    """All outputs of a request whose tokens come in groups; the last token reaches max_tokens."""
    engine.add(params)
    outputs: list[RequestOutput] = []
    for start in range(0, len(ids), step):
        last = start + step >= len(ids)
        outputs += engine.give(ids[start : start + step], finish_reason=FinishReason.LENGTH if last else None)
        if outputs and outputs[-1].finished:
            break
    return outputs


@pytest.mark.parametrize("step", [1, 3])
def test_output_kinds(byte_level: Tokenizer, step: int) -> None:
    text = " brown fox jumps 日本"
    ids = byte_level.encode(text)
    deltas = run(FakeEngine(byte_level), ids, SamplingParams(output_kind=DELTA), step)
    assert "".join(output.outputs[0].text for output in deltas) == text
    assert list(itertools.chain(*(output.outputs[0].token_ids for output in deltas))) == ids
    cumulative = run(FakeEngine(byte_level), ids, SamplingParams(), step)
    assert len(cumulative) == len(deltas) == -(-len(ids) // step)
    lengths = [len(output.outputs[0].token_ids) for output in cumulative]
    assert lengths == sorted(lengths)
    (final,) = run(FakeEngine(byte_level), ids, SamplingParams(output_kind=FINAL), step)
    for last in (cumulative[-1], final):
        assert (last.outputs[0].text, last.outputs[0].token_ids) == (text, ids)
        assert last.outputs[0].finish_reason == "length"
        assert last.finished
        assert last.prompt == "The quick"
    assert not any(output.finished for output in deltas[:-1])


def test_ended_requests_leave_nothing(byte_level: Tokenizer) -> None:
    engine = FakeEngine(byte_level)
    run(engine, [5, 6], SamplingParams(n=2))
    engine.give([7], index=1, finish_reason=FinishReason.LENGTH)
    assert engine.output.num_requests == engine.output.num_sequences == 0
    assert engine.give([7], index=1) == []  # late outputs are dropped


@pytest.mark.parametrize(("include", "expected"), [(False, " brown"), (True, " brown<|im_end|>")])
def test_the_stop_token_is_no_text(byte_level: Tokenizer, include: bool, expected: str) -> None:
    engine = FakeEngine(byte_level)
    params = SamplingParams(skip_special_tokens=False, include_stop_str_in_output=include)
    engine.add(params)
    ids = [*byte_level.encode(" brown"), byte_level.eos_token_id]
    (output,) = engine.give(ids, finish_reason=FinishReason.STOP)
    completion = output.outputs[0]
    assert (completion.text, completion.token_ids) == (expected, ids)
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)


def test_the_stop_token_id_is_the_reason(byte_level: Tokenizer) -> None:
    engine = FakeEngine(byte_level)
    engine.add(SamplingParams(stop_token_ids=[7]))
    (output,) = engine.give([7], finish_reason=FinishReason.STOP, stop_reason=7)
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("", 7)


def one_letter_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """A token per character, so that any character can end a step."""
    return [tokenizer.hf.convert_tokens_to_ids("Ġ" if character == " " else character) for character in text]


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    text=st.text("abc ", min_size=1, max_size=24),
    stops=st.lists(st.text("abc ", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
    step=st.integers(1, 5),
)
def test_stop_strings(
    byte_level: Tokenizer, text: str, stops: list[str], include: bool, min_tokens: int, step: int
) -> None:
    """Against the plain definition: after each character, is there a stop string at the end?"""
    expected, reason = text, None
    for end in range(max(min_tokens, 1), len(text) + 1):
        found = next((stop for stop in stops if text[:end].endswith(stop)), None)
        if found is not None:
            expected, reason = text[:end] if include else text[: end - len(found)], found
            break
    num_tokens = len(text) if reason is None else end
    params = SamplingParams(
        stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=99, output_kind=DELTA
    )
    engine = FakeEngine(byte_level)
    outputs = run(engine, one_letter_ids(byte_level, text), params, step)
    assert "".join(output.outputs[0].text for output in outputs) == expected
    assert sum(len(output.outputs[0].token_ids) for output in outputs) == num_tokens
    last = outputs[-1].outputs[0]
    assert (last.finish_reason, last.stop_reason) == ("length" if reason is None else "stop", reason)
    # the core is told exactly if it does not know
    ended_by_itself = len(outputs) == -(-len(text) // step)
    assert engine.stopped == ([] if reason is None or ended_by_itself else engine.core_ids["r"])
    assert engine.output.num_requests == 0


def test_what_may_begin_a_stop_string_is_held_back(byte_level: Tokenizer) -> None:
    engine = FakeEngine(byte_level)
    engine.add(SamplingParams(stop=["cat", "ab"], output_kind=DELTA))
    texts = [engine.give([id_])[0].outputs[0].text for id_ in one_letter_ids(byte_level, "bcabx"[:4])]
    assert texts[:2] == ["", ""]
    assert texts[2:] == ["b", "c"]  # "ab" is cut, and what was held back before it comes out
    assert engine.stopped == engine.core_ids["r"]


def logprobs_of(ids: list[int], *others: int) -> list[TokenLogprobs]:
    return [TokenLogprobs([id_, *others], [-1.0, -0.25, -2.5][: 1 + len(others)], 3) for id_ in ids]


def test_logprobs(byte_level: Tokenizer) -> None:
    first, second = byte_level.encode(" brown fox")[:2]
    engine = FakeEngine(byte_level)
    engine.add(SamplingParams(logprobs=2, output_kind=DELTA))
    (output,) = engine.give([first], new_logprobs=logprobs_of([first], second, first))
    position = output.outputs[0].logprobs[0]
    assert list(position) == [first, second]  # the sampled token first, none twice
    assert (position[first].logprob, position[first].rank) == (-1.0, 3)
    assert (position[second].logprob, position[second].rank) == (-0.25, 1)
    assert position[second].decoded_token == byte_level.decode([second])
    (output,) = engine.give([second], new_logprobs=logprobs_of([second], first, 3))
    assert len(output.outputs[0].logprobs) == 1
    assert output.outputs[0].cumulative_logprob == -2.0


@pytest.mark.parametrize(("asked", "count"), [(0, 1), (1, 2)])
def test_only_as_many_logprobs_as_asked_for(byte_level: Tokenizer, asked: int, count: int) -> None:
    engine = FakeEngine(byte_level)
    engine.add(SamplingParams(logprobs=asked))
    (output,) = engine.give([5], new_logprobs=logprobs_of([5], 6, 7))
    assert len(output.outputs[0].logprobs[0]) == count


def test_texts_of_logprob_tokens_join_to_the_text(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a𝒞é b")
    engine = FakeEngine(byte_level)
    engine.add(SamplingParams(logprobs=0, output_kind=FINAL))
    (output,) = engine.give(ids, new_logprobs=logprobs_of(ids), finish_reason=FinishReason.LENGTH)
    tokens = [next(iter(position.values())).decoded_token for position in output.outputs[0].logprobs]
    assert "".join(tokens) == "a𝒞é b"
    assert len(tokens) == len(ids)
    assert "" in tokens


def test_without_detokenising(byte_level: Tokenizer) -> None:
    engine = FakeEngine(byte_level)
    engine.add(SamplingParams(detokenize=False, logprobs=0))
    (output,) = engine.give([5], new_logprobs=logprobs_of([5]), finish_reason=FinishReason.LENGTH)
    assert output.outputs[0].text == ""
    assert output.outputs[0].token_ids == [5]
    assert output.outputs[0].logprobs[0][5].decoded_token is None


def test_several_sequences(byte_level: Tokenizer) -> None:
    engine = FakeEngine(byte_level)
    engine.add(SamplingParams(n=3, output_kind=DELTA))
    ids = engine.core_ids["r"]
    (output,) = engine.step(EngineCoreOutput(ids[2], [5]), EngineCoreOutput(ids[0], [6]))
    assert [(part.index, part.token_ids) for part in output.outputs] == [(2, [5]), (0, [6])]
    for index in (0, 1):
        (output,) = engine.give([7], index=index, finish_reason=FinishReason.LENGTH)
        assert not output.finished
    (output,) = engine.give([8], index=2, finish_reason=FinishReason.LENGTH)
    assert output.finished


def test_sequences_come_best_first_if_their_logprobs_are_known(byte_level: Tokenizer) -> None:
    for logprobs, order in ((0, [1, 0]), (None, [0, 1])):
        engine = FakeEngine(byte_level)
        engine.add(SamplingParams(n=2, logprobs=logprobs, output_kind=FINAL))
        for index in (0, 1):
            outputs = engine.give(
                [5],
                index=index,
                finish_reason=FinishReason.LENGTH,
                new_logprobs=[TokenLogprobs([5], [index - 5.0], 1)],
            )
        assert [part.index for part in outputs[0].outputs] == order


def test_a_request_id_is_taken_while_it_runs(byte_level: Tokenizer) -> None:
    engine = FakeEngine(byte_level)
    engine.add(SamplingParams())
    with pytest.raises(RequestError, match=r"Request r already exists\."):
        engine.add(SamplingParams())
    assert len(engine.output.abort("r", engine.stats)) == 1
    assert engine.output.abort("r", engine.stats) == []
    engine.add(SamplingParams())


async def test_a_slow_consumer_gets_merged_deltas(byte_level: Tokenizer) -> None:
    engine, queue = FakeEngine(byte_level), OutputQueue(DELTA)
    engine.add(SamplingParams(n=2, logprobs=0, output_kind=DELTA), queue=queue)
    for token_id in (5, 6):
        engine.give([token_id], new_logprobs=logprobs_of([token_id]))
    engine.give([7], index=1, finish_reason=FinishReason.LENGTH, new_logprobs=logprobs_of([7]))
    output = await queue.get()
    first, second = output.outputs
    assert (first.token_ids, len(first.logprobs), first.finish_reason) == ([5, 6], 2, None)
    assert (second.token_ids, second.finish_reason) == ([7], "length")
    assert first.text == byte_level.decode([5, 6])
    assert not output.finished
    engine.give([8], finish_reason=FinishReason.STOP, new_logprobs=logprobs_of([8]))
    output = await queue.get()
    assert output.finished
    assert [part.token_ids for part in output.outputs] == [[8]]


async def test_a_slow_consumer_gets_the_latest_state(byte_level: Tokenizer) -> None:
    engine, queue = FakeEngine(byte_level), OutputQueue(CUMULATIVE)
    engine.add(SamplingParams(), queue=queue)
    engine.give([5])
    engine.give([6])
    assert (await queue.get()).outputs[0].token_ids == [5, 6]


async def test_a_consumer_waits_for_outputs(byte_level: Tokenizer) -> None:
    engine, queue = FakeEngine(byte_level), OutputQueue(DELTA)
    engine.add(SamplingParams(output_kind=DELTA), queue=queue)
    waiting = asyncio.ensure_future(queue.get())
    await asyncio.sleep(0)
    assert not waiting.done()
    engine.give([5])
    assert (await waiting).outputs[0].token_ids == [5]


async def test_errors_reach_the_consumer_after_its_outputs(byte_level: Tokenizer) -> None:
    engine, queue = FakeEngine(byte_level), OutputQueue(DELTA)
    engine.add(SamplingParams(output_kind=DELTA), queue=queue)
    engine.give([5])
    engine.output.fail_all(EngineDeadError("gone"))
    assert (await queue.get()).outputs[0].token_ids == [5]
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="gone"):
            await queue.get()
    assert engine.output.num_requests == 0


async def test_an_error_of_the_core_ends_all_sequences(byte_level: Tokenizer) -> None:
    engine, queue = FakeEngine(byte_level), OutputQueue(DELTA)
    engine.add(SamplingParams(n=2, output_kind=DELTA), queue=queue)
    engine.give([], index=1, finish_reason=FinishReason.ERROR, error="the grammar is wrong")
    with pytest.raises(RequestError, match="the grammar is wrong"):
        await queue.get()
    assert engine.stopped == engine.core_ids["r"][:1]
    assert engine.output.num_sequences == 0
    assert [sequence.reason for sequence in engine.stats.finished_sequences] == ["error", "error"]


async def test_an_aborted_request_ends(byte_level: Tokenizer) -> None:
    engine, queue = FakeEngine(byte_level), OutputQueue(DELTA)
    engine.add(SamplingParams(stop=["long stop"], output_kind=DELTA), queue=queue)
    engine.give(byte_level.encode(" fox"))
    assert engine.output.abort("r", engine.stats) == engine.core_ids["r"]
    output = await queue.get()
    assert (output.finished, output.outputs[0].finish_reason, output.outputs[0].text) == (True, "abort", " fox")
    assert engine.give([5]) == []


async def test_log_probabilities_that_are_kept_have_a_limit(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_processor, "MAX_KEPT_LOGPROBS", 12)
    engine = FakeEngine(byte_level)
    queues = {name: OutputQueue[RequestOutput](FINAL if name != "stream" else DELTA) for name in ("a", "b", "stream")}
    for name, queue in queues.items():
        kind = DELTA if name == "stream" else FINAL
        engine.add(SamplingParams(n=2, logprobs=1, output_kind=kind), name, queue=queue)
    for token_id in range(5, 8):
        for name in ("a", "b", "stream", "stream"):
            engine.give([token_id], name, new_logprobs=logprobs_of([token_id], 9))
    # six of each of the two, and none of the stream, which has emitted them
    engine.give([8], "b", new_logprobs=logprobs_of([8], 9))
    with pytest.raises(RequestError, match=r"has 8 log-probabilities so far, .* at most 12") as caught:
        await queues["b"].get()
    assert caught.value.param == "logprobs"
    assert engine.stopped == engine.core_ids["b"]
    for index in (0, 1):
        engine.give([9], "a", index, finish_reason=FinishReason.LENGTH, new_logprobs=logprobs_of([9], 8))
    output = await queues["a"].get()
    assert sorted(len(part.logprobs) for part in output.outputs) == [1, 4]
    assert engine.output._num_kept_logprobs == 0
    (part,) = (await queues["stream"].get()).outputs
    assert len(part.logprobs) == 6


def test_times_and_counts(byte_level: Tokenizer) -> None:
    engine = FakeEngine(byte_level)
    engine.add(SamplingParams(n=2, max_tokens=9, output_kind=FINAL), arrival_time=10.0)
    prompt_length = len(byte_level.encode("The quick"))
    engine.give([5], now=11.0, first_scheduled_time=10.5, num_cached_tokens=2)
    engine.give([5], index=1, now=12.0, first_scheduled_time=11.5)
    engine.give([6, 7, 8], now=12.5, finish_reason=FinishReason.STOP)
    (output,) = engine.give([6], index=1, now=14.0, finish_reason=FinishReason.LENGTH)
    stats = engine.stats
    assert (stats.num_prompt_tokens, stats.num_generation_tokens, stats.num_cached_tokens) == (prompt_length, 6, 2)
    assert stats.first_token_s == [1.0]
    assert stats.inter_token_s == [(0.5, 3), (2.0, 1)]
    assert [(s.reason, s.num_generation_tokens) for s in stats.finished_sequences] == [("stop", 4), ("length", 2)]
    (request,) = stats.finished_requests
    assert (request.num_prompt_tokens, request.n, request.max_tokens) == (prompt_length, 2, 9)
    assert (request.e2e_s, request.queue_s, request.prefill_s) == (4.0, 0.5, 0.5)
    assert (request.decode_s, request.inference_s, request.mean_token_s) == (3.0, 3.5, 1.0)
    assert output.metrics.time_in_queue == 0.5
    assert (output.metrics.first_token_time, output.metrics.finished_time) == (11.0, 14.0)
    assert output.num_cached_tokens == 2


def test_several_tokens_in_the_first_step_came_at_once(byte_level: Tokenizer) -> None:
    engine = FakeEngine(byte_level)
    engine.add(SamplingParams(), arrival_time=10.0)
    engine.give([5, 6, 7], now=11.0)
    assert engine.stats.inter_token_s == [(0.0, 2)]


def test_decoding_text_takes_microseconds(byte_level: Tokenizer) -> None:
    """Well above the usual 5 to 10 µs, so that only a change of kind makes it fail.

    The thread's own time, and that of the usual step: whatever else runs on this machine does not count.
    """
    engine = FakeEngine(byte_level, max_model_len=100_000)
    for i in range(64):
        engine.add(SamplingParams(output_kind=DELTA, max_tokens=None), request_id=f"r{i}", queue=OutputQueue(DELTA))
    ids = byte_level.encode("The quick brown fox jumps over the lazy dog 日本")
    steps = [[EngineCoreOutput(core_ids[0], [id_]) for core_ids in engine.core_ids.values()] for id_ in ids]
    step_s = []
    for step in steps:
        start = time.thread_time()
        engine.step(*step)
        step_s.append(time.thread_time() - start)
    assert statistics.median(step_s) / 64 < 60e-6


def scored(token_id: int, logprob: float) -> dict[str, list[TokenLogprobs]]:
    return {"new_logprobs": [TokenLogprobs([token_id], [logprob], 1)]}


@pytest.mark.parametrize("kind", [FINAL, CUMULATIVE])
def test_the_best_of_several_are_returned(byte_level: Tokenizer, kind: RequestOutputKind) -> None:
    engine = FakeEngine(byte_level)
    engine.add(SamplingParams(n=2, best_of=4, output_kind=kind))
    for index, (token_id, logprob) in enumerate([(5, -3.0), (6, -1.0), (7, -2.0), (8, -1.0)]):
        outputs = engine.give([token_id], index=index, **scored(token_id, logprob))
    if kind is CUMULATIVE:
        assert [(part.index, part.token_ids) for part in outputs[0].outputs] == [(0, [6]), (1, [8])]
    else:
        assert outputs == []
    for index, logprob in enumerate([-0.5, -2.5, -1.0, -2.5]):
        outputs = engine.give([9], index=index, finish_reason=FinishReason.LENGTH, **scored(9, logprob))
    assert outputs[0].finished
    best = [(part.index, part.token_ids, part.cumulative_logprob, part.logprobs) for part in outputs[0].outputs]
    # of equal ones the first
    assert best == [(0, [7, 9], -3.0, None), (1, [5, 9], -3.5, None)]
    assert engine.stats.finished_requests[0].n == 2
    assert len(engine.stats.finished_sequences) == 4


def test_the_best_of_several_with_their_logprobs(byte_level: Tokenizer) -> None:
    engine = FakeEngine(byte_level)
    engine.add(SamplingParams(n=1, best_of=2, logprobs=0, output_kind=FINAL))
    engine.give([5], finish_reason=FinishReason.LENGTH, **scored(5, -2.0))
    (output,) = engine.give([6], index=1, finish_reason=FinishReason.LENGTH, **scored(6, -1.0))
    (best,) = output.outputs
    assert (best.index, best.token_ids, best.logprobs[0][6].logprob) == (0, [6], -1.0)


def test_a_stop_string_ends_one_of_the_best_of(byte_level: Tokenizer) -> None:
    (stop_id,) = one_letter_ids(byte_level, "x")
    engine = FakeEngine(byte_level)
    engine.add(SamplingParams(n=1, best_of=2, stop="x", output_kind=FINAL))
    assert engine.give([stop_id], index=1, **scored(stop_id, -0.5)) == []
    assert engine.stopped == [engine.core_ids["r"][1]]
    (output,) = engine.give([5], finish_reason=FinishReason.LENGTH, **scored(5, -1.0))
    (best,) = output.outputs
    assert (best.text, best.stop_reason, best.cumulative_logprob) == ("", "x", -0.5)


def beam(ids: list[int], logprob: float, reason: FinishReason | None = None, **fields: Any) -> BeamSequence:
    return BeamSequence(ids, logprob, reason, **fields)


def add_beams(engine: FakeEngine, queue: OutputQueue | None = None, **fields: Any) -> None:
    engine.add(SamplingParams(use_beam_search=True, temperature=0.0, **fields), queue=queue)
    assert len(engine.core_ids["r"]) == 1


def test_beams_come_whole_and_best_first_after_every_step(byte_level: Tokenizer) -> None:
    brown, fox = byte_level.encode(" brown"), byte_level.encode(" fox")
    eos = byte_level.eos_token_id
    engine = FakeEngine(byte_level)
    add_beams(engine, n=2)
    (output,) = engine.give([], beams=[beam(brown, -1.0), beam(fox, -2.0)], first_scheduled_time=10.5, now=11.0)
    assert [(part.index, part.text) for part in output.outputs] == [(0, " brown"), (1, " fox")]
    assert [part.finish_reason for part in output.outputs] == [None, None]
    best = [beam([*fox, eos], -2.5, FinishReason.STOP), beam([*brown, 7], -2.0, FinishReason.STOP, stop_reason=7)]
    (output,) = engine.give([], beams=best, finish_reason=FinishReason.STOP, now=11.5)
    assert output.finished
    assert [
        (part.index, part.text, part.token_ids, part.cumulative_logprob, part.finish_reason, part.stop_reason)
        for part in output.outputs
    ] == [(0, " fox", [*fox, eos], -2.5, "stop", None), (1, " brown", [*brown, 7], -2.0, "stop", 7)]
    assert all(part.logprobs is None for part in output.outputs)
    assert engine.output.num_requests == engine.output.num_sequences == 0
    stats = engine.stats
    assert stats.first_token_s == [1.0]
    assert stats.inter_token_s == [(0.5, 1)]
    num_tokens = len(brown) + len(fox) + 2
    assert stats.num_generation_tokens == num_tokens
    assert sum(sequence.num_generation_tokens for sequence in stats.finished_sequences) == num_tokens
    (request,) = stats.finished_requests
    assert (request.n, request.queue_s, request.prefill_s, request.decode_s) == (2, 0.5, 0.5, 0.5)


@pytest.mark.parametrize("kind", [DELTA, FINAL])
def test_beams_that_come_at_the_end_only(byte_level: Tokenizer, kind: RequestOutputKind) -> None:
    ids = byte_level.encode(" brown fox")
    engine = FakeEngine(byte_level)
    add_beams(engine, n=1, best_of=2, output_kind=kind)
    assert engine.give([], first_scheduled_time=10.5, num_cached_tokens=2) == []
    (output,) = engine.give(
        [], beams=[beam(ids, -1.0, FinishReason.LENGTH)], finish_reason=FinishReason.LENGTH, now=12.0
    )
    (part,) = output.outputs
    assert (output.finished, part.text, part.token_ids, part.finish_reason) == (True, " brown fox", ids, "length")
    assert output.num_cached_tokens == 2
    (request,) = engine.stats.finished_requests
    # all its tokens came at once
    assert (request.prefill_s, request.decode_s, request.mean_token_s, request.inference_s) == (None, None, None, 1.5)
    assert engine.stats.num_prompt_tokens == len(byte_level.encode("The quick"))


@pytest.mark.parametrize(("fields", "text"), [({}, ""), ({"skip_special_tokens": False}, "<|im_end|>")])
def test_special_tokens_of_beams(byte_level: Tokenizer, fields: dict[str, Any], text: str) -> None:
    engine = FakeEngine(byte_level)
    add_beams(engine, n=2, ignore_eos=True, output_kind=FINAL, **fields)
    best = [beam([byte_level.eos_token_id], -1.0, FinishReason.LENGTH)]
    (output,) = engine.give([], beams=best, finish_reason=FinishReason.LENGTH)
    assert output.outputs[0].text == text


async def test_aborted_beams_give_what_is_there(byte_level: Tokenizer) -> None:
    fox = byte_level.encode(" fox")
    engine, queue = FakeEngine(byte_level), OutputQueue(CUMULATIVE)
    add_beams(engine, queue, n=2)
    engine.give([], beams=[beam([*fox, 7], -1.0, FinishReason.STOP, stop_reason=7), beam(fox, -2.0)])
    assert engine.output.abort("r", engine.stats) == engine.core_ids["r"]
    output = await queue.get()
    assert output.finished
    assert [(part.text, part.finish_reason) for part in output.outputs] == [(" fox", "stop"), (" fox", "abort")]
    assert [sequence.reason for sequence in engine.stats.finished_sequences] == ["stop", "abort"]


async def test_beams_aborted_before_there_is_one(byte_level: Tokenizer) -> None:
    engine, queue = FakeEngine(byte_level), OutputQueue(DELTA)
    add_beams(engine, queue, n=2, best_of=3, output_kind=DELTA)
    engine.output.abort("r", engine.stats)
    parts = (await queue.get()).outputs
    assert [(part.index, part.text, part.token_ids, part.finish_reason) for part in parts] == [
        (0, "", [], "abort"),
        (1, "", [], "abort"),
    ]


def test_an_error_of_the_core_ends_beams(byte_level: Tokenizer) -> None:
    engine = FakeEngine(byte_level)
    add_beams(engine, OutputQueue(FINAL), n=2, output_kind=FINAL)
    engine.give([], finish_reason=FinishReason.ERROR, error="no memory")
    assert [sequence.reason for sequence in engine.stats.finished_sequences] == ["error", "error"]
    assert engine.output.num_requests == 0


@pytest.mark.parametrize(
    ("name", "expected", "num_timeouts"),
    [
        (None, RequestError, 0),
        ("EngineBusyError", EngineBusyError, 1),
        ("EngineDeadError", EngineDeadError, 0),
        ("ConfigError", RequestError, 0),
        ("__class__", RequestError, 0),
    ],
)
async def test_errors_of_the_core_have_their_class(
    byte_level: Tokenizer, name: str | None, expected: type[Exception], num_timeouts: int
) -> None:
    engine, queue = FakeEngine(byte_level), OutputQueue(FINAL)
    engine.add(SamplingParams(output_kind=FINAL), queue=queue)
    engine.give([], finish_reason=FinishReason.ERROR, error="waited for too long", error_class=name)
    with pytest.raises(Exception, match="waited for too long") as error:
        await queue.get()
    assert type(error.value) is expected
    assert engine.stats.num_queue_timeouts == num_timeouts


async def collect(queue: OutputQueue) -> list[RequestOutput]:
    """All outputs of a request that has ended."""
    outputs = [await queue.get()]
    while not outputs[-1].finished:
        outputs.append(await queue.get())
    return outputs


@pytest.mark.parametrize("each", [True, False])
@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE, FINAL])
async def test_several_tokens_a_step(byte_level: Tokenizer, each: bool, kind: RequestOutputKind) -> None:
    text = " brown fox jumps"
    ids = byte_level.encode(text)
    engine = FakeEngine(byte_level, stream_each_token=each)
    queue = engine.output.make_queue(kind)
    engine.add(SamplingParams(logprobs=0, output_kind=kind), queue=queue)
    engine.give(ids, new_logprobs=logprobs_of(ids), finish_reason=FinishReason.LENGTH, stop_reason=None, now=11.0)
    outputs = await collect(queue)
    assert len(outputs) == (len(ids) if each and kind is not FINAL else 1)
    assert [output.finished for output in outputs[:-1]] == [False] * (len(outputs) - 1)
    pieces = [output.outputs[0] for output in outputs]
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    if kind is DELTA:
        assert "".join(piece.text for piece in pieces) == text
        assert [id_ for piece in pieces for id_ in piece.token_ids] == ids
        assert sum(len(piece.logprobs) for piece in pieces) == len(ids)
    else:
        assert (pieces[-1].text, pieces[-1].token_ids, len(pieces[-1].logprobs)) == (text, ids, len(ids))
        assert [len(piece.token_ids) for piece in pieces] == list(range(len(ids) - len(pieces) + 1, len(ids) + 1))
    # however they are emitted, the tokens came at once
    assert engine.stats.inter_token_s == [(0.0, len(ids) - 1)]
    assert engine.stats.num_generation_tokens == len(ids)


async def test_several_tokens_a_step_of_several_sequences(byte_level: Tokenizer) -> None:
    engine = FakeEngine(byte_level, stream_each_token=True)
    queue = engine.output.make_queue(DELTA)
    engine.add(SamplingParams(n=3, output_kind=DELTA), queue=queue)
    first, second, third = engine.core_ids["r"]
    engine.step(
        EngineCoreOutput(first, [5, 6, 7], finish_reason=FinishReason.LENGTH),
        EngineCoreOutput(second, [8, 9], finish_reason=FinishReason.STOP),
        EngineCoreOutput(third, [4], finish_reason=FinishReason.LENGTH),
    )
    outputs = await collect(queue)
    assert [[(part.index, part.token_ids) for part in output.outputs] for output in outputs] == [
        [(2, [4])],
        [(0, [5]), (1, [8])],
        [(0, [6]), (1, [9])],
        [(0, [7])],
    ]
    assert engine.output.num_requests == 0


@pytest.mark.parametrize("ended", [True, False])
def test_a_stop_string_within_several_tokens(byte_level: Tokenizer, ended: bool) -> None:
    engine = FakeEngine(byte_level, stream_each_token=True)
    engine.add(SamplingParams(stop="cat", output_kind=DELTA))
    ids = one_letter_ids(byte_level, "acatbb")
    outputs = engine.give(ids, finish_reason=FinishReason.LENGTH if ended else None)
    assert "".join(output.outputs[0].text for output in outputs) == "a"
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 1, 1, 1]
    assert [output.finished for output in outputs] == [False, False, False, True]
    assert outputs[-1].outputs[0].stop_reason == "cat"
    # the core is told exactly if it does not know
    assert engine.stopped == ([] if ended else engine.core_ids["r"])


async def test_a_slow_consumer_of_single_tokens_gets_larger_pieces_in_the_end(byte_level: Tokenizer) -> None:
    engine = FakeEngine(byte_level, stream_each_token=True, max_model_len=2000)
    queue = engine.output.make_queue(DELTA)
    engine.add(SamplingParams(output_kind=DELTA, max_tokens=None), queue=queue)
    for _ in range(60):
        engine.give([5] * 8)
    engine.give([6] * 8, finish_reason=FinishReason.LENGTH)
    sizes = [len(output.outputs[0].token_ids) for output in await collect(queue)]
    assert sum(sizes) == 61 * 8
    assert sizes[:-1] == [1] * 255


def test_cached_tokens_are_those_of_the_first_sequence(byte_level: Tokenizer) -> None:
    engine = FakeEngine(byte_level)
    engine.add(SamplingParams(n=2, output_kind=FINAL))
    for index, cached in ((1, 9), (0, 4)):
        outputs = engine.give(
            [5],
            index=index,
            finish_reason=FinishReason.LENGTH,
            first_scheduled_time=10.5 + index,
            num_cached_tokens=cached,
        )
    assert outputs[0].num_cached_tokens == engine.stats.num_cached_tokens == 4


# ---- log-probabilities of the prompt ------------------------------------------------------------------------


def prompt_entries(ids: list[int]) -> list[TokenLogprobs]:
    """For each token but the first: itself, then two others."""
    return [TokenLogprobs([id_, 9, 10], [-3.0, -0.5, -1.0], 4) for id_ in ids[1:]]


def test_prompt_logprobs_have_the_shape_of_vllm(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("The 日本")
    engine = FakeEngine(byte_level)
    engine.add(SamplingParams(prompt_logprobs=1), prompt={"prompt_token_ids": ids})
    (first,) = engine.give([7], prompt_logprobs=prompt_entries(ids))
    (last,) = engine.give([8], finish_reason=FinishReason.LENGTH)
    for output in (first, last):
        found = output.prompt_logprobs
        assert found is not None
        assert found[0] is None
        assert [list(position) for position in found[1:] if position] == [[id_, 9] for id_ in ids[1:]]
        own = [position[id_] for id_, position in zip(ids[1:], found[1:], strict=True)]
        assert {(entry.logprob, entry.rank) for entry in own} == {(-3.0, 4)}
        assert (found[1][9].logprob, found[1][9].rank) == (-0.5, 1)
        # bytes of a character count where they complete it
        assert byte_level.token_text(ids[0]) + "".join(entry.decoded_token for entry in own) == "The 日本"


def test_who_adds_and_aborts_does_not_wait_for_the_log_probabilities_of_a_prompt(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of 30,000 tokens would hold the lock for seconds, and block the event loop."""
    has_begun, may_go_on = threading.Event(), threading.Event()

    def shape_slowly(*arguments: Any) -> Any:
        has_begun.set()
        assert may_go_on.wait(60)
        return shape_position(*arguments)

    shape_position = sequence_state._shape_position
    monkeypatch.setattr(sequence_state, "_shape_position", shape_slowly)
    engine = FakeEngine(byte_level)
    engine.add(SamplingParams(prompt_logprobs=1), prompt={"prompt_token_ids": [5, 6]})
    outputs: list[RequestOutput] = []
    giving = threading.Thread(
        target=lambda: outputs.extend(engine.give([7], prompt_logprobs=prompt_entries([5, 6]))), daemon=True
    )
    giving.start()
    assert has_begun.wait(60)
    aborting = threading.Thread(target=engine.output.abort, args=("another", engine.stats), daemon=True)
    aborting.start()
    aborting.join(60)
    assert not aborting.is_alive()
    may_go_on.set()
    giving.join(60)
    assert outputs[0].prompt_logprobs is not None


@pytest.mark.parametrize("kind", [DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY])
def test_log_probabilities_of_a_prompt_come_in_parts(byte_level: Tokenizer, kind: RequestOutputKind) -> None:
    """They are shaped as they come, and emitted when all of them are there."""
    ids = byte_level.encode("The quick 日本 fox")
    entries = prompt_entries(ids)
    engine = FakeEngine(byte_level)
    engine.add(SamplingParams(prompt_logprobs=1, output_kind=kind), prompt={"prompt_token_ids": ids})
    whole = engine.give([7], finish_reason=FinishReason.STOP, prompt_logprobs=entries)[-1].prompt_logprobs
    engine.add(SamplingParams(prompt_logprobs=1, output_kind=kind), prompt={"prompt_token_ids": ids})
    for first in range(0, len(entries) - 1, 3):
        assert engine.give([], prompt_logprobs=entries[first : min(first + 3, len(entries) - 1)]) == []
    last = engine.give([7], finish_reason=FinishReason.STOP, prompt_logprobs=entries[-1:])[-1]
    assert whole is not None and len(whole) == len(ids)
    assert last.prompt_logprobs == whole


def test_the_first_delta_has_the_prompt_logprobs(byte_level: Tokenizer) -> None:
    engine = FakeEngine(byte_level)
    engine.add(SamplingParams(prompt_logprobs=2, output_kind=DELTA), prompt={"prompt_token_ids": [5, 6]})
    (first,) = engine.give([7], prompt_logprobs=prompt_entries([5, 6]))
    (second,) = engine.give([8], finish_reason=FinishReason.LENGTH)
    assert [None if entry is None else list(entry) for entry in first.prompt_logprobs] == [None, [6, 9, 10]]
    assert second.prompt_logprobs is None


@pytest.mark.parametrize("ends_early", [False, True])
def test_a_sequence_that_is_ahead_waits_for_the_prompt_logprobs(byte_level: Tokenizer, ends_early: bool) -> None:
    engine = FakeEngine(byte_level)
    engine.add(SamplingParams(n=2, prompt_logprobs=0, output_kind=DELTA), prompt={"prompt_token_ids": [5, 6]})
    requests = engine.output._requests["r"].request.core_requests
    assert [request.sampling_params.prompt_logprobs for request in requests] == [0, None]
    assert engine.give([7], index=1) == []
    assert engine.give([8], index=1, finish_reason=FinishReason.LENGTH if ends_early else None) == []
    (output,) = engine.give([9], prompt_logprobs=prompt_entries([5, 6]))
    assert output.prompt_logprobs is not None
    assert {part.index: part.token_ids for part in output.outputs} == {0: [9], 1: [7, 8]}
    assert [part.finish_reason for part in output.outputs] == [None, "length" if ends_early else None]
    (output,) = engine.give([10], finish_reason=FinishReason.LENGTH)
    assert [part.token_ids for part in output.outputs] == [[10]]
    engine.output.abort("r", engine.stats)
