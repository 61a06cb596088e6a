"""Converts an EAGLE head as SafeAILab publishes it to the layout of vLLM 0.6, in place.

`python -m ascend_vllm.tools.convert_eagle_ckpt_to_vllm_compatible --base-path BASE --draft-path DRAFT
--base-weight-name FILE --draft-weight-name FILE`: a program of its own with the name and the arguments of the script
in Huawei's guide. The head gets copies of the base model's LM head and, if it has none, token embedding, as
`model.safetensors`, and a config.json that says what it is. This server reads heads in both layouts; a converted one
needs nothing of the base model, so that workers of a tensor-parallel group can use it, too.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any

import torch
from safetensors.torch import save_file

from ascend_vllm.errors import AscendVllmError, ModelLoadError
from ascend_vllm.logger import init_logger
from ascend_vllm.model_files import read_json
from ascend_vllm.models.checkpoint import SafetensorsFile, TorchFile, WeightFile

logger = init_logger("ascend_vllm.tools.convert_eagle_ckpt_to_vllm_compatible")

_LM_HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"
_BASE_EMBEDDING = f"model.{_EMBEDDING}"
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_OUTPUT = "model.safetensors"
# only heads of EAGLE-3 have a layer of this name
_MIDDLE_LAYER = "midlayer."


def convert(base_path: pathlib.Path, draft_path: pathlib.Path, base_weight_name: str, draft_weight_name: str) -> None:
    """Converts a head; a converted one stays as it is.

    Args:
        base_path: directory of the model that the head drafts for.
        draft_path: directory of the head; gets `model.safetensors` and another config.json, and loses the head's
            former weight file.
        base_weight_name: the file in `base_path` that has the LM head's weight, or the token embedding's where both
            are one.
        draft_weight_name: the file in `draft_path` that has the head's weights, .bin or .safetensors.

    Raises:
        ModelLoadError: a file is missing or damaged, or lacks what is needed.
    """
    config = read_json(draft_path / "config.json", dict)
    if config.get("model_type") == "eagle":
        logger.info("%s is converted already", draft_path)
        return
    tensors = _read(_open(draft_path / draft_weight_name))
    if "fc.weight" not in tensors:
        raise ModelLoadError(f"{draft_path / draft_weight_name}: is no EAGLE head, since it lacks tensor fc.weight")
    base = _open(base_path / base_weight_name)
    if _LM_HEAD not in tensors:
        tensors[_LM_HEAD] = _lm_head(base_path, base)
    if _EMBEDDING not in tensors:
        tensors[_EMBEDDING] = _embedding(base_path, base)
    is_eagle3 = any(name.startswith(_MIDDLE_LAYER) for name in tensors)
    _write(draft_path, tensors, config if is_eagle3 else _converted(config, has_bias="fc.bias" in tensors))
    if draft_weight_name != _OUTPUT:
        (draft_path / draft_weight_name).unlink()
    logger.info("%s has %d tensors in %s now", draft_path, len(tensors), _OUTPUT)


def _open(path: pathlib.Path) -> WeightFile:
    return SafetensorsFile(path) if path.suffix == ".safetensors" else TorchFile(path)


def _read(file: WeightFile) -> dict[str, torch.Tensor]:
    """All tensors of a file, as copies."""
    return {name: tensor.clone() for name, tensor in file.tensors(list(file.shapes))}


def _read_one(file: WeightFile, name: str) -> torch.Tensor:
    return next(tensor.clone() for _, tensor in file.tensors([name]))


def _lm_head(base_path: pathlib.Path, file: WeightFile) -> torch.Tensor:
    """The base model's LM head [V, H]: of a model whose head is tied to its embedding that one."""
    if _LM_HEAD in file.shapes:
        return _read_one(file, _LM_HEAD)
    elsewhere = _file_of(base_path, _LM_HEAD)
    if elsewhere is None and _BASE_EMBEDDING in file.shapes:
        return _read_one(file, _BASE_EMBEDDING)
    wanted = elsewhere or _file_of(base_path, _BASE_EMBEDDING)
    advice = f"; it is in {wanted}" if wanted else ""
    raise ModelLoadError(f"{file.path}: has neither tensor {_LM_HEAD} nor, tied to it, {_BASE_EMBEDDING}{advice}")


def _embedding(base_path: pathlib.Path, file: WeightFile) -> torch.Tensor:
    """The base model's token embedding [V, H], from the file with its LM head or from another."""
    if _BASE_EMBEDDING not in file.shapes:
        name = _file_of(base_path, _BASE_EMBEDDING)
        if name is None:
            raise ModelLoadError(f"{base_path}: no file of it is known to have tensor {_BASE_EMBEDDING}")
        file = _open(base_path / name)
    return _read_one(file, _BASE_EMBEDDING)


def _file_of(directory: pathlib.Path, tensor: str) -> str | None:
    """The name of the file with a tensor by the index of a checkpoint of several files; None: it names none."""
    for name in _INDEXES:
        if (directory / name).is_file():
            table = read_json(directory / name, dict).get("weight_map")
            found = table.get(tensor) if isinstance(table, dict) else None
            if isinstance(found, str) and pathlib.PurePath(found).name == found:
                return found
    return None


def _converted(config: dict[str, Any], *, has_bias: bool) -> dict[str, Any]:
    """config.json of a converted head: the former one inside, and whether `fc` has a bias under both names in use."""
    bias = {"bias": has_bias, "eagle_fc_bias": has_bias}
    return {"model_type": "eagle", "architectures": ["EAGLEModel"], **bias, "model": {**config, **bias}}


def _write(directory: pathlib.Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """Writes weights, then config.json, each all or nothing."""
    scratch = directory / f".{_OUTPUT}.partial"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, scratch, metadata={"format": "pt"})
    scratch.replace(directory / _OUTPUT)
    scratch = directory / ".config.json.partial"
    scratch.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    scratch.replace(directory / "config.json")


def main() -> None:
    """Converts what the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m ascend_vllm.tools.convert_eagle_ckpt_to_vllm_compatible",
        description="Converts an EAGLE head of SafeAILab's layout to that of vLLM 0.6, in place.",
    )
    parser.add_argument("--base-path", type=pathlib.Path, required=True, help="directory of the served model")
    parser.add_argument("--draft-path", type=pathlib.Path, required=True, help="directory of the head")
    parser.add_argument(
        "--base-weight-name",
        required=True,
        help="file of the served model with its LM head; model.safetensors.index.json says which, for example "
        "model-00037-of-00037.safetensors",
    )
    parser.add_argument("--draft-weight-name", required=True, help="file of the head, for example pytorch_model.bin")
    args = parser.parse_args()
    try:
        convert(args.base_path, args.draft_path, args.base_weight_name, args.draft_weight_name)
    except AscendVllmError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
