"""scripts/check_ascendc.sh, with the host shim in the place of a toolkit's headers."""

from __future__ import annotations

import pathlib
import subprocess

import pytest

from tests.npu_kernels.conftest import CSRC, ROOT

OPS = sorted(path.parent.name for path in (CSRC / "npu").glob("*/op_kernel.cpp"))


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the script."""
    command = ["sh", str(ROOT / "scripts" / "check_ascendc.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def make_toolkit(root: pathlib.Path, header: str) -> None:
    """A toolkit whose kernel_operator.h is `header`; None has none."""
    (root / "tools/tikicpulib/lib/include").mkdir(parents=True)
    (root / "tools/tikicpulib/lib/include/kern_fwk.h").touch()
    (root / "compiler/tikcpp/tikcfw").mkdir(parents=True)
    (root / "compiler/tikcpp/tikcfw/kernel_operator.h").write_text(header)


def test_it_says_that_there_is_no_toolkit(tmp_path: pathlib.Path) -> None:
    for arguments, message in (
        ((), "usage: "),
        ((str(tmp_path),), f"there is no tools/tikicpulib/lib/include/kern_fwk.h in {tmp_path}"),
    ):
        result = check(*arguments)
        assert result.returncode == 2
        assert message in result.stderr
    make_toolkit(tmp_path, "")
    (tmp_path / "compiler/tikcpp/tikcfw/kernel_operator.h").unlink()
    result = check(str(tmp_path))
    assert result.returncode == 2
    assert "there is no kernel_operator.h of Ascend C" in result.stderr


def test_kernels_that_do_not_fit_the_headers_fail(tmp_path: pathlib.Path) -> None:
    make_toolkit(tmp_path, "#error another interface\n")
    result = check(str(tmp_path))
    assert result.returncode == 1
    assert result.stdout.split() == [word for op in OPS for word in ("FAILED", op)]


@pytest.mark.exhaustive
def test_every_kernel_fits_the_headers(tmp_path: pathlib.Path) -> None:
    make_toolkit(tmp_path, f'#include "{CSRC / "sim/ascendc/kernel_operator.h"}"\n')
    result = check(str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [word for op in OPS for word in ("ok", op)]
