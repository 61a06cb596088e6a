"""Answers with n-gram drafts are those without, in fewer steps."""

from __future__ import annotations

from typing import Any

import pytest
from drafting import Answer, Asked, generate
from test_drafts import check_logprobs, make_config, make_requests

from ascend_vllm.sampling_params import RequestOutputKind, SamplingParams
from tests.moody_drafts import Moody

NGRAM: dict[str, Any] = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 4,
        # a larger batch than any: all rows have drafts, whatever they cost
        "disable_by_batch_size": 100,
    }
}
PADDED: dict[str, Any] = {
    "speculative_model": "[ngram]",
    "num_speculative_tokens": 3,
    "ngram_prompt_lookup_max": 2,
    "use_v2_block_manager": True,
    "speculative_disable_by_batch_size": 100,
}


def check_same(found: dict[str, Answer], expected: dict[str, Answer], *, in_chunks: bool = False) -> None:
    for name, answer in expected.items():
        assert found[name].token_ids == answer.token_ids, name
        check_logprobs(found[name].logprobs, answer.logprobs, in_chunks=in_chunks)


def repeating_requests() -> dict[str, Asked]:
    """Answers of three tokens, which soon repeat themselves."""
    params = SamplingParams(
        temperature=0,
        max_tokens=60,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
        allowed_token_ids=[5, 6, 7],
    )
    return {str(number): Asked([20 + number, 30, 31, 32] * 6, params) for number in range(5)}


@pytest.mark.parametrize("flags", [NGRAM, PADDED], ids=["ngram", "padded"])
def test_answers_are_those_without_drafts(flags: dict[str, Any]) -> None:
    requests = make_requests() | repeating_requests()
    plain = generate(make_config(), requests)
    drafted = generate(make_config(**flags), requests)
    check_same(drafted, plain)
    repeating = repeating_requests()
    counts = [sum(answers[name].num_outputs for name in repeating) for answers in (plain, drafted)]
    assert counts[1] < 0.7 * counts[0]


@pytest.mark.parametrize("overlaps", [True, False])
def test_no_answer_depends_on_when_there_are_drafts(monkeypatch: pytest.MonkeyPatch, overlaps: bool) -> None:
    flags = {"speculative_config": NGRAM["speculative_config"] | {"disable_by_batch_size": None}}
    requests = make_requests() | repeating_requests()
    plain = generate(make_config(async_scheduling=overlaps), requests)
    # measurements decide, whatever they are
    check_same(generate(make_config(async_scheduling=overlaps, **flags), requests), plain)
    monkeypatch.setattr("ascend_vllm.core.drafting.DraftCosts", Moody)
    monkeypatch.setattr(Moody, "num_given", 0)
    monkeypatch.setattr(Moody, "num_watching", 0)
    for settings in (
        {},
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 32},
        {"num_gpu_blocks_override": 20},
    ):
        found = generate(make_config(async_scheduling=overlaps, **settings, **flags), requests)
        check_same(found, plain, in_chunks="enable_chunked_prefill" in settings)
    assert Moody.num_given > 30
    assert Moody.num_watching > 5
