"""Compiled graphs on Ascend NPUs, by torchair's npugraph_ex, which is part of torch_npu."""

from __future__ import annotations

import importlib
import pathlib
import signal
import threading
import types
from collections.abc import Callable
from typing import Any

import torch

from ascend_vllm.errors import ConfigError
from ascend_vllm.platforms.interface import GraphCompiler

# makes graphs of the runtime, not of GE; in torchair's own module this is the mode "reduce-overhead", which torch_npu
# calls deprecated for it
_BACKEND = "npugraph_ex"


class NpuGraphCompiler(GraphCompiler):
    """npugraph_ex's `cache_compile`.

    Args:
        torch_npu: the module. Any: it has no annotations.
        soc: the runtime's name of the device.

    Raises:
        ConfigError: npugraph_ex cannot be loaded.
    """

    def __init__(self, torch_npu: Any, soc: str) -> None:
        self._torch_npu = torch_npu
        self._soc = soc
        # Operators of torch_npu with `out=` return what they fill. torch warns of that while it compiles, but makes
        # it an error where the variable CI is set.
        functorch: Any = importlib.import_module("torch._functorch.config")
        functorch.error_on_custom_op_aliasing = False
        try:
            self._backend = _import_backend()
        except (ImportError, OSError, RuntimeError) as error:
            raise ConfigError(
                f"INFER_MODE=PTA needs torch_npu's {_BACKEND}, which cannot be loaded: {error}. Unset INFER_MODE, or "
                "install what is missing."
            ) from error

    def compile(self, method: types.MethodType, directory: pathlib.Path) -> Callable[..., torch.Tensor]:
        compiled: Callable[..., torch.Tensor] = self._backend.inference.cache_compile(
            method, config=self._backend.CompilerConfig(), dynamic=True, cache_dir=str(directory)
        )
        return compiled

    def reset(self) -> None:
        torch._dynamo.reset()

    def versions(self) -> dict[str, str]:
        return {
            "torch_npu": str(self._torch_npu.__version__),
            "CANN": str(self._torch_npu.npu.utils.get_cann_version()),
            "compiler": _BACKEND,
            "SoC": self._soc,
        }


def _import_backend() -> Any:
    """Imports npugraph_ex, and restores the signal handlers that it replaces."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        # registers a lazy module under the backend's name, which is imported at its first use
        importlib.import_module("torch_npu.dynamo")
        module: Any = importlib.import_module(_BACKEND)
        importlib.import_module(f"{_BACKEND}.inference")
        return module
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                # None: not installed by Python, so that Python cannot restore it
                if handler is not None:
                    signal.signal(number, handler)
