"""The table of steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Step:
    """A part of the kit.

    Attributes:
        name: in reports and logs.
        module: has `cases(session)`, see `steps`.
        about: what it finds out, as a clause.
        seconds: most that it may take; what is left then is skipped.
        case_seconds: most that one of its cases may take.
        needs_device: whether it is skipped on machines without a usable NPU.
        variables: of the environment of its processes.
    """

    name: str
    module: str
    about: str
    seconds: float
    case_seconds: float = 60.0
    needs_device: bool = True
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)


_ROOM = f"{__package__}.steps"
# operators refuse their arguments where they are called, not in a thread of torch_npu, which ends with that
_REFUSES_AT_ONCE = {"TASK_QUEUE_ENABLE": "0"}
# 20 minutes in all
STEPS = (
    Step("versions", f"{_ROOM}.versions", "what is installed", 40, needs_device=False),
    Step("memory", f"{_ROOM}.memory", "what is taken and given back, and how fast blocks are swapped", 60),
    Step(
        "operators",
        f"{_ROOM}.operators",
        "whether operators are exact, and how long they take",
        300,
        variables=_REFUSES_AT_ONCE,
    ),
    Step("graphs", f"{_ROOM}.graphs", "captures, replays and the compiler's cache", 150),
    Step("collectives", f"{_ROOM}.collectives", "sums over several NPUs", 150, case_seconds=110),
    Step(
        "model", f"{_ROOM}.model", "tokens beside the CPU's and their times, with every switch", 480, case_seconds=120
    ),
)
