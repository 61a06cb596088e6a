"""Every op on every input of its generator, dtype and instruction set of this machine, against float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ascend_vllm.ops import native, registry

native.import_op_modules()

CASES = [(name, dtype) for name, spec in sorted(registry.OPS.items()) for dtype in spec.dtypes]


@pytest.fixture(autouse=True)
def _keep_isa() -> Iterator[None]:
    before = native.cpu_isa()
    yield
    if before is not None:
        native.set_cpu_isa(before)


def _copies(arguments: tuple[Any, ...], dtype: torch.dtype | None = None) -> list[Any]:
    """Copies that keep strides and shared memory; floating-point tensors are converted to `dtype` if given."""
    storages: dict[int, torch.Tensor] = {}
    copies = []
    for argument in arguments:
        if not isinstance(argument, torch.Tensor):
            copies.append(argument)
            continue
        storage = argument.untyped_storage()
        if storage._cdata not in storages:
            flat = torch.empty(0, dtype=argument.dtype).set_(storage).clone()
            storages[storage._cdata] = flat.to(dtype) if dtype and flat.is_floating_point() else flat
        flat = storages[storage._cdata]
        copies.append(flat.as_strided(argument.shape, argument.stride(), argument.storage_offset()))
    return copies


def _results(function: Any, spec: registry.OpSpec, arguments: list[Any]) -> list[torch.Tensor]:
    """The tensors that an op returns, and the arguments that it writes."""
    returned = function(*arguments)
    names = list(spec.reference.__annotations__)
    written = [arguments[names.index(name)] for name in spec.mutates]
    if isinstance(returned, tuple):
        return [*returned, *written]
    return ([returned] if isinstance(returned, torch.Tensor) else []) + written


def _error(got: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest difference; infinite where one is NaN or infinite and the other is not the same."""
    assert got.shape == truth.shape
    if got.numel() == 0:
        return 0.0
    got, truth = got.to(torch.float64), truth.to(torch.float64)
    same = (got == truth) | (got.isnan() & truth.isnan())
    difference = torch.where(same, 0.0, (got - truth).abs())
    return float(torch.where(difference.isnan(), math.inf, difference).max())


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=lambda value: str(value).removeprefix("torch."))
def test_kernel_is_as_right_as_the_reference(name: str, dtype: torch.dtype) -> None:
    spec = registry.OPS[name]
    kernel = getattr(torch.ops.ascend_vllm, name)
    isas = native.available_cpu_isas()
    assert isas, "the compiled library is missing"
    for case, arguments in enumerate(spec.inputs(dtype)):
        truth = _results(spec.reference, spec, _copies(arguments, torch.float64))
        plain = _results(spec.reference, spec, _copies(arguments))
        for isa in isas:
            native.set_cpu_isa(isa)
            untouched = _copies(arguments)
            given = _copies(arguments)
            got = _results(kernel, spec, given)
            for result, reference, exact in zip(got, plain, truth, strict=True):
                assert result.dtype == reference.dtype
                allowed = 2 * _error(reference, exact) + spec.tolerance
                error = _error(result, exact)
                assert error <= allowed, f"{name} {dtype} on {isa}, input {case}: error {error}, allowed {allowed}"
            names = list(spec.reference.__annotations__)
            for argument, before, argument_name in zip(given, untouched, names, strict=False):
                if isinstance(argument, torch.Tensor) and argument_name not in spec.mutates:
                    assert torch.equal(argument.nan_to_num(), before.nan_to_num()), f"{name} wrote {argument_name}"


def test_no_op_runs_on_its_reference_on_cpu() -> None:
    assert registry.OPS
    assert registry.ops_on_reference("cpu") == []


def test_generators_are_repeatable_and_not_empty() -> None:
    for name, spec in registry.OPS.items():
        first, second = list(spec.inputs(spec.dtypes[0])), list(spec.inputs(spec.dtypes[0]))
        assert len(first) == len(second) > 0, name
        for left, right in zip(first, second, strict=True):
            for a, b in zip(left, right, strict=True):
                assert torch.equal(a.nan_to_num(), b.nan_to_num()) if isinstance(a, torch.Tensor) else a == b, name
