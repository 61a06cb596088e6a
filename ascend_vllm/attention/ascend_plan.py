"""Splits a step's rows into calls of the Ascend operators, using integers on the host only.

Letters: R rows of a step, T tokens of a step.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


class RowKind(enum.IntEnum):
    """What a row computes in a step."""

    # one token, with others in the cache before it
    DECODE = 0
    # several tokens, with others in the cache before them: a chunk, or a prompt whose prefix was cached
    PREFIX = 1
    # a prompt from its first token on, or its first chunk
    PROMPT = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Precision:
    """Which kinds of rows are computed in high precision."""

    decode: bool = False
    prefix: bool = False
    prompt: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Neighbouring rows that one call computes. The operators take lists, which replays of graphs update."""

    # of the first row
    kind: RowKind
    # at least one row is to be computed in it
    high_precision: bool
    rows: slice
    tokens: slice
    # [rows] tokens of the part up to the end of each row
    query_ends: list[int]
    # [rows] tokens of each row in the cache after the step
    seq_lens: list[int]
    # of all rows
    kinds: frozenset[RowKind]


def split_rows(query_start: Int32Array, seq_lens: Int32Array, precision: Precision, *, by_kind: bool) -> list[Part]:
    """Cuts a step into parts, in the order of its rows.

    Args:
        query_start: [R+1].
        seq_lens: [R].
        precision: of each kind.
        by_kind: rows of a part have the same kind; otherwise all rows are one part.

    Returns:
        At least one part.

    Example::

        split_rows(np.array([0, 1, 6]), np.array([9, 5]), Precision(), by_kind=False)   # a decoding row, a prompt
    """
    query_lens = np.diff(query_start)
    kinds = np.where(query_lens == 1, RowKind.DECODE, np.where(query_lens < seq_lens, RowKind.PREFIX, RowKind.PROMPT))
    # by `RowKind`
    precise = np.array([precision.decode, precision.prefix, precision.prompt])[kinds]
    edges = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist()] if by_kind else [0]
    return [
        Part(
            kind=RowKind(int(kinds[first])),
            high_precision=bool(precise[first:last].any()),
            rows=slice(first, last),
            tokens=slice(int(query_start[first]), int(query_start[last])),
            query_ends=(query_start[first + 1 : last + 1] - query_start[first]).tolist(),
            seq_lens=seq_lens[first:last].tolist(),
            kinds=frozenset(map(RowKind, set(kinds[first:last].tolist()))),
        )
        for first, last in itertools.pairwise([*edges, len(kinds)])
    ]


# most query tokens of a row that the absorbed form of latent attention takes, and that decoding over keys in bytes
# computes one by one
MAX_DECODED_TOKENS = 16
# Cached tokens before those of the step that one call makes keys and values of each head of, from latents or bytes:
# limits the memory for them. A multiple of every block size.
MAX_EXPANDED_TOKENS = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class LatentPart:
    """Neighbouring rows whose latent attention one call computes, or one for each chunk."""

    # few tokens a row, computed in the latent space; otherwise keys and values of each head are made of the latents
    is_absorbed: bool
    rows: slice
    tokens: slice
    # as those of `Part`
    query_ends: list[int]
    seq_lens: list[int]
    max_query_len: int
    # first tokens of the chunks that sequences are expanded in; more than one only for a part of one row
    chunk_starts: tuple[int, ...] = (0,)


