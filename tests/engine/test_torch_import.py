"""Processes of an engine import torch without what only compilers need, which comes when one is used."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tests.server import ROOT

START = """
import sys
from ascend_vllm.torch_import import postpone_meta_registrations

postpone_meta_registrations()
import ascend_vllm.worker.worker
import torch

# what torch._meta_registrations takes so long to import
assert "torch._refs" not in sys.modules
"""
USES = {
    "compiler": """
        compute = lambda x: torch.nn.functional.softmax(x * 2, -1) + x.cumsum(0)
        given = torch.rand(3, 4)
        torch.testing.assert_close(torch.compile(compute, backend="aot_eager")(given), compute(given))
    """,
    "tensors without data": """
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            assert torch.linalg.qr(torch.empty(5, 3)).R.shape == (3, 3)
    """,
    "its names": """
        assert torch._meta_registrations.meta_mm(torch.empty(2, 3), torch.empty(3, 4)).shape == (2, 4)
    """,
}


@pytest.mark.parametrize("use", USES)
def test_it_comes_when_it_is_needed(use: str) -> None:
    program = (
        START
        + textwrap.dedent(USES[use])
        + 'assert torch._meta_registrations.__file__ and "torch._refs" in sys.modules'
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
