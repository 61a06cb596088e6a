"""Finds model directories, and reads config.json and generation_config.json.

The files of built-in families are normalised here from plain JSON: importing transformers' AutoConfig
loads torch in the API-server process, which takes seconds at start and hundreds of megabytes.
All others (new model types, plug-ins, a repository's own code) are read by AutoConfig.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from ascend_vllm import envs
from ascend_vllm.args.hf_checks import GENERATION, check_fields, check_hf_config, check_rope_spellings
from ascend_vllm.args.quantization_files import float_architecture, stated_quantization
from ascend_vllm.config.arch import rope_by_kind
from ascend_vllm.config.hf_defaults import DEFAULTS, SPELLINGS, WITH_CODE, WITHOUT_ROPE
from ascend_vllm.config.quantization import ADVICE
from ascend_vllm.errors import ConfigError, ModelLoadError
from ascend_vllm.model_files import is_there, needs_trust, one_line, read_json, shown

_DEFAULT_ROPE_THETA = 10000.0

# of EAGLE heads in the layout of vLLM 0.6, around the config of the head
_CONVERTED_HEAD = "eagle"
_DROPPED = ("transformers_version", "_name_or_path")
# used by classification heads only, and may be large
_DROPPED_WITHOUT_HEAD = ("id2label", "label2id")

_GENERATION_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_GENERATION_META = ("transformers_version", "_from_model_config")


def find_directory(
    flag: str,
    name: str,
    *,
    revision: str | None = None,
    revision_flag: str = "--revision",
    download_dir: str | None = None,
    patterns: Sequence[str] = (),
) -> str:
    """The directory of a model or tokenizer: a local one, or the copy of a hub repository.

    Args:
        flag: the flag with the name, for messages.
        name: a directory, or a repository on the Hugging Face hub.
        revision: the version of the repository.
        revision_flag: the flag with the revision, for messages.
        download_dir: directory for repositories; None: the hub's default cache.
        patterns: of the required files; empty: all.

    Raises:
        ConfigError: neither a directory nor a repository in the cache or on the hub.
    """
    path = pathlib.Path(name).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ConfigError(
                f"{revision_flag} chooses a version on the Hugging Face hub, but {flag} is a directory."
            )
        return str(path)
    if path.exists():
        if path.suffix == ".gguf":
            raise ConfigError(f"{flag} {name}: {ADVICE['gguf']}.")
        raise ConfigError(f"{flag} {name} is a file; give the directory it is in.")
    if name.startswith(("/", "./", "../", "~")) or name.count("/") > 1 or not name:
        raise ConfigError(f"{flag} {name!r}: there is no such directory.")
    if envs.use_modelscope():
        raise ConfigError(
            f"{flag} {name!r} is not a directory, and VLLM_USE_MODELSCOPE asks for ModelScope, from which nothing is "
            "loaded here. Download the model and give its directory."
        )
    import huggingface_hub

    try:
        return huggingface_hub.snapshot_download(
            name, revision=revision, cache_dir=download_dir, allow_patterns=list(patterns) or None
        )
    # errors of the hub are subclasses of OSError and ValueError, those of the HTTP client also of RuntimeError
    except (OSError, ValueError, RuntimeError) as err:
        reason = str(err).strip().splitlines()[0] if str(err).strip() else type(err).__name__
        raise ConfigError(
            f"{flag} {name!r} is not a directory, and getting it from the Hugging Face hub failed ({reason}). "
            "Give the path of a local directory with config.json and the weights."
        ) from err


def _merged(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with changes applied; nested objects are merged."""
    result = dict(base)
    for key, value in changes.items():
        inner = result.get(key)
        result[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, Mapping) else value
    return result


def _read_with_transformers(directory: str, raw: dict[str, Any], trust_remote_code: bool) -> dict[str, Any]:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
        values = config.to_dict() | config.get_text_config().to_dict()
    # a model's own code may raise any exception
    except Exception as err:
        kind = raw.get("model_type")
        raise ModelLoadError(
            f"{directory}/config.json: model type {shown(kind)} cannot be read: {one_line(err)}"
        ) from err
    # the text part of a config has no `architectures`, or None
    if raw.get("architectures"):
        values["architectures"] = raw["architectures"]
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain


def _normalise_rope(config: dict[str, Any], scaling: Mapping[str, Any] | None, theta: float | None) -> None:
    """Merges all spellings of rotary parameters, and those of the command line, in `rope_parameters`."""
    inner = dict(config.pop("rope_scaling", None) or config.get("rope_parameters") or {})
    outer_theta = config.pop("rope_theta", None)
    if rope_by_kind(inner):
        if scaling is not None or theta is not None:
            raise ConfigError("--rope-scaling and --rope-theta do not say which layers they are for.")
        return
    if scaling is not None:
        outer_theta = inner.get("rope_theta") or outer_theta
        inner = dict(scaling)
    if "type" in inner:
        inner.setdefault("rope_type", inner.pop("type"))
    inner.setdefault("rope_type", "default")
    inner["rope_theta"] = theta or inner.get("rope_theta") or outer_theta or _DEFAULT_ROPE_THETA
    config["rope_parameters"] = inner


