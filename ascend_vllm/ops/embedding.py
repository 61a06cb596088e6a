"""Embedding lookup."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ascend_vllm.ops.native import load_native_library
from ascend_vllm.ops.registry import define_op


def _gather_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    # rows of the table, width, number of indices: none; one row; several threads
    for seed, (rows, width, count) in enumerate([(3, 8, 0), (1, 1, 2), (17, 33, 40), (500, 256, 1000)]):
        generator = torch.Generator().manual_seed(seed)
        table = torch.randn(rows, width, generator=generator).to(dtype)
        yield table, torch.randint(rows, (count,), generator=generator)


@define_op(inputs=_gather_inputs, tolerance=0.0, devices=("cpu",), recordable=True)
def gather_rows(table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows of a table, as `torch.embedding` takes them.

    Args:
        table: [V, H] float, contiguous.
        indices: [T] int64, 0 … V-1.

    Returns:
        [T, H], contiguous, dtype of the table.
    """
    return torch.embedding(table, indices)


load_native_library()
