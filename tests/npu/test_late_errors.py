"""Failures that show at a synchronisation after their operator, as on hardware, and what a server makes of them."""

from __future__ import annotations

import json
import sys

import httpx

from tests.npu.processes import last_line, run
from tests.server import Server, wait_until
from tests.tiny_models import tiny_model

SERVE = "ascend_vllm.entrypoints.cli serve"
FLAGS = ["--device", "npu", "--dtype", "float16", "--num-gpu-blocks-override", "64", "--swap-space", "0"]
FLAGS += ["--max-model-len", "256", "--max-num-seqs", "2", "--served-model-name", "tiny"]
ATTENTION = "aclnnFusedInferAttentionScoreV3"


def test_a_failure_shows_at_the_next_synchronisation_and_all_that_follow() -> None:
    script = """
import torch, torch_npu
x = torch.ones(4).to("npu")
torch.npu.synchronize()
y = x * 2
seen = ["launched"]
for _ in range(2):
    try:
        torch.npu.synchronize()
    except RuntimeError as error:
        seen.append("507015" in str(error))
print(seen)
"""
    variables = {"ASCEND_SIM_LATE_ERRORS": "1", "ASCEND_SIM_FAIL": "aclnnMuls:1"}
    assert last_line(run(sys.executable, "-W", "ignore", "-c", script, **variables)) == "['launched', True, True]"


def test_a_server_reports_a_late_failure_and_ends() -> None:
    """In the middle of an answer: its stream ends with an error event, and the server with exit code 1."""
    # two layers: about eighty tokens after those of the start
    failing = {"ASCEND_SIM_LATE_ERRORS": "1", "ASCEND_SIM_FAIL": f"{ATTENTION}:200", "OMP_NUM_THREADS": "1"}
    server = Server(SERVE, [tiny_model("qwen2-64"), *FLAGS], failing)
    try:
        server.wait_ready(120)
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 240, "temperature": 0, "ignore_eos": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=60) as answer:
            events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert len(events) > 10
        assert [event for event in events if '"error"' in event] == events[-2:-1], events[-3:]
        assert json.loads(events[-2])["error"]["code"] == 500 and events[-1] == "[DONE]"
        assert wait_until(lambda: server.process.poll() is not None, 20), server.log
        assert server.wait_exit() == 1
        assert server.orphans() == []
        assert f"{ATTENTION} failed on the device" in server.log
    finally:
        server.close()


def test_streams_and_events_of_a_device_come_to_an_end() -> None:
    """A captured graph keeps the streams that it was captured on."""
    script = """
import torch, torch_npu
torch.npu.set_device(0)
x, graphs = torch.ones(4).to("npu"), []
try:
    for _ in range(100):
        graphs.append(torch.npu.NPUGraph())
        with torch.npu.graph(graphs[-1]):
            y = x + 1
except RuntimeError as error:
    print(len(graphs) < 60, "207008" in str(error))
"""
    done = run(sys.executable, "-W", "ignore", "-c", script, ASCEND_SIM_STREAMS="60")
    assert done.stdout.splitlines()[-1] == "True True", done.stderr
    script = "from tests.npu import acl; acl.call('aclrtSetDevice', 0); [acl.event() for _ in range(11)]"
    done = run(sys.executable, "-c", script, ASCEND_SIM_EVENTS="10")
    assert done.returncode != 0 and "the device's 10 events are in use" in done.stderr
