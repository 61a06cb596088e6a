"""Linear layers: fused outputs, shards of several ranks, and the quantization seam."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from ascend_vllm.distributed.parallel_context import ParallelContext, Shard
from ascend_vllm.errors import ConfigError
from ascend_vllm.layers.base import WeightSlot
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.layers.embedding import Embedding, LMHead
from ascend_vllm.layers.linear import (
    ColumnParallelLinear,
    Linear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from ascend_vllm.layers.quantization.base import LayerKind, LinearLayer, QuantMethod, QuantScheme
from ascend_vllm.layers.quantization.unquantized import Unquantized

HIDDEN = 24


def _context(rank: int = 0, size: int = 1) -> BuildContext:
    return BuildContext(torch.float32, torch.device("cpu"), ParallelContext(rank, size))


def _fill(layer: Linear) -> dict[str, torch.Tensor]:
    """Fills a layer as the loader does; returns the whole tensors by name, the same for every rank."""
    weights = {}
    for index, slot in enumerate(layer.slots()):
        weights[slot.name] = torch.randn(slot.shape, generator=torch.Generator().manual_seed(index))
        slot.fill(weights[slot.name])
    layer.after_load()
    return weights


def _x() -> torch.Tensor:
    return torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(99))


def _qkv(context: BuildContext) -> QKVParallelLinear:
    return QKVParallelLinear(context, "attn", HIDDEN, head_size=8, num_heads=4, num_kv_heads=2, bias=True)


def test_qkv_is_three_projections_side_by_side() -> None:
    layer = _qkv(_context())
    weights = _fill(layer)
    parts = layer.forward(_x()).split(layer.output_sizes, dim=-1)
    for part, name in zip(parts, ("q_proj", "k_proj", "v_proj"), strict=True):
        expected = _x() @ weights[f"attn.{name}.weight"].T + weights[f"attn.{name}.bias"]
        torch.testing.assert_close(part, expected)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_share_qkv_by_heads(num_ranks: int) -> None:
    """Query heads are split; where there are more ranks than KV heads, neighbours hold the same one."""
    whole = _qkv(_context())
    _fill(whole)
    query, key, value = whole.forward(_x()).split(whole.output_sizes, dim=-1)
    for rank in range(num_ranks):
        layer = _qkv(_context(rank, num_ranks))
        _fill(layer)
        assert (layer.num_heads, layer.num_kv_heads) == (4 // num_ranks, 1)
        parts = layer.forward(_x()).split(layer.output_sizes, dim=-1)
        kv_head = rank * 2 // num_ranks
        torch.testing.assert_close(parts[0], query.chunk(num_ranks, dim=-1)[rank])
        torch.testing.assert_close(parts[1], key.chunk(2, dim=-1)[kv_head])
        torch.testing.assert_close(parts[2], value.chunk(2, dim=-1)[kv_head])


def test_ranks_share_merged_columns() -> None:
    def make(context: BuildContext) -> MergedColumnParallelLinear:
        return MergedColumnParallelLinear(
            context, "mlp", ("gate_proj", "up_proj"), HIDDEN, (32, 32), merged_name="gate_up_proj"
        )

    whole = make(_context())
    weights = _fill(whole)
    gate, up = whole.forward(_x()).chunk(2, dim=-1)
    torch.testing.assert_close(gate, _x() @ weights["mlp.gate_proj.weight"].T)
    for rank in range(2):
        layer = make(_context(rank, 2))
        _fill(layer)
        expected = torch.cat((gate.chunk(2, dim=-1)[rank], up.chunk(2, dim=-1)[rank]), dim=-1)
        torch.testing.assert_close(layer.forward(_x()), expected)


def test_row_parallel_parts_add_up() -> None:
    whole = RowParallelLinear(_context(), "down_proj", HIDDEN, 10)
    _fill(whole)
    parts = []
    for rank in range(3):
        layer = RowParallelLinear(_context(rank, 3), "down_proj", HIDDEN, 10)
        _fill(layer)
        parts.append(layer.forward(_x().chunk(3, dim=-1)[rank].contiguous()))
    torch.testing.assert_close(sum(parts), whole.forward(_x()))


def test_column_parallel_splits_its_outputs() -> None:
    whole = ColumnParallelLinear(_context(), "proj", HIDDEN, 12, bias=True)
    weights = _fill(whole)
    torch.testing.assert_close(whole.forward(_x()), _x() @ weights["proj.weight"].T + weights["proj.bias"])
    parts = [ColumnParallelLinear(_context(rank, 2), "proj", HIDDEN, 12, bias=True) for rank in range(2)]
    for part in parts:
        _fill(part)
    torch.testing.assert_close(torch.cat([part.forward(_x()) for part in parts], dim=-1), whole.forward(_x()))


def test_uneven_shards_name_the_flag() -> None:
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 3 .* 4 attention heads"):
        _qkv(_context(0, 3))
    with pytest.raises(ConfigError, match=r"2 KV heads .* --tensor-parallel-size 5"):
        ParallelContext(0, 5).shard_or_replicate(2, "KV heads")
    assert ParallelContext(1, 2).shard_or_replicate(8, "KV heads") == Shard(4, 4)


def test_use_before_loading_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"attn\.qkv_proj"):
        _qkv(_context()).forward(_x())


def test_embedding_offset() -> None:
    embedding = Embedding(_context(), "positions", 6, 4, offset=2)
    embedding.slots()[0].fill(torch.arange(24.0).view(6, 4))
    torch.testing.assert_close(embedding.forward(torch.tensor([0, 3])), torch.arange(24.0).view(6, 4)[[2, 5]])


class _RowScaled(QuantMethod):
    """8-bit weights with a scale per output."""

    def create_weights(self, layer: LinearLayer) -> list[WeightSlot]:
        self.levels = torch.empty(layer.out_features, layer.in_features, dtype=torch.int8)
        self.scales = torch.empty(layer.out_features)
        name = layer.outputs[0].name
        return [
            WeightSlot(f"{name}.qweight", tuple(self.levels.shape), self.levels),
            WeightSlot(f"{name}.scales", tuple(self.scales.shape), self.scales),
        ]

    def after_load(self, layer: LinearLayer) -> None:  # noqa: ARG002
        self.weight = self.levels.float() * self.scales[:, None]

    def apply(self, layer: LinearLayer, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, layer.bias)


class _OnlyHeads(QuantScheme):
    """Quantizes heads."""

    def method_for(self, layer: LinearLayer) -> QuantMethod:
        return _RowScaled() if layer.kind is LayerKind.LM_HEAD else Unquantized()


def test_a_scheme_chooses_the_method_of_each_layer() -> None:
    context = BuildContext(torch.float32, torch.device("cpu"), quant=_OnlyHeads())
    plain = ColumnParallelLinear(context, "proj", HIDDEN, 6)
    assert [slot.name for slot in plain.slots()] == ["proj.weight"]
    quantized = LMHead(context, "lm_head", HIDDEN, 6, bias=True)
    assert [slot.name for slot in quantized.slots()] == ["lm_head.qweight", "lm_head.scales", "lm_head.bias"]
    levels, scales, bias = torch.ones(6, HIDDEN, dtype=torch.int8), torch.arange(6.0), torch.full((6,), 0.5)
    for slot, value in zip(quantized.slots(), (levels, scales, bias), strict=True):
        slot.fill(value)
    quantized.after_load()
    torch.testing.assert_close(quantized.forward(_x()), _x().sum(-1, keepdim=True) * scales + 0.5)


_DROP_A_TABLE = """
import threading, psutil, torch
from ascend_vllm.distributed.parallel_context import ParallelContext
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.layers.embedding import Embedding, VocabParallelEmbedding

def resident():
    return psutil.Process().memory_info().rss >> 20

def work():
    context = BuildContext(torch.float32, torch.device("cpu"), ParallelContext(0, 1))
    for kind in (Embedding, VocabParallelEmbedding):
        table = kind(context, "embed", 98304, 64)
        table.slots()[0].target.fill_(1)
        held = resident()
        del table
        print(held - resident())

work()
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def test_tables_give_their_memory_back_whatever_malloc_keeps() -> None:
    """malloc raises both limits in servers that run for a while, and never trims the top of a thread's arena."""
    limits = {"MALLOC_TRIM_THRESHOLD_": str(64 << 20), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
    run = subprocess.run(
        [sys.executable, "-c", _DROP_A_TABLE], env=os.environ | limits, capture_output=True, text=True, check=True
    )
    freed_mib = [int(line) for line in run.stdout.split()]
    assert len(freed_mib) == 4
    assert min(freed_mib) > 20, freed_mib
