"""The result of a comparison, as JSON and as a table."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import pathlib
import shlex
import signal
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from comparison.peaks import Reading

T = TypeVar("T")


def in_turns(sides: Iterable[T], number: int) -> list[T]:
    """The sides in the order of a round: whoever is read first, after a pause, may be slower."""
    order = list(sides)
    return order[::-1] if number % 2 else order


@dataclasses.dataclass(frozen=True)
class Line:
    """The properties of a line of the table.

    Attributes:
        name: on the command line.
        title: in the table.
        unit: of its readings.
        higher_is_better: whether higher readings are better.
        target_ratio: lower bound of the ratio of ours to the peer's; upper bound if lower is better.
        limit_text: what determines the limit, if there is one.
        most: upper bound of our reading; None: only the ratio counts.
    """

    name: str
    title: str
    unit: str
    higher_is_better: bool
    target_ratio: float
    limit_text: str = ""
    most: float | None = None


@dataclasses.dataclass
class RowResult:
    """The readings of a row.

    Attributes:
        row: its properties.
        readings: of each side, "ours" and "peer", one per round, in the row's unit.
        figures: all figures of each measurement.
        limits: readings of the machine's limits, before and after those of each round.
        allowed: what the limits of each round allow, in the row's unit.
    """

    row: Line
    readings: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    figures: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    limits: list[Reading] = dataclasses.field(default_factory=list)
    allowed: list[float] = dataclasses.field(default_factory=list)

    def add(self, side: str, value: float, figures: dict[str, Any]) -> None:
        """Adds a reading."""
        self.readings.setdefault(side, []).append(value)
        self.figures.setdefault(side, []).append(figures)

    def median(self, side: str) -> float | None:
        """Median of a side's readings; None: it has none."""
        values = self.readings.get(side)
        return statistics.median(values) if values else None

    @property
    def ratio(self) -> float | None:
        """Ratio of our median to the peer's; None without both."""
        mine, theirs = self.median("ours"), self.median("peer")
        return mine / theirs if mine is not None and theirs else None

    @property
    def pairs(self) -> tuple[float, float] | None:
        """Geometric mean of the ratios of ours to the peer's of each round, and its standard error.

        None: there are fewer than two rounds, or one has a reading that is not positive, such as a pause.

        Of many short readings in turns it is more precise than the ratio of the medians, since a machine whose speed
        changes is as fast for both readings of a round.
        """
        return _mean_ratio(self.readings.get("ours", ()), self.readings.get("peer", ()))

    @property
    def limit(self) -> float | None:
        """Median of the machine's limit for this row; None: it was not computed."""
        return statistics.median(self.allowed) if self.allowed else None

    @property
    def share(self) -> float | None:
        """Our share of the limit."""
        mine, limit = self.median("ours"), self.limit
        if not mine or not limit:
            return None
        return mine / limit if self.row.higher_is_better else limit / mine

    @property
    def share_of_rounds(self) -> tuple[float, float] | None:
        """Likewise of our shares of each round's limit, for the reason of `pairs`."""
        mine = self.readings.get("ours", ())
        pair = (mine, self.allowed) if self.row.higher_is_better else (self.allowed, mine)
        return _mean_ratio(*pair)

    def as_dict(self) -> dict[str, Any]:
        """The result for JSON."""
        row, ratio, ours = self.row, self.ratio, self.median("ours")
        name = "ratio_at_least" if row.higher_is_better else "ratio_at_most"
        target = {name: row.target_ratio}
        found = []
        if ratio is not None:
            found.append(ratio >= row.target_ratio if row.higher_is_better else ratio <= row.target_ratio)
        if row.most is not None:
            target["at_most"] = row.most
            if ours is not None:
                found.append(ours <= row.most)
        return {
            "name": row.name,
            "title": row.title,
            "unit": row.unit,
            "better": "higher" if row.higher_is_better else "lower",
            "ours": ours,
            "peer": self.median("peer"),
            "ratio": ratio,
            "ratio_of_pairs": self.pairs,
            "target": target,
            "meets_target": all(found) if found else None,
            "limit": self.limit,
            "limit_by": row.limit_text if self.allowed else None,
            "share_of_limit": self.share,
            "share_of_rounds": self.share_of_rounds,
            "readings": self.readings,
            "limit_readings": self.allowed,
            "machine_limits": [reading.as_dict() for reading in self.limits],
            "figures": self.figures,
        }


def _mean_ratio(above: Sequence[float], below: Sequence[float]) -> tuple[float, float] | None:
    """Geometric mean of the ratios of readings, and its standard error; None: too few, or one is not positive."""
    found = list(zip(above, below, strict=False))
    if len(found) < 2 or min(map(min, found)) <= 0:
        return None
    logs = [math.log(one / other) for one, other in found]
    mean = math.exp(statistics.fmean(logs))
    return mean, mean * statistics.stdev(logs) / math.sqrt(len(logs))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _with_error(value: tuple[float, float] | None) -> str:
    return "-" if value is None else "{:.3f} ± {:.3f}".format(*value)


def lines(results: list[RowResult], peer: str | None) -> Iterator[str]:
    """The lines of the table."""
    heads = f"{'ours':>10} {peer or 'peer':>10} {'ratio':>7} {'of pairs':>13} {'target':>13}"
    yield f"{'row':9} {heads} {'limit':>10} {'of limit':>9} {'of rounds':>13}  unit"
    for result in results:
        row, share = result.row, result.share
        pairs, rounds = map(_with_error, (result.pairs, result.share_of_rounds))
        target = f"{'>=' if row.higher_is_better else '<='} {row.target_ratio}"
        if row.most is not None:
            target += f", {row.most:g}"
        yield (
            f"{row.name:9} {_number(result.median('ours')):>10} {_number(result.median('peer')):>10}"
            f" {_number(result.ratio):>7} {pairs:>13} {target:>13} {_number(result.limit):>10}"
            f" {'-' if share is None else f'{share:.0%}':>9} {rounds:>13}  {row.unit}"
        )


# options left out of shown commands: paths on one machine, and the note, which is shown separately
_NOT_SHOWN = ("--peer-program", "--peer-python", "--tcmalloc", "--json", "--note")


def command_line(program: str, words: Sequence[str]) -> str:
    """The command without options for this machine only."""
    kept, skip = [], False
    for word in words:
        option, equals, _ = word.partition("=")
        if skip or option in _NOT_SHOWN:
            skip = not skip and not equals
            continue
        kept.append(shlex.quote(word))
    return " ".join([f"python benchmarks/{program}", *kept])


def parser_of(documentation: str | None, after: str) -> argparse.ArgumentParser:
    """A parser with the options of all programs with a result; `after`: when it is written, for the help."""
    parser = argparse.ArgumentParser(
        description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--note", default="", help="kept with the result, such as what else the machine did")
    parser.add_argument("--json", type=pathlib.Path, help=f"write the result here, {after}")
    return parser


def heading(kind: str, program: str, args: argparse.Namespace, machine: dict[str, Any]) -> dict[str, Any]:
    """The first fields of all results: kind, note, machine and command."""
    command = command_line(program, sys.argv[1:])
    return {"kind": kind, "note": args.note, "machine": machine, "command": command}


def run(main: Callable[[], None]) -> None:
    """Runs a program so that it also ends its child processes on SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("Ended by a signal."))
    main()


def save(path: pathlib.Path | None, content: dict[str, Any]) -> None:
    """Writes a result atomically, so that an interrupted run keeps the last one. None: does nothing."""
    if path is None:
        return
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)  # noqa: PTH105 - atomic, and named so
