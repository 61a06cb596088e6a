"""Watches which operators of torch_npu the code calls, and may change an argument of theirs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

# arguments that are told of each call
_TOLD = ("input_layout", "sparse_mode", "inner_precise", "cache_mode")


class _Watched:
    """In the place of torch.ops.npu."""

    def __init__(self, operators: Any, changes: Mapping[str, object], calls: list[str]) -> None:
        self._operators = operators
        self._changes = changes
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        operator = getattr(self._operators, name)

        def call(*args: Any, **arguments: Any) -> Any:
            arguments |= {key: value for key, value in self._changes.items() if key in arguments}
            told = [f"{key}={arguments[key]}" for key in _TOLD if key in arguments]
            text = " ".join([name, *told])
            if text not in self._calls:
                self._calls.append(text)
            return operator(*args, **arguments)

        return call


@contextlib.contextmanager
def watched_operators(changes: Mapping[str, object] | None = None) -> Iterator[list[str]]:
    """Collects the operators that are called meanwhile, each once, with some of their arguments.

    Args:
        changes: arguments that are replaced in calls that have them.
    """
    calls: list[str] = []
    # Any: torch makes its namespaces when they are asked for
    namespaces: Any = torch.ops
    operators = namespaces.npu
    namespaces.npu = _Watched(operators, changes or {}, calls)
    try:
        yield calls
    finally:
        namespaces.npu = operators
