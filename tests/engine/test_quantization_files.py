"""What a model directory says of its quantization, in config.json or beside it."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from ascend_vllm.args.quantization_files import check_quantization, stated_quantization
from ascend_vllm.errors import ConfigError, ModelLoadError

OLD_AWQ = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}
OLD_GPTQ = {"bits": 4, "group_size": 128, "desc_act": False, "sym": True, "damp_percent": 0.01}
SMOOTH = {"qkv": "per-tensor", "out": "per-token", "fc1": "per-tensor", "fc2": "per-token", "type": "int8"}
DESCRIPTION = {"model_quant_type": "W8A8_DYNAMIC", "model.layers.0.self_attn.q_proj.weight": "W8A8_DYNAMIC"}


@pytest.mark.parametrize(
    ("files", "config", "stated"),
    [
        ({}, {}, {}),
        ({}, {"quantization_config": {}}, {}),
        ({"quantize_config.json": OLD_GPTQ}, {"quantization_config": {"bits": 8}}, {"bits": 8}),
        ({}, {"compression_config": {"format": "x"}}, {"quant_method": "compressed-tensors", "format": "x"}),
        ({"quant_config.json": OLD_AWQ}, {}, {"quant_method": "awq"} | OLD_AWQ),
        ({"quantize_config.json": OLD_AWQ}, {}, {"quant_method": "awq"} | OLD_AWQ),
        ({"quantize_config.json": OLD_GPTQ}, {}, {"quant_method": "gptq"} | OLD_GPTQ),
        (
            {"quantize_config.json": OLD_GPTQ | {"quant_method": "awq"}},
            {},
            {"quant_method": "awq"} | OLD_GPTQ,
        ),
        ({"quant_config.json": SMOOTH}, {}, {"quant_method": "smoothquant"} | SMOOTH),
        ({"hf_quant_config.json": {"producer": {}}}, {}, {"quant_method": "modelopt", "producer": {}}),
        (
            {"quant_model_description.json": DESCRIPTION, "quant_model_description_w8a8.json": {"of": "w8a8"}},
            {},
            {"quant_method": "ascend", "description": DESCRIPTION},
        ),
        (
            {"quant_model_description.json": DESCRIPTION, "quant_model_description_w8a8.json": {"of": "w8a8"}},
            {"quantize": "w8a8"},
            {"quant_method": "ascend", "description": {"of": "w8a8"}},
        ),
    ],
)
def test_what_files_say(
    files: dict[str, dict[str, Any]], config: dict[str, Any], stated: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    for name, values in files.items():
        (tmp_path / name).write_text(json.dumps(values))
    assert stated_quantization(tmp_path, config) == stated


def test_broken_files_are_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "quant_config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match=r"quant_config\.json must hold a JSON object"):
        stated_quantization(tmp_path, {})


@pytest.mark.parametrize(
    ("requested", "stated", "agrees"),
    [
        (None, "awq", True),
        ("awq", None, True),
        ("awq", "awq", True),
        ("awq", "gptq", False),
        ("smooth_quant", "smoothquant", True),
        ("smoothquant", "smooth_quant", True),
        ("smoothquant", "compressed-tensors", False),
        ("weight_only_int8", "compressed-tensors", True),
        ("awq_marlin", "awq", True),
        ("gptq_marlin", "gptq", True),
        ("gptq_marlin", "awq", False),
    ],
)
def test_the_flag_confirms_or_contradicts(requested: str | None, stated: str | None, agrees: bool) -> None:
    values = {} if stated is None else {"quant_method": stated}
    if agrees:
        check_quantization(requested, values)
        return
    with pytest.raises(ConfigError) as caught:
        check_quantization(requested, values)
    assert str(caught.value) == (
        f"Quantization method specified in the model config ({stated}) does not match the quantization method "
        f"specified in the `quantization` argument ({requested})."
    )
