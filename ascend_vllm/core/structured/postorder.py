"""Postorder traversal without recursion, since clients choose the depth of the graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


def postorder(starts: Iterable[K], within: Callable[[K], Iterable[K]]) -> list[K]:
    """All reachable items once, each after its successors; the order within cycles is undefined.

    Example:
        >>> postorder("a", {"a": "bc", "b": "c", "c": ""}.__getitem__)
        ['c', 'b', 'a']
    """
    ordered: list[K] = []
    entered: set[K] = set()
    # items, and whether their successors have been visited
    todo = [(start, False) for start in reversed(list(starts))]
    while todo:
        item, is_finished = todo.pop()
        if is_finished:
            ordered.append(item)
        elif item not in entered:
            entered.add(item)
            todo.append((item, True))
            todo += [(inner, False) for inner in within(item)]
    return ordered
