"""Tapes: what a piece of code has the CPU's kernels do, recorded once and replayed without Python in between.

A decoding step of a small model calls a few hundred kernels, and calling them takes a good part of its time. A tape
holds the calls with the addresses that they read and write; `csrc_ascend/cpu/bind/tape.h` keeps it.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch.utils._python_dispatch import TorchDispatchMode

from ascend_vllm.ops.native import native_library
from ascend_vllm.ops.registry import NAMESPACE, OPS

T = TypeVar("T")


class UnrecordableError(Exception):
    """Something else than a kernel would have computed."""


class _KernelsOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets nothing compute but ops that are recorded; views are made while recording and stay."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # or torch would import its compiler, which takes seconds
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        is_recorded = func.namespace == NAMESPACE and func._opname in OPS and OPS[func._opname].recordable
        if not is_recorded and not func.is_view:
            raise UnrecordableError(f"{func} is no kernel that can be recorded")
        return func(*args, **kwargs or {})


class Tapes:
    """Tapes that work in the same memory, so that no two of them are replayed at a time. Needs the compiled library.

    Example::

        tapes = Tapes()
        x = torch.randn(4, 8)
        y = tapes.record(0, lambda: silu_and_mul(x))
        x.normal_()
        tapes.replay(0)         # y is silu_and_mul of what is in x now
    """

    def __init__(self) -> None:
        self._library = _library()
        self._handle = ctypes.c_void_p(self._library.ascend_vllm_tapes_make())
        weakref.finalize(self, self._library.ascend_vllm_tapes_free, self._handle)

    def record(self, key: int, function: Callable[[], T]) -> T:
        """Calls a function and keeps what it has kernels do, as the tape with a key.

        Tensors that it reads must stay where they are as long as the tape is replayed, and so must those that it
        returns and somebody reads: whoever lets go of one gives its memory to later recordings.

        Raises:
            UnrecordableError: the function computes with something else; there is no tape then.
        """
        self._library.ascend_vllm_tape_begin(self._handle, key)
        try:
            with _KernelsOnly():  # type: ignore[no-untyped-call]
                return function()
        except BaseException:
            self._library.ascend_vllm_tape_drop(self._handle, key)
            raise
        finally:
            self._library.ascend_vllm_tape_end()

    def length(self, key: int) -> int:
        """Calls on a tape; 0 if there is none."""
        return int(self._library.ascend_vllm_tape_length(self._handle, key))

    def replay(self, key: int) -> None:
        """Does again what was recorded.

        Raises:
            RuntimeError: a kernel refuses what it reads now, or there is no such tape.
        """
        error: bytes | None = self._library.ascend_vllm_tape_replay(self._handle, key)
        if error is not None:
            raise RuntimeError(error.decode())


def _library() -> ctypes.CDLL:
    library = native_library()
    library.ascend_vllm_tapes_make.restype = ctypes.c_void_p
    library.ascend_vllm_tapes_free.argtypes = [ctypes.c_void_p]
    for name in ("begin", "drop", "length", "replay"):
        getattr(library, f"ascend_vllm_tape_{name}").argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.ascend_vllm_tape_length.restype = ctypes.c_int64
    library.ascend_vllm_tape_replay.restype = ctypes.c_char_p
    return library
