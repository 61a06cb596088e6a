"""Implements the ops of `registry.OPS` with torch_npu's fused operators.

Importing this module registers them; the NPU platform lists it among the modules that its workers import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ascend_vllm.ops import ascend_elementwise, ascend_experts, ascend_lora, ascend_quantized, ascend_sampling
from ascend_vllm.ops.ascend_formats import format_stack, format_weight
from ascend_vllm.ops.ascend_quantized import NpuInt8Weight, make_coded_weight
from ascend_vllm.ops.ascend_quantized_experts import NpuQuantizedExperts
from ascend_vllm.ops.experts import STACK_FORMATS
from ascend_vllm.ops.gemm import WEIGHT_FORMATS
from ascend_vllm.ops.lora import ADAPTER_FORMS
from ascend_vllm.ops.native import import_op_modules
from ascend_vllm.ops.quantized_weights import CODED_FORMS, EXPERT_FORMS, INT8_FORMS, CodedForm
from ascend_vllm.ops.registry import implement_on_npus

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    implementation.__name__: implementation
    for implementation in (
        ascend_elementwise.rms_norm,
        ascend_elementwise.fused_add_rms_norm,
        ascend_elementwise.layer_norm,
        ascend_elementwise.rotary_embedding,
        ascend_elementwise.silu_and_mul,
        ascend_elementwise.gelu_and_mul,
        ascend_elementwise.add_rows,
        ascend_elementwise.concat_columns,
        ascend_experts.route_tokens,
        ascend_experts.grouped_experts_mlp,
        ascend_quantized.weight_only_linear,
        ascend_sampling.apply_token_bitmask,
        ascend_sampling.draw_tokens,
        ascend_sampling.token_logprobs,
    )
}


import_op_modules()
_library = implement_on_npus(IMPLEMENTATIONS)
WEIGHT_FORMATS["npu"] = format_weight
STACK_FORMATS["npu"] = format_stack
CODED_FORMS["npu"] = CodedForm(make_coded_weight, group_multiple=32, widened=("float8_e4m3",))
INT8_FORMS["npu"] = NpuInt8Weight
EXPERT_FORMS["npu"] = NpuQuantizedExperts
ADAPTER_FORMS["npu"] = ascend_lora.make_slots
