"""One process of a step: runs its cases in order and tells the parent of each.

    python -m ascend_vllm.tools.doctor.kit.child MODULE FIRST FD

It writes lines of JSON to the descriptor: {"begin": index, "name": …} before a case, {"row": {…}} after it, and
{"next": index} if the process has to be replaced before that case, which is -1 after the last one.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Sequence

from ascend_vllm import envs
from ascend_vllm.tools.doctor.kit.rows import Status
from ascend_vllm.tools.doctor.kit.session import Case, Result, Session

_LAST_LINES = 6


def main(words: Sequence[str]) -> int:
    """Runs the cases of a step from one on; returns the exit code."""
    module, first, descriptor = words[0], int(words[1]), int(words[2])
    session = Session()
    with os.fdopen(descriptor, "w", encoding="utf-8", buffering=1) as parent:

        def tell(**message: object) -> None:
            parent.write(json.dumps(message) + "\n")

        try:
            cases = importlib.import_module(module).cases(session)
        except Exception as error:
            tell(begin=first, name="start")
            tell(row=_told("start", _failure(error)))
            tell(next=-1)
            return 0
        environment = envs.everything()
        for index in range(first, len(cases)):
            case: Case = cases[index]
            has_variables = environment.items() >= case.variables.items()
            if not has_variables or (index > first and cases[index - 1].variables != case.variables):
                tell(next=index, variables=dict(case.variables))
                return 0
            tell(begin=index, name=case.name)
            try:
                result = case.run()
            except Exception as error:
                result = _failure(error)
            tell(row=_told(case.name, result))
            if result.status == Status.FAILED and not session.is_alive() and index + 1 < len(cases):
                tell(next=index + 1, variables={})
                return 0
        tell(next=-1)
    return 0


def _told(case: str, result: Result) -> dict[str, object]:
    return {
        "case": case,
        "status": result.status,
        "numbers": dict(result.numbers),
        "facts": dict(result.facts),
        "message": result.message,
    }


def _failure(error: Exception) -> Result:
    traceback.print_exc()
    lines = str(error).strip().splitlines()
    return Result(Status.FAILED, message=f"{type(error).__name__}: " + "\n".join(lines[:_LAST_LINES]))


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    # runtimes of devices that have failed may not end in order
    os._exit(code)
