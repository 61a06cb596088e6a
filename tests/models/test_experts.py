"""Mixtures of experts: DeepSeek's blocks against transformers, layouts of checkpoints, ranks, refusals."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from ascend_vllm.args.hf_files import read_hf_config
from ascend_vllm.config.arch import ArchConfig, ExpertsConfig
from ascend_vllm.config.model import LoadConfig
from ascend_vllm.distributed.parallel_context import ParallelContext, Shard
from ascend_vllm.errors import ConfigError, ModelLoadError
from ascend_vllm.layers.base import Layer
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.layers.experts import Experts
from ascend_vllm.layers.quantization.base import QuantScheme
from ascend_vllm.models.blocks import MoE
from ascend_vllm.models.loader import load_model
from tests.distributed.thread_ranks import on_ranks
from tests.models.paged_driver import PagedDriver, make_model_config, random_tokens
from tests.plain_arch import make_arch
from tests.tiny_models import VOCAB_SIZE, tiny_model

HIDDEN, INNER, COUNT = 32, 24, 16
CPU = torch.device("cpu")


def _fill(layer: Layer, tensors: Mapping[str, torch.Tensor]) -> None:
    for part in layer.layers():
        for slot in part.slots():
            assert tuple(tensors[slot.name].shape) == slot.shape, slot.name
            slot.fill(tensors[slot.name])
        part.after_load()


def _deepseek(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Draws the weights of a block; returns them by the names of a checkpoint, and some inputs."""
    generator = torch.Generator().manual_seed(3)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        scale = 3.0 if name == "gate.weight" else 1.0
        tensor.data.copy_(scale * torch.randn(tensor.shape, generator=generator) / tensor.shape[-1] ** 0.5)
    return {f"mlp.{name}": tensor for name, tensor in module.state_dict().items()}, torch.randn(
        50, HIDDEN, generator=generator
    )


def _block(
    experts: ExpertsConfig, tensors: Mapping[str, torch.Tensor], parallel: ParallelContext | None = None
) -> MoE:
    arch = msgspec.structs.replace(make_arch(1, hidden_size=HIDDEN), experts=experts, activation="silu")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    context = BuildContext(torch.float32, CPU, parallel or ParallelContext(), checkpoint_shapes=shapes)
    block = MoE(arch, context, "mlp")
    _fill(block, tensors)
    return block


SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INNER,
    "n_routed_experts": COUNT,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
GROUPED: dict[str, Any] = {
    "count": COUNT,
    "num_chosen": 3,
    "intermediate_size": INNER,
    "num_groups": 4,
    "num_chosen_groups": 2,
    "scale": 2.5,
    "shared_size": 2 * INNER,
    "shared_name": "shared_experts",
}


