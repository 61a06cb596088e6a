"""What the cases of a step run on: the device, sizes that fit it, and measurements.

A case is a function; its name is the same on every machine, and its sizes are not: on simulated NPUs they are small.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ascend_vllm.tools.doctor.kit.rows import Status

if TYPE_CHECKING:
    from ascend_vllm.platforms.npu import NpuPlatform

_T = TypeVar("_T")
# a function of the simulated runtime alone
_SIMULATED = "_ZN10ascend_sim4cannEv"
# calls that are timed, after one that is not
_REPEATS = 5


@dataclasses.dataclass(frozen=True)
class Result:
    """What a case found; see `Row`."""

    status: Status = Status.OK
    numbers: Mapping[str, float] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    message: str = ""

    @classmethod
    def of(cls, is_right: bool, message: str = "", **numbers: float) -> Result:
        """A case that ran.

        Args:
            is_right: what it computed.
            message: what is not right.
            numbers: that it measured.
        """
        return cls(Status.OK if is_right else Status.WRONG, numbers, message="" if is_right else message)

    @classmethod
    def compared(cls, error: float, allowed: float, numbers: Mapping[str, float]) -> Result:
        """A case that computed something with this largest error."""
        is_right = error <= allowed
        message = "" if is_right else f"the error is {error:.3g}, {allowed:.3g} are allowed"
        return cls(
            Status.OK if is_right else Status.WRONG, {"error": error, "allowed": allowed, **numbers}, {}, message
        )


@dataclasses.dataclass(frozen=True)
class Case:
    """A part of a step.

    Attributes:
        name: within the step.
        run: finds out; raises what its calls raise.
        variables: of the environment, that a process must begin with to run it.
    """

    name: str
    run: Callable[[], Result]
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Session:
    """One process of a step. The device is used from the first access to `platform` on."""

    @functools.cached_property
    def is_simulated(self) -> bool:
        """Whether the runtime is the simulated one."""
        try:
            return hasattr(ctypes.CDLL("libascendcl.so"), _SIMULATED)
        except OSError:
            return False

    @functools.cached_property
    def platform(self) -> NpuPlatform:
        """Of the first NPU, initialised."""
        return self.bind(0, 1)

    def bind(self, rank: int, count: int) -> NpuPlatform:
        """The platform of an NPU.

        Args:
            rank: of this process.
            count: processes, each with an NPU.
        """
        from ascend_vllm.ops.native import import_op_modules
        from ascend_vllm.platforms.npu import NpuPlatform

        platform = NpuPlatform()
        platform.initialize(rank, count)
        import_op_modules()
        importlib.import_module("ascend_vllm.ops.ascend")
        return platform

    def begin(self) -> None:
        """Binds to the first NPU, unless that is done: before "npu" means a device to torch."""
        _ = self.platform

    @property
    def npu(self) -> Any:
        """torch_npu.npu."""
        import torch

        self.begin()
        return torch.npu  # type: ignore[attr-defined]  # defined by torch_npu

    def size(self, on_card: _T, simulated: _T) -> _T:
        """A size for the kind of device that this is."""
        return simulated if self.is_simulated else on_card

    def is_alive(self) -> bool:
        """Whether the device still computes after a failure; true if it was never used."""
        if "platform" not in self.__dict__:
            return True
        import torch

        with contextlib.suppress(RuntimeError):
            return bool((torch.ones(3, device="npu") + 1).sum().item() == 6)
        return False

    def measure(self, call: Callable[[], _T]) -> tuple[_T, dict[str, float]]:
        """Runs a call several times.

        Returns:
            What it returned first, and "time_us", the median from the call to the end of its work on the device, and
            "taken_bytes", by which the first call lessened the free memory of the device: results and workspaces.
        """
        self.platform.release_memory()
        free = self.platform.free_bytes()
        result = call()
        self.npu.synchronize()
        taken = free - self.platform.free_bytes()
        times = []
        for _ in range(self.size(_REPEATS, 1)):
            start = time.perf_counter()
            call()
            self.npu.synchronize()
            times.append((time.perf_counter() - start) * 1e6)
        return result, {"time_us": statistics.median(times), "taken_bytes": float(taken)}
