"""Chips, devices and allocators that a process is started with, and torch_npu without CANN."""

from __future__ import annotations

import sys

from tests.npu.processes import HIDDEN, last_line, run


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
    chips = {"ASCEND_SIM_SOC": "Ascend310P3", "ASCEND_SIM_DEVICES": "4", "ASCEND_RT_VISIBLE_DEVICES": "2,3,9"}
    allocator = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
    done = run(sys.executable, "-W", "ignore", "-c", script, **chips, **allocator)
    assert last_line(done) == "Ascend310P3 2 {True} True True"


def test_a_chip_that_is_not_simulated_is_named() -> None:
    script = "import ctypes; ctypes.CDLL('libascendcl.so').aclrtGetSocName()"
    done = run(sys.executable, "-c", script, ASCEND_SIM_SOC="Ascend910A")
    assert done.returncode != 0 and "ASCEND_SIM_SOC=Ascend910A is not simulated" in done.stderr


def test_torch_npu_does_not_load_without_cann() -> None:
    alone = run(sys.executable, "-c", "import torch", without=HIDDEN)
    assert alone.returncode != 0 and "Failed to load the backend extension: torch_npu" in alone.stderr
