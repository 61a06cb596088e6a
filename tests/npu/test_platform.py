"""The NPU platform on simulated devices: what it finds, measures and refuses."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from typing import Any

import pytest
import torch
import torch_npu
from torch.utils._python_dispatch import _get_current_dispatch_mode as get_current_dispatch_mode

from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.errors import ConfigError
from ascend_vllm.platforms import facts, get_platform, resolve_device
from ascend_vllm.platforms.facts import NpuProbe, npu_unusable_reason
from ascend_vllm.platforms.npu import NpuPlatform
from ascend_vllm.platforms.npu_graphs import NpuGraphRecorder
from ascend_vllm.worker.worker import Worker
from tests.npu.processes import last_line, run
from tests.npu.test_runtime_processes import SIM_RUN
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import GREEDY, generate, make_config, make_prompt, started_worker

MIB = 1 << 20
_ask = facts.probe_npus.__wrapped__


@pytest.fixture(scope="module", autouse=True)
def platform() -> NpuPlatform:
    """In use before a test changes the variables that this process's runtime reads once."""
    found = get_platform("auto")
    assert isinstance(found, NpuPlatform)
    assert found.initialize(0) == torch.device("npu:0")
    return found


def probe(**options: bool) -> NpuProbe:
    """Asks the runtime anew, under the environment of now."""
    found: NpuProbe = _ask(**options)
    return found


def test_the_runtime_is_asked_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_SIM_DEVICES", "2")
    assert probe() == NpuProbe(count=2, soc="Ascend910B3", cann="9.1.0")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "1")
    found = probe(with_memory=True)
    assert (found.count, found.total_bytes) == (1, int(os.environ["ASCEND_SIM_MEMORY"]))
    assert 0 < found.free_bytes <= found.total_bytes


def test_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_SIM_DEVICES", "0")
    monkeypatch.setattr(facts, "probe_npus", functools.cache(probe))
    assert "there is no NPU to use, none is in this container" in (npu_unusable_reason() or "")
    assert resolve_device("auto") == "cpu"
    with pytest.raises(ConfigError, match="there is no NPU to use"):
        EngineArgs(model=tiny_model("qwen2"), device="npu").create_engine_config()


def test_configurations_follow_the_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decided by another process than this one, whose devices are what they are."""
    monkeypatch.setattr(facts, "probe_npus", functools.cache(probe))
    args = EngineArgs(model=tiny_model("qwen2", dtype="bfloat16"), max_num_seqs=4, enable_chunked_prefill=False)
    config = args.create_engine_config()
    assert (config.device.device, config.model.dtype, config.cache.block_size) == ("npu", "bfloat16", 128)
    monkeypatch.setenv("ASCEND_SIM_SOC", "Ascend310P3")
    monkeypatch.setattr(facts, "probe_npus", functools.cache(probe))
    args = dataclasses.replace(args, device="npu", dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"bfloat16 does not run on npu \(Ascend310P3\); possible are float16"):
        args.create_engine_config()
    with pytest.raises(ConfigError, match=r"attention on Ascend310P3 is not possible: .* Use --device cpu"):
        dataclasses.replace(args, dtype="float16").create_engine_config()
    config = dataclasses.replace(args, device="auto").create_engine_config()
    assert (config.device.device, config.model.dtype) == ("cpu", "bfloat16")


def test_the_longest_length_is_that_which_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = functools.cache(probe)
    monkeypatch.setattr(facts, "probe_npus", asked)
    monkeypatch.setattr("ascend_vllm.platforms.npu.probe_npus", asked)
    # keys and values of 3 layers of 2 heads of 16 elements in float16, a block of 128 tokens
    block_bytes = 2 * 3 * 2 * 16 * 2 * 128
    args = EngineArgs(model=tiny_model("qwen2"), dtype="float16", max_model_len="auto")
    args.kv_cache_memory_bytes = 3 * block_bytes
    # nine tenths of it, for what changes until the cache is there
    assert args.create_engine_config().model.max_model_len == 2 * 128
    args.kv_cache_memory_bytes = None
    assert args.create_engine_config().model.max_model_len == 512


def test_what_it_says_of_its_device(platform: NpuPlatform) -> None:
    assert platform.soc == "Ascend910B3"
    assert platform.dtypes == (torch.bfloat16, torch.float16)
    properties = torch_npu.npu.get_device_properties(0)
    assert platform.num_cube_cores == properties.cube_core_num > 0
    assert platform.num_vector_cores == properties.vector_core_num > 0


def test_weights_may_have_a_format_of_their_own(platform: NpuPlatform) -> None:
    """FRACTAL_NZ is 29; without the platform's setting the cast is silently left out."""
    weight = torch.randn(32, 64, dtype=torch.float16, device="npu:0")
    assert torch_npu.get_npu_format(torch_npu.npu_format_cast(weight, 29)) == 29


def test_ranks_without_a_device(platform: NpuPlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel-size: 3 NPUs are needed and this container has 2"):
        NpuPlatform().initialize(2)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ConfigError, match="and ASCEND_RT_VISIBLE_DEVICES=0,1 leaves 2"):
        NpuPlatform().initialize(2)


