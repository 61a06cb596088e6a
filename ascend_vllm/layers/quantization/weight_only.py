"""Products with weights in 4 or 8 bits and inputs in the model's dtype.

Letters: K inputs, N outputs, G groups of inputs.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from ascend_vllm.distributed.parallel_context import Shard
from ascend_vllm.errors import ConfigError, ModelLoadError
from ascend_vllm.layers.base import WeightSlot
from ascend_vllm.layers.quantization.base import LinearLayer, LinearOutput, QuantMethod
from ascend_vllm.layers.quantization.tensor_parts import KeptPart, TensorPart, stray_bias_slots
from ascend_vllm.ops.elementwise import concat_columns
from ascend_vllm.ops.gemm import GATED_ACTIVATIONS
from ascend_vllm.ops.quantized_gemm import GROUP_MULTIPLE, MIDDLES, QuantizedPanels
from ascend_vllm.ops.quantized_weights import CODED_FORMS, CodedWeight

# inputs of a group in another order are padded to a multiple of this
_PADDED_GROUP = 32
# ranks to try for the advice of an error
_MOST_RANKS = 64


@dataclasses.dataclass(frozen=True)
class CodedMatrix:
    """A rank's part of a matrix: w[n, k] = (codes[n, k] - zeros[n, g]) · scales[n, g], where g is groups[k].

    Attributes:
        codes: [N, K] uint8, or torch.float8_e4m3fn.
        scales: [N, G] float.
        zeros: [N, G] uint8; None: all are the middle of the code.
        groups: [K] int64.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    groups: torch.Tensor


class MatrixFormat(abc.ABC):
    """How a checkpoint stores a matrix of a layer.

    Attributes:
        code: one of `ops.quantized_gemm.CODES`.
        is_online: the checkpoint is not quantized; weights are rounded while they are loaded.
    """

    code: str
    is_online: bool = False

    @abc.abstractmethod
    def group_size(self, in_features: int) -> int:
        """How many consecutive inputs of a matrix have the same scale; 1: the checkpoint says which ones do."""

    @abc.abstractmethod
    def parts(self, layer: LinearLayer, output: LinearOutput) -> Mapping[str, TensorPart]:
        """The tensors of one matrix, under keys of the format's own."""

    @abc.abstractmethod
    def matrix(self, layer: LinearLayer, output: LinearOutput, tensors: Mapping[str, torch.Tensor]) -> CodedMatrix:
        """What they say."""


class WeightOnlyLinear(QuantMethod):
    """A weight in codes of 4 or 8 bits.

    Args:
        matrix_format: of the matrices that the layer consists of.
    """

    def __init__(self, matrix_format: MatrixFormat) -> None:
        self._format = matrix_format
        self._loading: list[dict[str, KeptPart]] = []
        # one, unless the matrices group their inputs differently
        self._blocks: list[CodedWeight] = []

    def create_weights(self, layer: LinearLayer) -> list[WeightSlot]:
        """Slots of each output's tensors.

        Raises:
            ModelLoadError: the device or the size of groups is not supported.
            ConfigError: ranks cannot split the inputs within groups.
        """
        _check_device(layer, self._format)
        _check_groups(layer, self._format.group_size(layer.total_in_features))
        for output in layer.outputs:
            self._loading.append({key: KeptPart(part) for key, part in self._format.parts(layer, output).items()})
        slots = [part.slot for parts in self._loading for part in parts.values()]
        return slots + stray_bias_slots(layer)

    def after_load(self, layer: LinearLayer) -> None:
        """Packs the matrices, those with the same groups of inputs into one weight."""
        if not self._loading:
            return
        matrices = [
            self._format.matrix(layer, output, {key: part.take() for key, part in parts.items()})
            for output, parts in zip(layer.outputs, self._loading, strict=True)
        ]
        self._loading = []
        agree = all(torch.equal(matrix.groups, matrices[0].groups) for matrix in matrices)
        joined = [matrices] if agree else [[matrix] for matrix in matrices]
        self._blocks = [pack_matrices(part, self._format.code, layer, self.rounds_inputs) for part in joined]
        self.product_kinds = product_kinds(self._blocks)
        if layer.bias is not None:
            layer.bias = layer.bias.to(self._blocks[0].bias_dtype)

    @property
    def panels(self) -> QuantizedPanels:
        """The loaded weight of a layer of one matrix on the CPU.

        Raises:
            RuntimeError: it is not loaded, or there are several matrices that group their inputs differently.
        """
        if len(self._blocks) != 1 or not isinstance(self._blocks[0], QuantizedPanels):
            raise RuntimeError("a weight is used before it is loaded")
        return self._blocks[0]

    def apply(self, layer: LinearLayer, x: torch.Tensor) -> torch.Tensor:
        if len(self._blocks) == 1:
            return self._blocks[0](x, layer.bias)
        results: torch.Tensor = concat_columns([block(x, None) for block in self._blocks])
        return results if layer.bias is None else results.add_(layer.bias)

    def apply_gated(self, layer: LinearLayer, x: torch.Tensor, activation: str) -> torch.Tensor:
        """x [T, in] → [T, out/2] without storing the product."""
        if len(self._blocks) == 1:
            return self._blocks[0].gated(x, layer.bias, activation)
        return GATED_ACTIVATIONS[activation](self.apply(layer, x))


