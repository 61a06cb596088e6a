"""What workers that share a model do together. Letters: n ranks, S rows, W columns of a rank, V columns in all."""

from __future__ import annotations

import abc
from typing import Any

import torch


class Collectives(abc.ABC):
    """Sums and gathers over the ranks of a group. Every rank makes the same calls in the same order.

    Results are the same on all ranks, bit for bit: whoever computes on with them comes to the same tokens.
    """

    @abc.abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors.

        Args:
            x: of one dimension or more, contiguous, of the same shape and dtype everywhere; may be overwritten.

        Returns:
            Shape and dtype of x.
        """

    @abc.abstractmethod
    def gather_columns(self, x: torch.Tensor, num_columns: int) -> torch.Tensor:
        """All ranks' columns side by side, the last ones cut off.

        Args:
            x: [S, W], contiguous, of the same shape and dtype everywhere.
            num_columns: V, at most n·W.

        Returns:
            [S, V], contiguous.
        """


class SingleRank(Collectives):
    """A group of one."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """x itself."""
        return x

    def gather_columns(self, x: torch.Tensor, num_columns: int) -> torch.Tensor:
        """x, without what is behind the last column."""
        return x if x.shape[1] == num_columns else x[:, :num_columns].contiguous()


class GroupCollectives(Collectives):
    """Collectives of a process group of torch, on a device whose library adds up by itself.

    Args:
        group: of torch.distributed, or one of its backends.
        size: n.
    """

    def __init__(self, group: Any, size: int) -> None:
        self._group = group
        self._size = size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collectives.all_reduce`; x is overwritten."""
        self._group.allreduce([x]).wait()
        return x

    def gather_columns(self, x: torch.Tensor, num_columns: int) -> torch.Tensor:
        """See `Collectives.gather_columns`."""
        return side_by_side(self._gather(x), num_columns)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """[n, *shape of x]: every rank's."""
        rows, *rest = x.shape
        parts = torch.empty((self._size * rows, *rest), dtype=x.dtype, device=x.device)
        self._group._allgather_base(parts, x).wait()
        return parts.view(self._size, rows, *rest)


class OrderedCollectives(GroupCollectives):
    """Collectives that add up in the order of the ranks, in float32 or wider.

    A library adds in an order that depends on where in the tensor a number lies. Here a row's sum does not depend
    on the rows beside it, as is true of all kernels on CPU.
    """

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collectives.all_reduce`."""
        if x.numel() == 0:
            return x
        return sum_in_order(self._gather(x))


def sum_in_order(parts: torch.Tensor) -> torch.Tensor:
    """[n, …] → […]: the sum over ranks, the first one first."""
    total = parts[0].to(torch.promote_types(parts.dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)


def side_by_side(parts: torch.Tensor, num_columns: int) -> torch.Tensor:
    """[n, S, W] → [S, num_columns], contiguous: the ranks' columns one after another, the last ones cut off."""
    size, num_rows, width = parts.shape
    whole = torch.empty((num_rows, num_columns), dtype=parts.dtype, device=parts.device)
    for rank in range(size):
        columns = whole[:, rank * width : (rank + 1) * width]
        columns.copy_(parts[rank, :, : columns.shape[1]])
    return whole
