"""The configuration of graphs, and their capture sizes.

A capture size is the number of rows of a decoding graph. Smaller batches are padded to the next larger size. Steps
with prompts have sizes of their own, which are numbers of tokens.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from ascend_vllm.errors import ConfigError

# size 1 is not captured: padding one row to two costs nothing, and compilers specialise dimensions of size 1
MIN_CAPTURE_SIZE = 2
# Tokens of a step with prompts. Up to the largest size a step takes about as long as reading the weights, so that
# padding costs the device little: an Ascend910B computes some 260 operations in 16 bits while it reads a byte.
_PIECE_SIZES = (16, 32, 64, 128, 256)


class GraphMode(enum.StrEnum):
    """How decoding steps are launched."""

    # operator by operator
    EAGER = "eager"
    # graphs captured at start
    CAPTURED = "captured"
    # tapes, recorded by the first step with a number of rows; on CPU
    RECORDED = "recorded"
    # graphs compiled by torchair and cached on disk
    COMPILED = "compiled"


class GraphConfig(msgspec.Struct, frozen=True):
    """How decoding steps are launched.

    Attributes:
        mode: by graphs, tapes or operators.
        capture_sizes: rows of each graph, ascending; empty: there are no graphs.
        max_seq_len: maximum length of sequences in a graph; steps with a longer one run eagerly.
        query_lens: tokens per row of a decoding step: 1, and with drafts also that of a row with drafts.
            There is a graph for each pair of capture size and query length; tapes are recorded for no other lengths.
        piece_sizes: tokens of steps with prompts that are captured in pieces between attention calls, ascending.
            Steps with more tokens run eagerly.
    """

    mode: GraphMode = GraphMode.EAGER
    capture_sizes: tuple[int, ...] = ()
    max_seq_len: int = 0
    query_lens: tuple[int, ...] = (1,)
    piece_sizes: tuple[int, ...] = ()


def default_piece_sizes(max_num_tokens: int) -> tuple[int, ...]:
    """`GraphConfig.piece_sizes` where a step has so many tokens at most."""
    return tuple(size for size in _PIECE_SIZES if size <= max_num_tokens)


def parse_capture_sizes(text: str, name: str) -> tuple[int, ...]:
    """Parses a list such as "2,4,6,8,16,32".

    Args:
        text: numbers above 0, separated by commas, in any order.
        name: of the variable, for error messages.

    Raises:
        ConfigError: the text is not such a list.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"{name} must be numbers above 0 separated by commas, such as 2,4,8,16, got {text!r}.")
    return tuple(int(part) for part in parts)


def default_capture_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Powers of two up to the maximum rows of a step, and that maximum."""
    powers = (1 << exponent for exponent in range(1, max_num_seqs.bit_length()))
    return tuple(sorted({*powers, max(max_num_seqs, MIN_CAPTURE_SIZE)}))


def fit_capture_sizes(sizes: Sequence[int], max_num_seqs: int) -> tuple[tuple[int, ...], list[str]]:
    """Makes the maximum rows of a step the largest of a list of sizes, as Ascend-vLLM 0.6.3 does.

    Args:
        sizes: each 1 or more.
        max_num_seqs: maximum rows of a step.

    Returns:
        The sizes, ascending, and a description of each change.

    Example:
        >>> fit_capture_sizes([2, 4, 8, 32], 10)[0]
        (2, 4, 8, 10)
    """
    largest = max(max_num_seqs, MIN_CAPTURE_SIZE)
    kept = sorted({size for size in sizes if MIN_CAPTURE_SIZE <= size <= largest})
    changes = []
    if any(size < MIN_CAPTURE_SIZE for size in sizes):
        changes.append(f"1 left out, single sequences are padded to {kept[0] if kept else largest}")
    too_large = sorted({size for size in sizes if size > largest})
    if too_large:
        changes.append(f"{', '.join(map(str, too_large))} left out, above --max-num-seqs {max_num_seqs}")
    if largest not in kept:
        changes.append(f"{largest} added, so that --max-num-seqs {max_num_seqs} sequences fit")
        kept.append(largest)
    return tuple(kept), changes