def product_kinds(weights: Iterable[CodedWeight]) -> frozenset[str]:
    """See `QuantMethod`."""
    return frozenset(weight.product_kind for weight in weights if isinstance(weight, QuantizedPanels))


def pack_matrices(
    matrices: Sequence[CodedMatrix], code: str, layer: LinearLayer, rounds_inputs: bool = False
) -> CodedWeight:
    """One weight of matrices with the same groups of inputs, in the form of the layer's device.

    Args:
        matrices: on the CPU.
        code: of them.
        layer: tells the device, and the dtype of activations.
        rounds_inputs: whether products may round inputs of whole numbers to 8 bits.
    """
    form = CODED_FORMS[layer.device.type]
    arrangement = arrange_groups(matrices[0].groups, form.group_multiple)
    order, padding, columns = arrangement.order, arrangement.padding, arrangement.columns
    has_zeros = any(matrix.zeros is not None for matrix in matrices)
    packed = form.make(
        sum(len(matrix.codes) for matrix in matrices),
        len(matrices[0].groups) if order is None else len(order),
        arrangement.group_size,
        code,
        has_zeros=has_zeros,
        scale_dtype=_scale_dtype(matrices),
        dtype=layer.dtype,
        device=layer.device,
    )
    row = 0
    for matrix in matrices:
        codes, zeros = matrix.codes, None
        if has_zeros:
            all_middle = torch.full_like(matrix.scales, MIDDLES[code], dtype=torch.uint8)
            zeros = (all_middle if matrix.zeros is None else matrix.zeros)[:, columns]
        if order is not None:
            codes = codes[:, order]
            # a weight of 0
            codes[:, padding] = MIDDLES[code] if zeros is None else zeros[:, padding // arrangement.group_size]
        packed.pack_rows(row, codes.contiguous(), matrix.scales[:, columns], zeros)
        row += len(codes)
    packed.order = None if order is None else order.int()
    packed.rounds_inputs = rounds_inputs and code != "float8_e4m3"
    packed.finish()
    return packed


@dataclasses.dataclass(frozen=True)
class GroupArrangement:
    """An order of inputs in which groups of one size follow one another.

    Attributes:
        order: [K'] int64, the input at each place; None: all stay where they are.
        padding: [P] int64, places whose inputs are there a second time, to be multiplied with 0.
        columns: [G'] int64, what each of these groups is in the checkpoint.
        group_size: of these groups; the last one may be shorter.
    """

    order: torch.Tensor | None
    padding: torch.Tensor
    columns: torch.Tensor
    group_size: int


def arrange_groups(groups: torch.Tensor, multiple: int = GROUP_MULTIPLE) -> GroupArrangement:
    """Finds an order for groups [K] int64 of inputs, if they do not follow one another in multiples of so many."""
    borders = (groups[1:] != groups[:-1]).nonzero()[:, 0] + 1
    size = math.gcd(*borders.tolist()) if len(borders) else len(groups)
    if len(borders) == 0 or size % multiple == 0:
        return GroupArrangement(None, torch.empty(0, dtype=torch.int64), groups[::size], size)
    by_group = torch.argsort(groups, stable=True)
    counts = torch.bincount(groups)
    present = counts.nonzero()[:, 0]
    sizes = counts[present].tolist()
    size = sizes[0]
    if size % multiple or set(sizes[:-1]) != {size} or sizes[-1] > size:
        size = _PADDED_GROUP
    order: list[torch.Tensor] = []
    padding: list[int] = []
    columns: list[int] = []
    for group, inputs in zip(present.tolist(), torch.split_with_sizes(by_group, sizes), strict=True):
        start = len(columns) * size
        columns += [group] * -(-len(inputs) // size)
        # the last group needs no padding; others repeat an input, which changes no largest value of the group
        end = start + len(inputs) if group == present[-1] else len(columns) * size
        padding += range(start + len(inputs), end)
        order += [inputs, inputs[:1].expand(end - start - len(inputs))]
    return GroupArrangement(torch.cat(order), torch.tensor(padding, dtype=torch.int64), torch.tensor(columns), size)


def _scale_dtype(matrices: Sequence[CodedMatrix]) -> torch.dtype:
    found = {matrix.scales.dtype for matrix in matrices}
    return found.pop() if len(found) == 1 else torch.float32


def _check_device(layer: LinearLayer, matrix_format: MatrixFormat) -> None:
    """Refuses rounding to what the device would only widen again.

    Raises:
        ModelLoadError: the format does that.
    """
    form = CODED_FORMS.get(layer.device.type)
    if form is None:
        raise ModelLoadError(f"quantized weights do not run on {layer.device.type}; serve the unquantized checkpoint")
    if matrix_format.is_online and matrix_format.code in form.widened:
        raise ModelLoadError(
            f"weights cannot be rounded to {matrix_format.code} for --device {layer.device.type}, which has no such "
            "products; use --quantization weight_only_int8"
        )


def _check_groups(layer: LinearLayer, group_size: int) -> None:
    """Checks that every rank's inputs consist of groups, or of equal parts of them, that there are kernels for.

    Raises:
        ModelLoadError: there are none for the checkpoint's size.
        ConfigError: other numbers of ranks would do.
    """
    total = layer.total_in_features

    def fits(size: int) -> bool:
        is_within_groups = size < total and group_size % size == 0
        return is_within_groups or math.gcd(size, group_size) % GROUP_MULTIPLE == 0

    if group_size == 1 or group_size >= total:
        return
    if group_size % GROUP_MULTIPLE:
        raise ModelLoadError(
            f"{layer.prefix}: groups of {group_size} inputs are not supported; they must have a multiple of "
            f"{GROUP_MULTIPLE}"
        )
    if layer.in_features < total and not fits(layer.in_features):
        sizes = [str(ranks) for ranks in range(1, _MOST_RANKS) if total % ranks == 0 and fits(total // ranks)]
        raise ConfigError(
            f"--tensor-parallel-size {total // layer.in_features} cannot split the {total} inputs of {layer.prefix}, "
            f"which are quantized in groups of {group_size}; possible are {', '.join(sizes)}"
        )


def plain_groups(inputs: Shard, group_size: int) -> torch.Tensor:
    """[K] int64: the group of each of a rank's inputs, if groups are consecutive."""
    return torch.arange(inputs.start, inputs.start + inputs.size) // group_size
