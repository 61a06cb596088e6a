"""What the releases of CANN that are simulated take, beside one another."""

from __future__ import annotations

import json
import sys

import pytest

from tests.npu.generation_calls import CALLS
from tests.npu.processes import last_line, run

SINCE_9_0 = {
    "heads of 96, blocks of 64",
    "heads of 96, blocks of 256",
    "heads of 96, a window",
    "single heads of 96",
    "rope TND 128",
    "rope BSND 64",
    "top-k 1025",
    "top-k 0",
}
SINCE_9_1 = {"cast to FRACTAL_NZ"}
NEVER = {"heads of 96, blocks of 528"}


@pytest.mark.parametrize(
    ("cann", "refused"), [("8.5", SINCE_9_0 | SINCE_9_1 | NEVER), ("9.0", SINCE_9_1 | NEVER), ("9.1", NEVER)]
)
def test_calls_that_a_release_takes(cann: str, refused: set[str]) -> None:
    done = run(sys.executable, "-W", "ignore", "-m", "tests.npu.generation_calls", ASCEND_SIM_CANN=cann)
    assert set(json.loads(last_line(done))) == CALLS.keys() - refused
