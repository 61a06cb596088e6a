"""Every op on every input of its generator, dtype and instruction set of this machine, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ascend_vllm.ops import native, registry
from tests.op_checks import copies, error_of, is_unchanged, results, tensors_in

native.import_op_modules()

CASES = [(name, dtype) for name, spec in sorted(registry.OPS.items()) for dtype in spec.dtypes]


@pytest.fixture(autouse=True)
def _keep_isa() -> Iterator[None]:
    before = native.cpu_isa()
    yield
    if before is not None:
        native.set_cpu_isa(before)


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=lambda value: str(value).removeprefix("torch."))
def test_kernel_is_as_right_as_the_reference(name: str, dtype: torch.dtype) -> None:
    spec = registry.OPS[name]
    kernel = getattr(torch.ops.ascend_vllm, name)
    isas = native.available_cpu_isas()
    assert isas, "the compiled library is missing"
    for case, arguments in enumerate(spec.inputs(dtype)):
        truth = results(spec.reference, spec, copies(arguments, torch.float64))
        plain = results(spec.reference, spec, copies(arguments))
        for isa in isas:
            native.set_cpu_isa(isa)
            untouched = copies(arguments)
            given = copies(arguments)
            got = results(kernel, spec, given)
            for result, reference, exact in zip(got, plain, truth, strict=True):
                assert result.dtype == reference.dtype
                allowed = 2 * error_of(reference, exact) + spec.tolerance
                error = error_of(result, exact)
                assert error <= allowed, f"{name} {dtype} on {isa}, input {case}: error {error}, allowed {allowed}"
            names = list(spec.reference.__annotations__)
            for argument, before, argument_name in zip(given, untouched, names, strict=False):
                if argument_name not in spec.mutates:
                    for one, other in zip(tensors_in(argument), tensors_in(before), strict=True):
                        assert is_unchanged(one, other), f"{name} wrote {argument_name}"


def test_no_op_runs_on_its_reference_on_cpu() -> None:
    assert registry.OPS
    assert registry.ops_on_reference("cpu") == []


def test_generators_are_repeatable_and_not_empty() -> None:
    for name, spec in registry.OPS.items():
        first, second = list(spec.inputs(spec.dtypes[0])), list(spec.inputs(spec.dtypes[0]))
        assert len(first) == len(second) > 0, name
        for left, right in zip(first, second, strict=True):
            for a, b in zip(left, right, strict=True):
                tensors = list(zip(tensors_in(a), tensors_in(b), strict=True))
                assert all(is_unchanged(*pair) for pair in tensors) if tensors else a == b, name
