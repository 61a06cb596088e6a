"""What the kit reports: rows, each of one case of one step."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Mapping
from typing import Any

# of the file's form; a reader refuses others
FORM = 1
# of a report that is read
_MOST_ROWS = 4096
_MOST_ENTRIES = 64
_MOST_CHARACTERS = 20_000


class Status(enum.StrEnum):
    """How a case ended.

    Attributes:
        OK: it ran, and what it computed is right.
        WRONG: it ran, and what it computed is not right.
        FAILED: a call raised an error.
        HUNG: it was ended after its time.
        CRASHED: its process ended by itself.
        SKIPPED: the machine has not what it needs, or there was no time left.
    """

    OK = "ok"
    WRONG = "wrong"
    FAILED = "failed"
    HUNG = "hung"
    CRASHED = "crashed"
    SKIPPED = "skipped"


class ReportError(Exception):
    """A file is not a report of the kit; the text says why."""


@dataclasses.dataclass(frozen=True)
class Row:
    """The result of a case.

    Attributes:
        step: name in the table of steps.
        case: name within the step, the same on every machine.
        status: how it ended.
        numbers: by name with the unit at its end: "error", "allowed", "time_us", "taken_bytes" …
        facts: what two machines can be compared in, and texts.
        message: what went wrong, or why it was skipped.
    """

    step: str
    case: str
    status: Status
    numbers: Mapping[str, float] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    message: str = ""

    @property
    def name(self) -> str:
        """Of step and case."""
        return f"{self.step}: {self.case}"


@dataclasses.dataclass(frozen=True)
class Report:
    """A run of the kit.

    Attributes:
        version: of this package.
        is_simulated: whether the NPUs were simulated.
        seconds: that it took.
        rows: of all cases, in the order of the run.
    """

    version: str
    is_simulated: bool
    seconds: float
    rows: tuple[Row, ...]

    def to_json(self) -> str:
        """The report as text that `from_json` reads; numbers that are not finite become null."""
        rows = [
            dataclasses.asdict(row) | {"numbers": {name: _finite(value) for name, value in row.numbers.items()}}
            for row in self.rows
        ]
        return json.dumps(dataclasses.asdict(self) | {"form": FORM, "rows": rows}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Reads a report that anybody may have written.

        Raises:
            ReportError: it has not the form of a report.
        """
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ReportError("it is not JSON") from error
        if not isinstance(values, dict) or values.get("form") != FORM:
            raise ReportError(f"it is no report of form {FORM}")
        rows = values.get("rows")
        if not isinstance(rows, list) or len(rows) > _MOST_ROWS:
            raise ReportError(f"it has no list of up to {_MOST_ROWS} rows")
        return cls(
            _text(values.get("version")),
            values.get("is_simulated") is True,
            _number(values.get("seconds")),
            tuple(map(_row, rows)),
        )


def _row(values: Any) -> Row:
    if not isinstance(values, dict):
        raise ReportError("a row is no object")
    try:
        status = Status(_text(values.get("status")))
    except ValueError as error:
        raise ReportError("the status of a row is unknown") from error
    return Row(
        _text(values.get("step")),
        _text(values.get("case")),
        status,
        {_text(name): _number(value) for name, value in _entries(values.get("numbers")) if value is not None},
        {_text(name): _text(value) for name, value in _entries(values.get("facts"))},
        _text(values.get("message")),
    )


def _entries(values: Any) -> list[tuple[Any, Any]]:
    if not isinstance(values, dict) or len(values) > _MOST_ENTRIES:
        raise ReportError(f"numbers or facts of a row are no object of up to {_MOST_ENTRIES}")
    return list(values.items())


def _text(value: Any) -> str:
    """Without characters that a terminal would act on."""
    if not isinstance(value, str) or len(value) > _MOST_CHARACTERS:
        raise ReportError(f"it has something else where a text of up to {_MOST_CHARACTERS} characters belongs")
    return "".join(character if character.isprintable() or character == "\n" else "?" for character in value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ReportError("it has something else where a number belongs")
    try:
        return float(value)
    except OverflowError as error:
        raise ReportError("a number is too large") from error


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
