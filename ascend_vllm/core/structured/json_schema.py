"""Analyses JSON schemas from clients, without recursion since they may be nested to any depth."""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, TypeVar

from ascend_vllm.core.structured.regex_size import expanded_size

K = TypeVar("K", bound=Hashable)

# keywords whose values map names to schemas
_NAMED_SCHEMAS = frozenset({"properties", "$defs", "definitions", "patternProperties", "dependentSchemas"})
# keywords whose values contain no schemas
_VALUES = frozenset({"enum", "const", "default", "examples", "required", "dependentRequired"})
# keywords whose schemas are only used through $ref
_DEFINITIONS = frozenset({"$defs", "definitions"})
# keyword → keywords that bound how often its schemas may occur
_COUNTED_BY = {
    "items": ("minItems", "maxItems"),
    "additionalProperties": ("minProperties", "maxProperties"),
    "patternProperties": ("minProperties", "maxProperties"),
}
# caps bounds, which may be infinite
_HUGE = 1 << 60


def schemas_in(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and all its subschemas, except booleans.

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
    """Whether lists and objects are nested more than `limit` levels deep."""
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


def schema_size(schema: Any, limit: int) -> int:
    """Values and characters that the bounds of a schema allow, capped at limit + 1.

    Example:
        >>> schema_size({"type": "array", "maxItems": 100, "items": {"type": "string", "maxLength": 20}}, 10_000)
        2001
    """
    parts = {id(part): part for part in schemas_in(schema)}
    # for each part: its direct subschemas, and how often they may occur
    within = {key: [(id(inner), times) for inner, times in _subschemas(part, schema)] for key, part in parts.items()}
    sizes: dict[int, int] = {}
    for key in postorder(parts, lambda key: [inner for inner, _ in within[key] if inner in parts]):
        size = max(_largest_bound(parts[key], "minLength", "maxLength"), _pattern_size(parts[key]))
        # a recursive reference counts as 1
        size += sum(times * sizes.get(inner, 1) for inner, times in within[key])
        sizes[key] = min(size, limit + 1)
    return sizes.get(id(schema), 1)


def _subschemas(part: dict[str, Any], schema: Any) -> Iterator[tuple[dict[str, Any], int]]:
    """The direct subschemas of a schema, references included, and how often each may occur."""
    for keyword, value in part.items():
        if keyword in _VALUES or keyword in _DEFINITIONS:
            continue
        todo = [_target(schema, value) if keyword == "$ref" else value]
        if keyword in _NAMED_SCHEMAS and isinstance(value, dict):
            todo = [*value.values()]
        times = _largest_bound(part, *_COUNTED_BY.get(keyword, ()))
        while todo:
            inner = todo.pop()
            if isinstance(inner, dict):
                yield inner, times
            elif isinstance(inner, list):
                todo += inner


def _largest_bound(part: dict[str, Any], *keywords: str) -> int:
    """The largest value of some keywords, at least 1."""
    values = [part.get(keyword) for keyword in keywords]
    return max(
        (int(min(value, _HUGE)) for value in values if isinstance(value, int | float) and value > 1), default=1
    )


def _pattern_size(part: dict[str, Any]) -> int:
    pattern = part.get("pattern")
    return expanded_size(pattern) if isinstance(pattern, str) else 1


def find_reference_cycle(schema: Any) -> list[str] | None:
    """A cycle of references that describe the same value, which no text can satisfy; None: there is none.

    A schema that contains itself in a property or an item is fine: its texts are finite.

    Example:
        >>> find_reference_cycle({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#"}]}}})
        ['#/$defs/a', '#']
    """
    done: set[int] = set()
    for start in schemas_in(schema):
        # depth-first search: id of each schema on the path → reference to it, and its remaining successors
        path: dict[int, tuple[str | None, Iterator[tuple[dict[str, Any], str | None]]]] = {}
        if id(start) not in done:
            path[id(start)] = None, _same_value(start, schema)
        while path:
            key = next(reversed(path))
            inner, reference = next(path[key][1], (None, None))
            if inner is None:
                done.add(key)
                del path[key]
            elif id(inner) in path:
                references = [*(name for name, _ in path.values()), reference]
                return [name for name in references[list(path).index(id(inner)) + 1 :] if name is not None]
            elif id(inner) not in done:
                path[id(inner)] = reference, _same_value(inner, schema)
    return None


def _same_value(part: dict[str, Any], schema: Any) -> Iterator[tuple[dict[str, Any], str | None]]:
    """The schemas that a value of this schema must match too, and the reference to each."""
    reference = part.get("$ref")
    target = _target(schema, reference)
    if isinstance(target, dict):
        yield target, reference
    for keyword in ("allOf", "anyOf", "oneOf"):
        inner = part.get(keyword)
        # of several alternatives another one may not be circular
        if isinstance(inner, list) and (keyword == "allOf" or len(inner) == 1):
            yield from ((each, None) for each in inner if isinstance(each, dict))


def _target(schema: Any, reference: Any) -> Any:
    """The target of a local reference such as "#/$defs/a"; None: there is none."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    target = schema
    for name in urllib.parse.unquote(reference).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and name.isdecimal() and len(name) < 7 and int(name) < len(target):
            target = target[int(name)]
        elif isinstance(target, dict):
            target = target.get(name)
        else:
            return None
    return target
