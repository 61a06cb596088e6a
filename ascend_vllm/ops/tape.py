"""Tapes: what a piece of code has the CPU's kernels do, recorded once and replayed without Python in between.

A decoding step of a small model calls a few hundred kernels, and calling them takes a good part of its time. A tape
holds the calls with the addresses that they read and write; `csrc_ascend/cpu/bind/tape.h` keeps it. An op without a
kernel of its own, such as one of a plug-in, and one of torch's in `_REPEATED` divide a tape in two: they are called
between them.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ascend_vllm.ops.native import native_library
from ascend_vllm.ops.registry import NAMESPACE, OPS

T = TypeVar("T")


# operators of torch that depend on nothing but their arguments; few families use them in layers, none but models that
# report states of layers those of the second line, none but drafts with a vocabulary of their own those of the third,
# none but caps of logits those of the last
_REPEATED = frozenset(
    {
        *("aten::add_", "aten::mul_", "aten::gelu", "aten::relu_"),
        *("aten::add", "aten::clone", "aten::cat"),
        *("aten::index_select", "aten::new_full", "aten::index_copy_", "aten::constant_pad_nd"),
        *("aten::div_", "aten::tanh_"),
    }
)


class UnrecordableError(Exception):
    """Something else than a kernel would have computed."""


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what is computed, and lets nothing compute but recordable ops; views stay as they are made.

    Args:
        library: keeps the tapes.
        handle: of them.
        key: of the tape.
        growth: see `Tapes.record`.

    Attributes:
        parts: keys of tapes in the library, and calls of references between them, in order.
    """

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p, key: int, growth: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._library = library
        self._handle = handle
        self._key = key
        self._growth = growth
        self.parts: list[int | Callable[[], None]] = []
        self._begin()

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
        spec = OPS.get(func._opname) if func.namespace == NAMESPACE else None
        if func.is_view or (spec is not None and spec.recordable and spec.has_kernel("cpu")):
            return func(*args, **kwargs or {})
        if func._schema.name not in _REPEATED and (spec is None or not spec.recordable):
            raise UnrecordableError(f"{func} is no kernel that can be recorded")
        self._library.ascend_vllm_tape_end()
        recorded = func(*args, **kwargs or {})

        def compute_again() -> None:
            results = func(*args, **kwargs or {})
            for target, result in zip(_tensors_of(recorded), _tensors_of(results), strict=True):
                target.copy_(result)

        self.parts.append(compute_again)
        self._begin()
        return recorded

    def _begin(self) -> None:
        """Begins another tape in the library: the first has the tape's key, others have keys of their own."""
        number = self._key + (len(self.parts) << 32)
        self.parts.append(number)
        self._library.ascend_vllm_tape_begin(self._handle, number, self._growth)


def _tensors_of(results: Any) -> Sequence[torch.Tensor]:
    """The results of an op as a sequence."""
    return () if results is None else (results,) if isinstance(results, torch.Tensor) else results


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
        # not at the end of the process, when one may be replayed
        weakref.finalize(self, self._library.ascend_vllm_tapes_free, self._handle).atexit = False
        # by key, see `_Recorder`
        self._parts: dict[int, list[int | Callable[[], None]]] = {}

    def record(self, key: int, function: Callable[[], T], growth: int = 1) -> T:
        """Calls a function and keeps what it has kernels do, as the tape with a key.

        Tensors that it reads must stay where they are as long as the tape is replayed, and so must those that it
        returns and somebody reads: whoever lets go of one gives its memory to later recordings.

        Args:
            key: of the tape.
            function: to be recorded.
            growth: how many times the memory later recordings will need, so that they find room in this one's.

        Raises:
            UnrecordableError: the function computes with something else; there is no tape then.
        """
        recorder = _Recorder(self._library, self._handle, key, growth)
        try:
            with recorder:
                result = function()
        except BaseException:
            self._parts.pop(key, None)
            for part in recorder.parts:
                if isinstance(part, int):
                    self._library.ascend_vllm_tape_drop(self._handle, part)
            raise
        finally:
            self._library.ascend_vllm_tape_end()
        self._parts[key] = recorder.parts
        return result

    def length(self, key: int) -> int:
        """Calls on a tape; 0 if there is none."""
        return sum(
            self._library.ascend_vllm_tape_length(self._handle, part) if isinstance(part, int) else 1
            for part in self._parts.get(key, ())
        )

    def replay(self, key: int) -> None:
        """Does again what was recorded.

        Raises:
            RuntimeError: a kernel refuses what it reads now, or there is no such tape.
        """
        for part in self._parts.get(key, (key,)):
            if not isinstance(part, int):
                part()
                continue
            error: bytes | None = self._library.ascend_vllm_tape_replay(self._handle, part)
            if error is not None:
                raise RuntimeError(error.decode())


def _library() -> ctypes.CDLL:
    library = native_library()
    library.ascend_vllm_tapes_make.restype = ctypes.c_void_p
    library.ascend_vllm_tapes_free.argtypes = [ctypes.c_void_p]
    library.ascend_vllm_tape_begin.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    for name in ("drop", "length", "replay"):
        getattr(library, f"ascend_vllm_tape_{name}").argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.ascend_vllm_tape_length.restype = ctypes.c_int64
    library.ascend_vllm_tape_replay.restype = ctypes.c_char_p
    return library
