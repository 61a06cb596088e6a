"""Several engine cores behind one server, over a socket: they give the same answers as one, and die together."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import psutil
import pytest
import torch

from ascend_vllm import LLM, SamplingParams
from ascend_vllm.args import parallel
from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.config.cache import CacheConfig
from ascend_vllm.config.engine import DeviceConfig, EngineConfig
from ascend_vllm.engine.core_client import CoreClient
from ascend_vllm.engine.core_process import VISIBLE_NPUS, config_of_engine, environment_of_engine
from ascend_vllm.errors import ConfigError, EngineDeadError
from ascend_vllm.platforms import cpu
from ascend_vllm.platforms.cpu import CpuPlatform
from ascend_vllm.platforms.facts import NpuProbe
from ascend_vllm.types.controls import CONTROLS
from tests.distributed.conftest import SYSTEM
from tests.plain_arch import make_arch
from tests.raw_requests import post_raw, read_events, read_rest
from tests.server import Server, is_alive, wait_until
from tests.tiny_models import tiny_model

SERVE = "ascend_vllm.entrypoints.cli serve"
START_S = 300.0
NUM_BLOCKS = 2048
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 16,
    "num_gpu_blocks_override": NUM_BLOCKS,
    "max_model_len": 32768,
    "max_num_seqs": 16,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "max_num_batched_tokens": 512,
    "seed": 0,
}
FLAGS = ["--dtype", "float32", "--block-size", "16", "--num-gpu-blocks-override", str(NUM_BLOCKS)]
FLAGS += [
    "--max-model-len",
    "32768",
    "--max-num-seqs",
    "16",
    "--enable-prefix-caching",
    "--enable-chunked-prefill",
    "--swap-space",
    "0",
]
FLAGS += ["--max-num-batched-tokens", "512", "--seed", "0", "--served-model-name", "tiny"]
ENV = {"OMP_NUM_THREADS": "1", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1", "VLLM_SERVER_DEV_MODE": "1"}
LENGTH = 16
GREEDY: dict[str, Any] = {"model": "tiny", "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
PROMPTS = [f"{SYSTEM if number % 2 else ''}{number} blocks of the cache hold keys" for number in range(24)]
# more tokens than any test waits for
LONG = GREEDY | {"prompt": "Hello", "max_tokens": 30000, "stream": True}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
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
    # each core reports it, even if it is zero
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
    """Yields a list that is filled at the end of the block: sequences that each core finished in it."""
    before = metric(http, "request_success_total")
    numbers: list[float] = []
    yield numbers
    numbers += [after - one for after, one in zip(metric(http, "request_success_total"), before, strict=True)]


def test_many_requests_have_the_tokens_of_one_engine(http: httpx.Client, llm: LLM) -> None:
    before = metric(http, "generation_tokens_total")
    with worked(http) as numbers, concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(lambda prompt: complete(http, prompt), PROMPTS))
    assert [tokens_of(answer) for answer in answers] == offline(llm, PROMPTS)
    assert sum(numbers) == len(PROMPTS)
    assert min(numbers) >= 1
    tokens = [after - one for after, one in zip(metric(http, "generation_tokens_total"), before, strict=True)]
    assert tokens == [LENGTH * number for number in numbers]


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
    assert wait_until(lambda: metric(http, "num_requests_running") == [2, 2], 30)
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
    blocks = metric(http, "cache_config_info", f'num_gpu_blocks="{NUM_BLOCKS}"')
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
    assert counts == {"results": [NUM_BLOCKS, NUM_BLOCKS]}
    refused = http.post("/collective_rpc", json={"method": "nothing"})
    assert refused.status_code == 400
    assert http.get("/health").status_code == 200


def test_families_of_metrics_are_told_once(http: httpx.Client) -> None:
    before = metric(http, "e2e_request_latency_seconds_count")
    with worked(http) as numbers:
        # equals take turns
        for prompt in ("One", "Two"):
            complete(http, prompt)
    assert numbers == [1, 1]
    assert metric(http, "e2e_request_latency_seconds_count") == [count + 1 for count in before]
    names = re.findall(r"^# TYPE (\S+)", http.get("/metrics").text, re.MULTILINE)
    assert len(names) == len(set(names))


def test_the_death_of_a_core_ends_all(server: Server) -> None:
    """The last of the tests that share this server."""
    cores = {core.pid: core for core in server.find("ascend_vllm.core.proc")}
    assert len(cores) == 2
    with httpx.Client(base_url=server.url, timeout=60) as http:
        streams = [post_raw(server, "/v1/completions", LONG) for _ in range(2)]
        received = [read_events(stream, 3) for stream in streams]
        assert wait_until(lambda: metric(http, "num_requests_running") == [1, 1], 30)
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


def test_cores_of_several_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines of two workers each, which have half of a mixture's experts.

    Any worker's death ends them all, also if the server must stay.
    """
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    model = tiny_model("qwen2-moe")
    alone = LLM(model, **OPTIONS)
    expected = offline(alone, PROMPTS[:4])
    alone.shutdown()
    flags = [model, "--data-parallel-size", "2", "-tp", "2", "--enable-expert-parallel", *FLAGS]
    server = Server(SERVE, flags, ENV | {"VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1"})
    try:
        server.wait_ready(START_S)
        with httpx.Client(base_url=server.url, timeout=120) as http:
            with concurrent.futures.ThreadPoolExecutor(4) as pool, worked(http) as numbers:
                answers = list(pool.map(lambda prompt: complete(http, prompt), PROMPTS[:4]))
            assert [tokens_of(answer) for answer in answers] == expected
            assert min(numbers) >= 1
            cores, workers = server.find("ascend_vllm.core.proc"), server.find("worker_process")
            assert (len(cores), len(workers)) == (2, 4)
            workers[0].kill()
            assert wait_until(lambda: http.get("/health").status_code == 503, 30)
            response = http.post("/v1/completions", json=GREEDY | {"prompt": "Hello"})
            assert response.status_code == 500
            assert f"(process {workers[0].pid}) was killed by signal 9" in response.text
            assert wait_until(lambda: not any(map(is_alive, [*cores, *workers])), 60)
        assert server.terminate() == 1
        assert server.orphans() == []
    finally:
        server.close()