def test_peaks_are_measured(platform: NpuPlatform) -> None:
    kept = []

    def step() -> None:
        kept.append(torch.empty(8 * MIB, dtype=torch.uint8, device="npu:0"))
        torch.empty(32 * MIB, dtype=torch.uint8, device="npu:0").fill_(1)

    assert 40 * MIB <= platform.peak_bytes(step) < 44 * MIB


_MEMORY_OF_A_FRESH_PROCESS = """
import json
import torch, torch_npu
from ascend_vllm.config.cache import CacheConfig
from ascend_vllm.platforms.npu import NpuPlatform
from ascend_vllm.platforms.npu_graphs import NpuGraphRecorder

def outcome(**options):
    try:
        return platform.kv_cache_bytes(CacheConfig(block_size=128, **options), peak_bytes=10 << 20)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

platform = NpuPlatform()
platform.initialize(0)
total = torch_npu.npu.mem_get_info(0)[1]
found = {"total": total, "before": outcome(gpu_memory_utilization=0.5)}
# the allocator pads what is asked for, then takes whole segments of 20 MiB
weights = torch.empty((100 << 20) - 4096, dtype=torch.uint8, device="npu:0")
found["after"] = outcome(gpu_memory_utilization=0.5)
found["too much"] = outcome(kv_cache_memory_bytes=total)
segments = torch_npu.npu.memory.memory_snapshot()
found["expandable"] = [segment["is_expandable"] for segment in segments if segment["total_size"] >= weights.nbytes]
print(json.dumps(found))
"""


def test_the_cache_gets_what_its_share_leaves_and_memory_grows_in_segments() -> None:
    """In a process of its own: the allocator reads its settings once, and other tests' engines hold memory."""
    command = (sys.executable, "-W", "ignore", "-c", _MEMORY_OF_A_FRESH_PROCESS)
    found = json.loads(last_line(run(*command, without=("PYTORCH_NPU_ALLOC_CONF",))))
    total, before = found["total"], found["before"]
    assert 0 <= total // 2 - 10 * MIB - before < total // 8
    assert before - found["after"] == pytest.approx(100 * MIB, abs=4 * MIB)
    assert "--kv-cache-memory-bytes asks for a KV cache of 1.00 GiB, but only" in found["too much"]
    assert found["expandable"] == [True]


_PEAK_OF_SEGMENTS = """
import torch, torch_npu
from ascend_vllm.platforms.npu import NpuPlatform

def step():
    for size in (12, 30):
        tensors = [torch.empty(size << 20, dtype=torch.uint8, device="npu:0") for _ in range(36 // size)]
        del tensors

platform = NpuPlatform()
platform.initialize(0)
print(platform.peak_bytes(step))
"""


def test_segments_count_beyond_the_peak() -> None:
    """Segments of 12 MiB are of no use to a tensor of 30 MiB, and stay allocated until all is released."""
    command = (sys.executable, "-W", "ignore", "-c", _PEAK_OF_SEGMENTS)
    peak = int(last_line(run(*command, PYTORCH_NPU_ALLOC_CONF="expandable_segments:False")))
    assert 66 * MIB <= peak < 80 * MIB


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_gpu_blocks_override": 1 << 20}, r"KV cache of 1048577 blocks .*lower --num-gpu-blocks-override"),
        ({"dtype": "float32"}, "--dtype float32 is not available on --device npu; possible here: bfloat16, float16"),
        ({"block_size": 16}, "ascend: block size 16 is not one of 64, 128"),
        (
            {"num_gpu_blocks_override": None, "gpu_memory_utilization": 1e-6},
            "no room for one block .*: set --gpu-memory-utilization or --kv-cache-memory-bytes higher",
        ),
    ],
)
def test_a_worker_that_cannot_start_names_the_flags(options: dict[str, object], message: str) -> None:
    settings = {"device": "npu", "dtype": "float16", "block_size": 64, **options}
    # less than the device has, so that the simulator need not hand all of it out first
    torch_npu.npu.set_per_process_memory_fraction(0.2)
    try:
        with pytest.raises(ConfigError, match=message):
            worker = Worker(make_config(tiny_model("qwen2"), **settings))
            worker.load_model()
            worker.initialize_cache(worker.determine_num_blocks())
    finally:
        torch_npu.npu.set_per_process_memory_fraction(1.0)


_ON_ANOTHER_CHIP = """
import json, os, sys
from ascend_vllm import LLM, SamplingParams
from ascend_vllm.platforms import get_platform
from ascend_vllm.worker.worker import Worker
from tests.npu.threads import cores_of_launches
from tests.worker.worker_driver import make_config

def outcome(**options):
    try:
        settings = {"device": "npu", "block_size": 64, "num_gpu_blocks_override": None, **options}
        worker = Worker(make_config(sys.argv[1], **settings))
        worker.load_model()
        return worker.determine_num_blocks()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

sizes = {"num_gpu_blocks_override": 8, "max_model_len": 256, "max_num_seqs": 4, "swap_space": 0}
llm = LLM(sys.argv[1], dtype="float16", block_size=64, enforce_eager=True, **sizes)
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
output = llm.generate({"prompt_token_ids": json.loads(sys.argv[2])}, params, use_tqdm=False)[0]
found = {"tokens": list(output.outputs[0].token_ids), "cores": cores_of_launches(os.getpid())}
platform = get_platform("auto")
platform.initialize(0)
found["soc"] = platform.soc
found["budget"] = outcome(dtype="float16", max_num_batched_tokens=1 << 18, max_num_seqs=1 << 10)
print(json.dumps(found))
"""


