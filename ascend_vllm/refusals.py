"""Features that do not exist, as data: whatever asks for one is refused by its name.

Each form in which a user may ask (flags, fields of requests, arguments of `LLM` and of LMDeploy's classes) has one
table of refusals by name. All tables are read by `first_refused`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A parameter that is known and whose feature does not exist.

    Attributes:
        reason: what is missing, or to be done instead.
        neutral: the values that ask for nothing; every other is refused.
    """

    reason: str
    neutral: tuple[Any, ...] = (None,)


class Refused(NamedTuple):
    """A parameter that asks for a feature that does not exist, with its value and the reason to give."""

    name: str
    value: Any
    reason: str


def first_refused(refusals: Mapping[str, Refusal], values: Mapping[str, Any]) -> Refused | None:
    """The first parameter, in the order of the table, whose value asks for something; None: none does.

    Args:
        refusals: the table, by name of the parameter.
        values: of parameters by name; those that are not in the table do not matter.
    """
    for name, refusal in refusals.items():
        if name in values and values[name] not in refusal.neutral:
            return Refused(name, values[name], refusal.reason)
    return None
