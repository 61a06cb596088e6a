"""Writes tests/seconds.json, by which tests/conftest.py starts the longest files first.

    make test-cpu ARGS=--junitxml=build/cpu.xml
    make test-npu ARGS=--junitxml=build/npu.xml
    python scripts/record_test_seconds.py build/cpu.xml build/npu.xml

Files that are not in the reports keep their seconds, unless they are deleted.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
from xml.etree import ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "seconds.json"


def seconds_of(report: pathlib.Path) -> dict[str, float]:
    """Seconds of each test file in a pytest report: setup, calls and teardown.

    Args:
        report: a file written by --junitxml.
    """
    found: dict[str, float] = collections.defaultdict(float)
    for case in ElementTree.parse(report).iter("testcase"):
        # tests.core.test_request, or with a class behind it
        module = case.attrib["classname"].split(".")
        while module and not (ROOT / "/".join(module)).with_suffix(".py").exists():
            module.pop()
        if module:
            found["/".join(module) + ".py"] += float(case.attrib["time"])
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", type=pathlib.Path, nargs="+", help="files that pytest --junitxml has written")
    seconds: dict[str, float] = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    for report in parser.parse_args().reports:
        seconds |= seconds_of(report)
    kept = {name: round(value, 1) for name, value in sorted(seconds.items()) if (ROOT / name).exists()}
    TABLE.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
