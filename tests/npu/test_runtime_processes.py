"""What a process is started with: other chips and devices, allocators, and torch_npu without CANN."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SIM_RUN = (sys.executable, "-m", "ascend_vllm.entrypoints.cli", "sim-run")


def run(*command: str, without: tuple[str, ...] = (), **variables: str) -> subprocess.CompletedProcess[str]:
    """A command in this environment, changed."""
    environment = {name: value for name, value in os.environ.items() if name not in without} | variables
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_another_chip_with_fewer_visible_devices_expandable_segments_and_torchair() -> None:
    script = """
import torch, torch_npu, torchair
torch.npu.set_device(0)
free = torch.npu.mem_get_info()[0]
x = torch.arange(1 << 20).to("npu")
y = torch.arange(4 << 20).to("npu")
used = free - torch.npu.mem_get_info()[0]
assert torch.equal(y.cpu(), torch.arange(4 << 20))
segments = [segment["is_expandable"] for segment in torch.npu.memory_snapshot()]
del x, y
torch.npu.empty_cache()
back = free - torch.npu.mem_get_info()[0]
print(torch.npu.get_device_name(0), torch.npu.device_count(), set(segments), used >= 40 << 20, back == 0)
torchair.CompilerConfig()
"""
    done = run(
        *SIM_RUN, "--soc", "Ascend310P3", "--devices", "4", "--", sys.executable, "-W", "ignore", "-c", script,
        ASCEND_RT_VISIBLE_DEVICES="2,3,9", PYTORCH_NPU_ALLOC_CONF="expandable_segments:True",
    )  # fmt: skip
    assert last_line(done) == "Ascend310P3 2 {True} True True"


def test_a_chip_that_is_not_simulated_is_named() -> None:
    script = "import ctypes; ctypes.CDLL('libascendcl.so').aclrtGetSocName()"
    done = run(*SIM_RUN, "--soc", "Ascend910A", "--", sys.executable, "-c", script)
    assert done.returncode != 0 and "ASCEND_SIM_SOC=Ascend910A is not simulated" in done.stderr


def test_the_package_works_where_torch_npu_is_installed_without_cann() -> None:
    hidden = ("LD_LIBRARY_PATH", "TORCH_DEVICE_BACKEND_AUTOLOAD")
    alone = run(sys.executable, "-c", "import torch", without=hidden)
    assert alone.returncode != 0 and "Failed to load the backend extension: torch_npu" in alone.stderr
    script = "import ascend_vllm, torch; from ascend_vllm import SamplingParams; print(torch.ones(2).sum().item())"
    assert last_line(run(sys.executable, "-c", script, without=hidden)) == "2.0"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--torch-npu", "/nowhere", "--", "true"), "has no torch_npu in it"),
        (("--", "no-such-command"), "Cannot run no-such-command: No such file or directory."),
    ],
)
def test_sim_run_says_what_is_missing(arguments: tuple[str, ...], text: str) -> None:
    done = run(*SIM_RUN, *arguments)
    assert done.returncode == 2 and text in done.stderr


def test_sim_run_passes_words_and_exit_codes_on() -> None:
    script = "import sys; print(sys.argv[1:]); sys.exit(7)"
    done = run(*SIM_RUN, "--", sys.executable, "-c", script, "--some_flag", "--devices", "9")
    assert (done.returncode, done.stdout) == (7, "['--some_flag', '--devices', '9']\n")
