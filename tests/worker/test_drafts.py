"""Rows that draft tokens get the answers of ordinary decoding, in fewer steps."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from ascend_vllm import SamplingParams
from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.ops import native
from ascend_vllm.sampling_params import RequestOutputKind
from ascend_vllm.types.messages import TokenLogprobs
from ascend_vllm.types.step import PADDING_TOKEN, REJECTED_TOKEN, NewRow, SchedulerOutput
from ascend_vllm.worker.input_batch import InputBatch
from ascend_vllm.worker.model_runner import _places_of
from ascend_vllm.worker.sampling.sampler import RAW_LOGPROBS, Sampler
from tests.tiny_models import tiny_model
from tests.worker.drafting import Asked, Drafts, generate, make_prompts, texts_of
from tests.worker.taped_steps import note_taped_steps

PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "logprobs": {"temperature": 0, "logprobs": 3},
    "sampled": {"seed": 3, "top_k": 20},
    "warm": {"seed": 4, "temperature": 1.5, "top_p": 0.9, "logprobs": 1},
    "penalised": {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "at least": {"temperature": 0, "min_tokens": 9, "ignore_eos": False, "stop_token_ids": list(range(40, 200))},
    "stops": {"seed": 8, "ignore_eos": False, "stop_token_ids": list(range(40, 100))},
    "long": {"temperature": 0, "max_tokens": 40},
}


def make_config(model: str = "qwen2", **options: Any) -> EngineConfig:
    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 128,
        "num_gpu_blocks_override": 60,
        "swap_space": 0,
        "block_size": 16,
        "max_num_seqs": 8,
        "disable_log_stats": True,
    }
    return EngineArgs(model=tiny_model(model), **(settings | options)).create_engine_config()


def make_requests() -> dict[str, Asked]:
    common: dict[str, Any] = {"max_tokens": 21, "ignore_eos": True, "output_kind": RequestOutputKind.DELTA}
    return {
        name: Asked(prompt, SamplingParams(**(common | changes)))
        for (name, changes), prompt in zip(PARAMS.items(), make_prompts(len(PARAMS)), strict=True)
    }


def check_logprobs(found: list[TokenLogprobs], expected: list[TokenLogprobs], *, in_chunks: bool = False) -> None:
    """Attention sums a row's keys in another order if its sequence has several rows, with AVX-512 more than eight.

    So do prompts whose chunks are shorter than that (`in_chunks`).
    """
    has_avx512 = str(native.cpu_isa("attention", torch.float32)).startswith("avx512")
    bound = (1e-5 if in_chunks else 0) if has_avx512 else 1e-4
    assert [(entry.token_ids, entry.rank) for entry in found] == [(entry.token_ids, entry.rank) for entry in expected]
    values, others = ([value for entry in entries for value in entry.logprobs] for entries in (expected, found))
    assert others == pytest.approx(values, rel=0, abs=bound)


@pytest.mark.parametrize("num_drafts", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"enforce_eager": True},
        {"enforce_eager": True, "dtype": "bfloat16"},
        {"enforce_eager": True, "enable_chunked_prefill": True, "max_num_batched_tokens": 32},
        {"enforce_eager": True, "num_gpu_blocks_override": 11, "enable_prefix_caching": True},
    ],
    ids=str,
)
def test_answers_are_those_of_ordinary_decoding(options: dict[str, Any], num_drafts: int) -> None:
    requests, config = make_requests(), make_config(**options)
    plain = generate(config, requests)
    if config.model.dtype == "bfloat16" and native.cpu_isa("attention", torch.bfloat16) in ("scalar", "amx_bf16"):
        pytest.skip("rounds the attention of one row and of several differently, see docs/scheduling.md")
    # the others decode beside them as always
    texts = {name: text for name, text in texts_of(requests, plain).items() if name != "long"}
    drafted = generate(config, requests, [Drafts(texts, num_drafts, is_steady=False)])
    for name, answer in plain.items():
        assert drafted[name].token_ids == answer.token_ids, name
        check_logprobs(drafted[name].logprobs, answer.logprobs)
    assert drafted["greedy"].num_outputs < plain["greedy"].num_outputs * (0.8 if num_drafts == 3 else 0.9)
    assert drafted["long"].num_outputs == plain["long"].num_outputs == 40


@pytest.mark.parametrize("model", ["qwen2", "mistral"])
def test_tapes_are_recorded_for_each_number_of_drafts(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = make_requests()
    plain = generate(make_config(model, enforce_eager=True), requests)
    taped = note_taped_steps(monkeypatch)
    config = make_config(model)
    config = msgspec.structs.replace(config, graphs=msgspec.structs.replace(config.graphs, query_lens=(1, 4)))
    drafted = generate(config, requests, [Drafts(texts_of(requests, plain), 3, is_steady=True)])
    for name, answer in plain.items():
        assert drafted[name].token_ids == answer.token_ids, name
        check_logprobs(drafted[name].logprobs, answer.logprobs)
    shapes = set(taped.layers)
    assert {(8, 4), (1, 4)} <= shapes
    # the ends of texts have other numbers of drafts
    assert {query_len for _, query_len in shapes} <= {1, 4}


def filled_batch() -> InputBatch:
    """Rows of 3, 4 and 5 tokens in slots 0 to 2, all computed but for the last."""
    batch = InputBatch(num_slots=4, max_model_len=8, block_size=4, vocab_size=100)
    rows = [
        NewRow(
            slot, str(slot), [10 + slot] * (3 + slot), 3 + slot, 2 + slot, [slot, 3 + slot], SamplingParams(), 0, []
        )
        for slot in range(3)
    ]
    batch.apply(SchedulerOutput(0, [], rows, [], [], []))
    return batch


def test_logits_are_wanted_at_each_draft() -> None:
    batch = filled_batch()
    batch.apply(SchedulerOutput(1, [], [], [], [], [], drafts=[(0, [20, 21]), (2, [22])]))
    slots = np.array([2, 1, 0])
    built = batch.build(slots, np.array([2, 1, 3]))
    assert built.input_ids.tolist() == [12, 22, 11, 10, 20, 21]
    assert built.positions.tolist() == [4, 5, 3, 2, 3, 4]
    assert built.logits_indices.tolist() == [0, 1, 2, 3, 4, 5]
    assert built.sampling_slots.tolist() == [2, 1, 0]
    assert built.num_places is not None
    batch.advance(slots, np.array([2, 1, 3]))
    # the second draft of slot 0 is wrong, that of slot 2 is right
    table = batch.accept(slots, built.num_places, np.array([22, 33, 44, 20, 99, 55]))
    assert table.tolist() == [[22, 33, PADDING_TOKEN], [44, PADDING_TOKEN, PADDING_TOKEN], [20, 99, REJECTED_TOKEN]]
    assert batch.num_tokens[:3].tolist() == [5, 5, 7]
    assert batch.num_computed_tokens[:3].tolist() == [4, 4, 6]
    assert batch.token_ids[0, :5].tolist() == [10, 10, 10, 20, 99]
    # what was rejected is computed again, and there is one place each
    batch.apply(SchedulerOutput(2, [], [], [], [], []))
    built = batch.build(slots, np.array([1, 1, 1]))
    assert built.input_ids.tolist() == [33, 44, 99]
    assert built.num_places is None
    with pytest.raises(ValueError, match="slot 2 has 7 tokens and 2 drafts"):
        batch.apply(SchedulerOutput(3, [], [], [], [], [], drafts=[(2, [1, 2])]))


def test_stages_that_do_not_sample_go_back_behind_wrong_drafts() -> None:
    batch = filled_batch()
    batch.apply(SchedulerOutput(1, [], [], [], [], [], drafts=[(0, [20, 21])]))
    slots, counts = np.array([0, 1]), np.array([3, 1])
    batch.build(slots, counts)
    batch.advance(slots, counts)
    batch.append_received(np.array([0, 1, 0]), np.array([20, 44, 99]))
    assert batch.token_ids[0, :5].tolist() == [10, 10, 10, 20, 99]
    assert batch.num_tokens[:2].tolist() == [5, 5]
    assert batch.num_computed_tokens[:2].tolist() == [4, 4]


def test_masks_find_the_places_of_their_rows() -> None:
    assert _places_of(np.array([7, 2]), np.array([2, 5, 7])).tolist() == [2, 0]
    assert _places_of(np.array([5, 2, 5]), np.array([5, 5, 7, 2])).tolist() == [0, 3, 1]


def test_drafts_are_seen_by_what_depends_on_tokens() -> None:
    """A plan for several places of a slot has another draw for each."""
    batch = filled_batch()
    batch.sampling.seed[:] = 5
    sampler = Sampler(batch, RAW_LOGPROBS, torch.device("cpu"), host_memory=False)
    plan = sampler.plan(np.array([0, 0, 1]), num_tokens=np.array([3, 4, 4]))
    assert plan.draws is not None
    uniforms = plan.draws.uniforms[0].tolist()
    assert uniforms[0] != uniforms[1] == uniforms[2]
