"""Scales of a KV cache in one byte per number, as checkpoints and --quantization-param-path have them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch

from ascend_vllm.errors import ModelLoadError
from ascend_vllm.layers.attention import ChannelScales
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.logger import init_logger
from ascend_vllm.models.blocks import CausalLM
from ascend_vllm.models.checkpoint import WeightFile

logger = init_logger(__name__)

# of keys, of values or, in old checkpoints, of both; compressed-tensors once named them after projections' outputs
_NAME = re.compile(r".*\blayers\.(\d+)\.(?:.*\.)?(?:([kv]|kv)_scale|([kv])_proj\.output_scale)")
# of channels of int8 keys or values, by ModelSlim
_CHANNEL_NAME = re.compile(r".*\blayers\.(\d+)\.(?:.*\.)?([kv])_proj\.kv_cache_(scale|offset)")
# tensors that need no layer
IGNORED = (r".*\.(k|v|kv)_scale", r".*\.[kv]_proj\.(output_scale|kv_cache_scale|kv_cache_offset)")
# scales of checkpoints map the largest number to that of this format
_CHECKPOINT_DTYPE = "float8_e4m3fn"


def set_cache_formats(model: CausalLM, num_layers: int, files: Sequence[WeightFile], context: BuildContext) -> None:
    """Sets the format of the KV cache in all attention layers of a model, or of a stage of it.

    Args:
        model: before there is a cache.
        num_layers: of the whole model.
        files: of the checkpoint. Where `context.kv_layer_scales` is None, their scales are used for FP8 (E4M3), and
            for int8 without scales of its own: such a format says that they are scales of int8.
        context: with the format.

    Raises:
        ModelLoadError: a scale is not a positive number or of another shape, or layers of the stage lack scales.
    """
    cache_format = context.kv_cache
    if cache_format is None:
        return
    own = context.parallel.layers(num_layers)
    scales: dict[int, tuple[float, float]] = {}
    if context.kv_layer_scales is not None:
        scales = {index: (scale, scale) for index, scale in enumerate(context.kv_layer_scales)}
    elif cache_format.dtype in (_CHECKPOINT_DTYPE, "int8") and not cache_format.has_scales:
        scales = _checkpoint_scales(files, own)
        if cache_format.dtype == "int8" and not scales and files:
            _set_channel_scales(model, files, own, context)
    if cache_format.dtype == _CHECKPOINT_DTYPE and not cache_format.has_scales and not scales:
        logger.warning(
            "The scales of the FP8 KV cache are 1.0, since neither the checkpoint nor --quantization-param-path has "
            "any. Large numbers are cut to 448, small ones lose accuracy; --kv-cache-dtype int8 needs no scales."
        )
    for index, layer in zip(own, model.attention_layers, strict=True):
        layer.set_cache_format(cache_format, *scales.get(index, (1.0, 1.0)))


def _set_channel_scales(model: CausalLM, files: Sequence[WeightFile], own: range, context: BuildContext) -> None:
    """Gives each layer of a stage the scales and offsets that ModelSlim has measured."""
    found: dict[tuple[int, str], torch.Tensor] = {}
    for file in files:
        matches = {name: match for name in file.shapes if (match := _CHANNEL_NAME.fullmatch(name)) is not None}
        for name, tensor in file.tensors([name for name, match in matches.items() if int(match[1]) in own]):
            numbers, layer = tensor.flatten().to(torch.float32), int(matches[name][1])
            is_right = numbers.isfinite() if matches[name][3] == "offset" else (numbers > 0) & numbers.isfinite()
            if not bool(is_right.all()):
                raise ModelLoadError(f"{file.path}: {name} must have finite numbers, and scales positive ones")
            spec = model.attention_layers[layer - own.start].spec
            num_heads, rest = divmod(len(numbers), spec.head_size)
            part = context.parallel.shard_or_replicate(num_heads, "KV heads") if num_heads else None
            if rest or part is None or part.size != spec.num_kv_heads:
                raise ModelLoadError(
                    f"{file.path}: {name} has shape {list(tensor.shape)}, which is not a number for each channel"
                )
            channels = slice(part.start * spec.head_size, (part.start + part.size) * spec.head_size)
            found[layer, f"{matches[name][2]}_{matches[name][3]}"] = numbers[channels].to(context.device)
    for index, layer_of_model in zip(own, model.attention_layers, strict=True):
        if (index, "k_scale") not in found or (index, "v_scale") not in found:
            raise ModelLoadError(
                f"{files[0].path.parent}: layer {index} lacks scales of int8 keys or values, which the checkpoint's "
                "description names; --kv-cache-dtype int8_per_token_head computes its own"
            )
        scales = [found[index, f"{part}_scale"] for part in "kv"]
        offsets = [found.get((index, f"{part}_offset"), torch.zeros_like(scales[0])) for part in "kv"]
        layer_of_model.set_channel_scales(ChannelScales(torch.stack(scales), torch.stack(offsets)))


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