async def test_a_core_that_dies_while_all_start() -> None:
    args = EngineArgs(model=tiny_model("qwen2"), data_parallel_size=2, num_gpu_blocks_override=64, max_model_len=128)
    deaths: list[EngineDeadError] = []
    client = CoreClient(args.create_engine_config(), lambda *_: None, deaths.append)
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
    assert CONTROLS["audit"].merge(audits) == {
        "num_blocks": 16,
        "blocks_by_request": {"r0": 2, "r1": 2},
        "violations": ["engine core 1: lost"],
    }
    stats = [{"num_running": 2, "kv_cache_usage": 0.5}, {"num_running": 1, "kv_cache_usage": 0.0}]
    assert CONTROLS["stats"].merge(stats) == {"num_running": 3, "kv_cache_usage": 0.25}
    drafts = [{"drafts": {"num_drafts": 2, "num_accepted_at": [1, rank]}} for rank in range(2)]
    assert CONTROLS["stats"].merge(drafts) == {"drafts": {"num_drafts": 4, "num_accepted_at": [2, 1]}}
    assert CONTROLS["stats"].merge([{"drafts": None}] * 2) == {"drafts": None}
    adapters = [{"running_adapters": ["a", "b"]}, {"running_adapters": ["b", "c"]}]
    assert CONTROLS["stats"].merge(adapters) == {"running_adapters": ["a", "b", "c"]}
    assert CONTROLS["list_loras"].merge([[2, 1], [2, 3]]) == [1, 2, 3]
    states = [{"is_paused": True, "is_sleeping": False}, {"is_paused": False, "is_sleeping": False}]
    assert CONTROLS["state"].merge(states) == {"is_paused": True, "is_sleeping": False}
    assert CONTROLS["reset_prefix_cache"].merge([True, False]) is False
    assert CONTROLS["collective_rpc"].merge([[1, 2], [3, 4]]) == [1, 2, 3, 4]
    assert CONTROLS["pause"].merge([None, None]) is None


def test_which_calls_empty_the_prefix_cache() -> None:
    emptying = [("reset_prefix_cache", []), ("sleep", [1]), ("pause", ["keep", True])]
    assert all(CONTROLS[method].forgets_prefixes(args) for method, args in emptying)
    keeping = [("pause", ["keep", False]), ("resume", []), ("wake_up", [None]), ("stats", [])]
    assert not any(CONTROLS[method].forgets_prefixes(args) for method, args in keeping)