def split_latent_rows(query_start: Int32Array, seq_lens: Int32Array) -> list[LatentPart]:
    """Cuts a step of latent attention into parts, in the order of its rows.

    Args:
        query_start: [R+1].
        seq_lens: [R].

    Returns:
        At least one part if there are rows.
    """
    query_lens, contexts = np.diff(query_start), seq_lens - np.diff(query_start)
    absorbed = _have_few_tokens(query_lens, contexts)
    return [
        LatentPart(
            is_absorbed=bool(absorbed[first]),
            rows=slice(first, last),
            tokens=slice(int(query_start[first]), int(query_start[last])),
            query_ends=(query_start[first + 1 : last + 1] - query_start[first]).tolist(),
            seq_lens=seq_lens[first:last].tolist(),
            max_query_len=int(query_lens[first:last].max()),
            chunk_starts=(0,) if absorbed[first] else _chunk_starts(contexts[first:last].tolist()),
        )
        for first, last in _limited_parts(absorbed, contexts)
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class BytePart:
    """Neighbouring rows whose attention over keys and values in bytes one call computes."""

    # few tokens a row, each computed like a row of one token; otherwise keys and values are made floats first
    is_decoded: bool
    # at least one row is to be computed in it
    high_precision: bool
    rows: slice
    tokens: slice
    # [rows] tokens up to the end of each row: of the step, and of the cache after it
    query_ends: list[int]
    kv_ends: list[int]
    # [rows] tokens of each row in the step
    query_lens: list[int]
    # [rows] tokens of each row in the cache after the step
    seq_lens: list[int]

    @property
    def is_fresh(self) -> bool:
        """All tokens of its rows are those of the step."""
        return self.query_ends == self.kv_ends


def split_byte_rows(query_start: Int32Array, seq_lens: Int32Array, precision: Precision) -> list[BytePart]:
    """Cuts a step of attention over keys in bytes into parts, in the order of its rows.

    Args:
        query_start: [R+1].
        seq_lens: [R].
        precision: of prompts and prefixes.

    Returns:
        At least one part if there are rows.
    """
    query_lens, contexts = np.diff(query_start), seq_lens - np.diff(query_start)
    decoded = _have_few_tokens(query_lens, contexts)
    precise = np.where(contexts > 0, precision.prefix, precision.prompt)
    return [
        BytePart(
            is_decoded=bool(decoded[first]),
            high_precision=bool(precise[first:last].any()),
            rows=slice(first, last),
            tokens=slice(int(query_start[first]), int(query_start[last])),
            query_ends=(query_start[first + 1 : last + 1] - query_start[first]).tolist(),
            kv_ends=np.cumsum(seq_lens[first:last]).tolist(),
            query_lens=query_lens[first:last].tolist(),
            seq_lens=seq_lens[first:last].tolist(),
        )
        for first, last in _limited_parts(decoded, contexts)
    ]


def _have_few_tokens(query_lens: Int32Array, contexts: Int32Array) -> npt.NDArray[np.bool_]:
    """[R]: which rows have so few tokens in a step that what is cached is read as it is."""
    few: npt.NDArray[np.bool_] = (query_lens == 1) | ((query_lens <= MAX_DECODED_TOKENS) & (contexts > 0))
    return few


def _limited_parts(few: npt.NDArray[np.bool_], contexts: Int32Array) -> list[tuple[int, int]]:
    """First row of each part, and its last row + 1.

    Args:
        few: [R], see `_have_few_tokens`; the same for all rows of a part.
        contexts: [R] tokens of each row before those of the step: at most MAX_EXPANDED_TOKENS in a part of
            several rows that are not few.
    """
    ends: list[int] = []
    # of the part that grows: cached tokens that it expands
    num_expanded = 0
    for row, (context, is_few) in enumerate(zip(contexts.tolist(), few.tolist(), strict=True)):
        joins = bool(ends) and bool(few[row - 1]) == is_few
        if not is_few:
            joins = joins and num_expanded + context <= MAX_EXPANDED_TOKENS
            num_expanded = num_expanded + context if joins else context
        if joins:
            ends[-1] = row + 1
        else:
            ends.append(row + 1)
    return list(itertools.pairwise([0, *ends]))


def _chunk_starts(contexts: list[int]) -> tuple[int, ...]:
    """The last chunk has a row's new tokens and at most MAX_EXPANDED_TOKENS before them, as every other chunk has."""
    longest = max(contexts) if len(contexts) == 1 else 0
    return tuple(range(0, max(longest, 1), MAX_EXPANDED_TOKENS))