@pytest.mark.parametrize("renormalizes", [True, False])
def test_blocks_of_deepseek_v3(renormalizes: bool) -> None:
    module = DeepseekV3MoE(transformers.DeepseekV3Config(**SIZES, norm_topk_prob=renormalizes))
    tensors, x = _deepseek(module)
    experts = ExpertsConfig(**GROUPED, scoring="sigmoid", has_correction=True, renormalizes=renormalizes)
    with torch.no_grad():
        torch.testing.assert_close(_block(experts, tensors).forward(x), module(x[None])[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_blocks_of_deepseek_v2(method: str) -> None:
    module = DeepseekV2Moe(transformers.DeepseekV2Config(**SIZES, topk_method=method))
    tensors, x = _deepseek(module)
    groups = {"num_groups": 1, "num_chosen_groups": 1} if method == "greedy" else {}
    experts = ExpertsConfig(**GROUPED | groups, renormalizes=False)
    with torch.no_grad():
        torch.testing.assert_close(_block(experts, tensors).forward(x), module(x[None])[0], rtol=1e-4, atol=1e-4)


# ---- layouts of checkpoints ------------------------------------------------------------------------------------


def _stacks() -> tuple[ExpertsConfig, dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    count, inner = 6, 20
    tensors = {
        "mlp.gate.weight": torch.randn(count, HIDDEN, generator=generator),
        "mlp.experts.gate_up_proj": torch.randn(count, 2 * inner, HIDDEN, generator=generator) / 6,
        "mlp.experts.down_proj": torch.randn(count, HIDDEN, inner, generator=generator) / 5,
    }
    experts = ExpertsConfig(count=count, num_chosen=2, intermediate_size=inner)
    return experts, tensors, torch.randn(9, HIDDEN, generator=generator)


def _layouts(tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The same weights as matrices per expert, and as stacks with outputs first and with inputs first."""
    rest = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    gate_up, down = tensors["mlp.experts.gate_up_proj"], tensors["mlp.experts.down_proj"]
    single = dict(rest)
    for index, (gate, up) in enumerate(tensor.chunk(2) for tensor in gate_up):
        single |= {f"mlp.experts.{index}.gate_proj.weight": gate, f"mlp.experts.{index}.up_proj.weight": up}
        single[f"mlp.experts.{index}.down_proj.weight"] = down[index]
    turned = {name: tensor.transpose(1, 2) for name, tensor in tensors.items() if ".experts." in name}
    return [single, tensors, rest | turned]


@pytest.mark.parametrize("parallel", [ParallelContext(1, 2), ParallelContext(1, 2, expert_parallel=True)])
def test_every_layout_of_a_checkpoint_holds_the_same_weights(parallel: ParallelContext) -> None:
    experts, tensors, x = _stacks()
    for context in (ParallelContext(), parallel):
        results = [_block(experts, layout, context).forward(x) for layout in _layouts(tensors)]
        assert bool(results[0].isfinite().all())
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])


def test_a_stack_in_a_file_is_loaded(tmp_path: pathlib.Path) -> None:
    source = pathlib.Path(tiny_model("qwen3-moe"))
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    weights = load_file(source / "model.safetensors")
    for prefix in sorted({name.split(".experts.")[0] for name in weights if ".experts." in name}):

        def stack(matrix: str, prefix: str = prefix) -> torch.Tensor:
            return torch.stack([weights.pop(f"{prefix}.experts.{index}.{matrix}.weight") for index in range(16)])

        weights[f"{prefix}.experts.gate_up_proj"] = torch.cat((stack("gate_proj"), stack("up_proj")), dim=1)
        weights[f"{prefix}.experts.down_proj"] = stack("down_proj")
    save_file(weights, tmp_path / "model.safetensors")
    prompt = {0: random_tokens(40, VOCAB_SIZE, seed=2)}
    plain = PagedDriver(make_model_config(source)).step(prompt)[0]
    assert torch.equal(PagedDriver(make_model_config(tmp_path)).step(prompt)[0], plain)


_LOAD = """
import re, sys
from tests.models.paged_driver import load, make_model_config

def memory(name):
    with open("/proc/self/status") as file:
        return int(re.search(rf"^{name}:\\s+(\\d+) kB$", file.read(), re.MULTILINE)[1]) * 1024

# libraries are loaded once, and are not part of what is measured
load(make_model_config(sys.argv[1], dtype="bfloat16"))
before = memory("VmRSS")
model = load(make_model_config(sys.argv[2], dtype="bfloat16"))
print(memory("VmHWM") - before)
"""


@pytest.mark.parametrize("layout", ["single", "stacks"])
def test_weights_are_never_in_memory_twice(tmp_path: pathlib.Path, layout: str) -> None:
    """Not even while they are loaded: they are packed as they are read from mapped files."""
    small = tiny_model("qwen3-moe")
    config = transformers.AutoConfig.from_pretrained(
        small, num_experts=64, moe_intermediate_size=512, decoder_sparse_step=1, num_hidden_layers=6
    )
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        shapes = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    weights = {}
    for name, weight in shapes.items():
        tensor = torch.zeros(weight.shape, dtype=torch.bfloat16)
        if layout == "stacks" or ".experts." not in name:
            weights[name] = tensor
            continue
        prefix, _, matrices = name.rpartition(".")
        for index, expert in enumerate(tensor):
            names = ("gate_proj", "up_proj") if matrices == "gate_up_proj" else ("down_proj",)
            for matrix, part in zip(names, expert.chunk(len(names)), strict=True):
                weights[f"{prefix}.{index}.{matrix}.weight"] = part.clone()
    save_file(weights, tmp_path / "model.safetensors")
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size > 70 << 20
    run = [sys.executable, "-c", _LOAD, small, str(tmp_path)]
    growth = int(subprocess.run(run, stdout=subprocess.PIPE, check=True, timeout=120).stdout)
    # beside the weights there are 1 to 3 MB of slots and pages of the file
    assert 0.9 * size < growth < size + (4 << 20)


def test_which_layers_have_a_window() -> None:
    """By the families' rules, and by layer_types where it is written."""
    config = read_hf_config(tiny_model("qwen2-moe-window")) | {"num_hidden_layers": 5}

    def windows(**changes: Any) -> list[int | None]:
        return [plan.sliding_window for plan in ArchConfig.from_hf(config | changes).layers]

    layer_types = ["full_attention", "sliding_attention"] * 3
    assert windows(layer_types=None, max_window_layers=4) == [24, None, 24, None, None]
    assert windows(layer_types=None, max_window_layers=28) == [24, None, 24, None, 24]
    assert windows(layer_types=layer_types) == [None, 24, None, 24, None]
    assert windows(layer_types=layer_types, use_sliding_window=False) == [None] * 5
    assert windows(architectures=["Qwen3MoeForCausalLM"], layer_types=layer_types) == [24] * 5


# ---- ranks -----------------------------------------------------------------------------------------------------


def test_experts_of_ranks() -> None:
    """They are contiguous, and the first ranks have one more."""
    ranks = [ParallelContext(rank, 4, expert_parallel=True) for rank in range(4)]
    assert [rank.experts(6) for rank in ranks] == [Shard(0, 2), Shard(2, 2), Shard(4, 1), Shard(5, 1)]
    assert ranks[1].inside_of_experts(7) == Shard(0, 7)
    assert ParallelContext(1, 2).experts(6) == Shard(0, 6)
    assert ParallelContext(1, 2).inside_of_experts(8) == Shard(4, 4)
    with pytest.raises(ConfigError, match="--tensor-parallel-size 4 is too much for 3 experts"):
        ranks[0].experts(3)


# 6 experts do not divide evenly among 4 ranks
@pytest.mark.parametrize(("name", "size"), [("mixtral", 4), ("qwen2-moe", 2), ("qwen3-moe", 2)])
def test_ranks_with_whole_experts_generate_what_one_generates(name: str, size: int) -> None:
    config = make_model_config(tiny_model(name))

    def run(context: BuildContext) -> tuple[torch.Tensor, list[int]]:
        parallel = dataclasses.replace(context.parallel, expert_parallel=True)
        own = dataclasses.replace(context, parallel=parallel)
        driver = PagedDriver(config, model=load_model(config, LoadConfig(use_tqdm=False), own))
        first = driver.step({0: random_tokens(57, VOCAB_SIZE, seed=3)})[0]
        tokens = [int(first[-1].argmax())]
        for _ in range(8):
            tokens.append(int(driver.step({0: tokens[-1:]})[0][-1].argmax()))
        return first, tokens

    ((expected, text),) = on_ranks(1, run)
    for log_probs, tokens in on_ranks(size, run):
        torch.testing.assert_close(log_probs, expected, rtol=1e-4, atol=1e-4)
        assert tokens == text


# ---- what is refused -------------------------------------------------------------------------------------------


class _OtherScheme(QuantScheme):
    def method_for(self, layer: Any) -> Any:  # noqa: ARG002
        return None


def test_formats_without_experts_are_refused() -> None:
    experts = ExpertsConfig(count=2, num_chosen=1, intermediate_size=8)
    quantized = BuildContext(torch.float32, CPU, quant=_OtherScheme())
    with pytest.raises(ModelLoadError, match=r"experts\.0\.gate_proj is quantized in another way"):
        Experts(quantized, "experts", experts, 8, "silu")
