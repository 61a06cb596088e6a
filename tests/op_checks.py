"""How results of an op are compared with its definition, on any device."""

from __future__ import annotations

import math
from typing import Any

import torch

from ascend_vllm.ops.registry import OpSpec


def copies(
    arguments: tuple[Any, ...], dtype: torch.dtype | None = None, device: torch.device | None = None
) -> list[Any]:
    """Copies that keep strides and shared memory; floating-point tensors become `dtype` if one is given."""
    storages: dict[int, torch.Tensor] = {}

    def copy_of(argument: Any) -> Any:
        if isinstance(argument, list):
            return [copy_of(one) for one in argument]
        if not isinstance(argument, torch.Tensor):
            return argument
        storage = argument.untyped_storage()
        if storage._cdata not in storages:
            flat = torch.empty(0, dtype=argument.dtype).set_(storage).clone()
            storages[storage._cdata] = flat.to(device=device, dtype=dtype if flat.is_floating_point() else None)
        flat = storages[storage._cdata]
        return flat.as_strided(argument.shape, argument.stride(), argument.storage_offset())

    return [copy_of(argument) for argument in arguments]


def tensors_in(argument: Any) -> list[torch.Tensor]:
    """An argument that is a tensor, or those in a list of them."""
    found = argument if isinstance(argument, list) else [argument]
    return [one for one in found if isinstance(one, torch.Tensor)]


def results(function: Any, spec: OpSpec, arguments: list[Any]) -> list[torch.Tensor]:
    """The tensors that an op returns, and the arguments that it writes."""
    returned = function(*arguments)
    names = list(spec.reference.__annotations__)
    # optional ones may be missing
    given = dict(zip(names, arguments, strict=False))
    written = [given[name] for name in spec.mutates if given.get(name) is not None]
    if isinstance(returned, tuple):
        return [*returned, *written]
    return ([returned] if isinstance(returned, torch.Tensor) else []) + written


def is_unchanged(after: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether a tensor has the same bytes."""
    return torch.equal(*(tensor.contiguous().flatten().view(torch.uint8) for tensor in (after, before)))


def error_of(got: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest difference; infinite where one is NaN or infinite and the other is not the same."""
    assert got.shape == truth.shape
    if got.numel() == 0:
        return 0.0
    got, truth = got.double(), truth.double()
    same = (got == truth) | (got.isnan() & truth.isnan())
    difference = torch.where(same, 0.0, (got - truth).abs())
    return float(torch.where(difference.isnan(), math.inf, difference).max())
