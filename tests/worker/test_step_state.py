"""Step state: layers read what their rows brought, in eager steps and on tapes."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from ascend_vllm.config.graphs import GraphMode
from ascend_vllm.layers.step_state import StepState, StepStateSpec
from ascend_vllm.models.registry import MODELS
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.step import NewRow
from ascend_vllm.worker.row_state import RowState
from tests.worker.biased_model import NUM_BIASES, BiasedForCausalLM, Biases, make_requests
from tests.worker.drafting import generate, texts_of
from tests.worker.taped_steps import note_taped_steps
from tests.worker.test_drafts import make_config


@pytest.mark.parametrize(
    "options",
    [
        {"enforce_eager": True, "enable_chunked_prefill": True, "max_num_batched_tokens": 16},
        {},
        {"num_scheduler_steps": 4},
        {"num_gpu_blocks_override": 9},
    ],
    ids=str,
)
def test_rows_of_a_step_get_their_own(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    base = generate(make_config(enforce_eager=True), make_requests())
    monkeypatch.setitem(MODELS, "Qwen2ForCausalLM", BiasedForCausalLM)
    taped = note_taped_steps(monkeypatch)
    requests, config = make_requests(), make_config(**options)
    answers = generate(config, requests, [Biases()])
    assert bool(taped.layers) == (config.graphs.mode == GraphMode.RECORDED)
    # replays of whole steps know nothing of state
    assert taped.whole == []
    alone = make_config(enforce_eager=True)
    for number in range(NUM_BIASES):
        own = {name: asked for name, asked in requests.items() if name.endswith(str(number))}
        for name, answer in generate(alone, own, [Biases()]).items():
            assert answers[name].token_ids == answer.token_ids, name
            assert (answer.token_ids == base[name].token_ids) == (number == 0), name


def test_rows_with_drafts_and_state_decode_from_tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "Qwen2ForCausalLM", BiasedForCausalLM)
    requests, config = make_requests(), make_config()
    plain = generate(config, requests, [Biases()])
    config = msgspec.structs.replace(config, graphs=msgspec.structs.replace(config.graphs, query_lens=(1, 3)))
    drafted = generate(config, requests, [Biases(texts_of(requests, plain), 2)])
    assert {name: answer.token_ids for name, answer in drafted.items()} == {
        name: answer.token_ids for name, answer in plain.items()
    }


def test_entries_are_written_and_padded() -> None:
    state = StepState(8, 3, torch.device("cpu"))
    memory = state.declare(StepStateSpec("place", torch.int64, (2,), fill=7))
    rows = state.declare(StepStateSpec("scale", torch.float32, fill=1, is_per_row=True))
    assert state.declare(StepStateSpec("scale", torch.float32, fill=1, is_per_row=True)) is rows
    with pytest.raises(ValueError, match="step state 'scale' is declared in two ways"):
        state.declare(StepStateSpec("scale", torch.float32))
    written = state.write({"place": torch.arange(8).view(4, 2), "scale": torch.tensor([0.5, 0.25])})
    assert written["place"].data_ptr() == memory.data_ptr()
    state.pad(slice(2, 3), slice(4, 6))
    assert memory.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [7, 7], [7, 7], [7, 7], [7, 7]]
    assert rows.tolist() == [0.5, 0.25, 1.0]
    assert {name: tuple(view.shape) for name, view in state.views(3, 6).items()} == {"place": (6, 2), "scale": (3,)}
    assert dict(StepState(8, 3, torch.device("cpu")).views(2, 2)) == {}


def test_tokens_are_sorted_by_another_tensor() -> None:
    state = StepState(8, 4, torch.device("cpu"))
    state.declare(StepStateSpec("adapter", torch.int64, fill=-1))
    order = state.declare(StepStateSpec("order", torch.int64, order_of="adapter"))
    # until a step is written, as graphs are captured
    assert order.tolist() == list(range(8))
    rows = RowState(state, 4)
    for slot, adapter in enumerate((3, None, 1)):
        values = {} if adapter is None else {"adapter": adapter}
        rows.enter(NewRow(slot, str(slot), [5], 1, 0, [], SamplingParams(), 0, [], state=values))
    host = rows.gather(np.array([0, 1, 2]), np.array([2, 2, 2]))
    assert not state.is_plain
    written = state.write({name: torch.from_numpy(value) for name, value in host.items()})
    assert written["adapter"].tolist() == [3, 3, -1, -1, 1, 1]
    assert written["order"].tolist() == [2, 3, 4, 5, 0, 1]
    state.write({"order": torch.zeros(8, dtype=torch.int64)})
    state.write({name: torch.from_numpy(value) for name, value in host.items()})
    state.pad(slice(3, 4), slice(6, 8))
    assert order.tolist() == [2, 3, 4, 5, 0, 1, 6, 7]
    rows.gather(np.array([1]), np.array([2]))
    assert state.is_plain
