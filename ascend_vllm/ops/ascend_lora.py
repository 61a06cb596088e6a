"""Products with LoRA adapters on Ascend NPUs: by torch_npu's operators, or by the custom ones if they are enabled.

torch_npu's way multiplies all rows by the adapters of all slots and keeps each row's own. With some ten slots that
reads and writes less than sorting rows for grouped products, which copies the inputs and the outputs three times
(docs/ascend_kernels.md). The custom operators read only the adapters in use.

Letters: T tokens, L slots, S slices of a layer, K inputs, N outputs of a slice, R largest rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from ascend_vllm.errors import ModelLoadError
from ascend_vllm.ops import ascend_custom
from ascend_vllm.ops.lora import AdapterSlots, PackedAdapter

# limits of lora_shrink and lora_expand
_INPUTS_MULTIPLE = 16
_MAX_RANK = 512


class _NpuSlots(AdapterSlots):
    """What both forms share: adapters are packed in host memory, as A [S, R, K] and B [R, N of all slices].

    A matrix that is not there is zeros.
    """

    index_dtype = torch.int64

    def _measure(self, inputs: int, max_rank: int, dtype: torch.dtype) -> None:
        """Notes what `pack` needs."""
        ends = list(itertools.accumulate(self._widths))
        self._columns = [slice(end - width, end) for end, width in zip(ends, self._widths, strict=True)]
        self._shape_of_a, self._shape_of_b = (len(self._widths), max_rank, inputs), (max_rank, ends[-1])
        self._dtype = dtype

    def pack(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor] | None]) -> PackedAdapter:
        a, b = (torch.zeros(shape, dtype=self._dtype) for shape in (self._shape_of_a, self._shape_of_b))
        rank = 0
        for index, part in enumerate(parts):
            if part is not None:
                rank = max(rank, len(part[0]))
                a[index, : len(part[0])] = part[0]
                b[: len(part[0]), self._columns[index]] = part[1].t()
        # they would become part of other rows' sums, times zero
        if not (a.isfinite().all() and b.isfinite().all()):
            raise ModelLoadError(f"weights of the adapter are not finite in {self._dtype}")
        return PackedAdapter(a, b, rank)


class DenseSlots(_NpuSlots):
    """Adapters of all slots side by side, as matrices of plain products."""

    def _make_memory(
        self, num_slots: int, inputs: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._measure(inputs, max_rank, dtype)
        self._a = torch.zeros(num_slots, len(self._widths) * max_rank, inputs, dtype=dtype, device=device)
        # of each slice [L, R, N]
        self._b = [torch.zeros(num_slots, max_rank, width, dtype=dtype, device=device) for width in self._widths]
        self._numbers = torch.arange(num_slots, device=device)

    def place(self, slot: int, adapter: PackedAdapter | None) -> None:
        if adapter is not None:
            self._a[slot].copy_(adapter.a.flatten(0, 1))
        for b, columns in zip(self._b, self._columns, strict=True):
            if adapter is None:
                b[slot].zero_()
            else:
                b[slot].copy_(adapter.b[:, columns])

    def shrink(self, x: torch.Tensor, slots: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:  # noqa: ARG002
        """See `AdapterSlots`; in the dtype of x."""
        num_slots, ranks, _ = self._a.shape
        of_all = torch.mm(x, self._a.flatten(0, 1).t()).view(len(x), num_slots, ranks)
        own = of_all.gather(1, slots.clamp(min=0).view(-1, 1, 1).expand(-1, 1, ranks))
        return own.view(len(x), len(self._widths), -1)

    def expand(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        slots: torch.Tensor,
        order: torch.Tensor | None,  # noqa: ARG002
    ) -> None:
        # [T, L, 1]
        is_other = (slots.unsqueeze(1) != self._numbers).unsqueeze(2)
        for index, (b, columns) in enumerate(zip(self._b, self._columns, strict=True)):
            spread = x[:, index].to(b.dtype).unsqueeze(1).expand(-1, len(b), -1).masked_fill(is_other, 0)
            y[:, columns].addmm_(spread.flatten(1), b.flatten(0, 1))


class CustomSlots(_NpuSlots):
    """Adapters as `lora_shrink` and `lora_expand` of csrc_ascend/npu read them."""

    reads_order = True

    def _make_memory(
        self, num_slots: int, inputs: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._measure(inputs, max_rank, dtype)
        self._max_rank = max_rank
        # of each slice [L, R, K] and [L, N, R]
        self._a = [torch.zeros(num_slots, max_rank, inputs, dtype=dtype, device=device) for _ in self._widths]
        self._b = [torch.zeros(num_slots, width, max_rank, dtype=dtype, device=device) for width in self._widths]

    def place(self, slot: int, adapter: PackedAdapter | None) -> None:
        for index, (a, b, columns) in enumerate(zip(self._a, self._b, self._columns, strict=True)):
            if adapter is None:
                b[slot].zero_()
            else:
                a[slot].copy_(adapter.a[index])
                b[slot].copy_(adapter.b[:, columns].t())

    def shrink(self, x: torch.Tensor, slots: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
        results = x.new_empty(len(self._a), len(x), self._max_rank, dtype=torch.float32)
        for a, result in zip(self._a, results.unbind(), strict=True):
            torch.ops.ascend_vllm_npu.lora_shrink(x, a, slots, order, result, 1.0)
        return results.transpose(0, 1)

    def expand(self, y: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, order: torch.Tensor | None) -> None:
        for index, (b, columns) in enumerate(zip(self._b, self._columns, strict=True)):
            part = x[:, index].contiguous()
            torch.ops.ascend_vllm_npu.lora_expand(part, b, slots, order, y, columns.start)


def make_slots(
    num_slots: int, widths: Sequence[int], inputs: int, max_rank: int, dtype: torch.dtype, device: torch.device
) -> AdapterSlots:
    """The slots of a layer, see `AdapterSlots`, for the custom operators if they are enabled and take the layer."""
    is_taken = inputs % _INPUTS_MULTIPLE == 0 and max_rank <= _MAX_RANK
    form = CustomSlots if is_taken and "lora_shrink" in ascend_custom.enabled() else DenseSlots
    return form(num_slots, widths, inputs, max_rank, dtype, device)
