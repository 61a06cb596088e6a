"""Slots that share a tensor, take a part of one, or take integers; loaded from files by the loader itself."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ascend_vllm.config.model import LoadConfig, ModelConfig
from ascend_vllm.distributed.parallel_context import ParallelContext, Shard
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.layers.base import Layer, WeightSlot
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.layers.linear import Linear, LinearOutput
from ascend_vllm.models import loader
from ascend_vllm.models.blocks import CausalLM
from ascend_vllm.models.llama import LlamaForCausalLM
from ascend_vllm.models.loader import load_model
from ascend_vllm.models.registry import MODELS
from tests.distributed.thread_ranks import on_ranks
from tests.models.paged_driver import PagedDriver, make_model_config, random_tokens
from tests.plain_arch import make_arch
from tests.tiny_models import VOCAB_SIZE, tiny_model

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# [experts, out, in]
STACK = torch.arange(4 * 6 * 8, dtype=torch.float32).view(4, 6, 8)
# shapes of one of four experts of width 6, in a model of width 8
_STACKS = {"gate_up": (12, 8), "down": (8, 6)}

# ---- whole models ------------------------------------------------------------------------------------------


def _fuse(layer: Linear, context: BuildContext) -> None:
    """Makes the matrices of a layer ranges of one in the checkpoint, which is called as the layer is."""
    total = sum(output.total for output in layer.outputs)
    outputs, start = [], 0
    for output in layer.outputs:
        shard = Shard(start + output.shard.start, output.shard.size)
        outputs.append(LinearOutput(layer.prefix, total, shard))
        start += output.total
    has_bias = layer.bias is not None
    Linear.__init__(layer, context, layer.prefix, outputs, layer.total_in_features, bias=has_bias)


class FusedLlama(LlamaForCausalLM):
    """Llama whose checkpoints have qkv_proj and gate_up_proj."""

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        for layer in self.decoder_layers:
            _fuse(layer.self_attn.qkv_proj, context)
            _fuse(layer.mlp.gate_up_proj, context)


def _fused_checkpoint(name: str, directory: pathlib.Path) -> pathlib.Path:
    shutil.copytree(tiny_model(name), directory)
    weights = load_file(directory / "model.safetensors")
    for parts, fused in ((("q_proj", "k_proj", "v_proj"), "qkv_proj"), (("gate_proj", "up_proj"), "gate_up_proj")):
        for first in [name for name in weights if f".{parts[0]}." in name]:
            tensors = [weights.pop(first.replace(parts[0], part)) for part in parts]
            weights[first.replace(parts[0], fused)] = torch.cat(tensors)
    save_file(weights, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", ["llama", "llama-biases"])
def test_a_fused_checkpoint_is_the_same_model(
    name: str, size: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole and on ranks, which take their heads of each of the fused matrices."""
    monkeypatch.setitem(MODELS, "FusedLlama", FusedLlama)
    plain = make_model_config(tiny_model(name))
    fused = make_model_config(_fused_checkpoint(name, tmp_path / name), architectures=["FusedLlama"])

    def run(context: BuildContext) -> list[torch.Tensor]:
        models = [load_model(config, LoadConfig(use_tqdm=False), context) for config in (plain, fused)]
        prompt = random_tokens(20, VOCAB_SIZE, seed=1)
        return [PagedDriver(plain, model=model).step({0: prompt})[0] for model in models]

    for expected, found in on_ranks(size, run):
        assert torch.equal(found, expected)


# ---- single layers -----------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class _Holder(Layer):
    """A layer of nothing but slots."""

    held: list[WeightSlot]
    num_loads: int = 0

    def slots(self) -> list[WeightSlot]:
        return self.held

    def after_load(self) -> None:
        self.num_loads += 1


