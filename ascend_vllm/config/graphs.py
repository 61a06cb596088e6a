"""The section of captured graphs, and the gears they are captured for.

A gear is a number of rows that a decoding graph computes. Fewer rows run in the next larger gear, padded.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from ascend_vllm.errors import ConfigError

# a gear of one row is not captured: padding one row to two costs nothing, and compilers treat a size of 1 apart
SMALLEST_GEAR = 2


class GraphMode(enum.StrEnum):
    """How decoding steps are launched."""

    # operator by operator
    EAGER = "eager"
    # replays of what was captured at start
    CAPTURED = "captured"
    # replays of what was recorded when a step of so many rows came first; on CPU
    RECORDED = "recorded"
    # replays of what torchair compiled and keeps on disk
    COMPILED = "compiled"


class GraphConfig(msgspec.Struct, frozen=True):
    """Whether decoding replays graphs.

    Attributes:
        mode: how decoding steps are launched.
        gears: rows of each graph, ascending; empty if there are none.
        max_seq_len: tokens of the longest sequence that is decoded in a graph; steps with a longer one run eager.
        query_lens: tokens that each row of a decoding step computes: 1, and as many as a row with drafts has. There
            is a graph for each pair of gear and query length; also tapes are recorded for these alone.
    """

    mode: GraphMode = GraphMode.EAGER
    gears: tuple[int, ...] = ()
    max_seq_len: int = 0
    query_lens: tuple[int, ...] = (1,)


def parse_gears(text: str, name: str) -> tuple[int, ...]:
    """A list such as "2,4,6,8,16,32".

    Args:
        text: numbers above 0, separated by commas, in any order.
        name: where it stands, for the text of an error.

    Raises:
        ConfigError: it is something else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"{name} must be numbers above 0 separated by commas, such as 2,4,8,16, got {text!r}.")
    return tuple(int(part) for part in parts)


def default_gears(max_num_seqs: int) -> tuple[int, ...]:
    """Powers of two up to the most rows of a step, which is the last one."""
    powers = (1 << exponent for exponent in range(1, max_num_seqs.bit_length()))
    return tuple(sorted({*powers, max(max_num_seqs, SMALLEST_GEAR)}))


def adjusted_gears(gears: Sequence[int], max_num_seqs: int) -> tuple[tuple[int, ...], list[str]]:
    """Fits a list of gears to the most rows of a step, as Ascend-vLLM 0.6.3 does: that is the largest gear.

    Args:
        gears: each 1 or more.
        max_num_seqs: the most rows.

    Returns:
        The gears, ascending, and a sentence for each thing that was changed.

    Example:
        >>> adjusted_gears([2, 4, 8, 32], 10)[0]
        (2, 4, 8, 10)
    """
    largest = max(max_num_seqs, SMALLEST_GEAR)
    kept = sorted({gear for gear in gears if SMALLEST_GEAR <= gear <= largest})
    changes = []
    if any(gear < SMALLEST_GEAR for gear in gears):
        changes.append(f"gear 1 is left out, single sequences run in gear {kept[0] if kept else largest}")
    too_large = sorted({gear for gear in gears if gear > largest})
    if too_large:
        changes.append(f"{_listed(too_large)} left out, above --max-num-seqs {max_num_seqs}")
    if largest not in kept:
        changes.append(f"{largest} added, so that --max-num-seqs {max_num_seqs} sequences fit")
        kept.append(largest)
    return tuple(kept), changes


def _listed(gears: Sequence[int]) -> str:
    return ", ".join(map(str, gears))
