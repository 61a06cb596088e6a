"""--kv-cache-dtype and --quantization-param-path: what a KV cache in 8 bits needs, and where it works."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from ascend_vllm.args.tables.engine import EngineFlags
from ascend_vllm.config.arch import ArchConfig
from ascend_vllm.errors import ConfigError, ModelLoadError
from ascend_vllm.model_files import read_json, shown
from ascend_vllm.platforms.facts import DeviceFacts
from ascend_vllm.types.kv_cache import KV_CACHE_FORMATS

# of the numbers that the file's scales were made for; files for int8 say it too
_FILE_DTYPE = "float8_e4m3fn"
# of a tensor in ModelSlim's description
_MODELSLIM_SCALE = re.compile(r".*\.k_proj\.kv_cache_scale")


def check_kv_cache(args: EngineFlags, facts: DeviceFacts, arch: ArchConfig) -> None:
    """Checks --kv-cache-dtype against the device and the model.

    Raises:
        ConfigError: it is not available there, the checkpoint's scales are of another format, or
            --quantization-param-path has scales that are not used.
    """
    name = args.kv_cache_dtype
    cache_format = KV_CACHE_FORMATS.get(name)
    if cache_format is not None and cache_format.dtype not in facts.kv_byte_dtypes:
        raise ConfigError(
            f"--kv-cache-dtype {name} is not available on --device {facts.label}, whose attention reads no 8-bit "
            "floats; use int8, or leave it at auto."
        )
    if cache_format is not None and arch.latent is not None and not facts.has_latent_bytes:
        raise ConfigError(
            f"--kv-cache-dtype {name} is not available on --device {facts.label} for models with latent attention "
            "(MLA), whose cache is small already and stays in the model's dtype; leave it at auto."
        )
    if args.quantization_param_path is None:
        if name in ("fp8", "fp8_e4m3") and _scales_are_of_integers(arch):
            raise ConfigError(
                f"--kv-cache-dtype {name}: the checkpoint's scales of keys and values are those of integers; "
                "use int8."
            )
        return
    is_dynamic = cache_format is not None and cache_format.has_scales and name != "int8"
    if cache_format is None or is_dynamic:
        raise ConfigError(
            f"--quantization-param-path has scales that --kv-cache-dtype {name} does not use; use int8, fp8, "
            "fp8_e4m3 or fp8_e5m2, or leave the file out."
        )


def has_int8_scales(arch: ArchConfig) -> bool:
    """Whether a checkpoint has scales of int8 keys and values: ModelSlim's, or compressed-tensors' of layers."""
    scheme = _kv_cache_scheme(arch)
    is_of_layers = scheme.get("num_bits") == 8 and scheme.get("strategy") == "tensor"
    is_served = is_of_layers and scheme.get("symmetric") is not False and not scheme.get("dynamic")
    return _scales_are_of_integers(arch) and (is_served or not scheme)


def _scales_are_of_integers(arch: ArchConfig) -> bool:
    description = arch.quantization.parameters.get("description") if arch.quantization is not None else None
    is_modelslim = isinstance(description, Mapping) and any(map(_MODELSLIM_SCALE.fullmatch, description))
    return is_modelslim or _kv_cache_scheme(arch).get("type") == "int"


def _kv_cache_scheme(arch: ArchConfig) -> Mapping[str, Any]:
    """What compressed-tensors says of keys and values; {}: nothing."""
    scheme = arch.quantization.parameters.get("kv_cache_scheme") if arch.quantization is not None else None
    return scheme if isinstance(scheme, Mapping) else {}


def read_layer_scales(
    path: str, num_layers: int, tensor_parallel_size: int, model_type: str | None
) -> tuple[tuple[float, ...], ...]:
    """The scales in a file of --quantization-param-path, one per layer for each tensor-parallel rank.

    vLLM 0.6.3 logs what is wrong with the file and goes on with scales of 1; here it is an error.

    Args:
        path: of the JSON file: {"model_type": …, "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {rank:
            {layer: scale}}}}, as vLLM's extract_scales.py writes it.
        num_layers: of the model.
        tensor_parallel_size: number of ranks.
        model_type: of config.json; the file's may be null.

    Raises:
        ConfigError: the file cannot be read, or is not for this model and this number of ranks.
    """
    try:
        content = read_json(pathlib.Path(path), dict)
    except ModelLoadError as error:
        raise ConfigError(f"--quantization-param-path: {error}") from error

    def wrong(what: str) -> ConfigError:
        return ConfigError(f"--quantization-param-path {path}: {what}")

    stated = content.get("model_type")
    if stated is not None and stated != model_type:
        raise wrong(f"model_type is {shown(stated)}, the model's is {shown(model_type)}")
    cache = content.get("kv_cache")
    if not isinstance(cache, dict):
        raise wrong("it has no object kv_cache")
    if cache.get("dtype") != _FILE_DTYPE:
        raise wrong(f"kv_cache.dtype must be {_FILE_DTYPE}, got {shown(cache.get('dtype'))}")
    ranks = cache.get("scaling_factor")
    if not isinstance(ranks, dict) or set(ranks) != set(map(str, range(tensor_parallel_size))):
        names = shown(sorted(ranks)) if isinstance(ranks, dict) else shown(ranks)
        raise wrong(
            f"kv_cache.scaling_factor must have the ranks 0 to {tensor_parallel_size - 1} of "
            f"--tensor-parallel-size {tensor_parallel_size}, got {names}"
        )
    return tuple(
        tuple(_scale(ranks[str(rank)], rank, layer, wrong) for layer in range(num_layers))
        for rank in range(tensor_parallel_size)
    )


def _scale(layers: Any, rank: int, layer: int, wrong: Callable[[str], ConfigError]) -> float:
    value = layers.get(str(layer)) if isinstance(layers, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise wrong(
            f"kv_cache.scaling_factor of rank {rank} and layer {layer} must be a positive number, got {shown(value)}"
        )
    return float(value)
