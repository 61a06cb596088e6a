"""Going through what refers to each other without recursion: clients choose how deep it is."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


def postorder(starts: Iterable[K], within: Callable[[K], Iterable[K]]) -> list[K]:
    """All that can be reached, each once, after what is within it; where things are within each other, in any order.

    Example:
        >>> postorder("a", {"a": "bc", "b": "c", "c": ""}.__getitem__)
        ['c', 'b', 'a']
    """
    ordered: list[K] = []
    entered: set[K] = set()
    # what is looked at, and whether all within it has been
    todo = [(start, False) for start in reversed(list(starts))]
    while todo:
        item, is_left = todo.pop()
        if is_left:
            ordered.append(item)
        elif item not in entered:
            entered.add(item)
            todo.append((item, True))
            todo += [(inner, False) for inner in within(item)]
    return ordered
