"""Tensors of a checkpoint that describe a matrix together, kept until all are loaded, and how their bits are packed.

Letters: K inputs, N outputs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from ascend_vllm.distributed.parallel_context import Shard
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.layers.base import WeightSlot
from ascend_vllm.layers.quantization.base import LinearLayer, LinearOutput

# bits of the integers that values are packed in
_WORD = 32


@dataclasses.dataclass(frozen=True)
class TensorPart:
    """What a rank needs of one tensor of a checkpoint.

    Attributes:
        name: of the tensor.
        shape: of the whole tensor.
        dtype: integers and 8-bit floats must have it; float32 stands for any float of more bits, which is kept.
        ranges: of each dimension from the first; all of those that are left out.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    ranges: tuple[Shard, ...] = ()


class KeptPart:
    """A target that keeps a copy of what is loaded."""

    def __init__(self, part: TensorPart) -> None:
        whole = [Shard(0, size) for size in part.shape]
        ranges = [*part.ranges, *whole[len(part.ranges) :]]
        self.shape = tuple(item.size for item in ranges)
        self.dtype = part.dtype
        self.slot = WeightSlot(part.name, part.shape, self, tuple(item.start for item in ranges))
        self._value: torch.Tensor | None = None

    def copy_(self, source: torch.Tensor) -> None:
        """source: a view of the mapped file, on the CPU."""
        self._value = source.to(torch.float32) if source.dtype == torch.float64 else source.clone()

    def take(self) -> torch.Tensor:
        """What was loaded, once."""
        value, self._value = self._value, None
        if value is None:
            raise RuntimeError(f"{self.slot.name} is not loaded")
        return value


class _Zeros:
    """A target of a tensor that nothing uses, as all of it is zero."""

    def __init__(self, name: str, size: int) -> None:
        self.shape = (size,)
        self.dtype = torch.float32
        self._name = name

    def copy_(self, source: torch.Tensor) -> None:
        if source.any():
            raise ModelLoadError(f"tensor {self._name} is not zero, but config.json says that there is no such bias")


def stray_bias_slots(layer: LinearLayer) -> list[WeightSlot]:
    """Slots of biases that old AutoGPTQ wrote for layers that have none: all zero."""
    if layer.has_bias:
        return []
    totals = {f"{output.name}.bias": output.total for output in layer.outputs}
    return [
        WeightSlot(name, (total,), _Zeros(name, total))
        for name, total in totals.items()
        if name in layer.checkpoint_shapes
    ]


class _Unread:
    """A target that takes nothing."""

    def __init__(self, size: int) -> None:
        self.shape = (size,)
        self.dtype = torch.float32

    def copy_(self, _source: torch.Tensor) -> None:
        pass


def unread_bias_slots(layer: LinearLayer) -> list[WeightSlot]:
    """Slots of biases that a checkpoint has in another form, too."""
    totals = {f"{output.name}.bias": output.total for output in layer.outputs}
    return [
        WeightSlot(name, (total,), _Unread(total))
        for name, total in totals.items()
        if name in layer.checkpoint_shapes
    ]


def is_quantized(layer: LinearLayer, suffix: str) -> bool | None:
    """Whether a layer's matrices are quantized, by whether the checkpoint has their tensors with a suffix.

    Returns:
        None if there is no checkpoint, as weights are random.

    Raises:
        ModelLoadError: some are and some are not.
    """
    if not layer.checkpoint_shapes:
        return None
    found = {f"{output.name}{suffix}" in layer.checkpoint_shapes for output in layer.outputs}
    if len(found) > 1:
        raise ModelLoadError(
            f"Detected some but not all shards of {layer.prefix} are quantized. All shards of fused layers to have "
            "the same precision."
        )
    return found.pop()


# last parts of names of tensors that hold a matrix
_MATRICES = (".weight", ".qweight", ".weight_packed")


