"""Runs the hardware kit on simulated NPUs, and keeps what it finds as the expected result and as the docs' example.

    python scripts/make_hardware_kit_example.py

Writes docs/hardware_kit/simulator.tgz, what the reader says of it into docs/hardware_kit/simulator.txt, and its rows
into the package, where `ascend-vllm doctor --read` compares other reports with them. Needs `make sim`.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

from ascend_vllm.tools.doctor.kit import archive, reader
from ascend_vllm.tools.doctor.kit.rows import Report

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs" / "hardware_kit"
PROGRAM = [sys.executable, "-m", "ascend_vllm.entrypoints.cli"]
# as `make test-npu` has them
DEVICES = ["--devices", "2", "--memory", str(1 << 30), "--sync-timeout", "5"]


def main() -> None:
    DOCS.mkdir(exist_ok=True)
    file = DOCS / "simulator.tgz"
    subprocess.run([*PROGRAM, "sim-run", *DEVICES, "--", *PROGRAM, "doctor", "--report", str(file)], check=True)
    text = archive.read_archive(file)[archive.REPORT]
    expected = pathlib.Path(reader.__file__).with_name(reader.EXPECTED)
    expected.write_text(text, encoding="utf-8")
    report = Report.from_json(text)
    (DOCS / "simulator.txt").write_text(reader.describe(report, report), encoding="utf-8")


if __name__ == "__main__":
    main()