class _Files:
    """Loads tensors of one file into layers."""

    def __init__(self, directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = directory / "model.safetensors"
        self._monkeypatch = monkeypatch

    def load(
        self, tensors: dict[str, torch.Tensor], *layers: Sequence[WeightSlot], load_format: str = "safetensors"
    ) -> list[_Holder]:
        holders = [_Holder(list(slots)) for slots in layers]

        class Model(CausalLM):
            def __init__(self, config: ModelConfig, context: BuildContext) -> None:
                del config, context
                self.parts = holders

            def forward(self, *_: Any) -> torch.Tensor:
                raise NotImplementedError

            def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
                raise NotImplementedError

        self._monkeypatch.setitem(MODELS, "Model", Model)
        if load_format in ("pt", "npcache"):
            self.path = self.path.with_name("pytorch_model.bin")
            torch.save(tensors, self.path)
        elif load_format == "safetensors":
            save_file(tensors, self.path)
        names = ("tiny",)
        config = ModelConfig(
            str(self.path.parent), names, "", "Model", make_arch(), {}, dtype="float32", max_model_len=1
        )
        context = BuildContext(torch.float32, torch.device("cpu"))
        load_model(config, LoadConfig(load_format=load_format, use_tqdm=False), context)
        return holders


@pytest.fixture
def files(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> _Files:
    """An empty directory of a model."""
    return _Files(tmp_path, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("starts", "shape"),
    [
        ((), (4, 6, 8)),
        ((2,), (2, 6, 8)),
        ((0, 3), (4, 3, 8)),
        ((0, 0, 4), (4, 6, 4)),
        # some experts, of these some outputs, of these some inputs
        ((1, 4, 2), (2, 2, 5)),
    ],
)
def test_stacked_experts_are_cut_along_any_axis(
    files: _Files, starts: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    target = torch.full(shape, math.nan, dtype=dtype)
    files.load({"experts": STACK}, [WeightSlot("experts", (4, 6, 8), target, starts)])
    places = [slice(start, start + size) for start, size in zip((*starts, 0, 0, 0), shape, strict=False)]
    assert torch.equal(target, STACK[tuple(places)].to(dtype))


def test_each_expert_of_a_stack_can_be_a_matrix_of_its_own(files: _Files) -> None:
    targets = [torch.empty(3, 8) for _ in range(4)]
    slots = [[WeightSlot("experts", (4, 6, 8), target, (index, 2))] for index, target in enumerate(targets)]
    holders = files.load({"experts": STACK}, *slots)
    assert torch.equal(torch.stack(targets), STACK[:, 2:5])
    assert [holder.num_loads for holder in holders] == [1] * 4


def _experts_of_rank(parallel: ParallelContext, split: str) -> tuple[list[WeightSlot], Callable[[], torch.Tensor]]:
    """Slots for a rank's part of two stacks, gate with up and down; and what the rank computes with them."""
    num_experts, width, hidden = 4, 6, 8
    experts, inner = Shard(0, num_experts), Shard(0, width)
    if split == "experts":
        experts = parallel.shard(num_experts, "experts")
    else:
        inner = parallel.shard(width, "width of experts")
    # [E, gate and up, in], and [E, out, down]
    gate_up = torch.full((experts.size, 2 * inner.size, hidden), math.nan)
    down = torch.full((experts.size, hidden, inner.size), math.nan)
    slots = [
        WeightSlot(
            "gate_up",
            (num_experts, 2 * width, hidden),
            gate_up[:, index * inner.size : (index + 1) * inner.size],
            (experts.start, index * width + inner.start),
        )
        for index in range(2)
    ]
    slots.append(WeightSlot("down", (num_experts, hidden, width), down, (experts.start, 0, inner.start)))
    x = torch.linspace(-1, 1, 3 * hidden).view(3, hidden)

    def sum_of_experts() -> torch.Tensor:
        gate, up = (x @ gate_up.transpose(1, 2)).chunk(2, dim=-1)
        return ((gate * up) @ down.transpose(1, 2)).sum(0)

    return slots, sum_of_experts


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("split", ["experts", "width"])
def test_ranks_share_stacked_experts(files: _Files, split: str, size: int) -> None:
    """By whole experts, or by outputs of gate and up and inputs of down: what the ranks compute adds up."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(4, *shape, generator=generator) for name, shape in _STACKS.items()}
    found = torch.zeros(3, 8)
    for rank in range(size):
        slots, sum_of_experts = _experts_of_rank(ParallelContext(rank, size), split)
        files.load(tensors, slots)
        found += sum_of_experts()
    x = torch.linspace(-1, 1, 3 * 8).view(3, 8)
    expected = torch.zeros(3, 8)
    for gate_up, down in zip(tensors["gate_up"], tensors["down"], strict=True):
        expected += ((x @ gate_up[:6].T) * (x @ gate_up[6:].T)) @ down.T
    torch.testing.assert_close(found, expected)


def test_experts_of_many_tensors_fill_one_stack(files: _Files) -> None:
    """A checkpoint with a matrix for each expert; the second rank has the last two of four, and half of each."""
    tensors = {f"experts.{index}.weight": STACK[index].clone() for index in range(2, 4)}
    stack = torch.full((2, 3, 8), math.nan)
    shard = ParallelContext(1, 2).shard(4, "experts")
    slots = [
        WeightSlot(f"experts.{shard.start + index}.weight", (6, 8), target, (3,))
        for index, target in enumerate(stack)
    ]
    files.load(tensors, slots)
    assert torch.equal(stack, STACK[2:, 3:])


def test_stacks_that_are_stored_transposed(files: _Files) -> None:
    """[E, in, out] in the checkpoint, and a part of it as [E, out, in] here."""
    stack = torch.full((4, 8, 2), math.nan)
    files.load({"experts": STACK}, [WeightSlot("experts", (4, 6, 8), stack.transpose(1, 2), (0, 4))])
    assert torch.equal(stack, STACK[:, 4:].transpose(1, 2))


def test_slots_of_one_name_are_all_filled(files: _Files) -> None:
    """In one layer and in several, each of which is ready once."""
    first, second, third, other = torch.empty(2), torch.empty(3), torch.empty(6), torch.empty(())
    holders = files.load(
        {"fused": torch.arange(6.0), "other": torch.tensor(7.0)},
        [WeightSlot("fused", (6,), first, (4,)), WeightSlot("fused", (6,), second, (1,))],
        [WeightSlot("other", (), other), WeightSlot("fused", (6,), third)],
    )
    assert first.tolist() == [4, 5]
    assert second.tolist() == [1, 2, 3]
    assert third.tolist() == [0, 1, 2, 3, 4, 5]
    assert other.item() == 7
    assert [holder.num_loads for holder in holders] == [1, 1]


@pytest.mark.parametrize("load_format", ["safetensors", "pt", "npcache"])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_load_as_they_are(files: _Files, dtype: torch.dtype, load_format: str) -> None:
    limits = torch.iinfo(dtype)
    values = torch.tensor([[limits.min, 0, 1], [limits.max, 2, 3]], dtype=dtype)
    whole, part = torch.empty(2, 3, dtype=dtype), torch.empty(2, 1, dtype=dtype)
    slots = [WeightSlot("packed", (2, 3), whole), WeightSlot("packed", (2, 3), part, (0, 2))]
    files.load({"packed": values}, slots, load_format=load_format)
    assert torch.equal(whole, values)
    assert torch.equal(part, values[:, 2:])


@pytest.mark.parametrize("load_format", ["safetensors", "pt"])
@pytest.mark.parametrize(
    ("found", "wanted", "words"),
    [
        (torch.float32, torch.int8, "has dtype torch.float32, but the model wants torch.int8"),
        (torch.bfloat16, torch.int32, "has dtype torch.bfloat16, but the model wants torch.int32"),
        (torch.int64, torch.int32, "has dtype torch.int64, but the model wants torch.int32"),
        (torch.int8, torch.uint8, "has dtype torch.int8, but the model wants torch.uint8"),
        (torch.int8, torch.float32, "which is not supported"),
        (torch.int32, torch.bfloat16, "which is not supported"),
    ],
)
def test_another_dtype_than_the_slots_is_refused(
    files: _Files, found: torch.dtype, wanted: torch.dtype, words: str, load_format: str
) -> None:
    """Even if another slot of the name would take it."""
    slots = [WeightSlot("x", (4,), torch.empty(4, dtype=dtype)) for dtype in (found, wanted)]
    with pytest.raises(ModelLoadError, match=re.escape(words)) as caught:
        files.load({"x": torch.zeros(4, dtype=found)}, slots, load_format=load_format)
    assert str(caught.value).startswith(f"{files.path}: tensor x has dtype ")


def test_a_stack_of_another_shape_is_refused(files: _Files) -> None:
    slots = [WeightSlot("experts", (4, 6, 8), torch.empty(6, 8), (index,)) for index in range(4)]
    with pytest.raises(ModelLoadError, match=re.escape("shape [3, 6, 8], but config.json asks for [4, 6, 8]")):
        files.load({"experts": STACK[:3].clone()}, slots)
    with pytest.raises(ModelLoadError, match=re.escape("tensor experts of shape [4, 6, 8] is missing")):
        files.load({}, slots)


@pytest.mark.parametrize("is_read", [False, True])
def test_values_are_looked_at_where_they_are_read(files: _Files, *, is_read: bool) -> None:
    values = torch.arange(6.0)
    values[3] = math.nan
    slots = [WeightSlot("x", (6,), torch.empty(2), (start,)) for start in (0, 3 if is_read else 4)]
    if is_read:
        with pytest.raises(ModelLoadError, match="tensor x has values that are not finite"):
            files.load({"x": values}, slots)
    else:
        files.load({"x": values}, slots)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(), (7,), (300, 1000), (3, 5, 7)], ids=str)
@pytest.mark.parametrize("others", [0.0, -1.0, "largest", "smallest"])
def test_a_value_that_is_not_finite_is_found_among_any(
    dtype: torch.dtype, shape: tuple[int, ...], others: float | str
) -> None:
    """The largest and smallest finite values, all of one sign, and in a tensor whose rows are not contiguous."""
    facts = torch.finfo(dtype)
    value = {"largest": facts.max, "smallest": facts.min}.get(str(others), others)
    values = torch.full((*shape[:-1], shape[-1] + 3) if shape else (), value, dtype=dtype)
    part = values[..., 1:-2] if shape else values
    assert loader._are_finite(part)
    for bad in (math.inf, -math.inf, math.nan, -math.nan):
        part[tuple(size - 1 for size in shape)] = bad
        assert not loader._are_finite(part), bad
        # what is beside the part does not count
        part[...] = value
        if shape:
            values[..., 0] = bad
            assert loader._are_finite(part)


def test_random_weights_of_shared_tensors_and_of_integers(files: _Files) -> None:
    upper, lower, levels = torch.zeros(3, 4), torch.zeros(3, 4), torch.ones(5, dtype=torch.int32)
    slots = [WeightSlot("x", (6, 4), upper), WeightSlot("x", (6, 4), lower, (3,)), WeightSlot("levels", (5,), levels)]
    (holder,) = files.load({}, slots, load_format="dummy")
    assert not upper.equal(lower)
    assert torch.cat([upper, lower]).count_nonzero() == 24
    assert levels.tolist() == [0] * 5
    assert holder.num_loads == 1
