"""Mixtures of experts on a simulated NPU: which operators compute them, every routing, ranks."""

from __future__ import annotations

import dataclasses
import math
import zlib
from typing import Any

import msgspec
import pytest
import torch

from ascend_vllm.config.arch import ExpertsConfig
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.models.blocks import MoE
from ascend_vllm.ops.ascend import IMPLEMENTATIONS
from tests.distributed.thread_ranks import on_ranks
from tests.npu.launches import launched_by
from tests.npu.recorder import Recorder
from tests.plain_arch import make_arch

HIDDEN, INNER, COUNT, TOKENS = 64, 32, 16, 9
X = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(4))

_SIZES: dict[str, Any] = {"count": COUNT, "num_chosen": 3, "intermediate_size": INNER}
_SHARED: dict[str, Any] = {"shared_size": 48, "shared_name": "shared_experts"}
_GROUPS: dict[str, Any] = {"num_groups": 4, "num_chosen_groups": 2, "scale": 2.5}
MIXTRAL = ExpertsConfig(**_SIZES)
QWEN2 = ExpertsConfig(**_SIZES, **_SHARED, renormalizes=False, has_shared_gate=True)
DEEPSEEK_V2 = ExpertsConfig(**_SIZES, **_SHARED, **_GROUPS, renormalizes=False)
DEEPSEEK_V3 = ExpertsConfig(**_SIZES, **_SHARED, **_GROUPS, scoring="sigmoid", has_correction=True)
FAMILIES = {"mixtral": MIXTRAL, "qwen2": QWEN2, "deepseek-v2": DEEPSEEK_V2, "deepseek-v3": DEEPSEEK_V3}
FAMILIES["sigmoid"] = msgspec.structs.replace(DEEPSEEK_V3, renormalizes=False)


def make_block(experts: ExpertsConfig, context: BuildContext) -> MoE:
    """A layer with the same weights on every device."""
    arch = msgspec.structs.replace(make_arch(1, hidden_size=HIDDEN), experts=experts, activation="silu")
    block = MoE(arch, context, "mlp")
    for layer in block.layers():
        for slot in layer.slots():
            generator = torch.Generator().manual_seed(zlib.crc32(slot.name.encode()))
            gain = 3.0 if slot.name == "mlp.gate.weight" else 1.0
            slot.fill(torch.randn(slot.shape, generator=generator) * gain / math.sqrt(slot.shape[-1]))
        layer.after_load()
    return block


def results(experts: ExpertsConfig, device: str, size: int = 1, *, expert_parallel: bool = False) -> torch.Tensor:
    """[TOKENS, HIDDEN] of a layer in float16, by so many ranks."""

    def forward(context: BuildContext) -> torch.Tensor:
        parallel = dataclasses.replace(context.parallel, expert_parallel=expert_parallel)
        block = make_block(experts, dataclasses.replace(context, parallel=parallel))
        return block.forward(X.half().to(device)).cpu()

    first, *others = on_ranks(size, forward, torch.float16, device)
    assert all(torch.equal(first, other) for other in others)
    return first


def _assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got.float(), expected.float(), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("experts", FAMILIES.values(), ids=FAMILIES)
def test_layers_compute_what_they_do_on_the_cpu(experts: ExpertsConfig) -> None:
    got = results(experts, "npu")
    _assert_close(got, results(experts, "cpu"))
    _assert_close(results(experts, "npu", 2), got)
    # 3 ranks have 6, 5 and 5 experts
    for size in (2, 3):
        _assert_close(results(experts, "npu", size, expert_parallel=True), got)


# ---- operators -----------------------------------------------------------------------------------------------------


def _launched(name: str, *arguments: Any) -> list[str]:
    """Operators of torch_npu that an op launches, in order; the host waits for none, and gives the device nothing."""
    with Recorder() as recorder:
        IMPLEMENTATIONS[name](*arguments)
    launched = recorder.launched()
    assert not {"aten::_local_scalar_dense", "aten::nonzero"}.intersection(launched)
    tensors = [value for _, given in recorder.calls for value in given.values() if isinstance(value, torch.Tensor)]
    assert {tensor.device.type for tensor in tensors} == {"npu"}
    return [call for call in launched if call.startswith("npu::")]


@pytest.mark.parametrize(
    ("routing", "operator"),
    [
        (("softmax", True, 1, 1, 1.0), "npu::npu_moe_gating_top_k_softmax"),
        (("softmax", False, 4, 2, 16.0), "npu::npu_moe_gating_top_k"),
        (("sigmoid", True, 1, 1, 2.5), "npu::npu_moe_gating_top_k"),
        # what it does not compute: no renormalising after a sigmoid, groups of two
        (("sigmoid", False, 1, 1, 1.0), None),
        (("softmax", True, 8, 4, 1.0), None),
    ],
)
def test_operators_choose_experts(routing: tuple[Any, ...], operator: str | None) -> None:
    logits = torch.randn(TOKENS, COUNT, dtype=torch.float16).npu()
    assert _launched("route_tokens", logits, None, 3, *routing) == ([] if operator is None else [operator])


def test_operators_of_a_layer() -> None:
    ids = torch.tensor([[0, 3], [5, 1]], dtype=torch.int32).npu()
    weights = torch.ones(2, 2).npu()
    gate_up = torch.randn(4, 2 * INNER, HIDDEN).half().npu().transpose(1, 2)
    down = torch.randn(4, HIDDEN, INNER).half().npu().transpose(1, 2)
    arguments = (X[:2].half().npu(), ids, weights, gate_up, down, "silu", 8)
    assert _launched("grouped_experts_mlp", *arguments) == [
        "npu::npu_moe_init_routing_v2",
        "npu::npu_grouped_matmul",
        "npu::npu_swiglu",
        "npu::npu_grouped_matmul",
        "npu::_npu_moe_token_unpermute",
    ]


def test_weights_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, launched = launched_by(lambda: results(MIXTRAL, "npu"))
    assert "aclnnGroupedMatmulV5" in launched
    monkeypatch.setenv("VLLM_ASCEND_ENABLE_NZ", "2")
    tiled, launched = launched_by(lambda: results(MIXTRAL, "npu"))
    assert "aclnnGroupedMatmulWeightNz" in launched
    _assert_close(tiled, plain)
