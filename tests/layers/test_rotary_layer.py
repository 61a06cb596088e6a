"""Rotary tables against transformers' frequencies, and both spellings of config.json."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ascend_vllm.attention.backend import ForwardBatch
from ascend_vllm.config.arch import read_rope
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.layers.rotary import DynamicNTKRotaryEmbedding, RotaryEmbedding, make_rotary_embedding

HEAD_SIZE = 64
CPU = torch.device("cpu")

VARIANTS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "truncate": False},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8, "beta_fast": 16.0, "beta_slow": 2.0},
    {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.25},
    {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 128},
]


def _hf_config(parameters: dict[str, Any]) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=1024,
        rope_parameters={"rope_theta": 50000.0, **parameters},
    )


def _rotary(hf_config: dict[str, Any], max_model_len: int) -> RotaryEmbedding:
    return make_rotary_embedding(read_rope(hf_config, HEAD_SIZE), max_model_len, CPU)


def _table(hf_config: dict[str, Any], max_model_len: int = 600) -> torch.Tensor:
    return _rotary(hf_config, max_model_len).cos_sin


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("parameters", VARIANTS)
def test_tables_have_the_frequencies_of_transformers(parameters: dict[str, Any]) -> None:
    config = _hf_config(parameters)
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    angles = torch.arange(600.0)[:, None] * frequencies
    table = _table(config.to_dict())
    assert table.dtype == torch.float32
    # angles of 600 radians have seven digits
    torch.testing.assert_close(table, torch.cat((angles.cos(), angles.sin()), -1) * magnitude, rtol=0, atol=2e-4)


def test_both_spellings_mean_the_same() -> None:
    base = {"max_position_embeddings": 1024}
    scaling = {"factor": 2.0}
    new = _table(base | {"rope_parameters": {"rope_type": "linear", "rope_theta": 50000.0, **scaling}})
    old = _table(base | {"rope_theta": 50000.0, "rope_scaling": {"type": "linear", **scaling}})
    assert torch.equal(new, old)
    plain = _table(base | {"rope_theta": 50000.0, "rope_scaling": None})
    assert torch.equal(plain, _table(base | {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}}))
    assert not torch.equal(plain, new)
    assert torch.equal(_table(base), _table(base | {"rope_theta": 10000.0}))


def test_partial_rotation_narrows_the_table() -> None:
    rotary = _rotary({"max_position_embeddings": 64, "partial_rotary_factor": 0.5}, 64)
    assert rotary.cos_sin.shape == (64, HEAD_SIZE // 2)
    query, key = torch.randn(3, 2 * HEAD_SIZE), torch.randn(3, HEAD_SIZE)
    before = query.clone()
    rotary.prepare(_batch([3])).rotate(query, key, HEAD_SIZE)
    heads, heads_before = query.view(3, 2, HEAD_SIZE), before.view(3, 2, HEAD_SIZE)
    assert torch.equal(heads[..., HEAD_SIZE // 2 :], heads_before[..., HEAD_SIZE // 2 :])
    assert not torch.equal(heads[1:, :, : HEAD_SIZE // 2], heads_before[1:, :, : HEAD_SIZE // 2])


def _batch(seq_lens: list[int], query_lens: list[int] | None = None) -> ForwardBatch:
    """Rows of the given lengths, of which the last tokens are computed in this step."""
    query_lens = query_lens or seq_lens
    positions = torch.cat([torch.arange(end - count, end) for end, count in zip(seq_lens, query_lens, strict=True)])
    empty = torch.empty(0, dtype=torch.int64)
    return ForwardBatch(
        input_ids=torch.zeros_like(positions),
        positions=positions,
        slot_mapping=empty,
        query_start=torch.tensor([0, *query_lens]).cumsum(0).int(),
        seq_lens=torch.tensor(seq_lens).int(),
        block_table=empty,
        logits_indices=empty,
        query_start_np=np.cumsum([0, *query_lens], dtype=np.int32),
        seq_lens_np=np.array(seq_lens, np.int32),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )


def test_dynamic_ntk_gives_each_row_the_base_of_its_length() -> None:
    config = _hf_config({"rope_type": "dynamic", "factor": 3.0})
    config.max_position_embeddings = 100
    rotary = _rotary(config.to_dict(), 400)
    assert isinstance(rotary, DynamicNTKRotaryEmbedding)
    seq_lens, query_lens = [350, 90, 120, 101], [350, 1, 1, 20]
    batch = _batch(seq_lens, query_lens)
    step = rotary.prepare(batch)
    rows = step.cos_sin[step.positions].split(query_lens)
    for row, positions, length in zip(rows, batch.positions.split(query_lens), seq_lens, strict=True):
        frequencies, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=length)
        angles = positions[:, None].float() * frequencies
        torch.testing.assert_close(row, torch.cat((angles.cos(), angles.sin()), -1), rtol=0, atol=2e-4)


def test_dynamic_ntk_served_inside_the_trained_length_is_plain() -> None:
    hf_config = {"max_position_embeddings": 128, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}
    rotary = _rotary(hf_config, 128)
    assert type(rotary) is RotaryEmbedding
    assert torch.equal(rotary.cos_sin, _table({"max_position_embeddings": 128}, 128))


def test_odd_width_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="even"):
        _rotary({"max_position_embeddings": 64, "partial_rotary_factor": 0.52}, 64)
