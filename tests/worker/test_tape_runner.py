"""Decoding from tapes: the tokens of eager steps, whatever rows come and go."""

from __future__ import annotations

import logging

import pytest

from ascend_vllm import LLM, SamplingParams
from ascend_vllm.worker import tape_runner
from ascend_vllm.worker.tape_runner import TapeRunner
from tests.combinations import combinations
from tests.tiny_models import tiny_model

# of different lengths, so that the number of rows falls from step to step
PROMPTS = [[5 + (7 * row + index) % 90 for index in range(3 + 5 * row)] for row in range(6)]
PARAMS = [
    SamplingParams(temperature=0.8 * (row % 2), seed=row, max_tokens=4 + 6 * row, ignore_eos=True) for row in range(6)
]


def _token_ids(model: str, **options: object) -> list[list[int]]:
    llm = LLM(model, max_model_len=160, kv_cache_memory_bytes="16M", block_size=16, **options)  # type: ignore[arg-type]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each step that was replayed or recorded."""
    rows: list[int] = []

    class Counted(TapeRunner):
        def run(self, batch):  # type: ignore[no-untyped-def]
            hidden = super().run(batch)
            if hidden is not None:
                rows.append(len(hidden))
            return hidden

    monkeypatch.setattr("ascend_vllm.worker.runner_choice.TapeRunner", Counted)
    return rows


@pytest.mark.parametrize(
    ("name", "options"),
    combinations(
        ["llama-biases", "mistral", "qwen2", "qwen2-tied", "qwen3", "gemma3", "falcon-new"],
        [{}, {"num_scheduler_steps": 4}, {"num_gpu_blocks_override": 11}],
    ),
    ids=str,
)
def test_tokens_are_those_of_eager_steps(
    name: str, options: dict[str, int], replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # fewer than there will be, so that some steps are computed as before
    monkeypatch.setattr(tape_runner, "MOST_ROWS", 5)
    model = tiny_model(name, dtype="bfloat16")
    taped = _token_ids(model, **options)
    assert set(replays) >= {1, 2, 3}
    assert max(replays) <= 5
    replays.clear()
    assert _token_ids(model, enforce_eager=True, **options) == taped
    assert replays == []


@pytest.mark.parametrize("name", ["opt", "llama-dynamic"])
def test_other_models_decode_as_before(name: str, replays: list[int], caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(name)
    with caplog.at_level(logging.INFO):
        taped = _token_ids(model)
    assert replays == []
    said = [record.getMessage() for record in caplog.records if "from tapes" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("Decoding is not replayed from tapes: aten.")
    assert _token_ids(model, enforce_eager=True) == taped
