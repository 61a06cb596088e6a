"""Compiled graphs on Ascend NPUs, over torchair."""

from __future__ import annotations

import importlib
import pathlib
import types
from collections.abc import Callable
from typing import Any

import torch

from ascend_vllm.errors import ConfigError
from ascend_vllm.platforms.interface import GraphCompiler

# torchair's mode that makes graphs of the runtime, not of GE
_MODE = "reduce-overhead"


class TorchairCompiler(GraphCompiler):
    """torchair's `cache_compile`.

    Args:
        torch_npu: the module. Any: it has no annotations.

    Raises:
        ConfigError: torchair does not load.
    """

    def __init__(self, torch_npu: Any) -> None:
        self._torch_npu = torch_npu
        # Operators of torch_npu with `out=` return what they fill. torch warns of that while it compiles, but makes
        # it an error where the variable CI is set.
        functorch: Any = importlib.import_module("torch._functorch.config")
        functorch.error_on_custom_op_aliasing = False
        try:
            importlib.import_module("torch_npu.dynamo")
            self._torchair: Any = importlib.import_module("torchair")
        except (ImportError, OSError, RuntimeError) as error:
            raise ConfigError(
                f"INFER_MODE=PTA needs torchair, which cannot be loaded: {error}. Unset INFER_MODE, or install what "
                "is missing."
            ) from error

    def compile(self, method: types.MethodType, directory: pathlib.Path) -> Callable[..., torch.Tensor]:
        """See `GraphCompiler.compile`."""
        config = self._torchair.CompilerConfig()
        config.mode = _MODE
        compiled: Callable[..., torch.Tensor] = self._torchair.inference.cache_compile(
            method, config=config, dynamic=True, cache_dir=str(directory)
        )
        return compiled

    def reset(self) -> None:
        """See `GraphCompiler.reset`."""
        torch._dynamo.reset()

    def versions(self) -> dict[str, str]:
        """See `GraphCompiler.versions`."""
        return {
            "torch_npu": str(self._torch_npu.__version__),
            "CANN": str(self._torch_npu.npu.utils.get_cann_version()),
            "torchair mode": _MODE,
        }
