"""Commands in processes of their own, in an environment that is changed."""

from __future__ import annotations

import os
import subprocess

from tests.server import ROOT

# without them torch imports torch_npu, which does not find CANN
HIDDEN = ("LD_LIBRARY_PATH", "TORCH_DEVICE_BACKEND_AUTOLOAD")


def run(
    *command: str, without: tuple[str, ...] = (), timeout: float = 120, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command in this environment, without some variables and with others."""
    environment = {name: value for name, value in os.environ.items() if name not in without} | variables
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """What a successful process has printed last."""
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]
