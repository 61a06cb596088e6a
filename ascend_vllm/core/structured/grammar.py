"""Interface of the libraries for guided decoding.

A `GrammarBackend` compiles a constraint for a vocabulary; a `CompiledGrammar` is shared by all requests with that
constraint; a `Grammar` is the matcher state of one sequence. Grammars know no stop tokens: see `output_constraint`.

Letters: V tokens of the vocabulary, W = ceil(V / 32) words of a bitmask. Token t is bit t % 32 of word t // 32.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ascend_vllm.core.structured.constraint import Constraint

Bitmask = npt.NDArray[np.int32]


class GrammarError(ValueError):
    """A library cannot compile a constraint; the message says why."""


class Grammar(abc.ABC):
    """Matcher state of a sequence. Not thread-safe.

    Args:
        matcher: the library's.
        num_tokens: V.

    Attributes:
        num_accepted: tokens that it has accepted.
    """

    def __init__(self, matcher: Any, num_tokens: int) -> None:
        self.matcher = matcher
        self._num_tokens = num_tokens
        self.num_accepted = 0

    @abc.abstractmethod
    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        """Advances by tokens; False, with the state unchanged, if they do not match."""

    @abc.abstractmethod
    def fill_bitmask(self, row: Bitmask) -> None:
        """Sets the bits of the tokens that may come next.

        Args:
            row: [W], overwritten.
        """

    def rollback(self, num_tokens: int) -> None:
        """Undoes the last tokens.

        Raises:
            ValueError: fewer tokens were accepted.
        """
        if num_tokens > self.num_accepted:
            raise ValueError(f"cannot roll back {num_tokens} tokens, {self.num_accepted} were accepted")
        self._rollback(num_tokens)
        self.num_accepted -= num_tokens

    @abc.abstractmethod
    def _rollback(self, num_tokens: int) -> None:
        """Undoes the last tokens, as many as were accepted at most."""

    @property
    @abc.abstractmethod
    def is_accepting(self) -> bool:
        """Whether the text so far is complete; more tokens may be possible."""

    @property
    @abc.abstractmethod
    def is_terminated(self) -> bool:
        """Whether the text is complete and no token can follow."""


class CompiledGrammar(abc.ABC):
    """A constraint compiled for a vocabulary; shared by requests."""

    @abc.abstractmethod
    def start(self) -> Grammar:
        """The state of an empty sequence."""

    @property
    @abc.abstractmethod
    def num_bytes(self) -> int:
        """Approximate memory use."""

    def set_measured_bytes(self, num_bytes: int) -> None:  # noqa: B027 - for some libraries
        """Sets the memory that its compilation took, for libraries that do not report it."""

    def add_mask_time(self, seconds: float) -> None:  # noqa: B027 - for some libraries
        """Counts time spent on masks, for libraries that cache what they compute and do not report its size."""


class GrammarBackend(abc.ABC):
    """A library."""

    @abc.abstractmethod
    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """Compiles a constraint; slow, but releases the GIL.

        Raises:
            GrammarError: the constraint is invalid or not supported.
        """

    @abc.abstractmethod
    def pack(self, compiled: CompiledGrammar, max_bytes: int) -> bytes | None:
        """Serialises a grammar for `unpack` in another process; None: not supported by the library, or too large."""

    @abc.abstractmethod
    def unpack(self, packed: bytes) -> CompiledGrammar:
        """The grammar that a backend for the same vocabulary packed."""

    @abc.abstractmethod
    def fill_bitmasks(self, grammars: Sequence[Grammar], bitmask: Bitmask, rows: Sequence[int]) -> None:
        """`Grammar.fill_bitmask` for several grammars of this backend.

        Args:
            grammars: of this backend.
            bitmask: [G, W].
            rows: row of each grammar, none twice.
        """


def last_word(num_tokens: int) -> np.int32:
    """The valid bits of a bitmask's last word."""
    return np.int32(-1 if num_tokens % 32 == 0 else (1 << num_tokens % 32) - 1)


def choice_regex(choices: Sequence[str]) -> str:
    """A regular expression that matches exactly these strings, in the common subset of all dialects."""
    escaped = ("".join(_escape(character) for character in choice) for choice in choices)
    return "(" + "|".join(escaped) + ")"


def _escape(character: str) -> str:
    if character in r".^$*+?()[]{}|\/-":
        return "\\" + character
    return {"\n": r"\n", "\r": r"\r", "\t": r"\t"}.get(character, character)
