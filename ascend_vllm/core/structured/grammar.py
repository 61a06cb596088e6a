"""The seam to libraries that keep a text to a grammar.

A `GrammarBackend` compiles a constraint for a vocabulary; a `CompiledGrammar` is shared by all requests with that
constraint; a `Grammar` is where one sequence stands in it. Grammars know text only: how a sequence may end is the
matter of core/structured/manager.py.

Letters: V tokens of the vocabulary, W = ceil(V / 32) words of a bitmask. Token t is bit t % 32 of word t // 32.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ascend_vllm.core.structured.constraint import Constraint

Bitmask = npt.NDArray[np.int32]


class GrammarError(ValueError):
    """A library cannot compile a constraint; the text says why."""


class Grammar(abc.ABC):
    """Where a sequence stands. Not safe to be used by two threads at a time."""

    @abc.abstractmethod
    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        """Moves on by tokens of text; False, and nothing has changed, if they do not fit."""

    @abc.abstractmethod
    def fill_bitmask(self, row: Bitmask) -> None:
        """Marks the tokens of text that may come next.

        Args:
            row: [W], overwritten.
        """

    @abc.abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Takes back the tokens accepted last.

        Raises:
            ValueError: there were not so many.
        """

    @property
    @abc.abstractmethod
    def is_accepting(self) -> bool:
        """Whether the text so far is complete; it may be able to go on."""

    @property
    @abc.abstractmethod
    def is_terminated(self) -> bool:
        """Whether the text is complete and no token can follow."""


class CompiledGrammar(abc.ABC):
    """A constraint compiled for a vocabulary; safe to share."""

    @abc.abstractmethod
    def start(self) -> Grammar:
        """A sequence that has no text yet."""

    @property
    @abc.abstractmethod
    def num_bytes(self) -> int:
        """Memory it takes, about."""

    @abc.abstractmethod
    def note_bytes(self, num_bytes: int) -> None:
        """Hears what its compilation was seen to take, for a library that does not say it."""

    @abc.abstractmethod
    def note_work(self, seconds: float) -> None:
        """Hears what computing its masks took: a library may keep what it has worked out."""


class GrammarBackend(abc.ABC):
    """A library."""

    @abc.abstractmethod
    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """Compiles a constraint; takes its time, and leaves other threads running.

        Raises:
            GrammarError: the constraint is invalid, or asks for what the library cannot do.
        """

    @abc.abstractmethod
    def pack(self, compiled: CompiledGrammar, max_bytes: int) -> bytes | None:
        """What `unpack` makes the grammar of in another process; None: the library cannot, or it is too large."""

    @abc.abstractmethod
    def unpack(self, packed: bytes) -> CompiledGrammar:
        """The grammar that a backend for the same vocabulary has packed."""

    @abc.abstractmethod
    def fill_bitmasks(self, grammars: Sequence[Grammar], bitmask: Bitmask, rows: Sequence[int]) -> None:
        """`Grammar.fill_bitmask` for several grammars of this backend at once.

        Args:
            grammars: whose masks are wanted.
            bitmask: [G, W].
            rows: of each grammar, none twice.
        """


def last_word(num_tokens: int) -> np.int32:
    """The bits that the last word of a bitmask has."""
    return np.int32(-1 if num_tokens % 32 == 0 else (1 << num_tokens % 32) - 1)


def choice_regex(choices: Sequence[str]) -> str:
    """A regular expression that exactly these strings match, in what all dialects have in common."""
    escaped = ("".join(_escape(character) for character in choice) for choice in choices)
    return "(" + "|".join(escaped) + ")"


def _escape(character: str) -> str:
    if character in r".^$*+?()[]{}|\/-":
        return "\\" + character
    return {"\n": r"\n", "\r": r"\r", "\t": r"\t"}.get(character, character)
