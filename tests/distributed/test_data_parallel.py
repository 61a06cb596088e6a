"""Several engine cores behind one server, over a socket: together they answer as one does, and die together."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from ascend_vllm import LLM, SamplingParams
from ascend_vllm.engine.args import EngineArgs
from ascend_vllm.engine.data_parallel_client import DataParallelClient, merge_results
from ascend_vllm.errors import ConfigError, EngineDeadError, RequestError, UnsupportedFlagError
from tests.raw_requests import post_raw, read_events, read_rest
from tests.server import Server, is_alive, running, wait_until
from tests.tiny_models import tiny_model

SERVE = "ascend_vllm.entrypoints.cli serve"
START_S = 300.0
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 16,
    "num_gpu_blocks_override": 512,
    "max_model_len": 8192,
    "max_num_seqs": 16,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "max_num_batched_tokens": 512,
    "seed": 0,
}
FLAGS = ["--dtype", "float32", "--block-size", "16", "--num-gpu-blocks-override", "512", "--max-model-len", "8192"]
FLAGS += ["--max-num-seqs", "16", "--enable-prefix-caching", "--enable-chunked-prefill", "--swap-space", "0"]
FLAGS += ["--max-num-batched-tokens", "512", "--seed", "0", "--served-model-name", "tiny"]
ENV = {"OMP_NUM_THREADS": "1", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1", "VLLM_SERVER_DEV_MODE": "1"}
LENGTH = 16
GREEDY: dict[str, Any] = {"model": "tiny", "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
SYSTEM = "The quick brown fox jumps over the lazy dog while the sun shines on the hills. "
PROMPTS = [f"{SYSTEM if number % 2 else ''}{number} blocks of the cache hold keys" for number in range(24)]
# as many tokens as the test of an end in the midst of it may take
LONG = GREEDY | {"prompt": "Hello", "max_tokens": 8000, "stream": True}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
        llm = LLM(tiny_model("qwen2"), **OPTIONS)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = [tiny_model("qwen2"), "-dp", "2", "--enable-sleep-mode", "--enable-prompt-tokens-details", *FLAGS]
    server = Server(SERVE, flags, ENV)
    try:
        server.wait_ready(START_S)
        yield server
    finally:
        server.close()


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client
        assert wait_until(lambda: is_idle(client), 30)


def metric(http: httpx.Client, name: str, labels: str = "") -> list[float]:
    """A metric of each core, in the order of their numbers; samples that differ in other labels are added up."""
    text = http.get("/metrics").raise_for_status().text
    found = re.findall(rf"^vllm:{name}\{{(.*)\}} (\S+)$", text, re.MULTILINE)
    values = {f'engine="{rank}"': [0.0] for rank in range(2)}
    for all_labels, value in found:
        (engine,) = re.findall(r'engine="\d+"', all_labels)
        values[engine].append(float(value) if labels in all_labels else 0.0)
    # even if it is zero, each core tells it
    assert all(len(told) > 1 for told in values.values()), name
    return [sum(told) for told in values.values()]


def is_idle(http: httpx.Client) -> bool:
    return all(
        metric(http, name) == [0, 0]
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    )


def complete(http: httpx.Client, prompt: str, **fields: Any) -> dict[str, Any]:
    body = GREEDY | {"prompt": prompt, "return_token_ids": True} | fields
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def tokens_of(answer: dict[str, Any]) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


def offline(llm: LLM, prompts: list[str], **params: Any) -> list[list[list[int]]]:
    chosen = SamplingParams(**({"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True} | params))
    outputs = llm.generate(prompts, chosen, use_tqdm=False)
    return [[list(choice.token_ids) for choice in output.outputs] for output in outputs]


@contextlib.contextmanager
def worked(http: httpx.Client) -> Iterator[list[float]]:
    """How many sequences each core brings to their ends within; filled at the end."""
    before = metric(http, "request_success_total")
    numbers: list[float] = []
    yield numbers
    numbers += [after - one for after, one in zip(metric(http, "request_success_total"), before, strict=True)]


def test_many_requests_have_the_tokens_of_one_engine(http: httpx.Client, llm: LLM) -> None:
    with worked(http) as numbers, concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(lambda prompt: complete(http, prompt), PROMPTS))
    assert [tokens_of(answer) for answer in answers] == offline(llm, PROMPTS)
    assert sum(numbers) == len(PROMPTS)
    assert min(numbers) >= 4
    tokens = metric(http, "generation_tokens_total")
    assert sum(tokens) == LENGTH * len(PROMPTS)
    assert min(tokens) >= 4 * LENGTH


def test_one_beginning_is_computed_once(http: httpx.Client) -> None:
    for name in ("first", "second"):
        beginning = f"The {name} story " + "keeps every stream moving and nobody waits for long; " * 4
        with worked(http) as numbers:
            answers = [complete(http, f"{beginning}{number}") for number in range(4)]
        assert sorted(numbers) == [0, 4]
        cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        assert cached[0] == 0
        assert min(cached[1:]) >= 64


def test_the_sequences_of_a_request_stay_together(http: httpx.Client, llm: LLM) -> None:
    sampled: dict[str, Any] = {"n": 4, "temperature": 0.9, "top_p": 0.95, "seed": 7}
    with worked(http) as numbers:
        answer = complete(http, PROMPTS[1], **sampled)
    assert sorted(numbers) == [0, 4]
    assert sorted(tokens_of(answer)) == sorted(offline(llm, [PROMPTS[1]], **sampled)[0])
    with worked(http) as numbers:
        search = complete(http, PROMPTS[3], n=2, best_of=3, use_beam_search=True)
    assert sorted(numbers) == [0, 2]
    assert len(tokens_of(search)) == 2


def test_a_stream_has_the_tokens_of_one_engine(http: httpx.Client, llm: LLM) -> None:
    ids: list[int] = []
    body = GREEDY | {"prompt": PROMPTS[2], "stream": True, "return_token_ids": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                ids += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
    assert [[ids]] == offline(llm, [PROMPTS[2]])


def test_a_client_that_leaves_frees_its_core(http: httpx.Client, server: Server) -> None:
    streams = [post_raw(server, "/v1/completions", LONG | {"n": 2, "temperature": 1}) for _ in range(2)]
    for stream in streams:
        read_events(stream, 3)
    assert metric(http, "num_requests_running") == [2, 2]
    streams[0].close()
    assert wait_until(lambda: sorted(metric(http, "num_requests_running")) == [0, 2], 30)
    # the free one takes the next
    free = metric(http, "num_requests_running").index(0)
    with worked(http) as numbers:
        complete(http, "Good bye")
    assert numbers[free] == 1
    streams[1].close()
    assert wait_until(lambda: is_idle(http), 30)
    assert metric(http, "request_success_total", 'finished_reason="abort"') == [2, 2]


def test_calls_go_to_all_cores(http: httpx.Client, llm: LLM) -> None:
    expected = offline(llm, PROMPTS[:2])
    blocks = metric(http, "cache_config_info", 'num_gpu_blocks="512"')
    assert blocks == [1, 1]
    assert http.post("/sleep?level=2").status_code == 200
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert metric(http, "engine_sleep_state", 'sleep_state="discard_all"') == [1, 1]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(complete, http, prompt) for prompt in PROMPTS[:2]]
        assert http.post("/wake_up?tags=weights").status_code == 200
        assert http.get("/is_sleeping").json() == {"is_sleeping": True}
        assert http.post("/wake_up").status_code == 200
        answers = [future.result(120) for future in asked]
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}
    assert [tokens_of(answer) for answer in answers] == expected
    # nothing is known of what was asked before
    assert http.post("/reset_prefix_cache").json() == {"success": True}
    answer = complete(http, PROMPTS[1])
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    counts = http.post("/collective_rpc", json={"method": "determine_num_blocks"}).json()
    assert counts == {"results": [512, 512]}
    refused = http.post("/collective_rpc", json={"method": "nothing"})
    assert refused.status_code == 400
    assert http.get("/health").status_code == 200


def test_families_of_metrics_are_told_once(http: httpx.Client) -> None:
    names = re.findall(r"^# TYPE (\S+)", http.get("/metrics").text, re.MULTILINE)
    assert len(names) == len(set(names))
    counts = metric(http, "e2e_request_latency_seconds_count")
    assert min(counts) > 0
    assert sum(counts) < sum(metric(http, "request_success_total"))


def test_the_death_of_a_core_ends_all(server: Server) -> None:
    """The last of the tests that share this server."""
    cores = {child.pid: child for child in server.children() if "ascend_vllm.core.proc" in " ".join(child.cmdline())}
    assert len(cores) == 2
    with httpx.Client(base_url=server.url, timeout=60) as http:
        streams = [post_raw(server, "/v1/completions", LONG) for _ in range(2)]
        received = [read_events(stream, 3) for stream in streams]
        assert metric(http, "num_requests_running") == [1, 1]
    victim = max(cores)
    os.kill(victim, signal.SIGKILL)
    for start, stream in zip(received, streams, strict=True):
        lines = (start + read_rest(stream)).decode().splitlines()
        *_, error, done = [line for line in lines if line.startswith("data: ")]
        assert done == "data: [DONE]"
        message = json.loads(error.removeprefix("data: "))["error"]
        assert (message["code"], message["type"]) == (500, "InternalServerError")
        assert re.match(r"engine core [01] was killed by signal 9", message["message"]), message
    assert server.wait_exit() == 1
    assert server.orphans() == []
    assert not is_alive(cores[min(cores)])
    assert re.search(r"\(EngineCore_DP1 pid=\d+\) INFO", server.log)


def test_cores_of_several_workers(llm: LLM) -> None:
    """Two engines of two workers each, which end in order; and die with any of their workers, if one must go on."""
    flags = [tiny_model("qwen2"), "--data-parallel-size", "2", "-tp", "2", *FLAGS]
    with running(SERVE, flags, ENV | {"VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1"}, START_S) as server:
        with httpx.Client(base_url=server.url, timeout=120) as http:
            with concurrent.futures.ThreadPoolExecutor(4) as pool, worked(http) as numbers:
                answers = list(pool.map(lambda prompt: complete(http, prompt), PROMPTS[:4]))
            assert [tokens_of(answer) for answer in answers] == offline(llm, PROMPTS[:4])
            assert min(numbers) >= 1
        workers = [child for child in server.children() if "worker_process" in " ".join(child.cmdline())]
        assert len(workers) == 4


def test_a_server_that_must_stay_ends_all_its_cores() -> None:
    server = Server(SERVE, [tiny_model("qwen2"), "-dp", "2", *FLAGS], ENV | {"VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1"})
    try:
        server.wait_ready(START_S)
        children = server.children()
        cores = [child for child in children if "ascend_vllm.core.proc" in " ".join(child.cmdline())]
        cores[0].kill()
        with httpx.Client(base_url=server.url, timeout=60) as http:
            assert wait_until(lambda: http.get("/health").status_code == 503, 30)
            response = http.post("/v1/completions", json=GREEDY | {"prompt": "Hello"})
            assert response.status_code == 500
            assert re.search(r"engine core [01] was killed by signal 9", response.text)
        assert wait_until(lambda: not is_alive(cores[1]), 30)
        assert server.terminate() == 1
        assert server.orphans() == []
    finally:
        server.close()


async def test_a_core_that_dies_while_all_start() -> None:
    args = EngineArgs(model=tiny_model("qwen2"), data_parallel_size=2, num_gpu_blocks_override=64, max_model_len=128)
    deaths: list[EngineDeadError] = []
    client = DataParallelClient(args.create_engine_config(), lambda *_: None, deaths.append)
    client.start()
    try:
        processes = [psutil.Process(pid) for pid in client.pids if pid is not None]
        processes[1].kill()
        with pytest.raises(EngineDeadError, match="engine core 1 was killed by signal 9"):
            await client.ready()
        assert isinstance(client.error, EngineDeadError)
        with pytest.raises(EngineDeadError, match="engine core 1 was killed by signal 9"):
            await client.call_utility("audit")
    finally:
        client.shutdown()
        client.shutdown()
    assert len(processes) == 2
    assert not any(map(is_alive, processes))


# ---- results and flags -------------------------------------------------------------------------------------


def test_results_of_all_cores_are_merged() -> None:
    audits = [
        {"num_blocks": 8, "blocks_by_request": {f"r{rank}": 2}, "violations": ["lost"] * rank} for rank in range(2)
    ]
    assert merge_results("audit", audits[:1]) == audits[0]
    assert merge_results("audit", audits) == {
        "num_blocks": 16,
        "blocks_by_request": {"r0": 2, "r1": 2},
        "violations": ["engine core 1: lost"],
    }
    stats = [{"num_running": 2, "kv_cache_usage": 0.5}, {"num_running": 1, "kv_cache_usage": 0.0}]
    assert merge_results("stats", stats) == {"num_running": 3, "kv_cache_usage": 0.25}
    states = [{"is_paused": True, "is_sleeping": False}, {"is_paused": False, "is_sleeping": False}]
    assert merge_results("state", states) == {"is_paused": True, "is_sleeping": False}
    assert merge_results("reset_prefix_cache", [True, False]) is False
    assert merge_results("collective_rpc", [[1, 2], [3, 4]]) == [1, 2, 3, 4]
    assert merge_results("pause", [None, None]) is None