def stated_name(layer: LinearLayer, output: LinearOutput) -> str:
    """The checkpoint's own name of a matrix, which rules of a format refer to."""
    for suffix in _MATRICES:
        name = layer.checkpoint_names.get(output.name + suffix)
        if name is not None and name.endswith(suffix):
            return name.removesuffix(suffix)
    return output.name


def packed_size(count: int, bits: int) -> int:
    """Words of so many values."""
    return -(-count * bits // _WORD)


def packed_range(values: Shard, bits: int, total: int) -> tuple[Shard, int]:
    """The words that hold a range of values.

    Returns:
        The words, and how many values of the first ones are not of the range.

    Example:
        >>> packed_range(Shard(12, 8), 4, 64)
        (Shard(start=1, size=2), 4)
    """
    # values begin and end together with words at multiples of so many
    cycle_values, cycle_words = _WORD // math.gcd(_WORD, bits), bits // math.gcd(_WORD, bits)
    first, last = values.start // cycle_values, -(-(values.start + values.size) // cycle_values)
    end = min(last * cycle_words, packed_size(total, bits))
    return Shard(first * cycle_words, end - first * cycle_words), values.start - first * cycle_values


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """words [..., W] int32, a little-endian stream of values of 2, 3, 4 or 8 bits → [..., W * 32 / bits] uint8."""
    if bits == 3:
        return _unpack_three(words)
    parts = words.contiguous().view(torch.uint8)
    shifts = range(0, 8, bits)
    mask = (1 << bits) - 1
    return parts if bits == 8 else torch.stack([parts >> shift & mask for shift in shifts], -1).flatten(-2)


def _unpack_three(words: torch.Tensor) -> torch.Tensor:
    """As `unpack_words`: three bytes hold eight values."""
    parts = words.contiguous().view(torch.uint8).int()
    triples = parts.view(*parts.shape[:-1], -1, 3)
    numbers = triples[..., 0] | triples[..., 1] << 8 | triples[..., 2] << 16
    return torch.stack([numbers >> shift & 7 for shift in range(0, 24, 3)], -1).flatten(-2).to(torch.uint8)


def rows_part(
    layer: LinearLayer, output: LinearOutput, suffix: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> TensorPart:
    """A tensor with a value or several per output, or one for all of them.

    Args:
        layer: the layer.
        output: the matrix.
        suffix: of the tensor's name.
        shape: [N, ...] that it has if the checkpoint does not show another one, as weights are random.
        dtype: of it.

    Raises:
        ModelLoadError: it has another size.
    """
    name = f"{output.name}.{suffix}"
    found = layer.checkpoint_shapes.get(name, shape)
    if math.prod(found) == 1:
        return TensorPart(name, found, dtype)
    if math.prod(found) != math.prod(shape) or found[0] != output.total:
        raise ModelLoadError(f"tensor {name} has shape {list(found)}, but its matrix asks for {list(shape)}")
    return TensorPart(name, found, dtype, (output.shard,))


def number_part(layer: LinearLayer, output: LinearOutput, suffix: str, dtype: torch.dtype) -> TensorPart:
    """A tensor with one value for a whole matrix, of any dtype that the checkpoint has.

    Raises:
        ModelLoadError: it has several.
    """
    name = f"{output.name}.{suffix}"
    shape = layer.checkpoint_shapes.get(name, (1,))
    if math.prod(shape) != 1:
        raise ModelLoadError(f"tensor {name} has shape {list(shape)}, but it must be one value")
    found = layer.checkpoint_dtypes.get(name, dtype)
    return TensorPart(name, shape, torch.float32 if found.is_floating_point else found)


def to_rows(values: torch.Tensor, output: LinearOutput) -> torch.Tensor:
    """What was loaded of a `rows_part`: [N, M], with M = 1 of a single value or of one per output."""
    return (
        values.reshape(1, 1).expand(output.shard.size, 1) if values.numel() == 1 else values.reshape(len(values), -1)
    )


def same(values: Sequence[object]) -> bool:
    """Whether all are equal."""
    return all(value == values[0] for value in values)
