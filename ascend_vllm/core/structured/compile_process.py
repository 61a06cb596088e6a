"""What compiles grammars first, in limited processes (`prepare` there, see `sandbox.child`).

A grammar is a program of a client: a few bytes can ask a library for any amount of work. So it is compiled and tried
out where the system limits memory and CPU time, and where it can be killed at any moment. A result that took long
goes to the engine core as the library serialises it; what took little is compiled there once more, in the same time.

The process is given the vocabulary, and imports neither torch nor transformers.
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

from ascend_vllm.core.structured.backends import BACKENDS
from ascend_vllm.core.structured.constraint import Constraint
from ascend_vllm.core.structured.constraint_checks import check_constraint
from ascend_vllm.core.structured.grammar import CompiledGrammar, GrammarBackend, GrammarError
from ascend_vllm.core.structured.vocabulary import Vocabulary
from ascend_vllm.errors import RequestError

# of a serialised grammar
MAX_PACKED_BYTES = 48 << 20
# CPU seconds that serialising and reading a grammar takes for each byte, about; where compiling it a second time
# takes less, the engine core does that, up to so many seconds
_PACKING_S = 50e-9
_AFFORDABLE_S = 2.0
# a grammar is tried out with so many tokens, whose masks together may take so long, and the first one so long
_NUM_TRIED_TOKENS = 16
_MAX_TRIAL_S = 0.25
_MAX_MASK_S = 0.05
# libraries that xgrammar imports for what is not done here; they take seconds, and hundreds of MiB
_NOT_NEEDED = ("torch", "transformers")


class Trial(msgspec.Struct):
    """What became of a constraint.

    Attributes:
        error: why there is no grammar; None: there is one.
        is_refused: no library may have the constraint, because of `error`.
        num_bytes: memory that the grammar takes, about.
        packed: the grammar as the library serialises it; None: the engine core can afford to compile it.
    """

    error: str | None = None
    is_refused: bool = False
    num_bytes: int = 0
    packed: bytes | None = None


def try_out(constraint: Constraint, backend: GrammarBackend, vocabulary: Vocabulary) -> Trial:
    """Compiles a constraint, and computes some masks with it.

    Raises:
        MemoryError: there is not enough.
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
    """Refuses grammars whose masks take so long that steps would have to wait for them.

    Raises:
        GrammarError: with what was measured, and the limit.
    """
    grammar, rng = compiled.start(), random.Random(0)
    row = np.zeros(vocabulary.num_words, np.int32)
    # what a library does once for all masks
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
    """A module whose names are all there, and mean nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda *_args, **_kwargs: None})


def _import_xgrammar() -> None:
    """Imports the library without what it needs for other things than compiling."""
    # its base checks by itself whether they are there, and needs them not
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
        Makes a `Trial` of the name of a library and a `Constraint`, all in msgpack.
    """
    vocabulary = Vocabulary(msgspec.msgpack.decode(setup, type=list[bytes]), {}, [])
    _import_xgrammar()
    backends = {name: make(vocabulary, 1) for name, make in BACKENDS.items()}
    decode = msgspec.msgpack.Decoder(tuple[str, Constraint]).decode

    def answer(data: bytes) -> bytes:
        name, constraint = decode(data)
        return msgspec.msgpack.encode(try_out(constraint, backends[name], vocabulary))

    return answer
