"""Records the operators that code launches on the device."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# operators that launch nothing
VIEWS = {
    f"aten::{name}"
    for name in (
        "alias",
        "as_strided",
        "detach",
        "expand",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "transpose",
        "unbind",
        "unsqueeze",
        "view",
        "_reshape_alias",
        "_unsafe_view",
    )
}


class Recorder(TorchDispatchMode):
    """The operators that run, and their arguments by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # what equals its default does not arrive here
        arguments = {argument.name: argument.default_value for argument in func._schema.arguments}
        arguments |= dict(zip(arguments, args, strict=False)) | (kwargs or {})
        self.calls.append((func._schema.name, arguments))
        return func(*args, **(kwargs or {}))

    def launched(self) -> list[str]:
        """Names of the operators that compute or copy."""
        return [name for name, _ in self.calls if name not in VIEWS and not name.startswith("ascend_vllm::")]

    def attention(self) -> list[dict[str, Any]]:
        """Arguments of the attention operators."""
        return [arguments for name, arguments in self.calls if name.endswith(("attention", "attention_score"))]


@contextlib.contextmanager
def traced() -> Iterator[list[dict[str, Any]]]:
    """Collects what the simulator was asked to launch meanwhile: {"op": "aclnn…", "args": {…}} each, in order."""
    npu: Any = torch.npu  # type: ignore[attr-defined]
    before = os.environ.get("ASCEND_SIM_TRACE")
    # it opens one file in the life of a process
    path = pathlib.Path(before or _trace_path())
    os.environ["ASCEND_SIM_TRACE"] = str(path)
    npu.synchronize()
    start = path.stat().st_size if path.exists() else 0
    calls: list[dict[str, Any]] = []
    try:
        yield calls
        npu.synchronize()
    finally:
        if before is None:
            del os.environ["ASCEND_SIM_TRACE"]
    calls += [json.loads(line) for line in path.read_text()[start:].splitlines()]


@functools.cache
def _trace_path() -> str:
    handle, path = tempfile.mkstemp(prefix="npu-trace-", suffix=".jsonl")
    os.close(handle)
    atexit.register(pathlib.Path(path).unlink)
    return path
