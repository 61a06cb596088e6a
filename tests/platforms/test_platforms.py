"""What the platforms answer and refuse."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest
import torch

from ascend_vllm.args.checks import check_block_size
from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.args.limits import resolve_dtype
from ascend_vllm.config.cache import CacheConfig
from ascend_vllm.errors import ConfigError
from ascend_vllm.platforms import cpu, facts, get_platform, npu, resolve_device
from ascend_vllm.platforms.cpu import GIB, CpuPlatform
from ascend_vllm.platforms.facts import FACTS, DeviceFacts, NpuProbe
from ascend_vllm.platforms.npu import NpuPlatform

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def torch_npu_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be found, as it seems; nobody gets so far as to import it."""
    find, spec = importlib.util.find_spec, importlib.machinery.ModuleSpec("torch_npu", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "torch_npu" else find(name))


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Free memory of the machine under test; change "free" to taste."""
    state = {"free": 8 * GIB}
    monkeypatch.setattr(cpu, "available_memory_bytes", lambda: state["free"])
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    return state


def test_auto_is_the_cpu_here(package_log: pytest.LogCaptureFixture) -> None:
    assert resolve_device("auto") == "cpu"
    assert "--device auto takes the CPU: torch_npu is not installed" in package_log.text
    assert isinstance(get_platform("auto"), CpuPlatform)
    assert isinstance(get_platform("npu"), NpuPlatform)


def test_auto_without_cann_says_what_is_missing(
    package_log: pytest.LogCaptureFixture, torch_npu_is_there: None
) -> None:
    """The runtime is really asked, and is really not there."""
    assert resolve_device("auto") == "cpu"
    assert re.search(
        r"takes the CPU, for no NPU can be used\. .*libascendcl\.so of CANN cannot be loaded", package_log.text
    )
    assert "source CANN's set_env.sh" in package_log.text


def test_an_unknown_device_names_the_flag() -> None:
    with pytest.raises(ConfigError, match="--device must be one of auto, cpu, npu, got 'tpu'"):
        resolve_device("tpu")


@pytest.mark.parametrize(("free", "expected"), [(2 * GIB, GIB // 2), (64 * GIB, 4 * GIB), (0, 0)])
def test_the_default_leaves_most_of_a_small_machine(memory: dict[str, int], free: int, expected: int) -> None:
    memory["free"] = free
    assert CpuPlatform().kv_cache_bytes(CacheConfig(block_size=32), peak_bytes=0) == expected


def test_activations_come_off_first(memory: dict[str, int]) -> None:
    assert CpuPlatform().kv_cache_bytes(CacheConfig(block_size=32), peak_bytes=4 * GIB) == GIB


def test_the_variable_is_in_gib_and_the_flag_wins(memory: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1.5")
    assert CpuPlatform().kv_cache_bytes(CacheConfig(block_size=32), 0) == 3 * GIB // 2
    assert CpuPlatform().kv_cache_bytes(CacheConfig(block_size=32, kv_cache_memory_bytes=12345), 0) == 12345


def test_too_much_names_where_it_came_from(memory: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "9")
    with pytest.raises(ConfigError, match=r"VLLM_CPU_KVCACHE_SPACE asks for .* 9\.00 GiB, but only 8\.00 GiB"):
        CpuPlatform().kv_cache_bytes(CacheConfig(block_size=32), 0)
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes asks for"):
        CpuPlatform().kv_cache_bytes(CacheConfig(block_size=32, kv_cache_memory_bytes=9 * GIB), 0)
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes must be positive"):
        CpuPlatform().kv_cache_bytes(CacheConfig(block_size=32, kv_cache_memory_bytes=0), 0)


def test_the_cpu_gets_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        assert CpuPlatform().initialize(0) == torch.device("cpu")
        assert torch.get_num_threads() == 3
        monkeypatch.delenv("OMP_NUM_THREADS")
        monkeypatch.setattr(cpu, "usable_cores", lambda: 2)
        CpuPlatform().initialize(0)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("chosen", "num_workers", "expected"),
    [(None, 1, [3, 4, 4, 3]), ("4", 1, [4, 4, 4, 4]), (None, 2, [2, 2, 2, 2])],
    ids=["one worker", "OMP_NUM_THREADS", "two workers"],
)
def test_small_steps_of_small_models_leave_a_core_to_the_server(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, num_workers: int, expected: list[int]
) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(cpu, "usable_cores", lambda: 4)
    if chosen is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    try:
        platform = CpuPlatform()
        platform.initialize(0, num_workers)
        found = []
        # 64 rows of a model of 5 million weights, its prompts, one row of a model of half a billion, and a row again
        for num_tokens, num_weights in ((64, 5_000_000), (2048, 5_000_000), (1, 494_000_000), (1, 5_000_000)):
            platform.begin_step(num_tokens, num_weights)
            found.append(torch.get_num_threads())
        assert found == expected
    finally:
        torch.set_num_threads(before)


def test_the_npu_says_what_is_missing(torch_npu_is_there: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"libascendcl\.so of CANN cannot be loaded.*ascend-vllm doctor"):
        NpuPlatform().initialize(0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'ascend-vllm\[npu\]'"):
        NpuPlatform().initialize(0)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (NpuProbe(count=2, soc="Ascend910B3"), None),
        (NpuProbe(count=1, soc="Ascend910_9391"), None),
        (NpuProbe(count=1, soc="Ascend910B"), "this is an Ascend910B. Use --device cpu"),
        (NpuProbe(count=1, soc="Ascend310B1"), "models run on Ascend910B1 to B4"),
        (NpuProbe(count=0, soc="Ascend910B3"), "ASCEND_RT_VISIBLE_DEVICES=7 leaves none"),
        (NpuProbe(error="aclInit of CANN failed with 507008"), "--device npu: aclInit of CANN failed with 5"),
    ],
)
def test_which_npus_can_be_used(
    found: NpuProbe, message: str | None, torch_npu_is_there: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "7")
    monkeypatch.setattr(facts, "probe_npus", lambda: found)
    reason = facts.npu_unusable_reason()
    assert reason is None if message is None else reason is not None and message in reason
    assert resolve_device("auto") == ("npu" if message is None else "cpu")


def test_facts_are_those_of_the_kind_of_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "probe_npus", lambda: NpuProbe(count=1, soc="Ascend310P3"))
    found = facts.device_facts("npu")
    assert (found.name, found.dtypes) == ("npu", ("float16",))
    with pytest.raises(ConfigError, match=r"bfloat16 does not run on npu \(Ascend310P3\); possible are float16"):
        resolve_dtype("auto", "bfloat16", found)
    assert resolve_dtype("auto", "float32", found) == "float16"
    with pytest.raises(ConfigError, match=r"one of 64, 128 on npu \(Ascend310P3\), got 16"):
        check_block_size(16, found)
    for soc in ("Ascend910B4", "Ascend910_9391"):
        known = facts.npu_facts(soc)
        assert known is not None and known.refusal is None
    assert facts.npu_facts("Ascend910B4") == dataclasses.replace(facts.NPU, model="Ascend910B4")
    assert facts.device_facts("cpu") is facts.CPU


def test_chips_that_lack_operators_of_every_model(
    torch_npu_is_there: None,
    monkeypatch: pytest.MonkeyPatch,
    package_log: pytest.LogCaptureFixture,
) -> None:
    """Refused before a model is looked for, and left by --device auto; a dtype that is wrong there comes first."""
    monkeypatch.setattr(facts, "probe_npus", lambda: NpuProbe(count=1, soc="Ascend310P3"))
    args = EngineArgs(model="/nowhere", device="npu")
    attention = (
        "--device npu: attention on Ascend310P3 is not possible: .*Use --device cpu, or another chip: Ascend910B"
    )
    for dtype in ("auto", "float16", "half"):
        with pytest.raises(ConfigError, match=attention):
            dataclasses.replace(args, dtype=dtype).create_engine_config()
    with pytest.raises(ConfigError, match=r"bfloat16 does not run on npu \(Ascend310P3\); possible are float16"):
        dataclasses.replace(args, dtype="bfloat16").create_engine_config()
    assert resolve_device("auto") == "cpu"
    assert (
        "--device auto takes the CPU, for no NPU can be used. --device npu: attention on Ascend310P3"
        in package_log.text
    )


def test_a_runtime_that_crashes_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "probe.py"
    script.write_text("import sys\nprint('some banner')\nsys.exit('driver version too old')\n")
    monkeypatch.setattr(facts, "_PROBE", script)
    assert facts.probe_npus.__wrapped__() == NpuProbe(
        error="the runtime of CANN ended with exit code 1 (driver version too old)"
    )
    script.write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(facts, "_PROBE_TIMEOUT_S", 0.2)
    assert "has not answered" in facts.probe_npus.__wrapped__().error


@pytest.mark.parametrize(
    ("utilization", "used", "peak", "expected"),
    [(0.9, 2 * GIB, GIB, int(57.6 * GIB) - 3 * GIB), (0.5, 30 * GIB, 3 * GIB, -GIB)],
)
def test_the_npus_cache_is_what_the_share_leaves(utilization: float, used: int, peak: int, expected: int) -> None:
    config = CacheConfig(block_size=128, gpu_memory_utilization=utilization)
    assert npu.size_of_cache(config, 64 * GIB - used, 64 * GIB, used, peak) == expected


def test_the_npus_cache_is_not_more_than_there_is(package_log: pytest.LogCaptureFixture) -> None:
    config = CacheConfig(block_size=128, gpu_memory_utilization=0.9)
    assert npu.size_of_cache(config, 10 * GIB, 64 * GIB, 2 * GIB, GIB) == 9 * GIB
    assert "asks for 57.60 GiB of the NPU, but other processes leave 12.00 GiB" in package_log.text
    config = CacheConfig(block_size=128, kv_cache_memory_bytes=10 * GIB)
    assert npu.size_of_cache(config, 11 * GIB, 64 * GIB, 2 * GIB, GIB) == 10 * GIB
    with pytest.raises(ConfigError, match=r"of 10\.00 GiB, but only 9\.00 GiB of the NPU's memory"):
        npu.size_of_cache(config, 10 * GIB, 64 * GIB, 2 * GIB, GIB)
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes must be positive"):
        npu.size_of_cache(CacheConfig(block_size=128, kv_cache_memory_bytes=0), GIB, GIB, 0, 0)


def test_importing_the_package_keeps_torch_from_loading_torch_npu(tmp_path: pathlib.Path) -> None:
    """An installed torch_npu without CANN breaks every import of torch, unless torch is told not to load it."""
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')\n")
    entry_points = tmp_path / "torch_npu-2.13.0.dist-info"
    entry_points.mkdir()
    (entry_points / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")
    (entry_points / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    environment = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    subprocess.run([sys.executable, "-c", "import ascend_vllm, torch"], env=environment, check=True, timeout=120)


@pytest.mark.parametrize("facts", FACTS.values())
def test_the_default_block_size_is_allowed(facts: DeviceFacts) -> None:
    assert facts.default_block_size in facts.block_sizes
