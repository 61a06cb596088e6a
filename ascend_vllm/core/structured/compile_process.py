"""Compilation of grammars in limited processes (`prepare` runs there, see `sandbox.child`).

A grammar is a client's program: a few bytes can cause any amount of work in a library. So it is first compiled and
tried out in a process with limits of memory and CPU time, which can be killed. If that took long, the engine core
gets the grammar as the library serialises it; if not, it compiles the grammar again itself.

The process gets the vocabulary, and imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib
import pathlib
import random
import resource
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from ascend_vllm.core.structured.backends import BACKENDS, make_backend
from ascend_vllm.core.structured.constraint import Constraint
from ascend_vllm.core.structured.constraint_checks import check_constraint
from ascend_vllm.core.structured.grammar import CompiledGrammar, GrammarBackend, GrammarError
from ascend_vllm.core.structured.vocabulary import Vocabulary
from ascend_vllm.errors import RequestError

# largest serialised grammar
MAX_PACKED_BYTES = 48 << 20
# approximate CPU seconds to serialise and load a byte of a grammar; if compiling takes less, and at most
# _AFFORDABLE_S, the engine core compiles the grammar again
_PACKING_S = 50e-9
_AFFORDABLE_S = 2.0
# a grammar is tried out with this many tokens; limits for all of their masks, and for the first one
_NUM_TRIED_TOKENS = 16
_MAX_TRIAL_S = 0.25
_MAX_MASK_S = 0.05
# xgrammar imports them, but not for compiling; they would take seconds and hundreds of MiB
_NOT_NEEDED = ("torch", "transformers")


class Trial(msgspec.Struct):
    """The result of compiling a constraint.

    Attributes:
        error: why there is no grammar; None: there is one.
        is_refused: the constraint must not be compiled by any library, because of `error`.
        num_bytes: approximate memory of the grammar.
        packed: the serialised grammar; None: the engine core should compile it again.
    """

    error: str | None = None
    is_refused: bool = False
    num_bytes: int = 0
    packed: bytes | None = None


def try_out(constraint: Constraint, backend: GrammarBackend, vocabulary: Vocabulary) -> Trial:
    """Compiles a constraint, and tries out some masks.

    Raises:
        MemoryError: the process reached its limit of memory.
    """
    try:
        check_constraint(constraint)
    except RequestError as error:
        return Trial(error=str(error), is_refused=True)
    before, started = _resident_bytes(), time.process_time()
    try:
        compiled = backend.compile(constraint)
        cpu_s = time.process_time() - started
        _try_masks(compiled, vocabulary)
        packed = _pack(backend, compiled, cpu_s)
    except GrammarError as error:
        return Trial(error=str(error))
    return Trial(num_bytes=max(_resident_bytes() - before, 0), packed=packed)


def _pack(backend: GrammarBackend, compiled: CompiledGrammar, cpu_s: float) -> bytes | None:
    is_affordable = cpu_s <= _AFFORDABLE_S
    packed = backend.pack(compiled, int(cpu_s / _PACKING_S) if is_affordable else MAX_PACKED_BYTES)
    if packed is None and not is_affordable:
        raise GrammarError(f"the compilation took {cpu_s:.1f} s of CPU time, the limit is {_AFFORDABLE_S:g} s")
    return packed


def _try_masks(compiled: CompiledGrammar, vocabulary: Vocabulary) -> None:
    """Rejects grammars whose masks take so long that they would delay steps.

    Raises:
        GrammarError: with the measured time and the limit.
    """
    grammar, rng = compiled.start(), random.Random(0)
    row = np.zeros(vocabulary.num_words, np.int32)
    # one-time work of a library, which is not measured
    compiled.start().fill_bitmask(row)
    total_s = 0.0
    for index in range(_NUM_TRIED_TOKENS):
        started = time.thread_time()
        grammar.fill_bitmask(row)
        mask_s = time.thread_time() - started
        if index == 0 and mask_s > _MAX_MASK_S:
            raise GrammarError(f"a mask of it takes {mask_s * 1e3:.0f} ms, the limit is {_MAX_MASK_S * 1e3:.0f} ms")
        words = np.flatnonzero(row)
        if not words.size:
            return
        # any of the tokens that have a bit in one of the words
        word = int(words[rng.randrange(words.size)])
        bits = int(row.view(np.uint32)[word])
        token_id = 32 * word + rng.choice([bit for bit in range(32) if bits >> bit & 1])
        started = time.thread_time()
        is_accepted = grammar.accept_tokens([token_id])
        total_s += mask_s + time.thread_time() - started
        if total_s > _MAX_TRIAL_S:
            raise GrammarError(
                f"the masks of {index + 1} tokens take {total_s * 1e3:.0f} ms, the limit is "
                f"{_MAX_TRIAL_S * 1e3:.0f} ms for {_NUM_TRIED_TOKENS}"
            )
        if not is_accepted:
            return


def _resident_bytes() -> int:
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class _Placeholder(types.ModuleType):
    """A module that has every name, each an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda *_args, **_kwargs: None})


def _import_xgrammar() -> None:
    """Imports xgrammar without the modules that compiling does not need."""
    # tvm_ffi does without them if they cannot be imported; xgrammar needs to find names in them
    for module, stand_in in (("tvm_ffi", None), ("xgrammar", _Placeholder)):
        for name in _NOT_NEEDED:
            sys.modules[name] = stand_in(name) if stand_in else None  # type: ignore[assignment]
        importlib.import_module(module)
        for name in _NOT_NEEDED:
            del sys.modules[name]


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    """Loads the libraries for a vocabulary; see `sandbox.child`.

    Args:
        setup: the vocabulary's tokens in msgpack.

    Returns:
        A function from (name of a library, `Constraint`) to `Trial`, both in msgpack.
    """
    vocabulary = Vocabulary(msgspec.msgpack.decode(setup, type=list[bytes]), {}, [])
    _import_xgrammar()
    backends = {name: make_backend(name, vocabulary, 1) for name in BACKENDS}
    decode = msgspec.msgpack.Decoder(tuple[str, Constraint]).decode

    def answer(data: bytes) -> bytes:
        name, constraint = decode(data)
        return msgspec.msgpack.encode(try_out(constraint, backends[name], vocabulary))

    return answer
