"""Shortens `import torch` in the processes of an engine.

A third of its processor time goes to torch._meta_registrations: what operators return for tensors without data, of
which only compilers and torch_npu ask. It is imported when they are.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

_POSTPONED = "torch._meta_registrations"
# what torch.compile, torch.export and their like import first, and the backend of NPUs, which changes some of them
_NEEDED_BY = ("torch._dynamo", "torch._inductor", "torch_npu")


class _Postponing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an empty module, which is replaced by the true one when something needs that."""

    _is_over = False

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the protocol's
        target: types.ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        if self._is_over:
            return None
        if name == _POSTPONED:
            return importlib.machinery.ModuleSpec(name, self)
        if name in _NEEDED_BY:
            self._import()
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        def look_up(name: str) -> Any:
            # `inspect` asks every module for its file
            if name.startswith("__"):
                raise AttributeError(name)
            return getattr(self._import(), name)

        module.__dict__["__getattr__"] = look_up

    def _import(self) -> types.ModuleType:
        if not self._is_over:
            self._is_over = True
            sys.modules.pop(_POSTPONED, None)
        return importlib.import_module(_POSTPONED)


def postpone_meta_registrations() -> None:
    """For a process that has not imported torch yet; does nothing in others."""
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _Postponing())
