"""The simulated HCCL: collectives of torch.distributed between processes, and what it refuses."""

from __future__ import annotations

import ctypes
import os
import pathlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.npu import acl
from tests.server import ROOT, free_port

HCCL = ctypes.CDLL("libhccl.so")
FP32, FP64, BF16, INT8 = 4, 10, 11, 0
SUM, PROD = 0, 1
SUCCESS, PARAMETER, REMOTE, TIMEOUT = 0, 1, 21, 9


@pytest.mark.parametrize(("ranks", "ending"), [(2, "leave"), (4, "differ")])
def test_collectives_between_processes(ranks: int, ending: str, tmp_path: pathlib.Path) -> None:
    environment = os.environ | {"ASCEND_SIM_DEVICES": "4", "HCCL_EXEC_TIMEOUT": "60", "OMP_NUM_THREADS": "1"}
    # or a thread of torch_npu ends the process when it sees the failure before the call that failed does
    environment["TORCH_HCCL_ASYNC_ERROR_HANDLING"] = "0"
    port = free_port()
    logs = [tmp_path / f"{rank}.log" for rank in range(ranks)]
    started = []
    for rank, log in enumerate(logs):
        command = [sys.executable, "-m", "tests.npu.hccl_ranks", str(rank), str(ranks), str(port), ending]
        with log.open("wb") as output:
            started.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output))
    try:
        codes = [process.wait(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    texts = [log.read_text() for log in logs]
    assert codes == [0] * ranks, "\n".join(texts)
    wanted = "rank 1 has left the communicator or ended" if ending == "leave" else "HcclAllReduce: count: 3 on rank 0"
    assert wanted in texts[0]


class _Ranks:
    """Communicators of one process, used from a thread each: enough to see what is refused."""

    def __init__(self, count: int) -> None:
        root = ctypes.create_string_buffer(4108)
        assert HCCL.HcclGetRootInfo(root) == SUCCESS
        self.handles = [ctypes.c_void_p() for _ in range(count)]
        self.streams = [torch.npu.Stream() for _ in range(count)]
        # a communicator is its thread's device's
        self._threads = ThreadPoolExecutor(count, initializer=acl.call, initargs=("aclrtSetDevice", 0))
        self.each(
            lambda rank: HCCL.HcclCommInitRootInfo(count, root, rank, ctypes.byref(self.handles[rank])),
            [SUCCESS] * count,
        )

    def each(self, call: object, codes: list[int]) -> None:
        """Calls on all ranks at once and compares what they answer."""
        assert callable(call)
        assert list(self._threads.map(call, range(len(self.handles)))) == codes

    def stream(self, rank: int) -> ctypes.c_void_p:
        """The stream of a rank."""
        return ctypes.c_void_p(self.streams[rank].npu_stream)


def _address(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _all_reduce(
    ranks: _Ranks, rank: int, x: torch.Tensor, *, count: int = 4, dtype: int = FP32, op: int = SUM
) -> int:
    code: int = HCCL.HcclAllReduce(
        _address(x), _address(x), ctypes.c_uint64(count), dtype, op, ranks.handles[rank], ranks.stream(rank)
    )
    return code


@pytest.fixture
def alone() -> _Ranks:
    """A communicator of one rank."""
    torch.npu.set_device(0)
    return _Ranks(1)


def test_arguments_that_are_wrong_are_named(alone: _Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    x = torch.ones(4, device="npu")
    on_host = torch.ones(4)
    calls = {
        "HcclAllReduce: sendBuf: its 16 bytes are not in device memory": lambda: _all_reduce(alone, 0, on_host),
        "HcclAllReduce: dataType: number 10 is not supported": lambda: _all_reduce(alone, 0, x, dtype=FP64),
        "HcclAllReduce: op: it must be sum, prod, max or min": lambda: _all_reduce(alone, 0, x, op=9),
        "HcclAllReduce: op: prod does not support int16 and bfloat16": lambda: _all_reduce(
            alone, 0, x, dtype=BF16, op=PROD
        ),
        "HcclBroadcast: root: 3 is outside [0, 1)": lambda: HCCL.HcclBroadcast(
            _address(x), ctypes.c_uint64(4), FP32, 3, alone.handles[0], alone.stream(0)
        ),
        "HcclSend: destRank: it is this rank itself": lambda: HCCL.HcclSend(
            _address(x), ctypes.c_uint64(4), FP32, 0, alone.handles[0], alone.stream(0)
        ),
        "HcclAlltoAll: recvType: it differs from sendType": lambda: HCCL.HcclAlltoAll(
            _address(x), ctypes.c_uint64(4), FP32, _address(x), ctypes.c_uint64(4), INT8, alone.handles[0], None
        ),
        "HcclBarrier: comm: it is no living communicator": lambda: HCCL.HcclBarrier(None, None),
    }
    for text, call in calls.items():
        assert call() == PARAMETER
        assert text in capfd.readouterr().err
    # a refused call harms nothing
    assert _all_reduce(alone, 0, x) == SUCCESS
    assert x.tolist() == [1.0] * 4


def test_ranks_that_differ_are_told_apart(capfd: pytest.CaptureFixture[str]) -> None:
    x = torch.ones(8, device="npu")
    torch.npu.synchronize()
    for other, text in (({"count": 5}, "count: 4 on rank 0 but 5"), ({"dtype": 2}, "dataType: 4 on rank 0 but 2")):
        ranks = _Ranks(2)
        codes = list(
            ThreadPoolExecutor(2).map(
                lambda rank, ranks=ranks, other=other: _all_reduce(
                    ranks, rank, x[4 * rank :], **(other if rank else {})
                ),
                range(2),
            )
        )
        assert PARAMETER in codes
        assert SUCCESS not in codes
        assert text in capfd.readouterr().err


def test_a_rank_that_leaves_is_noticed(capfd: pytest.CaptureFixture[str]) -> None:
    x = torch.ones(4, device="npu")
    torch.npu.synchronize()
    ranks = _Ranks(2)
    assert HCCL.HcclCommDestroy(ranks.handles[1]) == SUCCESS
    assert _all_reduce(ranks, 0, x) == REMOTE
    assert "rank 1 has left the communicator or ended" in capfd.readouterr().err


def test_a_rank_that_does_not_come_is_waited_for_only_so_long(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(4, device="npu")
    torch.npu.synchronize()
    monkeypatch.setenv("HCCL_EXEC_TIMEOUT", "1")
    ranks = _Ranks(2)
    assert _all_reduce(ranks, 0, x) == TIMEOUT
    assert "HcclAllReduce: waited 1 s for the other ranks" in capfd.readouterr().err
