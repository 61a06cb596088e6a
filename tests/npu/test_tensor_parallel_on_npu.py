"""Two workers on two devices: the steps of one, with collectives over HCCL; or two engines of one worker each."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pathlib

import httpx
import psutil
import pytest

from ascend_vllm import GenerationConfig, TurbomindEngineConfig, pipeline
from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.engine.async_llm import AsyncLLM
from ascend_vllm.errors import ConfigError
from ascend_vllm.sampling_params import SamplingParams
from tests.npu.recorder import traced
from tests.npu.test_graphs import FAST_KERNELS, layer_kernels
from tests.npu.threads import cores_of_launches
from tests.server import Server, wait_until
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import GREEDY, generate, make_prompt, started_worker

SERVE = "ascend_vllm.entrypoints.cli serve"
FLAGS = ["--device", "npu", "--dtype", "float16", "--num-gpu-blocks-override", "64", "--swap-space", "0"]
FLAGS += ["--max-model-len", "256", "--max-num-seqs", "4", "--served-model-name", "tiny"]
LENGTH = 12
# what is measured with the largest step before the cache is made, and captured
SMALL_STEPS = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "max_model_len": 256}
HCCL = {"HCCL_IF_IP": "127.0.0.1", "HCCL_BUFFSIZE": "64"}


def test_a_pipeline_with_two_devices() -> None:
    """Its texts equal those of one, and its share of memory is one of the devices' memory."""
    texts = []
    for tp in (1, 2):
        backend = TurbomindEngineConfig(tp=tp, enable_prefix_caching=True, dtype="float16")
        with pipeline(tiny_model("qwen2-64"), backend_config=backend, device="npu", **SMALL_STEPS) as pipe:
            responses = pipe(["Hello! How are you today?", "The quick"], GenerationConfig(max_new_tokens=LENGTH))
            texts.append([response.text for response in responses])
            size = pipe.llm_engine.config.cache.kv_cache_memory_bytes
            assert size is not None and 1 << 28 < size <= 1 << 29
    assert texts[0] == texts[1]


def test_a_server_with_two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """It decodes by graphs with collectives in them, and its texts equal those of one worker that runs operators; by
    default its workers have HCCL's variables and cores of their own; and the server ends when a worker dies.
    """
    # each has two query heads and one of keys, of 64, four of the experts, and half of the MLP beside them
    model, prompt = tiny_model("qwen2-moe-64"), make_prompt(40)
    worker = started_worker(model, device="npu", dtype="float16", block_size=128, num_gpu_blocks_override=64)
    with traced() as calls:
        expected = generate(worker, prompt, GREEDY, LENGTH)
    assert layer_kernels(calls) >= FAST_KERNELS
    # the worker here has set it for this process
    monkeypatch.delenv("CPU_AFFINITY_CONF", raising=False)
    # and torch_npu may have bound this thread to a core, which the server would inherit
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    flags = ["--tensor-parallel-size", "2", "--enable-expert-parallel", *FLAGS]
    server = Server(SERVE, [model, *flags], {"OMP_NUM_THREADS": "1", **HCCL})
    try:
        server.wait_ready(180)
        with httpx.Client(base_url=server.url, timeout=60) as http:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
            answer = http.post("/v1/completions", json=body | {"return_token_ids": True}).json()
            assert answer["choices"][0]["token_ids"] == expected, server.log
        workers = server.find("worker_process")
        assert len(workers) == 2
        for worker_process in workers:
            assert HCCL.items() <= worker_process.environ().items()
        assert "Decoding replays captured graphs of 2, 4 sequences" in server.log
        assert "Captured 2 graphs" in server.log and "pieces of steps with prompts" in server.log
        assert "CPU affinity of the workers: 1; HCCL's expansion mode: AIV" in server.log
        first, second = (set(cores_of_launches(worker_process.pid)) for worker_process in workers)
        assert first and second and not first & second and first | second <= os.sched_getaffinity(0)
        workers[1].kill()
        assert wait_until(lambda: server.process.poll() is not None, 20), server.log
        assert server.wait_exit() == 1
        assert server.orphans() == []
        assert f"worker 1 (process {workers[1].pid}) was killed by signal 9" in server.log
    finally:
        server.close()


@pytest.mark.exhaustive
def test_compiled_graphs_with_two_devices(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start that the sources describe: graphs of torchair, decode gears and two cards."""
    model, prompt = tiny_model("qwen2-64"), make_prompt(40)
    worker = started_worker(model, device="npu", dtype="float16", block_size=128, num_gpu_blocks_override=64)
    expected = generate(worker, prompt, GREEDY, LENGTH)
    monkeypatch.delenv("CPU_AFFINITY_CONF", raising=False)
    gears = {"PTA_TORCHAIR_DECODE_GEAR_ENABLE": "1", "PTA_TORCHAIR_DECODE_GEAR_LIST": "4"}
    cache = {"INFER_MODE": "PTA", "TORCHAIR_CACHE_HOME": str(tmp_path)}
    server = Server(SERVE, [model, "--tensor-parallel-size", "2", *FLAGS], {"OMP_NUM_THREADS": "1", **gears, **cache})
    try:
        server.wait_ready(300)
        with httpx.Client(base_url=server.url, timeout=60) as http:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
            answer = http.post("/v1/completions", json=body | {"return_token_ids": True}).json()
        assert answer["choices"][0]["token_ids"] == expected, server.log
        compiled = [path.read_bytes().decode("latin1") for path in tmp_path.rglob("compiled_module")]
        assert len(compiled) == 2
        assert all("ascend_vllm.all_reduce.default" in text for text in compiled)
    finally:
        server.close()


def test_more_workers_than_devices_are_refused() -> None:
    """With both numbers, before any of them is started; the simulator has two devices here."""
    args = EngineArgs(model=tiny_model("qwen2"), device="npu", dtype="float16", tensor_parallel_size=2)
    assert args.create_engine_config().parallel.tensor_parallel_size == 2
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size: 4 NPUs are needed and .* 2\. Lower it"):
        dataclasses.replace(args, tensor_parallel_size=4).create_engine_config()
    with pytest.raises(ConfigError, match="--data-parallel-size 2 with --tensor-parallel-size 2: 4 NPUs are needed"):
        dataclasses.replace(args, data_parallel_size=2).create_engine_config()


async def test_each_engine_has_a_device_of_its_own() -> None:
    options = {"max_model_len": 256, "num_gpu_blocks_override": 64, "swap_space": 0, "enforce_eager": True}
    args = EngineArgs(model=tiny_model("qwen2"), device="npu", dtype="float16", data_parallel_size=2, **options)
    engine = AsyncLLM.from_engine_args(args)
    try:
        await engine.ready()
        devices = [psutil.Process(pid).environ()["ASCEND_RT_VISIBLE_DEVICES"] for pid in engine._client.pids]
        assert devices == ["0", "1"]
        assert (await engine.call_utility("audit"))["num_free_blocks"] == 2 * 64
        params = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)

        async def generate_one(number: int) -> list[int]:
            outputs = [one async for one in engine.generate("Hello", params, str(number))]
            return list(outputs[-1].outputs[0].token_ids)

        first, *others = await asyncio.gather(*(generate_one(number) for number in range(4)))
        assert len(first) == LENGTH
        assert others == [first] * 3
    finally:
        engine.shutdown()
