"""The command `ascend-vllm doctor`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib

from ascend_vllm import envs
from ascend_vllm.args.parser import FlexibleArgumentParser
from ascend_vllm.errors import AscendVllmError, ConfigError
from ascend_vllm.tools.doctor.checks import Machine, describe, examine


def add_arguments(parser: FlexibleArgumentParser) -> None:
    parser.description = (
        "Checks what a model on an Ascend NPU needs: Python packages, driver, CANN, devices and variables. Ends with"
        " exit code 1 if something is in the way."
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    kit = parser.add_mutually_exclusive_group()
    kit.add_argument(
        "--report",
        type=pathlib.Path,
        metavar="FILE.tgz",
        help="try out what models do on the NPUs, for at most 20 minutes, and write to this file what was found,"
        " without names, addresses, paths and tokens",
    )
    kit.add_argument(
        "--read",
        type=pathlib.Path,
        metavar="FILE.tgz",
        help="print what such a file says beside the simulated NPU and the documentation; ends with exit code 1 if"
        " rows disagree",
    )


def run(namespace: argparse.Namespace) -> int:
    """Prints the findings; returns exit code 1 if there is a problem.

    Raises:
        ConfigError: a file cannot be read or written, or is no report.
    """
    if namespace.report is not None:
        return _report(namespace.report)
    if namespace.read is not None:
        return _read(namespace.read)
    findings = examine(Machine(envs.everything()))
    if namespace.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        print(describe(findings))
    return 1 if any(finding.level == "problem" for finding in findings) else 0


def _report(path: pathlib.Path) -> int:
    from ascend_vllm.tools.doctor.kit import archive, reader
    from ascend_vllm.tools.doctor.kit.run import Kit

    try:
        # a path that cannot be written is told now, not after 20 minutes
        path.open("ab").close()
    except OSError as error:
        raise ConfigError(f"--report {path} cannot be written: {error.strerror}.") from error
    kit = Kit(show=lambda line: print(line, flush=True))
    report = kit.run()
    files = {archive.REPORT: report.to_json(), archive.TABLE: reader.table(report.rows)}
    try:
        archive.write_archive(path, files | {f"{archive.LOGS}/{name}.txt": text for name, text in kit.logs.items()})
    except OSError as error:
        raise AscendVllmError(f"--report {path} cannot be written: {error.strerror}.") from error
    print(f"{len(report.rows)} rows in {report.seconds:.0f} s, written to {path}; read it before you pass it on.")
    return 0


def _read(path: pathlib.Path) -> int:
    from ascend_vllm.tools.doctor.kit import archive, reader
    from ascend_vllm.tools.doctor.kit.rows import Report, ReportError

    try:
        report = Report.from_json(archive.read_archive(path)[archive.REPORT])
    except OSError as error:
        raise ConfigError(f"--read {path} cannot be read: {error.strerror}.") from error
    except ReportError as error:
        raise ConfigError(f"--read {path} is no report of the doctor: {error}.") from error
    expected = reader.expected_report()
    print(reader.describe(report, expected), end="")
    return 1 if any(reader.disagreements(report, expected)) else 0
