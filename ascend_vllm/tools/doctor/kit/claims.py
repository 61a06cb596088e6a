"""What the documentation says of cases: that of torch_npu, of its operators and of CANN, and docs/ascend.md."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable

from ascend_vllm.tools.doctor.kit.rows import Row, Status


@dataclasses.dataclass(frozen=True)
class Claim:
    """A sentence about cases.

    Attributes:
        pattern: of their names, with * for any text.
        text: what is said.
        holds: whether a row is as it says.
    """

    pattern: str
    text: str
    holds: Callable[[Row], bool]


def _works(row: Row) -> bool:
    return row.status == Status.OK


CLAIMS = (
    Claim("memory: before and after emptying", "empty_cache gives everything back", _works),
    Claim("memory: fill at 0.9", "--gpu-memory-utilization 0.9 of the card can be allocated", _works),
)


def claim_of(name: str) -> Claim | None:
    """The first claim about a case; None if nothing is said."""
    return next((claim for claim in CLAIMS if fnmatch.fnmatchcase(name, claim.pattern)), None)
