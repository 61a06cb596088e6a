"""Defines ops by their references.

`define_op` makes a plain Python function on tensors the torch schema, the definition and the fallback of
``torch.ops.ascend_vllm.<name>``. Compiled kernels in ``csrc_ascend`` register themselves for their device under the
same name, and torch's dispatcher chooses; callers do not ask which device they are on.

Example::

    @define_op(inputs=my_inputs, tolerance=1e-5)
    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        ...

    silu_and_mul(torch.randn(3, 8))     # the kernel of the device, or the function above
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

NAMESPACE = "ascend_vllm"

# An input generator yields argument tuples in the given dtype; tests run every one of them.
InputGenerator = Callable[[torch.dtype], Iterator[tuple[Any, ...]]]


@dataclasses.dataclass(frozen=True)
class OpSpec:
    """An op's definition and how it is tested.

    Attributes:
        name: name under ``torch.ops.ascend_vllm``.
        reference: the definition.
        inputs: yields argument tuples for a dtype; covers edge cases (empty, tails, every mode).
        mutates: names of the arguments written in place.
        dtypes: dtypes the op is defined for.
        tolerance: absolute error allowed in float32 against float64; other dtypes are allowed twice the reference's
            own error.
        devices: device types whose code calls it.
        recordable: whether its CPU binding, or without one its reference, can be recorded on a tape (`ops/tape.py`).
    """

    name: str
    reference: Callable[..., Any]
    inputs: InputGenerator
    mutates: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    tolerance: float
    devices: tuple[str, ...]
    recordable: bool

    def has_kernel(self, device_type: str) -> bool:
        """Whether a kernel is registered for ``"cpu"`` or ``"npu"``."""
        key = {"cpu": "CPU", "npu": "PrivateUse1"}[device_type]
        return torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{self.name}", key)


OPS: dict[str, OpSpec] = {}
# Any: torch leaves this class without annotations
_library: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def define_op(
    *,
    inputs: InputGenerator,
    mutates: Sequence[str] = (),
    dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES,
    tolerance: float = 1e-5,
    devices: tuple[str, ...] = ("cpu", "npu"),
    recordable: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Defines an op from its reference; returns what callers call (the dispatcher's entry, not the reference)."""

    def decorate(reference: Callable[..., Any]) -> Callable[..., Any]:
        name = reference.__name__
        schema = torch.library.infer_schema(reference, mutates_args=list(mutates))
        _library.define(name + schema)
        _library.impl(name, reference, "CompositeExplicitAutograd")
        OPS[name] = OpSpec(name, reference, inputs, tuple(mutates), dtypes, tolerance, devices, recordable)
        overload: Callable[..., Any] = getattr(getattr(torch.ops, NAMESPACE), name).default
        return overload

    return decorate


def implement_on_npus(implementations: Mapping[str, Callable[..., Any]]) -> Any:
    """Registers kernels by the names of their ops; the returned library must be kept alive."""
    library: Any = torch.library.Library(NAMESPACE, "IMPL")  # type: ignore[no-untyped-call]
    for name, implementation in implementations.items():
        library.impl(name, implementation, "PrivateUse1")
    return library


def ops_on_reference(device_type: str) -> list[str]:
    """Names of the ops that a device uses without a kernel of its own, sorted."""
    return sorted(
        name for name, spec in OPS.items() if device_type in spec.devices and not spec.has_kernel(device_type)
    )
