"""Calls that an engine core serves beside requests, such as pausing: the table of all of them.

`EngineCore` has a method of each name, the clients' `call_utility` calls it in every core, and public methods of
`AsyncLLM` and `LLMEngine` wrap these calls. A new control is a row here, an `EngineCore` method and a public method.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def _first(results: Sequence[Any]) -> Any:
    return results[0]


def _joined(results: Sequence[Any]) -> list[Any]:
    return [one for result in results for one in result]


def _worst_state(results: Sequence[str | None]) -> str | None:
    """Of results of `EngineCore.load_lora`."""
    return next((reason for reason in results if reason), None if None in results else "")


def _union(results: Sequence[Sequence[Any]]) -> list[Any]:
    return sorted(set(_joined(results)))


def _any_field(results: Sequence[Mapping[str, bool]]) -> dict[str, bool]:
    return {name: any(result[name] for result in results) for name in results[0]}


def _accounts(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: _merge_field(name, [result[name] for result in results]) for name in results[0]}


def _merge_field(name: str, values: Sequence[Any]) -> Any:
    if name == "violations":
        return [f"engine core {rank}: {sentence}" for rank, value in enumerate(values) for sentence in value]
    if values[0] is None:
        # of something that the engine does not do
        return None
    if name == "drafts":
        return {key: _summed([value[key] for value in values]) for key in values[0]}
    if isinstance(values[0], Mapping):
        return {key: entry for value in values for key, entry in value.items()}
    if isinstance(values[0], list):
        return list(dict.fromkeys(_joined(values)))
    total = sum(values)
    return total / len(values) if name.endswith("_usage") else total


def _summed(values: Sequence[Any]) -> Any:
    """The sum of numbers, or of lists place by place."""
    if isinstance(values[0], list):
        return [sum(column) for column in zip(*values, strict=True)]
    return sum(values)


@dataclasses.dataclass(frozen=True)
class Control:
    """One row of `CONTROLS`.

    Attributes:
        arguments: the method's parameter names, for readers and for `empties_prefix_cache`.
        merge: merges the results of several engine cores, given in the order of their ranks.
        empties_prefix_cache: True or False, or the name of the argument that decides.
    """

    arguments: tuple[str, ...] = ()
    merge: Callable[[Sequence[Any]], Any] = _first
    empties_prefix_cache: bool | str = False

    def forgets_prefixes(self, args: Sequence[Any]) -> bool:
        """Whether prefix caches are empty after a call with these arguments."""
        if isinstance(self.empties_prefix_cache, bool):
            return self.empties_prefix_cache
        return bool(dict(zip(self.arguments, args, strict=False)).get(self.empties_prefix_cache))


CONTROLS: dict[str, Control] = {
    # counts are summed, the requests' blocks collected, violations prefixed with the core's rank
    "audit": Control(merge=_accounts),
    # counts are summed, cache usages averaged
    "stats": Control(merge=_accounts),
    "check_health": Control(),
    # true if all cores could
    "reset_prefix_cache": Control(merge=all, empties_prefix_cache=True),
    "pause": Control(("mode", "clear_cache"), empties_prefix_cache="clear_cache"),
    "resume": Control(),
    "check_sleep": Control(("level",)),
    "sleep": Control(("level",), empties_prefix_cache=True),
    "wake_up": Control(("tags",)),
    # true if it is of any core: the engine is asleep while one core still is
    "state": Control(merge=_any_field),
    "profile": Control(("is_start",)),
    # loading as long as one core is, failed if one has
    "load_lora": Control(("name", "number", "path"), merge=_worst_state),
    # whether a core had it
    "remove_lora": Control(("number",), merge=any),
    "pin_lora": Control(("number",), merge=any),
    "list_loras": Control(merge=_union),
    # the results of all workers, those of the first core first
    "collective_rpc": Control(("method", "timeout", "args", "kwargs"), merge=_joined),
}