def test_another_chip_with_little_memory() -> None:
    """In a process of its own: an A3 whose 64 MiB hold the tiny model and not the largest step of another."""
    model, prompt = tiny_model("qwen2"), make_prompt(150)
    expected = generate(started_worker(model, dtype="float16", block_size=64), prompt, GREEDY, 12)
    chip = ("--devices", "2", "--soc", "Ascend910_9391", "--memory", str(64 * MIB))
    program = (sys.executable, "-W", "ignore", "-c", _ON_ANOTHER_CHIP, model, json.dumps(prompt))
    done = run(*SIM_RUN, *chip, "--", *program, timeout=300, CPU_AFFINITY_CONF="0")
    found = json.loads(last_line(done))
    assert found["soc"] == "Ascend910_9391"
    assert found["tokens"] == expected
    assert found["cores"] == sorted(os.sched_getaffinity(0))
    assert (
        found["budget"].startswith("ConfigError") and "--max-num-batched-tokens or --max-num-seqs" in found["budget"]
    )


def test_replays_of_a_graph_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host launches the next replay while the device is busy; each has its own lengths."""
    npu: Any = torch.npu  # type: ignore[attr-defined]
    calls: list[str] = []

    def record(name: str) -> None:
        plain = getattr(npu.NPUGraph, name)
        monkeypatch.setattr(
            npu.NPUGraph, name, lambda *args, **options: (calls.append(name), plain(*args, **options))
        )

    record("replay")
    record("update")
    query = torch.zeros(1, 4, 64, dtype=torch.float16, device="npu")
    key = torch.zeros(1, 128, 2 * 64, dtype=torch.float16, device="npu")
    # a query of zeros attends to all tokens alike, so that the result is their mean
    value = torch.arange(128, dtype=torch.float16)[:, None].expand(128, 2 * 64).contiguous()[None].to("npu")
    table = torch.zeros(1, 1, dtype=torch.int32, device="npu")
    outputs: list[torch.Tensor] = []

    def work() -> None:
        outputs.append(
            torch.ops.npu.npu_fused_infer_attention_score(
                query,
                key,
                value,
                actual_seq_lengths=[1],
                actual_seq_lengths_kv=[1],
                block_table=table,
                num_heads=4,
                num_key_value_heads=2,
                input_layout="TND",
                block_size=128,
            )[0]
        )

    graph = NpuGraphRecorder(npu).capture(work)
    busy, side = npu.ExternalEvent(), npu.Stream()
    busy.wait(npu.current_stream())
    results = []
    for length in (5, 9, 101):
        graph.replay({"actual_seq_lengths": [1], "actual_seq_lengths_kv": [length]})
        results.append(outputs[0].clone())
    assert not npu.current_stream().query()
    busy.record(side)
    assert [float(result.flatten()[0].cpu()) for result in results] == [2.0, 4.0, 50.0]
    # the device begins while the host prepares the updates
    assert calls == ["replay", "update"] * 3


def test_a_capture_that_fails_leaves_everything_as_it_was() -> None:
    npu: Any = torch.npu  # type: ignore[attr-defined]
    stream, x = npu.current_stream(), torch.ones(2, device="npu")
    with pytest.raises(RuntimeError, match="capture_end"):
        NpuGraphRecorder(npu).capture(lambda: print((x + 1).cpu()))
    assert npu.current_stream() == stream
    assert get_current_dispatch_mode() is None
    assert (x + 1).cpu().tolist() == [2.0, 2.0]


@pytest.mark.parametrize(("cann", "works"), [("8.5", False), ("9.0", True)])
def test_older_releases_of_cann(cann: str, works: bool) -> None:
    """8.5 is refused before anything is downloaded, with the doctor's sentence; 9.0 starts and is warned of."""
    script = """
import logging
from ascend_vllm.platforms import facts, get_platform
from ascend_vllm.platforms.npu import NpuPlatform
logging.basicConfig(level=logging.WARNING)
print(facts.npu_unusable_reason())
NpuPlatform().initialize(0)
"""
    done = run(sys.executable, "-W", "ignore", "-c", script, ASCEND_SIM_CANN=cann)
    sentence = facts.CannFacts.of(f"{cann}.0")
    if works:
        assert done.returncode == 0 and done.stdout.splitlines()[0] == "None", done.stderr
        assert sentence.warning and sentence.warning in done.stderr + done.stdout
    else:
        assert sentence.refusal is not None and sentence.refusal in done.stdout.splitlines()[0]
        assert done.returncode != 0 and f"ConfigError: --device npu: {sentence.refusal}" in done.stderr
