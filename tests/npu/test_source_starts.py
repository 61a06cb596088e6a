"""The start commands of the pages on Ascend-vLLM on each release of CANN: one card and two, operators and graphs."""

from __future__ import annotations

import os
import pathlib
import sys

import httpx
import pytest

from ascend_vllm.platforms.facts import CannFacts
from tests.npu.processes import run
from tests.server import OPENAI_SERVER, running
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import GREEDY, generate, make_prompt, started_worker

MODEL = "qwen2-64"
LENGTH = 20
PROMPT = make_prompt(40)
# as on the pages but for the lengths, which are the model's, and the data type, which its checkpoint does not have
FLAGS = [
    "--max-num-batched-tokens=4096",
    "--max-model-len=256",
    "--dtype=float16",
    "--block-size=128",
    "--gpu-memory-utilization=0.9",
    "--num-scheduler-steps=8",
    "--trust-remote-code",
]
PRECISION = {"USE_PFA_HIGH_PRECISION_MODE": "1", "USE_IFA_HIGH_PRECISION_MODE": "1"}
COMPILED = {
    "INFER_MODE": "PTA",
    "PTA_TORCHAIR_DECODE_GEAR_ENABLE": "1",
    "PTA_TORCHAIR_DECODE_GEAR_LIST": "2,4",
    "VLLM_ENGINE_ITERATION_TIMEOUT_S": "1500",
    "HCCL_OP_EXPANSION_MODE": "AIV",
}
# how decoding steps are launched → flags, variables, what the log says
MODES: dict[str, tuple[list[str], dict[str, str], str]] = {
    "eager": (["--max-num-seqs=256", "--enforce-eager"], {}, "attention backend ascend"),
    "captured": (["--max-num-seqs=256"], {}, "Captured 8 graphs"),
    # the largest gear is --max-num-seqs, as the pages advise
    "compiled": (["--max-num-seqs=4"], COMPILED, "Decoding replays compiled graphs of 2, 4 sequences"),
}
# the other suites start the newest release without compiled graphs, on one card and on two
ORDINARY = {("9.0", 1, "captured")}


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """Of a worker that runs operators."""
    worker = started_worker(
        tiny_model(MODEL), device="npu", dtype="float16", block_size=128, num_gpu_blocks_override=64
    )
    return generate(worker, PROMPT, GREEDY, LENGTH)


def starts() -> list[object]:
    cases = [(cann, tp, mode) for cann in ("9.0", "9.1") for tp in (1, 2) for mode in MODES]
    return [pytest.param(*case, marks=() if case in ORDINARY else pytest.mark.exhaustive) for case in cases]


@pytest.mark.parametrize(("cann", "tp", "mode"), starts())
def test_the_pages_commands_serve(
    cann: str,
    tp: int,
    mode: str,
    expected: list[int],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # the worker here has set it for this process, and may have bound this thread to a core
    monkeypatch.delenv("CPU_AFFINITY_CONF", raising=False)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    flags, variables, says = MODES[mode]
    environment = {
        "ASCEND_SIM_CANN": cann,
        "ASCEND_RT_VISIBLE_DEVICES": ",".join(map(str, range(tp))),
        "TORCHAIR_CACHE_HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        **PRECISION,
        **variables,
    }
    model = tiny_model(MODEL)
    command = ["--model", model, f"--tensor-parallel-size={tp}", *flags, *FLAGS]
    body = {"model": model, "prompt": PROMPT, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
    with running(OPENAI_SERVER, command, environment, timeout_s=300) as server:
        with httpx.Client(base_url=server.url, timeout=120) as http:
            answer = http.post("/v1/completions", json=body | {"return_token_ids": True}).json()
        assert answer["choices"][0]["token_ids"] == expected, server.log
        assert says in server.log
        assert ("CANN 9.0" in server.log) == (cann == "9.0"), server.log


def test_the_start_on_an_older_release_is_refused_in_the_doctors_words() -> None:
    command = ["--model", tiny_model(MODEL), "--device", "npu", "--max-num-seqs=256", *FLAGS]
    done = run(sys.executable, "-m", OPENAI_SERVER, *command, ASCEND_SIM_CANN="8.5")
    assert done.returncode != 0
    assert f"--device npu: {CannFacts.of('8.5.0').refusal}" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
