"""Sums over 2, 4 and 8 NPUs, as many as there are: the same in every repeat and on every rank, how fast, in graphs.

Each rank is a process of its own (`rank`), which goes on to the next finding while this one reports the last.
"""

from __future__ import annotations

import functools
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from ascend_vllm.platforms.facts import probe_npus
from ascend_vllm.tools.doctor.kit.rows import Status
from ascend_vllm.tools.doctor.kit.session import Case, Result, Session
from ascend_vllm.tools.doctor.kit.steps import rank

_COUNTS = (2, 4, 8)
_WAIT_SECONDS = 100.0
_POLL_SECONDS = 0.05


def cases(session: Session) -> list[Case]:  # noqa: ARG001 - each rank has its own
    """See `steps`."""
    return [
        Case(f"{finding} on {count}", functools.partial(_run, count, finding))
        for count in _COUNTS
        for finding in rank.FINDINGS
    ]


class _Ranks:
    """Processes of `rank`, ended with the process of the step."""

    def __init__(self, count: int) -> None:
        self._directory = pathlib.Path(tempfile.mkdtemp())
        self._files = [self._directory / f"{index}.jsonl" for index in range(count)]
        self._processes = []
        for index in range(count):
            command = [sys.executable, "-m", rank.__name__, str(self._directory), str(index), str(count)]
            self._processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))

    def found(self, finding: str) -> list[dict[str, Any]]:
        """What each rank has found.

        Raises:
            RuntimeError: a rank ended before.
            TimeoutError: it takes too long.
        """
        end = time.monotonic() + _WAIT_SECONDS
        while time.monotonic() < end:
            # before their files are read
            have_ended = all(process.poll() is not None for process in self._processes)
            told = [_told(path) for path in self._files]
            results = [lines[finding] for lines in told if finding in lines]
            errors = [line["error"] for lines in told for line in lines.values() if line["error"]]
            if errors:
                raise RuntimeError(errors[0])
            if len(results) == len(self._files):
                return results
            if have_ended:
                codes = ", ".join(str(process.returncode) for process in self._processes)
                raise RuntimeError(f"the ranks ended with the exit codes {codes}")
            time.sleep(_POLL_SECONDS)
        raise TimeoutError(f"{len(results)} of {len(self._files)} ranks told in {_WAIT_SECONDS:.0f} s")


def _told(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """By finding, what a rank has told until now."""
    if not path.exists():
        return {}
    # the last line may not be complete
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    return {line["finding"]: line for line in lines}


@functools.cache
def _ranks(count: int) -> _Ranks:
    return _Ranks(count)


def _run(count: int, finding: str) -> Result:
    have = probe_npus().count
    if have < count:
        return Result(Status.SKIPPED, message=f"there are {have} NPUs")
    results = _ranks(count).found(finding)
    wrong = [result["wrong"] for result in results if result["wrong"]]
    if len({result.get("bits") for result in results}) > 1:
        wrong.append("ranks have different sums")
    return Result.of(not wrong, "; ".join(dict.fromkeys(wrong)), **results[0]["numbers"])
