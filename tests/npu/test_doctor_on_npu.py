"""`ascend-vllm doctor --report` on simulated NPUs, whole, beside what is kept of an earlier run."""

from __future__ import annotations

import pathlib
import sys

from ascend_vllm.tools.doctor.kit import archive, reader
from ascend_vllm.tools.doctor.kit.rows import Report, Status
from tests.npu.processes import run
from tests.server import ROOT

EXAMPLE = ROOT / "docs" / "hardware_kit"
# of versions: what depends on this machine
OWN = {"versions: checks", "versions: npu-smi", "versions: custom operators"}


def test_the_kit_finds_on_the_simulator_what_is_expected_of_cards(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "report.tgz"
    # against a hang alone
    done = run(sys.executable, "-m", "ascend_vllm.entrypoints.cli", "doctor", "--report", str(file), timeout=900)
    assert done.returncode == 0, done.stderr
    report, expected = Report.from_json(archive.read_archive(file)[archive.REPORT]), reader.expected_report()
    assert [f"{row.name}: {how}\n{row.message}" for row, how in reader.disagreements(report, expected)] == []
    skipped = {row.name: row.message for row in report.rows if row.status == Status.SKIPPED}
    assert skipped.keys() - OWN == {row.name for row in expected.rows if row.status == Status.SKIPPED} - OWN, skipped
    assert report.is_simulated


def test_the_example_of_the_docs_is_what_the_reader_expects() -> None:
    """scripts/make_hardware_kit_example.py writes all three."""
    text = archive.read_archive(EXAMPLE / "simulator.tgz")[archive.REPORT]
    report = Report.from_json(text)
    assert report == reader.expected_report()
    assert (EXAMPLE / "simulator.txt").read_text() == reader.describe(report, report)
