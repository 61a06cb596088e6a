"""Reads LoRA adapters as PEFT writes them: `adapter_config.json` beside `adapter_model.safetensors` or `.bin`.

An adapter has two matrices for each linear layer that it changes: A takes the layer's inputs to a few numbers, the
rank, and B takes these to the layer's outputs (Hu et al. 2021). The scale, `lora_alpha` by the rank or by its root,
is multiplied into B here. For an embedding the columns of A are the tokens.

An adapter may add tokens to the vocabulary, whose ids follow the model's own. Their vectors are in `new_embeddings`,
as vLLM 0.6.3 reads them, or behind the model's own in the copies that PEFT keeps of a resized embedding and head.

Letters: R rank, K inputs, N outputs, V tokens of the model, H width of an embedding.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from ascend_vllm.errors import ModelLoadError
from ascend_vllm.layers.lora import ADDED_INPUTS, ADDED_OUTPUTS
from ascend_vllm.model_files import read_json, shown
from ascend_vllm.models.checkpoint import SafetensorsFile, TorchFile, WeightFile

T = TypeVar("T")

_CONFIG = "adapter_config.json"
_FILES: dict[str, type[WeightFile]] = {"adapter_model.safetensors": SafetensorsFile, "adapter_model.bin": TorchFile}
_PREFIX = "base_model.model."
_MATRIX = re.compile(r"(?P<module>.+)\.(lora_(?P<matrix>[AB])\.weight|lora_embedding_(?P<table>[AB]))")
# copies of the model's own weights, which PEFT stores beside matrices of embeddings and heads
_BASE_COPY = re.compile(r".+\.base_layer\.weight")
# copies of an embedding and a head, which PEFT stores if their number of tokens is not the model's
_VOCABULARY_COPY = re.compile(r".*\b(embed_tokens|lm_head)(\.base_layer)?\.weight")
# vectors of tokens that the adapter adds to the vocabulary, of vLLM 0.6.3
_NEW_EMBEDDINGS: dict[str, type[WeightFile]] = {
    "new_embeddings.safetensors": SafetensorsFile,
    "new_embeddings.bin": TorchFile,
}
_HEAD = "lm_head"

# keys of the configuration that must not be set → why; `True` stands for any other value than null, false and empty
_REFUSED: dict[str, str] = {
    "use_dora": "DoRA is not supported",
    "lora_bias": "biases of LoRA matrices (lora_bias) are not supported",
    "modules_to_save": "whole modules in an adapter (modules_to_save) are not supported; merge the adapter",
    "layer_replication": "layer_replication is not supported",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens) is not supported",
    "trainable_token_indices": "trained token embeddings (trainable_token_indices) are not supported",
    "context_length": "adapters for longer contexts (context_length) are not supported",
    "use_qalora": "QALoRA is not supported",
    "use_bdlora": "BD-LoRA is not supported",
    "arrow_config": "arrow_config is not supported",
    "kasa_config": "kasa_config is not supported",
    "velora_config": "velora_config is not supported",
    "monteclora_config": "monteclora_config is not supported",
    "fan_in_fan_out": "weights with inputs first (fan_in_fan_out) are not supported",
}
# initialisations that leave the model's own weights as they are
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal", "mica", "lora_ga")


@dataclasses.dataclass(frozen=True, slots=True)
class LoRAMatrices:
    """What an adapter adds to one linear layer, x Aᵀ Bᵀ, or to the vectors of an embedding, Aᵀ Bᵀ.

    Attributes:
        a: [R, K] float; of an embedding K is the number of tokens.
        b: [N, R] float32, with the scale; of an embedding N is the width.
        is_table: of an embedding.
    """

    a: torch.Tensor
    b: torch.Tensor
    is_table: bool = False


class _Scaling:
    """Rank and scale of each module, of an adapter's configuration."""

    def __init__(self, config: Mapping[str, Any], path: pathlib.Path) -> None:
        self._path = path
        self._rank = self._as_rank("r", config["r"])
        self._alpha = self._as_alpha("lora_alpha", config["lora_alpha"])
        self._takes_root = bool(config.get("use_rslora"))
        self._ranks = self._pattern(config, "rank_pattern", self._as_rank)
        self._alphas = self._pattern(config, "alpha_pattern", self._as_alpha)

    def _as_rank(self, name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelLoadError(f"{self._path}: LoRA rank `{name}` must be a positive integer, got {shown(value)}.")
        return value

    def _as_alpha(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelLoadError(f"{self._path}: {name} must be a number, got {shown(value)}.")
        return float(value)

    def _pattern(self, config: Mapping[str, Any], name: str, convert: Callable[[str, Any], T]) -> dict[str, T]:
        values = config.get(name) or {}
        if not isinstance(values, dict):
            raise ModelLoadError(f"{self._path}: {name} must be an object, got {shown(values)}.")
        return {pattern: convert(f"{name}.{pattern}", value) for pattern, value in values.items()}

    @property
    def largest(self) -> int:
        """The largest rank that the configuration names."""
        return max([self._rank, *self._ranks.values()])

    def of(self, module: str) -> tuple[int, float]:
        """Rank and scale of a module, by its name in the model."""
        rank = next((rank for pattern, rank in self._ranks.items() if _names(pattern, module)), self._rank)
        alpha = next((alpha for pattern, alpha in self._alphas.items() if _names(pattern, module)), self._alpha)
        return rank, alpha / (math.sqrt(rank) if self._takes_root else rank)


def _names(pattern: str, module: str) -> bool:
    """Whether a key of `rank_pattern` or `alpha_pattern` means this module, by PEFT's rule."""
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterLimits:
    """What an adapter may have.

    Attributes:
        max_rank: the largest rank.
        num_tokens: V.
        max_added_tokens: the most tokens that it may add.
        is_tied: the model's head has the weight of its embedding.
    """

    max_rank: int
    num_tokens: int
    max_added_tokens: int = 0
    is_tied: bool = False


def read_adapter(
    directory: str, limits: AdapterLimits, rest: Callable[[], None] = lambda: None
) -> dict[str, LoRAMatrices]:
    """Reads an adapter.

    Args:
        directory: of its files.
        limits: of adapters of the model.
        rest: called after each tensor, so that a reader beside other work may wait.

    Returns:
        Its matrices by the layer's name in the model's checkpoint, such as "model.layers.0.self_attn.q_proj". The
        vectors of n tokens that it adds are A [n, H] of `ADDED_INPUTS` and of `ADDED_OUTPUTS`.

    Raises:
        ModelLoadError: a file is missing, damaged or of another kind, or a matrix has a wrong rank; the text names
            file and tensor.
    """
    folder = pathlib.Path(directory)
    config_path = folder / _CONFIG
    config = read_json(config_path, dict)
    _check_config(config, config_path)
    scaling = _Scaling(config, config_path)
    if scaling.largest > limits.max_rank:
        raise ModelLoadError(
            f"{config_path}: LoRA rank {scaling.largest} is greater than max_lora_rank {limits.max_rank}. "
            "Start the server with a larger --max-lora-rank."
        )
    file = _open(folder)
    matrices = _pair(file, scaling, _module_names(file, limits.num_tokens), rest)
    vectors = _new_embeddings(folder) or _resized(file, limits.num_tokens)
    return _with_added_tokens(matrices, vectors, limits, folder)


def _new_embeddings(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    """The vectors in `new_embeddings`, by their names there."""
    found = next((kind(folder / name) for name, kind in _NEW_EMBEDDINGS.items() if (folder / name).exists()), None)
    if found is None:
        return {}
    names = [name for name in (ADDED_INPUTS, ADDED_OUTPUTS) if name in found.shapes]
    if ADDED_INPUTS not in names:
        raise ModelLoadError(f"{found.path} has no {ADDED_INPUTS}")
    return {name: tensor.clone() for name, tensor in found.tensors(names)}


def _resized_copies(file: WeightFile, num_tokens: int) -> dict[str, str]:
    """Names of copies of the model's embedding and head that have more tokens → which of the two it is."""
    found = {}
    for name, shape in file.shapes.items():
        match = _VOCABULARY_COPY.fullmatch(name)
        if match is not None and len(shape) == 2 and shape[0] > num_tokens:
            found[name] = ADDED_OUTPUTS if match[1] == _HEAD else ADDED_INPUTS
    return found


def _resized(file: WeightFile, num_tokens: int) -> dict[str, torch.Tensor]:
    """The rows behind the model's own in copies of its embedding and head."""
    copies = _resized_copies(file, num_tokens)
    return {copies[name]: tensor[num_tokens:].clone() for name, tensor in file.tensors(copies)}


def _with_added_tokens(
    matrices: dict[str, LoRAMatrices], vectors: dict[str, torch.Tensor], limits: AdapterLimits, folder: pathlib.Path
) -> dict[str, LoRAMatrices]:
    """The matrices of the model's own tokens, and the vectors of others with what the matrices add to them."""
    if not vectors:
        return matrices
    if limits.is_tied:
        vectors.setdefault(ADDED_OUTPUTS, vectors[ADDED_INPUTS])
    shapes = {name: tuple(tensor.shape) for name, tensor in vectors.items()}
    if set(shapes) != {ADDED_INPUTS, ADDED_OUTPUTS} or len(set(shapes.values())) != 1:
        raise ModelLoadError(
            f"{folder}: tokens that an adapter adds need a vector each in the embedding and in the head, got {shapes}"
        )
    count = len(vectors[ADDED_INPUTS])
    if count > limits.max_added_tokens:
        raise ModelLoadError(
            f"{folder}: the adapter adds {count} tokens to the vocabulary, {limits.max_added_tokens} are possible "
            "(--lora-extra-vocab-size; none with speculative decoding, on NPUs and in models that cap logits). Or "
            "serve a model that the adapter is merged into."
        )
    size, result = limits.num_tokens, {}
    for module, part in matrices.items():
        if module.rpartition(".")[2] == _HEAD and len(part.b) == size + count:
            vectors[ADDED_OUTPUTS] = vectors[ADDED_OUTPUTS].float() + part.b[size:] @ part.a.float()
            part = LoRAMatrices(part.a, part.b[:size])
        elif part.is_table and part.a.shape[1] == size + count:
            vectors[ADDED_INPUTS] = vectors[ADDED_INPUTS].float() + (part.b @ part.a[:, size:].float()).T
            part = dataclasses.replace(part, a=part.a[:, :size])
        result[module] = part
    return result | {name: LoRAMatrices(rows, rows.new_zeros(1, count)) for name, rows in vectors.items()}


def _check_config(config: Mapping[str, Any], path: pathlib.Path) -> None:
    """Refuses what would compute something else than low-rank products of linear layers."""
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise ModelLoadError(f"{path}: peft_type {shown(kind)} is not supported; adapters of type LORA are.")
    missing = {name for name in ("r", "lora_alpha", "target_modules") if name not in config}
    if missing:
        raise ModelLoadError(f"{path}: Missing required configuration fields: {missing}")
    reasons = [reason for name, reason in _REFUSED.items() if config.get(name)]
    if (config.get("bias") or "none") != "none":
        reasons.append("Adapter bias is not supported")
    start = config.get("init_lora_weights", True)
    if start is not None and start not in _PLAIN_STARTS:
        reasons.append(
            f"init_lora_weights={shown(start)} changed the model's weights before training; convert the adapter"
        )
    if reasons:
        raise ModelLoadError(f"{path}: {'; '.join(reasons)}.")


def _open(folder: pathlib.Path) -> WeightFile:
    for name, kind in _FILES.items():
        if (folder / name).exists():
            return kind(folder / name)
    raise ModelLoadError(f"{folder} doesn't contain tensors: there is no {' or '.join(_FILES)}")


def _module_names(file: WeightFile, num_tokens: int) -> dict[tuple[str, str], str]:
    """(module, "A" or "B") → name of the tensor."""
    resized = _resized_copies(file, num_tokens)
    found: dict[tuple[str, str], str] = {}
    for name in file.shapes:
        match = _MATRIX.fullmatch(name.removeprefix(_PREFIX))
        if match is not None:
            found[match["module"], match["matrix"] or match["table"]] = name
        elif not _BASE_COPY.fullmatch(name) and name not in resized:
            raise ModelLoadError(f"{file.path}: {name} is unsupported LoRA weight")
    return found


def _pair(
    file: WeightFile, scaling: _Scaling, names: Mapping[tuple[str, str], str], rest: Callable[[], None]
) -> dict[str, LoRAMatrices]:
    tensors, matrices = {}, {}
    for name, tensor in file.tensors(names.values()):
        tensors[name] = tensor.clone()
        rest()
    for module in _in_order(module for module, _ in names):
        absent = next((matrix for matrix in "AB" if (module, matrix) not in names), None)
        if absent is not None:
            other = names[module, "AB".replace(absent, "")]
            ending = f"lora_embedding_{absent}" if "lora_embedding_" in other else f"lora_{absent}.weight"
            raise ModelLoadError(f"{file.path}: {module} has no {ending}")
        a, b = (tensors[names[module, matrix]] for matrix in "AB")
        rank, scale = scaling.of(module)
        for name, tensor, dim in ((names[module, "A"], a, 0), (names[module, "B"], b, 1)):
            if tensor.dim() != 2 or tensor.shape[dim] != rank:
                raise ModelLoadError(
                    f"{file.path}: {name} has shape {list(tensor.shape)}; by {_CONFIG} its rank is {rank}"
                )
        is_table = "lora_embedding_" in names[module, "A"]
        matrices[module] = LoRAMatrices(a, b.float() * scale, is_table)
        rest()
    return matrices


def _in_order(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
