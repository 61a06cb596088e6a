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

# Each change of precision between neighbouring rows costs a call in every layer. With more calls than this, the
# whole step is computed in one call in high precision.
MAX_PARTS = 4


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
        by_kind: rows of a part have the same kind; otherwise the same precision.

    Returns:
        At least one part; without by_kind at most MAX_PARTS.

    Example::

        split_rows(np.array([0, 1, 6]), np.array([9, 5]), Precision(), by_kind=False)   # a decoding row, a prompt
    """
    query_lens = np.diff(query_start)
    kinds = np.where(query_lens == 1, RowKind.DECODE, np.where(query_lens < seq_lens, RowKind.PREFIX, RowKind.PROMPT))
    # by `RowKind`
    precise = np.array([precision.decode, precision.prefix, precision.prompt])[kinds]
    differs = np.diff(kinds) if by_kind else np.diff(precise)
    edges = [0, *(np.flatnonzero(differs) + 1).tolist(), len(kinds)]
    if not by_kind and len(edges) > MAX_PARTS + 1:
        edges, precise = [0, len(kinds)], np.ones_like(precise)
    return [
        Part(
            kind=RowKind(int(kinds[first])),
            high_precision=bool(precise[first]),
            rows=slice(first, last),
            tokens=slice(int(query_start[first]), int(query_start[last])),
            query_ends=(query_start[first + 1 : last + 1] - query_start[first]).tolist(),
            seq_lens=seq_lens[first:last].tolist(),
            kinds=frozenset(map(RowKind, set(kinds[first:last].tolist()))),
        )
        for first, last in itertools.pairwise(edges)
    ]