def make_config(**options: Any) -> EngineConfig:
    return EngineArgs(model=tiny_model("qwen2"), **options).create_engine_config()


def test_one_process_has_one_engine() -> None:
    with pytest.raises(ConfigError, match=r"LLM\(data_parallel_size=2\) is not supported for single-process usage"):
        LLM(tiny_model("qwen2"), data_parallel_size=2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"data_parallel_size": 0}, "--data-parallel-size must be at least 1, got 0"),
        ({"data_parallel_size_local": 0}, "--data-parallel-size-local must be at least 1, got 0"),
        ({"data_parallel_size_local": 2}, r"data_parallel_size_local \(2\) must be <= data_parallel_size \(1\)"),
        ({"data_parallel_size": 2, "data_parallel_size_local": 1}, "--data-parallel-size-local 1 leaves engines"),
        (
            {"data_parallel_size": 2, "worker_use_ray": True},
            "--data-parallel-size 2 is not supported with --distributed-executor-backend ray",
        ),
        ({"data_parallel_backend": "ray"}, "--data-parallel-backend ray is not supported"),
        ({"data_parallel_rank": 0}, "--data-parallel-rank 0 is not supported"),
        ({"data_parallel_start_rank": 2}, "--data-parallel-start-rank 2 is not supported"),
        ({"data_parallel_address": "10.0.0.1"}, r"--data-parallel-address 10\.0\.0\.1 is not supported"),
        ({"data_parallel_rpc_port": 13345}, "--data-parallel-rpc-port 13345 is not supported"),
        ({"data_parallel_hybrid_lb": True}, "--data-parallel-hybrid-lb is not supported"),
        ({"data_parallel_external_lb": True}, "--data-parallel-external-lb is not supported"),
        ({"data_parallel_multi_port_external_lb": True}, "--data-parallel-multi-port-external-lb is not supported"),
    ],
)
def test_what_means_several_machines_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_config(**options)


def test_flags_that_ask_for_what_is_done_anyway() -> None:
    config = make_config(data_parallel_size=2, data_parallel_size_local=2, data_parallel_backend="mp")
    assert config.parallel.data_parallel_size == 2
    assert [config_of_engine(config, rank).parallel.data_parallel_rank for rank in range(2)] == [0, 1]
    assert environment_of_engine(config, 1) == {}


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, ["0,1", "2,3"]), ("6,4,2,0", ["6,4", "2,0"]), ("1,3,5,7,9", ["1,3", "5,7"])]
)
def test_each_core_has_npus_of_its_own(
    visible: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VISIBLE_NPUS, raising=False)
    if visible is not None:
        monkeypatch.setenv(VISIBLE_NPUS, visible)
    config = make_config(data_parallel_size=2, tensor_parallel_size=2)
    config = msgspec.structs.replace(config, device=DeviceConfig("npu"))
    cards = [environment_of_engine(config, rank)[VISIBLE_NPUS] for rank in range(2)]
    assert cards == expected


def test_too_few_npus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "probe_npus", lambda: NpuProbe(3, "Ascend910B3"))
    args = EngineArgs(model="", data_parallel_size=2, tensor_parallel_size=2)
    text = r"--data-parallel-size 2 with --tensor-parallel-size 2: 4 NPUs are needed and this container has 3\."
    with pytest.raises(ConfigError, match=text):
        parallel.parallel_config(args, make_arch(), "npu")
    alone = dataclasses.replace(args, tensor_parallel_size=1)
    assert parallel.parallel_config(alone, make_arch(), "npu").world_size == 1


def test_cores_share_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "available_memory_bytes", lambda: 8 << 30)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(cpu, "usable_cores", lambda: 9)
    num_threads = torch.get_num_threads()
    cache = CacheConfig(block_size=32)
    try:
        platform = CpuPlatform()
        platform.initialize(0, 2, num_engines=2)
        assert torch.get_num_threads() == 2
        assert platform.kv_cache_bytes(cache, 0) == (2 << 30) // 4
    finally:
        torch.set_num_threads(num_threads)
    # of what the weights of all of them leave
    assert CpuPlatform().expected_kv_cache_bytes(cache, 2 << 30, 1, 2) == (1 << 30) // 2
