"""Decoding from tapes: the tokens of eager steps, whatever rows come and go."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from ascend_vllm import LLM, SamplingParams
from ascend_vllm.worker import plain_decoding, tape_runner
from tests.combinations import combinations
from tests.tiny_models import tiny_model
from tests.worker.taped_steps import TapedSteps, note_taped_steps

# of different lengths, so that the number of rows falls from step to step
PROMPTS = [[5 + (7 * row + index) % 90 for index in range(3 + 5 * row)] for row in range(6)]
PARAMS = [
    SamplingParams(temperature=0.8 * (row % 2), seed=row, max_tokens=4 + 6 * row, ignore_eos=True) for row in range(6)
]


def _token_ids(model: str, params: list[SamplingParams] = PARAMS, **options: object) -> list[list[int]]:
    llm = LLM(model, max_model_len=160, kv_cache_memory_bytes="16M", block_size=16, **options)  # type: ignore[arg-type]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture
def taped(monkeypatch: pytest.MonkeyPatch) -> TapedSteps:
    """Steps that were replayed or recorded."""
    return note_taped_steps(monkeypatch)


@pytest.mark.parametrize(
    ("name", "options"),
    combinations(
        ["llama-biases", "mistral", "qwen2", "qwen2-tied", "qwen3", "gemma3", "falcon-new"],
        [{}, {"num_scheduler_steps": 4}, {"num_gpu_blocks_override": 11}],
    ),
    ids=str,
)
def test_tokens_are_those_of_eager_steps(
    name: str, options: dict[str, int], taped: TapedSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    # fewer than there will be, so that some steps are computed as before
    monkeypatch.setattr(tape_runner, "MOST_ROWS", 5)
    monkeypatch.setattr(plain_decoding, "MOST_ROWS", 5)
    model = tiny_model(name, dtype="bfloat16")
    token_ids = _token_ids(model, **options)
    assert set(taped.num_rows) >= {1, 2, 3}
    assert max(taped.num_rows) <= 5
    # of a step with several passes the layers are replayed in each
    assert set(taped.whole) >= {1, 2, 3} or "num_scheduler_steps" in options
    num_steps = len(taped.num_rows)
    assert _token_ids(model, enforce_eager=True, **options) == token_ids
    assert len(taped.num_rows) == num_steps


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
@pytest.mark.parametrize(
    "need",
    [{"presence_penalty": 0.5}, {"min_tokens": 3, "stop_token_ids": [7]}, {"logprobs": 1}],
    ids=str,
)
def test_steps_with_a_row_that_needs_more_replay_the_layers(
    name: str, need: dict[str, Any], taped: TapedSteps
) -> None:
    """The others' tokens are as without it, and steps are replayed whole again when it has ended."""
    model = tiny_model(name, dtype="bfloat16")
    params = [SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, **need), *PARAMS[1:]]
    token_ids = _token_ids(model, params)
    assert {rows for rows, _ in taped.layers} == {6}
    assert set(taped.whole) >= {1, 2, 3}
    assert _token_ids(model, params, enforce_eager=True) == token_ids


@pytest.mark.parametrize("name", ["opt", "llama-dynamic"])
def test_other_models_decode_as_before(name: str, taped: TapedSteps, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(name)
    with caplog.at_level(logging.INFO):
        token_ids = _token_ids(model)
    assert taped.num_rows == []
    said = [record.getMessage() for record in caplog.records if "from tapes" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("Decoding is not replayed from tapes: aten.")
    assert _token_ids(model, enforce_eager=True) == token_ids
