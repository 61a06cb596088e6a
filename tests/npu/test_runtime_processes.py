"""What a process is started with: `sim-run`, and torch_npu without CANN."""

from __future__ import annotations

import sys

import pytest

from tests.npu.processes import HIDDEN, last_line, run

SIM_RUN = (sys.executable, "-m", "ascend_vllm.entrypoints.cli", "sim-run")


def test_the_package_works_where_torch_npu_is_installed_without_cann() -> None:
    script = "import ascend_vllm, torch; from ascend_vllm import SamplingParams; print(torch.ones(2).sum().item())"
    assert last_line(run(sys.executable, "-c", script, without=HIDDEN)) == "2.0"


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
