"""--stream-interval: tokens per output, and the count of --max-num-queued-tokens; the test plays the core."""

from __future__ import annotations

import pytest

from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.outputs import RequestOutput
from ascend_vllm.sampling_params import RequestOutputKind, SamplingParams
from ascend_vllm.types.messages import EngineCoreOutput, FinishReason
from tests.engine.engine_for_tests import FakeEngine


def run(engine: FakeEngine, num_tokens: int, params: SamplingParams, num_steps: int = 1) -> list[RequestOutput]:
    """All outputs of a request that ends after so many tokens, which come so many at a time."""
    engine.add(params)
    outputs = []
    for start in range(0, num_tokens, num_steps):
        is_last = start + num_steps >= num_tokens
        ids = list(range(65, 65 + num_tokens))[start : start + num_steps]
        outputs += engine.give(ids, finish_reason=FinishReason.LENGTH if is_last else None)
    return outputs


@pytest.mark.parametrize(("interval", "sizes"), [(1, [1] * 10), (4, [1, 4, 4, 1]), (3, [1, 3, 3, 3]), (20, [1, 9])])
@pytest.mark.parametrize("each", [False, True])
def test_tokens_are_gathered(byte_level: Tokenizer, interval: int, sizes: list[int], each: bool) -> None:
    delta = SamplingParams(output_kind=RequestOutputKind.DELTA, logprobs=None)
    outputs = run(FakeEngine(byte_level, stream_interval=interval, stream_each_token=each), 10, delta)
    assert [len(output.outputs[0].token_ids) for output in outputs] == sizes
    assert [output.finished for output in outputs] == [False] * (len(sizes) - 1) + [True]
    whole = run(FakeEngine(byte_level), 10, SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY))
    assert "".join(output.outputs[0].text for output in outputs) == whole[0].outputs[0].text
    cumulative = run(FakeEngine(byte_level, stream_interval=interval), 10, SamplingParams())
    assert [len(output.outputs[0].token_ids) for output in cumulative] == [
        sum(sizes[: count + 1]) for count in range(len(sizes))
    ]


def test_tokens_of_several_steps_at_once(byte_level: Tokenizer) -> None:
    delta = SamplingParams(output_kind=RequestOutputKind.DELTA)
    outputs = run(FakeEngine(byte_level, stream_interval=4), 10, delta, num_steps=3)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 6, 1]


def test_every_sequence_gathers_its_own(byte_level: Tokenizer) -> None:
    engine = FakeEngine(byte_level, stream_interval=3)
    engine.add(SamplingParams(n=2, output_kind=RequestOutputKind.DELTA))
    first, second = engine.core_ids["r"]

    def step(*ended: str) -> list[int]:
        reason = dict.fromkeys(ended, FinishReason.LENGTH)
        told = engine.step(*(EngineCoreOutput(core_id, [70], finish_reason=reason.get(core_id)) for core_id in ids))
        return [output.index for request in told for output in request.outputs]

    ids = [first]
    assert step() == [0]
    ids = [first, second]
    assert step() == [1]  # the first has gathered one, the second tells its first
    assert step() == []
    assert step() == [0]
    assert step(first) == [0, 1]  # the end tells the one, three tokens the other
    ids = [second]
    assert step(second) == [1]


def test_prompt_tokens_that_wait(byte_level: Tokenizer) -> None:
    engine = FakeEngine(byte_level)
    engine.add(SamplingParams(n=2), "one", {"prompt_token_ids": [65] * 7})
    engine.add(SamplingParams(), "two", {"prompt_token_ids": [65] * 20})
    assert engine.output.num_prefill_tokens == 27
    engine.give([66], "one")
    assert engine.output.num_prefill_tokens == 20
    engine.output.abort("two", engine.stats)
    assert engine.output.num_prefill_tokens == 0
