"""Puts a report beside that of the simulated NPU, and beside what the documentation says."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator, Sequence

from ascend_vllm.tools.doctor.kit.claims import claim_of
from ascend_vllm.tools.doctor.kit.rows import Report, Row, Status

# the report of the simulated NPU
EXPECTED = "simulator.json"
# step whose facts differ from machine to machine
_VERSIONS = "versions"
# of times and errors, in the order in which they are shown; the others follow
_UNITS = (
    ("_us", 1.0, "us"),
    ("_s", 1.0, "s"),
    ("_bytes", 1 / (1 << 20), "MiB"),
    ("_gb_per_s", 1.0, "GB/s"),
)


def expected_report() -> Report:
    """The report of the simulated NPU that belongs to this version."""
    return Report.from_json(importlib.resources.files(__package__).joinpath(EXPECTED).read_text(encoding="utf-8"))


def table(rows: Sequence[Row]) -> str:
    """Rows as text: status, case, numbers, and below it what went wrong."""
    lines = []
    step = ""
    for row in rows:
        if row.step != step:
            step = row.step
            lines.append(f"\n{step}")
        lines.append(f"  {row.status:<8} {row.case}  {numbers_of(row)}".rstrip())
        lines += [f"           {name}: {_indented(text)}" for name, text in row.facts.items()]
        if row.message:
            lines.append(f"           {_indented(row.message)}")
    return "\n".join(lines).lstrip("\n") + "\n"


def numbers_of(row: Row) -> str:
    """The numbers of a row in one line, with their units."""
    return ", ".join(_number_text(name, value) for name, value in row.numbers.items())


def _number_text(name: str, value: float) -> str:
    for ending, factor, unit in reversed(_UNITS):
        if name.endswith(ending):
            return f"{name.removesuffix(ending).replace('_', ' ')} {value * factor:.4g} {unit}"
    return f"{name.replace('_', ' ')} {value:.3g}"


def _indented(text: str) -> str:
    return text.strip().replace("\n", "\n           ")


def disagreements(report: Report, expected: Report) -> Iterator[tuple[Row, str]]:
    """Rows that are not as the simulated NPU or the documentation has them, and how they differ."""
    known = {row.name: row for row in expected.rows}
    for row in report.rows:
        if row.status == Status.SKIPPED:
            continue
        other = known.get(row.name)
        if other is not None and other.status != Status.SKIPPED:
            if row.status != other.status:
                yield row, f"{row.status}, and {other.status} on the simulator"
            if row.step != _VERSIONS:
                for name in sorted(row.facts.keys() & other.facts.keys()):
                    if row.facts[name] != other.facts[name]:
                        yield row, f"{name} is {row.facts[name]}, and {other.facts[name]} on the simulator"
        claim = claim_of(row.name)
        if claim is not None and not claim.holds(row):
            yield row, f"the documentation says: {claim.text}"
    for row in expected.rows:
        if row.status != Status.SKIPPED and row.name not in {found.name for found in report.rows}:
            yield row, "is not in the report"


def describe(report: Report, expected: Report) -> str:
    """A report as a table beside the simulator and the documentation, and the rows that disagree."""
    known = {row.name: row for row in expected.rows}
    found = list(disagreements(report, expected))
    wrong = {row.name for row, _ in found}
    width = max((len(row.name) for row in report.rows), default=0)
    device = "simulated NPUs" if report.is_simulated else "NPUs"
    lines = [
        f"ascend-vllm {report.version} on {device}, {len(report.rows)} rows in {report.seconds:.0f} s",
        "",
        f"  {'case':<{width}}  {'here':<8} {'simulator':<9} numbers; what the documentation says",
    ]
    for row in report.rows:
        other, claim = known.get(row.name), claim_of(row.name)
        texts = [numbers_of(row), claim.text if claim else ""]
        mark = "!" if row.name in wrong else " "
        beside = other.status if other is not None else "-"
        lines.append(
            f"{mark} {row.name:<{width}}  {row.status:<8} {beside:<9} {'; '.join(filter(None, texts))}".rstrip()
        )
    lines += ["", f"{len(wrong)} rows disagree" + (":" if wrong else "")]
    for row, how in found:
        lines.append(f"  {row.name}: {how}")
        if row.message and row.status != Status.SKIPPED:
            lines.append(f"      {row.message.strip().splitlines()[0]}")
    return "\n".join(lines) + "\n"
