"""A step of the hardware kit that leaves a file."""

from __future__ import annotations

import pathlib
import tempfile

from ascend_vllm import envs
from ascend_vllm.tools.doctor.kit.session import Case, Result, Session


def cases(session: Session) -> list[Case]:
    """One, which tells a variable, too."""
    return [Case("leaves a file", _leave)]


def _leave() -> Result:
    path = pathlib.Path(tempfile.mkdtemp()) / "left-by-the-kit.txt"
    path.write_text("x")
    return Result(numbers={"left": float(path.exists())}, facts={"mode": envs.everything()["INFER_MODE"]})
