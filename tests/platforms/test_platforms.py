"""What the platforms answer and refuse."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from ascend_vllm.config.cache import CacheConfig
from ascend_vllm.errors import ConfigError
from ascend_vllm.platforms import cpu, get_platform, resolve_device
from ascend_vllm.platforms.cpu import GIB, CpuPlatform
from ascend_vllm.platforms.npu import NpuPlatform


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Free memory of the machine under test; change "free" to taste."""
    state = {"free": 8 * GIB}
    monkeypatch.setattr(cpu, "available_memory_bytes", lambda: state["free"])
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    return state


def test_auto_is_the_cpu_here() -> None:
    assert resolve_device("auto") == "cpu"
    assert isinstance(get_platform("auto"), CpuPlatform)
    assert isinstance(get_platform("npu"), NpuPlatform)


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


def test_the_npu_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'ascend-vllm\[npu\]'"):
        NpuPlatform().initialize(0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    with pytest.raises(ConfigError, match="no Ascend kernels"):
        NpuPlatform().initialize(0)


@pytest.mark.parametrize("platform", [CpuPlatform(), NpuPlatform()])
def test_the_default_block_size_is_allowed(platform: CpuPlatform | NpuPlatform) -> None:
    assert platform.default_block_size in platform.block_sizes
