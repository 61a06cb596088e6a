"""Runs the steps, each in processes of its own: a fault, a crash or a hang ends one case.

The parent never touches the device. It reads what its child tells, ends it when a case has taken its time, and starts
another one behind the case that failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ascend_vllm
from ascend_vllm import envs
from ascend_vllm.platforms.facts import npu_unusable_reason
from ascend_vllm.tools.doctor.kit.private import Redactor
from ascend_vllm.tools.doctor.kit.rows import Report, Row, Status
from ascend_vllm.tools.doctor.kit.table import STEPS, Step

# seconds from the start of a process to its first case: the runtime and the operators are loaded
_START_SECONDS = 120.0
# from what a process tells last to its end
_ENDING_SECONDS = 10.0
# what is kept of a step's output
_LAST_CHARACTERS = 16_000
_LAST_LINES = 3
# CANN writes its log files below it
_CANN_LOGS = "ASCEND_PROCESS_LOG_PATH"


class Kit:
    """A run of the kit.

    Args:
        steps: to run, in their order.
        show: called with each line of the progress.
    """

    def __init__(self, steps: Sequence[Step] = STEPS, show: Callable[[str], None] = print) -> None:
        self._steps = steps
        self._show = show
        self._redactor = Redactor.of_this_machine(envs.everything())
        self._rows: list[Row] = []
        # step → what it wrote, redacted; of steps in which something failed
        self.logs: dict[str, str] = {}

    def run(self) -> Report:
        """Runs the steps; those that need a device are skipped if none can be used.

        Returns:
            The report, redacted.
        """
        start = time.monotonic()
        refusal = npu_unusable_reason()
        with tempfile.TemporaryDirectory() as directory:
            for number, step in enumerate(self._steps, 1):
                self._show(f"[{number}/{len(self._steps)}] {step.name}: {step.about}")
                if step.needs_device and refusal is not None:
                    self.add(step, "start", Status.SKIPPED, message=refusal)
                else:
                    _StepRun(self, step, pathlib.Path(directory) / step.name).run()
        is_simulated = any(row.facts.get("runtime") == "simulated" for row in self._rows)
        return Report(ascend_vllm.__version__, is_simulated, time.monotonic() - start, tuple(self._rows))

    def add(
        self,
        step: Step,
        case: str,
        status: str,
        numbers: Mapping[str, float] | None = None,
        facts: Mapping[str, str] | None = None,
        message: str = "",
    ) -> None:
        """Adds a row, redacted, and shows it."""
        text = self._redactor.text
        row = Row(
            step.name,
            case,
            Status(status),
            dict(numbers or {}),
            {name: text(value) for name, value in (facts or {}).items()},
            text(message),
        )
        self._rows.append(row)
        first_line = row.message.partition("\n")[0]
        self._show(f"    {row.status:<8} {row.case}" + (f"  {first_line}" if first_line else ""))

    def keep_log(self, step: Step, text: str) -> None:
        """Keeps the end of what a step wrote, redacted."""
        self.logs[step.name] = self._redactor.text(text)[-_LAST_CHARACTERS:]


class _StepRun:
    """The processes of a step, one after another."""

    def __init__(self, kit: Kit, step: Step, directory: pathlib.Path) -> None:
        self._kit = kit
        self._step = step
        self._directory = directory
        self._output = directory / "output.txt"
        self._end = self._case_end = time.monotonic() + step.seconds
        # what a process has begun, and its process has not finished
        self._running: str | None = None
        self._has_failed = False

    def run(self) -> None:
        """Runs all cases, as long as there is time."""
        self._directory.mkdir()
        index: int | None = 0
        variables: dict[str, str] = {}
        while index is not None:
            if time.monotonic() >= self._end:
                self._add("rest", Status.SKIPPED, f"the step has taken its {self._step.seconds:.0f} s")
                break
            index, variables = self._run_process(index, variables)
        if self._has_failed:
            self._kit.keep_log(self._step, "\n".join(self._texts()))

    def _add(self, case: str, status: Status, message: str) -> None:
        self._kit.add(self._step, case, status, message=message)

    def _run_process(self, first: int, variables: dict[str, str]) -> tuple[int | None, dict[str, str]]:
        """Runs cases from one on.

        Returns:
            The first case for another process, None if there is none, and the variables that it needs.
        """
        read, write = os.pipe()
        command = [sys.executable, "-m", f"{__package__}.child", self._step.module, str(first), str(write)]
        # the parent removes what they leave
        places = {_CANN_LOGS: str(self._directory / "cann"), "TMPDIR": str(self._directory)}
        self._case_end = time.monotonic() + _START_SECONDS
        with self._output.open("ab") as output, os.fdopen(read, "rb", buffering=0) as messages:
            process = subprocess.Popen(
                command,
                env={**envs.everything(), **self._step.variables, **places, **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(write,),
                start_new_session=True,
            )
            os.close(write)
            current, has_ended = first - 1, True
            try:
                for message in _messages(messages.fileno(), self._deadline):
                    if "begin" in message:
                        current, self._running = message["begin"], message["name"]
                        self._case_end = time.monotonic() + self._step.case_seconds
                    elif "row" in message:
                        self._take(message["row"])
                        self._case_end = time.monotonic() + _START_SECONDS
                    else:
                        following = message["next"]
                        return (None if following < 0 else following), message.get("variables", {})
                has_ended = time.monotonic() < self._deadline()
            finally:
                _end(process, has_ended=has_ended)
        return self._after_fault(process, current, has_ended), {}

    def _after_fault(self, process: subprocess.Popen[bytes], current: int, has_ended: bool) -> int | None:
        """Tells of the case that the process did not finish; returns the next one, None if none can begin."""
        self._has_failed = True
        is_started, case = self._running is not None, self._running or "start"
        self._running = None
        if has_ended:
            last = self._texts()[-1][-1000:].strip().splitlines()[-_LAST_LINES:]
            ending = f"its process ended with {_ending(process.returncode)}"
            self._add(case, Status.CRASHED, "\n".join([ending, *last]))
        else:
            self._add(case, Status.HUNG, "it was ended after its time")
        return current + 1 if is_started else None

    def _deadline(self) -> float:
        return min(self._case_end, self._end)

    def _take(self, row: dict[str, Any]) -> None:
        self._running = None
        self._has_failed |= row["status"] == Status.FAILED
        self._kit.add(self._step, **row)

    def _texts(self) -> list[str]:
        """Errors in CANN's own logs, and what the processes of the step wrote."""
        errors = [
            line
            for path in sorted((self._directory / "cann").rglob("*.log"))
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
            if line.startswith("[ERROR]")
        ]
        written = self._output.read_text(encoding="utf-8", errors="replace")
        return ["\n".join(errors[-100:]), written[-_LAST_CHARACTERS:]]


def _messages(descriptor: int, deadline: Callable[[], float]) -> Iterator[dict[str, Any]]:
    """Lines of JSON until the other end is closed, or the time has come, which messages may move."""
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while (left := deadline() - time.monotonic()) > 0:
            if not selector.select(left):
                continue
            read = os.read(descriptor, 1 << 16)
            if not read:
                return
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                yield json.loads(line)


def _end(process: subprocess.Popen[bytes], *, has_ended: bool) -> None:
    """Ends a process, and all that it has started."""
    if has_ended:
        # its own exit code says more than that it was ended
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_ENDING_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
