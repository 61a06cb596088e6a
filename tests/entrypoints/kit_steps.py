"""Cases of the hardware kit that go wrong in every way, without a device."""

from __future__ import annotations

import os
import signal
import time

from ascend_vllm import envs
from ascend_vllm.tools.doctor.kit.session import Case, Result, Session


def cases(session: Session) -> list[Case]:
    """One of each ending."""
    return [
        Case("works", lambda: Result.of(True, time_us=12.0)),
        Case("computes wrongly", lambda: Result.compared(0.5, 0.25, {})),
        Case("raises", _raise),
        Case("dies", lambda: os.kill(os.getpid(), signal.SIGSEGV)),  # type: ignore[arg-type, return-value]
        Case("hangs", _hang),
        Case("has a variable", lambda: _variable("1"), {"ASCEND_VLLM_CUSTOM_OPS": "1"}),
        Case("has it no more", lambda: _variable("")),
    ]


def _raise() -> Result:
    raise ValueError("no such operator\nin line 2")


def _hang() -> Result:
    time.sleep(60)
    return Result()


def _variable(wanted: str) -> Result:
    return Result.of(envs.everything().get("ASCEND_VLLM_CUSTOM_OPS", "") == wanted)
