"""Workers of Ray on two devices: each computes on its own, and they reach each other over HCCL."""

from __future__ import annotations

import importlib.util
import pathlib
import secrets
import shutil
import tempfile

import pytest

from ascend_vllm.executor.base import create_executor
from tests.distributed import worker_functions
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import make_config

# as all layouts of Ray's workers, see tests/server.py
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'ascend-vllm[ray]'"),
]


def test_each_worker_has_the_device_that_ray_gave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # short enough for the names of Ray's sockets
    directory = pathlib.Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    for name, value in {
        "RAY_TMPDIR": str(directory),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ADDRESS": "local",
        "OMP_NUM_THREADS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    config = make_config(
        tiny_model("qwen2-64"),
        device="npu",
        dtype="float16",
        block_size=128,
        num_gpu_blocks_override=64,
        swap_space_gib=0,
        tensor_parallel_size=2,
        distributed_executor_backend="ray",
    )
    executor = create_executor(config)
    try:
        # the steps that warm up add up what both have
        assert executor.initialize().num_blocks == 64
        assert executor.collective_rpc(worker_functions.device) == ["npu:0", "npu:1"]
        assert executor.collective_rpc(worker_functions.visible_devices) == ["0,1", "0,1"]
        assert len(set(executor.collective_rpc(worker_functions.process_id))) == 2
    finally:
        executor.shutdown()
        shutil.rmtree(directory, ignore_errors=True)
