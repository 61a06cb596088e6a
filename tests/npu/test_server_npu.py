"""The OpenAI-compatible server on a simulated NPU, started with the sources' flags, answers as on the CPU.

Both are asked the same, greedily, over HTTP.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.server import OPENAI_SERVER, Server, running
from tests.tiny_models import tiny_model

# of the pages on Ascend-vLLM, with a shorter sequence: the tiny model has 512 positions
SOURCES_FLAGS = [
    "--max-num-seqs=256",
    "--max-model-len=512",
    "--max-num-batched-tokens=4096",
    "--tensor-parallel-size=1",
    "--block-size=128",
    "--gpu-memory-utilization=0.9",
    "--num-scheduler-steps=8",
    "--trust-remote-code",
    # the simulator fills pinned memory; 4 GiB of it, the default, take half a minute
    "--swap-space=0.01",
]
CPU_FLAGS = ["--device", "cpu", "--kv-cache-memory-bytes", "32M"]


def _started(device_flags: list[str], stack: contextlib.ExitStack) -> Server:
    flags = ["--model", tiny_model("qwen2"), "--served-model-name", "tiny", "--dtype", "float16"]
    flags += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    return stack.enter_context(running(OPENAI_SERVER, [*flags, *device_flags], timeout_s=180))


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server]]:
    """On the NPU, as --device auto finds it, and on the CPU."""
    tiny_model("qwen2")
    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        npu = pool.submit(_started, SOURCES_FLAGS, first)
        cpu = pool.submit(_started, CPU_FLAGS, second)
        yield npu.result(), cpu.result()


HELLO = {"messages": [{"role": "user", "content": "hello, how are you?"}]}
COUNT = {"prompt": "1 2 3 4 5 6", "max_tokens": 24}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"word": {"enum": ["block", "cache"]}},
            "required": ["word"],
            "additionalProperties": False,
        },
    },
}

REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", HELLO | {"max_tokens": 40}),
    "completion": ("completions", COUNT),
    "many prompts": ("completions", {"prompt": ["a fox", "the sun", "one two"], "max_tokens": 9}),
    # as good as greedy, and drawn
    "n": ("completions", COUNT | {"n": 3, "temperature": 1.0, "top_k": 1}),
    "beams": ("completions", {"prompt": "the sun", "max_tokens": 6, "n": 2, "use_beam_search": True}),
    "penalties": ("completions", COUNT | {"presence_penalty": 0.5, "repetition_penalty": 1.3}),
    "stop": ("completions", COUNT | {"stop": ["e", "a"]}),
    "echo": ("completions", {"prompt": "a long prompt " * 30, "max_tokens": 3, "echo": True}),
    "choice": ("chat/completions", HELLO | {"guided_choice": ["yes, please", "no, thanks"], "max_tokens": 30}),
    "regex": ("completions", COUNT | {"guided_regex": "[0-9]{3}-[a-f]+", "max_tokens": 12}),
    "tool": (
        "chat/completions",
        HELLO
        | {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look_up"}}, "max_tokens": 30},
    ),
}


def ask(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(f"{server.url}/v1/{path}", json={"model": "tiny", "temperature": 0} | body, timeout=120)
    assert response.status_code == 200, f"{response.text}\n{server.log}"
    answer: dict[str, Any] = response.json()
    return answer


def shown(answer: dict[str, Any]) -> Any:
    """An answer without the ids that are drawn anew each time."""
    for choice in answer["choices"]:
        # of floats, which differ in their last digits
        choice.pop("cum_log_probs", None)
        for call in choice.get("message", {}).get("tool_calls") or ():
            call.pop("id")
    return answer["choices"], answer["usage"]


@pytest.mark.parametrize("name", REQUESTS)
def test_answers_are_the_cpus(name: str, servers: tuple[Server, Server]) -> None:
    npu, cpu = (shown(ask(server, *REQUESTS[name])) for server in servers)
    assert npu == cpu


def test_streams_are_the_cpus(servers: tuple[Server, Server]) -> None:
    texts = []
    for server in servers:
        body = {"model": "tiny", "temperature": 0, "stream": True, "max_tokens": 30} | HELLO
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=120) as response:
            events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert events[-1] == "[DONE]"
        deltas = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1]]
        texts.append("".join(deltas))
    assert texts[0] == texts[1] != ""


def test_probabilities_are_the_cpus(servers: tuple[Server, Server]) -> None:
    npu, cpu = (
        ask(server, "completions", COUNT | {"logprobs": 3, "max_tokens": 6})["choices"][0]["logprobs"]
        for server in servers
    )
    assert npu["tokens"] == cpu["tokens"]
    # float16, added up in another order
    assert npu["token_logprobs"] == pytest.approx(cpu["token_logprobs"], abs=0.06)


def test_seeded_answers_repeat(servers: tuple[Server, Server]) -> None:
    body = COUNT | {"temperature": 1.0, "seed": 11, "top_p": 0.9}
    first, again, other = (
        shown(ask(servers[0], "completions", body | {"seed": seed}))[0][0]["text"] for seed in (11, 11, 12)
    )
    assert first == again != other


def test_the_log_says_where_it_runs(servers: tuple[Server, Server]) -> None:
    log = servers[0].log
    assert "NPU worker 0: Ascend910B3" in log
    assert "attention backend ascend" in log
    assert "NPU memory: 1.00 GiB in all" in log
    # the weights, the runtime and what 4096 tokens need are not the cache's
    assert "ops run on their reference on npu" in log


def test_the_doctor_finds_the_simulated_npus() -> None:
    """Everything that the simulator has is well; it has no driver and no installation of CANN."""
    command = [sys.executable, "-m", "ascend_vllm.entrypoints.cli", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    for name in ("Python", "torch", "torch_npu", "CANN runtime", "NPUs", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        assert findings[name]["level"] == "ok", findings[name]
    assert findings["NPUs"]["found"].endswith("x Ascend910B3")
    problems = [name for name, finding in findings.items() if finding["level"] == "problem"]
    assert problems in ([], ["driver"], ["CANN"], ["driver", "CANN"])
    assert done.returncode == (1 if problems else 0)
