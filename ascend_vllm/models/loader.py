"""Builds a model and fills it with weights.

Names and shapes are first checked against the files' tables of contents. Then tensors are copied one by one from the
files, whose memory is given back at once, and a layer is packed as soon as its last tensor is loaded, which frees its
loaded form: memory stays at the model's size, beside what is read ahead of files that the file cache cannot hold.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
import time
import zlib
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np
import torch
from tqdm import tqdm

from ascend_vllm.config.model import LoadConfig, ModelConfig
from ascend_vllm.errors import ConfigError, ModelLoadError
from ascend_vllm.layers.base import Layer, WeightSlot
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.layers.lora import LoRAScheme, Ranks
from ascend_vllm.layers.quantization.online import QuantizedHeadScheme, RoundedInputsScheme
from ascend_vllm.layers.quantization.registry import make_scheme
from ascend_vllm.logger import init_logger
from ascend_vllm.models.blocks import CausalLM
from ascend_vllm.models.checkpoint import WeightFile, open_checkpoint
from ascend_vllm.models.kv_scales import IGNORED, set_cache_formats
from ascend_vllm.models.np_cache import open_np_cache
from ascend_vllm.models.pooler import Pooler
from ascend_vllm.models.registry import resolve_model_class
from ascend_vllm.platforms.host import available_memory_bytes
from ascend_vllm.platforms.weight_reserve import WeightReserve, taking_from

logger = init_logger(__name__)

# of tensors' names in quantized checkpoints
_QUANTIZED_SUFFIXES = (
    *(".qweight", ".qzeros", ".scales", ".g_idx"),
    *(".weight_packed", ".weight_shape", ".weight_scale", ".weight_scale_inv", ".weight_offset"),
    *(".dequant_scale", ".deq_scale", ".quant_bias"),
)

# half the width of the uniform distribution of dummy weights; its standard deviation is 0.02
_DUMMY_RANGE = 0.02 * 3**0.5
# of a tensor whose values are checked
_CHECKED_BYTES = 256 << 10


def load_model(
    model_config: ModelConfig, load_config: LoadConfig, context: BuildContext, reserve: WeightReserve | None = None
) -> CausalLM:
    """A model ready to run.

    Args:
        model_config: what to load; its `model` is a directory, unless the load format is "dummy".
        load_config: how to find and read the files.
        context: surroundings of the layers; `context.dtype` is what weights are converted to. A quantized checkpoint
            has its own scheme in the place of `context.quant`.
        reserve: memory for the weights that are made before anything is loaded; what they leave of it is given back.

    Raises:
        ModelLoadError: an unsupported architecture or feature, or a wrong, missing or damaged file or tensor; the
            message names it.
        ConfigError: the architecture cannot be cut into stages.
    """
    start = time.monotonic()
    quantization = model_config.arch.quantization
    if quantization is not None:
        context = dataclasses.replace(context, quant=make_scheme(model_config.model, quantization))
    if load_config.quantize_lm_head:
        context = dataclasses.replace(context, quant=QuantizedHeadScheme(context.quant))
    if load_config.cpu_int8_activations:
        context = dataclasses.replace(context, quant=RoundedInputsScheme(context.quant))
    if context.lora is not None:
        ranks = Ranks(context.parallel, context.collectives)
        scheme = LoRAScheme(context.quant, context.lora, context.step_state, ranks)
        context = dataclasses.replace(context, quant=scheme)
    model_class = resolve_model_class(model_config.architecture)
    files = _open_files(model_config.model, load_config)
    context = dataclasses.replace(
        context,
        checkpoint_shapes={
            model_class.checkpoint_name(name): shape for file in files for name, shape in file.shapes.items()
        },
        checkpoint_dtypes={
            model_class.checkpoint_name(name): dtype for file in files for name, dtype in file.dtypes.items()
        },
        checkpoint_names={model_class.checkpoint_name(name): name for file in files for name in file.shapes},
    )
    with torch.no_grad():
        with taking_from(reserve):
            model = _build(model_class, model_config, context)
        unfilled = _Unfilled(model)
        model.num_weights = unfilled.num_weights
        if load_config.load_format == "dummy":
            _fill_randomly(unfilled, model_config.seed)
        else:
            model.ignored_weights = (*model.ignored_weights, *context.quant.ignored_weights, *IGNORED)
            _check_contents(model_config, model, files, unfilled.slots)
            if context.parallel.world_size == 1 and not _fit_in_cache(files):
                for file in files:
                    file.past_cache = True
            _fill_from_files(model, files, unfilled, load_config.use_tqdm)
        unfilled.finish()
    set_cache_formats(model, model_config.num_layers, files, context)
    logger.debug("Loading model weights took %.2f seconds", time.monotonic() - start)
    return model


def _open_files(model: str, load_config: LoadConfig) -> Sequence[WeightFile]:
    if load_config.load_format == "dummy":
        return []
    if load_config.load_format != "npcache":
        return open_checkpoint(model, load_config)
    files = open_checkpoint(model, msgspec.structs.replace(load_config, load_format="pt"))
    return [open_np_cache(pathlib.Path(model), files)]


def _build(model_class: type[CausalLM], model_config: ModelConfig, context: BuildContext) -> CausalLM:
    if context.parallel.pp_size > 1 and not model_class.supports_pp:
        raise ConfigError(
            "Pipeline parallelism is not supported for this model. Supported models implement the `SupportsPP` "
            f"interface. (--pipeline-parallel-size; {model_class.__name__} does not set supports_pp.)"
        )
    try:
        model = model_class(model_config, context)
        if model_config.pooler is not None and context.parallel.is_last_stage:
            model.pooler = Pooler(model_config.pooler, context, model_config.arch.embedding_size)
        return model
    except KeyError as error:
        raise ModelLoadError(f"{model_config.model}: config.json lacks {error}") from error


class _Unfilled:
    """The slots of a model that are not filled yet.

    Attributes:
        slots: by name in the checkpoint, which several may share; filled ones are removed, since they refer to the
            loaded form.
        num_weights: numbers that all slots take together.
    """

    def __init__(self, model: Layer) -> None:
        self.num_weights = 0
        self.slots: dict[str, list[WeightSlot]] = {}
        # layer of each slot, and how many of its slots are unfilled
        self._owners: dict[WeightSlot, Layer] = {}
        self._num_missing: dict[Layer, int] = {}
        for layer in model.layers():
            slots = layer.slots()
            self._num_missing[layer] = len(slots)
            self.num_weights += sum(math.prod(slot.target.shape) for slot in slots)
            for slot in slots:
                self.slots.setdefault(slot.name, []).append(slot)
                self._owners[slot] = layer

    def fill(
        self, name: str, tensor: torch.Tensor, finish_part: Callable[[torch.Tensor], None] = lambda _: None
    ) -> None:
        """Fills the slots of one name, and calls `after_load` of layers without unfilled slots.

        Args:
            name: of the tensor in the checkpoint.
            tensor: what it contains.
            finish_part: called with the part of the tensor that a slot has read, at once.
        """
        layers = []
        for slot in self.slots.pop(name):
            slot.fill(tensor)
            finish_part(slot.part(tensor))
            layers.append(self._owners.pop(slot))
        for layer in layers:
            self._num_missing[layer] -= 1
            if self._num_missing[layer] == 0:
                del self._num_missing[layer]
                layer.after_load()

    def finish(self) -> None:
        """Calls `after_load` of layers without slots, which may depend on other layers."""
        for layer in self._num_missing:
            layer.after_load()
        self._num_missing.clear()


def _fill_randomly(unfilled: _Unfilled, seed: int) -> None:
    """Fills all slots: matrices with small random values, norms with 1, biases and integers with 0."""
    for name in list(unfilled.slots):
        shape, dtype = unfilled.slots[name][0].shape, unfilled.slots[name][0].target.dtype
        if not dtype.is_floating_point:
            values = torch.zeros(shape, dtype=dtype)
        elif len(shape) > 1:
            # a random stream per tensor, so that values do not depend on the order of layers
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            values = torch.empty(shape, dtype=dtype if dtype.itemsize > 1 else torch.float32)
            values = values.uniform_(-_DUMMY_RANGE, _DUMMY_RANGE, generator=generator).to(dtype)
        else:
            values = torch.full(shape, 0.0 if name.endswith(".bias") else 1.0)
        unfilled.fill(name, values)


def _check_contents(
    model_config: ModelConfig, model: CausalLM, files: Sequence[WeightFile], slots: dict[str, list[WeightSlot]]
) -> None:
    """Checks names, shapes and dtypes of all tensors against the model."""
    file_of: dict[str, WeightFile] = {}
    for file in files:
        for raw_name, shape in file.shapes.items():
            name = model.checkpoint_name(raw_name)
            if name in file_of:
                raise ModelLoadError(f"{file.path}: tensor {raw_name} is in {file_of[name].path.name} as well")
            file_of[name] = file
            for slot in slots.get(name, []):
                _check_tensor(file, raw_name, shape, slot)
            if name not in slots and not any(re.fullmatch(pattern, name) for pattern in model.ignored_weights):
                raise ModelLoadError(
                    f"{file.path}: tensor {raw_name} is not part of {model_config.architecture}"
                    f"{_advice(name, model_config)}"
                )
    missing = [name for name in slots if name not in file_of]
    if missing:
        where = files[0].path if len(files) == 1 else files[0].path.parent
        others = f" (and {len(missing) - 1} others)" if len(missing) > 1 else ""
        raise ModelLoadError(
            f"{where}: tensor {missing[0]} of shape {list(slots[missing[0]][0].shape)} is missing{others}"
        )


def _advice(name: str, model_config: ModelConfig) -> str:
    """What to do about a tensor that only quantized checkpoints have."""
    if model_config.arch.quantization is not None or not name.endswith(_QUANTIZED_SUFFIXES):
        return ""
    return (
        "; the checkpoint is quantized, but neither config.json (quantization_config) nor a file beside it "
        "(quantize_config.json, quant_config.json, quant_model_description.json) says how"
    )


def _check_tensor(file: WeightFile, name: str, shape: tuple[int, ...], slot: WeightSlot) -> None:
    if shape != slot.shape:
        raise ModelLoadError(
            f"{file.path}: tensor {name} has shape {list(shape)}, but config.json asks for {list(slot.shape)}"
        )
    wanted, found = slot.target.dtype, file.dtypes.get(name)
    is_converted = wanted.is_floating_point and wanted.itemsize > 1
    if name in file.odd_dtypes and (found is None or is_converted):
        raise ModelLoadError(f"{file.path}: tensor {name} has dtype {file.odd_dtypes[name]}, which is not supported")
    if not is_converted and found != wanted:
        raise ModelLoadError(f"{file.path}: tensor {name} has dtype {found}, but the model wants {wanted}")


def _fit_in_cache(files: Sequence[WeightFile]) -> bool:
    """Whether the system's file cache can hold the files beside weights of the same size."""
    return 2 * sum(file.path.stat().st_size for file in files) < available_memory_bytes()


