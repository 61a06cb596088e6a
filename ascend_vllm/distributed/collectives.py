"""Collectives of tensor parallelism. Letters: n ranks, S rows, W columns per rank, V columns in all."""

from __future__ import annotations

import abc
from typing import Any

import torch


class Collectives(abc.ABC):
    """Sums and gathers over the ranks of a group. Every rank makes the same calls in the same order.

    Results are bitwise identical on all ranks, so that all of them sample the same tokens.
    """

    @abc.abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors.

        Args:
            x: at least one dimension, contiguous, same shape and dtype on all ranks; may be overwritten.

        Returns:
            Shape and dtype of x.
        """

    @abc.abstractmethod
    def gather_columns(self, x: torch.Tensor, num_columns: int) -> torch.Tensor:
        """Concatenates all ranks' columns in rank order and drops those behind the first V, which are padding.

        Args:
            x: [S, W], contiguous, same shape and dtype on all ranks.
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
        """The first V columns of x."""
        return x if x.shape[1] == num_columns else x[:, :num_columns].contiguous()


# of this process, in the order in which they were made: compilers cannot trace calls of process groups, so that an op
# takes a number
_groups: list[Any] = []


def _summed(x: torch.Tensor, group: int) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    _groups[group].allreduce([total]).wait()
    return total


_library: Any = torch.library.Library("ascend_vllm", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("all_reduce(Tensor x, int group) -> Tensor")
_library.impl("all_reduce", _summed, "PrivateUse1")
_library.impl("all_reduce", lambda x, _: torch.empty_like(x, memory_format=torch.contiguous_format), "Meta")


class GroupCollectives(Collectives):
    """Collectives of a torch process group, in the summation order of the device's library.

    Args:
        group: a process group of torch.distributed, or one of its backends.
        size: n.
    """

    def __init__(self, group: Any, size: int) -> None:
        self._group = group
        self._size = size
        self._number = len(_groups)
        _groups.append(group)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collectives.all_reduce`; x is overwritten, except in compiled functions."""
        if torch.compiler.is_compiling():
            return torch.ops.ascend_vllm.all_reduce(x, self._number)  # type: ignore[no-any-return]
        self._group.allreduce([x]).wait()
        return x

    def gather_columns(self, x: torch.Tensor, num_columns: int) -> torch.Tensor:
        """See `Collectives.gather_columns`."""
        return concat_columns(self._gather(x), num_columns)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """[n, *x.shape]: x of every rank."""
        rows, *rest = x.shape
        parts = torch.empty((self._size * rows, *rest), dtype=x.dtype, device=x.device)
        self._group._allgather_base(parts, x).wait()
        return parts.view(self._size, rows, *rest)


class OrderedCollectives(GroupCollectives):
    """Collectives that sum in rank order, in float32 or wider.

    Libraries sum in an order that depends on an element's offset in the tensor. Here a row's sum does not depend on
    the other rows of the batch, as in all CPU kernels.
    """

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collectives.all_reduce`."""
        if x.numel() == 0:
            return x
        return sum_in_order(self._gather(x))


def sum_in_order(parts: torch.Tensor) -> torch.Tensor:
    """[n, …] → […]: the sum over ranks, added from rank 0 upwards."""
    total = parts[0].to(torch.promote_types(parts.dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)


def concat_columns(parts: torch.Tensor, num_columns: int) -> torch.Tensor:
    """[n, S, W] → [S, num_columns], contiguous: the ranks' columns in rank order, without padding at the end."""
    size, num_rows, width = parts.shape
    whole = torch.empty((num_rows, num_columns), dtype=parts.dtype, device=parts.device)
    for rank in range(size):
        columns = whole[:, rank * width : (rank + 1) * width]
        columns.copy_(parts[rank, :, : columns.shape[1]])
    return whole
