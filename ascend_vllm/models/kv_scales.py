"""Scales of a KV cache in one byte per number, as checkpoints and --quantization-param-path have them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch

from ascend_vllm.errors import ModelLoadError
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.logger import init_logger
from ascend_vllm.models.blocks import CausalLM
from ascend_vllm.models.checkpoint import WeightFile

logger = init_logger(__name__)

# of keys, of values or, in old checkpoints, of both; compressed-tensors once named them after projections' outputs
_NAME = re.compile(r".*\blayers\.(\d+)\.(?:.*\.)?(?:([kv]|kv)_scale|([kv])_proj\.output_scale)")
# tensors that need no layer
IGNORED = (r".*\.(k|v|kv)_scale", r".*\.[kv]_proj\.output_scale")
# scales of checkpoints map the largest number to that of this format
_CHECKPOINT_DTYPE = "float8_e4m3fn"


def set_cache_formats(model: CausalLM, num_layers: int, files: Sequence[WeightFile], context: BuildContext) -> None:
    """Sets the format of the KV cache in all attention layers of a model, or of a stage of it.

    Args:
        model: before there is a cache.
        num_layers: of the whole model.
        files: of the checkpoint. Their scales are used for FP8 (E4M3) where `context.kv_layer_scales` is None: what
            they are scales of.
        context: with the format.

    Raises:
        ModelLoadError: a scale is not a positive number, or only some layers of the stage have scales.
    """
    cache_format = context.kv_cache
    if cache_format is None:
        return
    own = context.parallel.layers(num_layers)
    scales: dict[int, tuple[float, float]] = {}
    if context.kv_layer_scales is not None:
        scales = {index: (scale, scale) for index, scale in enumerate(context.kv_layer_scales)}
    elif cache_format.dtype == _CHECKPOINT_DTYPE and not cache_format.has_scales:
        scales = _checkpoint_scales(files, own)
    if cache_format.dtype == _CHECKPOINT_DTYPE and not cache_format.has_scales and not scales:
        logger.warning(
            "The scales of the FP8 KV cache are 1.0, since neither the checkpoint nor --quantization-param-path has "
            "any. Large numbers are cut to 448, small ones lose accuracy; --kv-cache-dtype int8 needs no scales."
        )
    for index, layer in zip(own, model.attention_layers, strict=True):
        layer.set_cache_format(cache_format, *scales.get(index, (1.0, 1.0)))


def _checkpoint_scales(files: Sequence[WeightFile], own: range) -> dict[int, tuple[float, float]]:
    """Scales of keys and values by layer; {} if the checkpoint has none of these layers."""
    found: dict[int, dict[str, float]] = {}
    for index, part, value in _stated(files, own):
        found.setdefault(index, {}).update({"k": value, "v": value} if part == "kv" else {part: value})
    incomplete = [index for index in own if found and found.get(index, {}).keys() != {"k", "v"}]
    if incomplete:
        raise ModelLoadError(
            f"{files[0].path.parent}: layer {incomplete[0]} lacks k_scale or v_scale, which other layers have"
        )
    return {index: (scales["k"], scales["v"]) for index, scales in found.items()}


def _stated(files: Sequence[WeightFile], own: range) -> Iterator[tuple[int, str, float]]:
    """Layer, "k", "v" or "kv", and the scale, of each such tensor."""
    for file in files:
        matches = {name: match for name in file.shapes if (match := _NAME.fullmatch(name)) is not None}
        names = [name for name, match in matches.items() if int(match[1]) in own]
        for name in names:
            if name not in file.dtypes or file.shapes[name] not in ((), (1,)):
                raise ModelLoadError(f"{file.path}: {name} must be one number, got shape {list(file.shapes[name])}")
        for name, tensor in file.tensors(names):
            value = float(tensor.to(torch.float32))
            if not 0 < value < float("inf"):
                raise ModelLoadError(f"{file.path}: {name} must be a positive number, got {value}")
            yield int(matches[name][1]), matches[name][2] or matches[name][3], value