def _fill_from_files(model: CausalLM, files: Sequence[WeightFile], unfilled: _Unfilled, use_tqdm: bool) -> None:
    description = f"Loading {files[0].format_name} checkpoint shards"
    for file in tqdm(files, desc=description, unit="file", disable=not use_tqdm):
        wanted: Iterable[str] = [name for name in file.shapes if model.checkpoint_name(name) in unfilled.slots]
        for raw_name, tensor in file.tensors(wanted):

            def finish_part(part: torch.Tensor, file: WeightFile = file, raw_name: str = raw_name) -> None:
                _check_values(file, raw_name, part)
                file.release()

            unfilled.fill(model.checkpoint_name(raw_name), tensor, finish_part)


def _are_finite(values: torch.Tensor) -> bool:
    """Whether no value is infinite or NaN; values: floats of 2, 4 or 8 bytes, at least one, in CPU memory.

    Read as integers, floats of one sign are in the order of their magnitudes, with infinity and then NaN at the end.
    So the largest integer is that of a positive float, if there is one, and the largest unsigned integer that of a
    negative one. Uses one thread; several of torch's would spin until the next tensor.
    """
    of_size = {2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32), 8: (torch.int64, np.uint64)}
    signed, unsigned = of_size[values.itemsize]
    infinity = int(torch.tensor(math.inf, dtype=values.dtype).view(signed))
    negative_infinity = infinity + (1 << (8 * values.itemsize - 1))
    rows = values.view(signed).numpy()
    rows = rows.reshape(1) if rows.ndim == 0 else rows
    # few enough that the second cache has them when they are read again
    step = max(1, _CHECKED_BYTES * len(rows) // rows.nbytes)
    parts = (rows[start : start + step] for start in range(0, len(rows), step))
    return all(part.max() < infinity and part.view(unsigned).max() < negative_infinity for part in parts)


def _check_values(file: WeightFile, name: str, values: torch.Tensor) -> None:
    """Checks that values are finite: a single NaN or infinity makes all output meaningless.

    In the token embedding they may belong to unused tokens.

    Args:
        file: where the tensor is.
        name: of the tensor.
        values: the part of it that a slot has read.
    """
    if values.numel() == 0 or not values.is_floating_point():
        return
    # there are several kinds of 8-bit floats, some of them without infinity
    if _are_finite(values.half() if values.itemsize == 1 else values):
        return
    finding = f"{file.path}: tensor {name} has values that are not finite (NaN or infinity)"
    if not name.endswith("embed_tokens.weight"):
        raise ModelLoadError(finding)
    logger.warning("%s; what is generated of their tokens means nothing.", finding)
