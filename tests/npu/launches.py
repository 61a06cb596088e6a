"""Which operators of the simulated library an expression takes, and how results are compared."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

_LIBRARY = ctypes.CDLL("libopapi.so")
_LIBRARY.ascend_sim_operators.restype = ctypes.c_char_p
_LIBRARY.ascend_sim_take_launched.restype = ctypes.c_char_p


def operators() -> set[str]:
    """Every operator of the library."""
    return set(_LIBRARY.ascend_sim_operators().decode().split())


class Cost(NamedTuple):
    """What an operator cost, by the simulator's count.

    Attributes:
        launches: how often the host launched it, be it into a graph.
        runs: how often the device ran it, replays of graphs included.
        read: bytes that the runs read, each tensor once.
        written: bytes that they wrote.
        workspace: bytes of the largest workspace.
    """

    launches: int
    runs: int
    read: int
    written: int
    workspace: int


def costs_of(call: Callable[[], Any]) -> tuple[Any, dict[str, Cost]]:
    """What a call returns, and what each operator cost that it launched or that graphs ran."""
    torch.npu.synchronize()
    _LIBRARY.ascend_sim_take_launched()
    result = call()
    torch.npu.synchronize()
    lines = map(str.split, _LIBRARY.ascend_sim_take_launched().decode().splitlines())
    return result, {name: Cost(*map(int, numbers)) for name, *numbers in lines}


def launched_by(call: Callable[[], Any]) -> tuple[Any, set[str]]:
    """What a call returns and the operators it launched, into a graph or at once."""
    result, costs = costs_of(call)
    return result, {name for name, cost in costs.items() if cost.launches}


def takes(*operators: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a test that must launch these operators."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def wrapped(*args: Any, **kwargs: Any) -> None:
            _, launched = launched_by(lambda: test(*args, **kwargs))
            assert launched >= set(operators), launched

        return wrapped

    return decorate


def to(device: str, value: Any) -> Any:
    """Tensors of nested lists and tuples on a device, with the strides they have."""
    if isinstance(value, torch.Tensor):
        return _with_strides(value, device)
    if isinstance(value, (list, tuple)):
        return type(value)(to(device, item) for item in value)
    return value


def _with_strides(value: torch.Tensor, device: str) -> torch.Tensor:
    if value.is_contiguous():
        return value.to(device, copy=True)
    if value.device.type != "cpu":
        return value.to(device)
    storage = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
    return storage.to(device).as_strided(value.size(), value.stride(), value.storage_offset())


def doubled(value: Any) -> Any:
    """Floating tensors of nested lists and tuples as float64."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.double()
    if isinstance(value, (list, tuple)):
        return type(value)(doubled(item) for item in value)
    return value


def flat(value: Any) -> list[torch.Tensor]:
    """The tensors of a result, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in flat(item)]
    return [torch.tensor(value)]


def assert_as_good_as(actual: Any, plain: Any, exact: Any) -> None:
    """Results have the dtype and shape of the plain ones and at most twice their distance to the exact ones."""
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = list(
        zip(flat(actual), flat(plain), flat(exact), strict=True)
    )
    for got, want, truth in pairs:
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        if not want.is_floating_point():
            assert torch.equal(got, want)
            continue
        finite = truth.double().isfinite() & want.double().isfinite()
        assert torch.equal(got.double()[~finite].nan_to_num(7.0), want.double()[~finite].nan_to_num(7.0))
        error = (got.double() - truth.double())[finite].abs()
        allowed = 2 * (want.double() - truth.double())[finite].abs().max() if finite.any() else 0.0
        # a result that the plain one hits by luck may still be off by its own rounding
        rounding = torch.finfo(want.dtype).eps * truth.double()[finite].abs()
        assert (error <= allowed + rounding).all(), (error.max(), allowed)


class Case:
    """One call that must take a given operator and agree with the CPU.

    Args:
        operator: name in the library, such as "aclnnExp".
        call: computes with tensors of any device; arguments that it changes are copies of its own.
        inputs: arguments of the call, on the CPU.
    """

    def __init__(self, operator: str, call: Callable[..., Any], *inputs: Any) -> None:
        self.operator = operator
        self.call = call
        self.inputs = inputs

    def check(self) -> None:
        """Runs the call on the device, as it is on the CPU, and in float64."""
        inputs = to("npu", list(self.inputs))
        actual, launched = launched_by(lambda: self.call(*inputs))
        assert self.operator in launched, launched
        plain = self.call(*to("cpu", list(self.inputs)))
        exact = self.call(*doubled(list(self.inputs)))
        assert_as_good_as(to("cpu", actual), plain, exact)


def ids(cases: Sequence[Case]) -> list[str]:
    """Names of tests, one per case."""
    return [f"{case.operator}-{index}" for index, case in enumerate(cases)]


class Values:
    """Repeatable inputs."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Standard normal values."""
        return torch.randn(shape, generator=self._generator).to(dtype)

    def positive(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Values in [0.25, 1.25)."""
        return (torch.rand(shape, generator=self._generator) + 0.25).to(dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Integers in [low, high)."""
        return torch.randint(low, high, shape, generator=self._generator).to(dtype)
