"""Looking through JSON schemas without recursion: they come from clients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# keywords whose values map names, which are no keywords, to schemas
_NAMED_SCHEMAS = frozenset({"properties", "$defs", "definitions", "patternProperties", "dependentSchemas"})
# keywords whose values are no schemas
_VALUES = frozenset({"enum", "const", "default", "examples", "required", "dependentRequired"})


def schemas_in(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and all schemas within it, booleans left out.

    Example:
        >>> [part["type"] for part in schemas_in({"type": "array", "items": {"type": "null"}})]
        ['array', 'null']
    """
    todo = [schema]
    while todo:
        part = todo.pop()
        if isinstance(part, list):
            todo += part
        if not isinstance(part, dict):
            continue
        yield part
        for keyword, value in part.items():
            if keyword in _NAMED_SCHEMAS and isinstance(value, dict):
                todo += value.values()
            elif keyword not in _VALUES:
                todo.append(value)


def depth_exceeds(value: Any, limit: int) -> bool:
    """Whether lists and objects are nested more than so many levels."""
    level = [value]
    for _ in range(limit + 1):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
        ]
        if not level:
            return False
    return True
