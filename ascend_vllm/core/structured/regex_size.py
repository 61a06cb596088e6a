"""Size of a regular expression with its counted repetitions expanded.

The time and memory that libraries need grow at least linearly with it, and a short expression can make it any size.
"""

from __future__ import annotations

import re

_COUNTS = re.compile(r"\{(\d{1,9})(?:,(\d{0,9}))?\}")


def expanded_size(regex: str) -> int:
    """Number of characters and classes with x{2,3} expanded to xxx; syntax errors are ignored.

    Example:
        >>> expanded_size("(ab{10}|[cd]){2,5}")
        60
    """
    # for each open group: its size so far, and that of its last element, which a repetition multiplies
    stack = [[0, 0]]
    index = 0
    while index < len(regex):
        character = regex[index]
        counts = _COUNTS.match(regex, index) if character == "{" else None
        if counts is not None:
            group = stack[-1]
            times = max(int(counts[1]), int(counts[2] or 0), 1)
            group[0] += group[1] * (times - 1)
            group[1] *= times
            index = counts.end()
            continue
        if character == "(":
            stack.append([0, 0])
        elif character == ")" and len(stack) > 1:
            size = stack.pop()[0]
            stack[-1] = [stack[-1][0] + size, size]
        elif character not in "*+?|":
            index = end_of_class(regex, index) if character == "[" else index + (character == "\\")
            stack[-1] = [stack[-1][0] + 1, 1]
        index += 1
    return sum(size for size, _ in stack)


def end_of_class(regex: str, start: int) -> int:
    """Index of the "]" of the class that begins at `start`; a "]" that comes first is one of its characters."""
    index = start + 1
    if regex[index : index + 1] == "^":
        index += 1
    if regex[index : index + 1] == "]":
        index += 1
    while index < len(regex) and regex[index] != "]":
        index += 2 if regex[index] == "\\" else 1
    return index