def read_hf_config(
    directory: str,
    *,
    trust_remote_code: bool = False,
    overrides: Mapping[str, Any] | None = None,
    rope_scaling: Mapping[str, Any] | None = None,
    rope_theta: float | None = None,
) -> dict[str, Any]:
    """The text part of a model's config.json, with the defaults that transformers would add.

    Args:
        directory: with config.json.
        trust_remote_code: whether the model's own configuration class may run.
        overrides: of --hf-overrides.
        rope_scaling: of --rope-scaling; replaces the model's.
        rope_theta: of --rope-theta.

    Returns:
        Plain JSON values. Rotary parameters are in `rope_parameters` with `rope_type` and `rope_theta`,
        whatever their spelling in the file. `quantization_config` is what `stated_quantization` finds.

    Raises:
        ModelLoadError: the file is missing or broken, or its model type is unknown; names the file.
        ConfigError: the model has its own code and --trust-remote-code is not given.
    """
    path = pathlib.Path(directory) / "config.json"
    if not is_there(path):
        raise ModelLoadError(f"{directory} has no config.json; it must be a model in Hugging Face layout")
    raw = read_json(path, dict)
    if raw.get("model_type") == _CONVERTED_HEAD and isinstance(raw.get("model"), dict):
        raw = raw["model"]
    model_type, auto_map = raw.get("model_type"), raw.get("auto_map")
    if not isinstance(auto_map, dict | None):
        raise ModelLoadError(f"{path}: 'auto_map' must be an object, got {shown(auto_map)}")
    has_code = "AutoConfig" in (auto_map or {})
    defaults = DEFAULTS.get(model_type) if isinstance(model_type, str) else None
    if has_code and trust_remote_code and model_type not in WITH_CODE:
        defaults = None
    if defaults is not None:
        config = _merged(dict(defaults), raw)
    elif has_code and not trust_remote_code:
        raise ConfigError(needs_trust(path, "configuration"))
    else:
        config = _read_with_transformers(directory, raw, trust_remote_code)
    config = _merged(config, overrides or {})
    for usual, own in SPELLINGS.get(str(model_type), {}).items():
        if config.get(own) is not None:
            config[usual] = config[own]
    check_rope_spellings(path, config)
    if model_type not in WITHOUT_ROPE or rope_scaling is not None or rope_theta is not None:
        changed = overrides or {}
        # an override in the older spelling takes precedence over the file's newer one
        scaling = rope_scaling if rope_scaling is not None else changed.get("rope_scaling")
        _normalise_rope(config, scaling, rope_theta or changed.get("rope_theta"))
    check_hf_config(path, config, is_known=defaults is not None)
    stated = stated_quantization(path.parent, config)
    config["quantization_config"] = stated
    config["architectures"] = [float_architecture(name, stated) for name in config["architectures"]]
    has_head = config["architectures"][0].endswith("ForSequenceClassification")
    for name in _DROPPED if has_head else _DROPPED + _DROPPED_WITHOUT_HEAD:
        config.pop(name, None)
    return config


def read_generation_config(source: str, model_directory: str, overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """Sampling defaults and token ids of generation_config.json.

    Args:
        source: of --generation-config: "auto", "vllm" or a directory.
        model_directory: with the file for "auto".
        overrides: of --override-generation-config.

    Returns:
        The file's values; with "vllm" only its token ids, which end generation whatever the sampling defaults are.
        {} if the model has no such file.

    Raises:
        ConfigError: the directory in `source` has no generation_config.json.
        ModelLoadError: the file is broken.
    """
    named = source not in ("auto", "vllm")
    path = pathlib.Path(source if named else model_directory).expanduser() / "generation_config.json"
    if named and not is_there(path):
        raise ConfigError(f"--generation-config {source}: there is no {path}.")
    values = read_json(path, dict) if is_there(path) else {}
    if source == "vllm":
        values = {name: values[name] for name in _GENERATION_IDS if name in values}
    kept = {name: value for name, value in values.items() if name not in _GENERATION_META}
    kept |= dict(overrides or {})
    check_fields(f"{path} or --override-generation-config" if overrides else path, kept, GENERATION)
    return kept


_BESIDE_WEIGHTS = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken")
_WEIGHTS = {"safetensors": ("*.safetensors",), "pt": ("*.bin", "*.pt"), "npcache": ("*.bin", "*.pt"), "dummy": ()}


def find_model_directory(
    name: str, revision: str | None, download_dir: str | None, load_format: str, flag: str = "--model"
) -> str:
    """The directory of --model, or of another `flag`; only the files that the load format requires are downloaded.

    Raises:
        ConfigError: see `find_directory`.
    """
    formats = ("safetensors", "pt") if load_format == "auto" else (load_format,)
    for candidate in formats:
        patterns = (*_BESIDE_WEIGHTS, *_WEIGHTS[candidate])
        directory = find_directory(flag, name, revision=revision, download_dir=download_dir, patterns=patterns)
        found = [file for pattern in _WEIGHTS[candidate] for file in pathlib.Path(directory).glob(pattern)]
        if found or pathlib.Path(name).expanduser().is_dir():
            break
    return directory


def find_tokenizer_directory(name: str, revision: str | None, download_dir: str | None) -> str:
    """The directory of --tokenizer.

    Raises:
        ConfigError: see `find_directory`.
    """
    return find_directory(
        "--tokenizer",
        name,
        revision=revision,
        revision_flag="--tokenizer-revision",
        download_dir=download_dir,
        patterns=_BESIDE_WEIGHTS,
    )


def weight_bytes(directory: str) -> int:
    """Size of the weight files in a directory; 0 without any."""
    files = [file for pattern in ("*.safetensors", "*.bin", "*.pt") for file in pathlib.Path(directory).glob(pattern)]
    return sum(file.stat().st_size for file in files if file.is_file())
