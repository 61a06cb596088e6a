"""Combinations of a parametrised test: those that meet every need in an ordinary run, and all of them with --all."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def combinations(*axes: Sequence[Any], together: int = 1) -> list[Any]:
    """The product of some axes, for `pytest.mark.parametrize`.

    Args:
        axes: the values of each argument.
        together: without --all only so many combinations run that any `together` values of different axes are in one
            of them; 1: that each value is.
    """
    product = list(itertools.product(*(range(len(axis)) for axis in axes)))
    met: set[tuple[tuple[int, int], ...]] = set()

    def parts(places: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(itertools.combinations(enumerate(places), together))

    chosen: set[tuple[int, ...]] = set()
    used: collections.Counter[tuple[int, int]] = collections.Counter()

    def worth(places: tuple[int, ...]) -> tuple[int, int]:
        """What it brings; of those that bring as much, one of the values used least."""
        return len(parts(places) - met), -sum(used[place] for place in enumerate(places))

    while not all(parts(places) <= met for places in product):
        best = max(product, key=worth)
        chosen.add(best)
        used.update(enumerate(best))
        met |= parts(best)
    return [
        pytest.param(
            *(axis[place] for axis, place in zip(axes, places, strict=True)),
            marks=() if places in chosen else pytest.mark.exhaustive,
        )
        for places in product
    ]
