"""Compiled graphs on disk are used again for the same model and arguments, and for nothing else."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable

import msgspec
import pytest

from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.attention.cpu import CpuAttention
from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.config.graphs import GraphConfig, GraphMode
from ascend_vllm.worker.graph_cache import GraphCache, fingerprint
from tests.worker.test_capture_sizes import HF_CONFIG

VERSIONS = {"CANN": "8.5"}


@pytest.fixture
def config(tmp_path: pathlib.Path) -> EngineConfig:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(HF_CONFIG))
    (directory / "model.safetensors").write_bytes(b"weights")
    made = EngineArgs(model=str(directory), dtype="float16", device="cpu").create_engine_config()
    return msgspec.structs.replace(made, graphs=GraphConfig(GraphMode.COMPILED, (2, 4), 4096))


def prepare(config: EngineConfig, directory: pathlib.Path, versions: dict[str, str] | None = None) -> bool:
    """Whether what is in the directory can be used; if not it is made, as far as this is about."""
    cache = GraphCache(directory, fingerprint(config, CpuAttention(config.cache.block_size), versions or VERSIONS))
    usable = cache.prepare()
    if not usable:
        assert list(directory.iterdir()) == []
        (directory / "graph").write_bytes(b"compiled")
        cache.keep()
    return usable


def test_the_same_again(config: EngineConfig, tmp_path: pathlib.Path, package_log: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "deep" / "cache"
    assert not prepare(config, directory)
    assert prepare(config, directory)
    assert (directory / "graph").read_bytes() == b"compiled"
    assert f"Compiled graphs are taken from {directory}" in package_log.text


def with_other_sizes(config: EngineConfig) -> EngineConfig:
    return msgspec.structs.replace(config, graphs=msgspec.structs.replace(config.graphs, capture_sizes=(2, 8)))


def with_other_dtype(config: EngineConfig) -> EngineConfig:
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, dtype="bfloat16"))


def with_other_config(config: EngineConfig) -> EngineConfig:
    arch = msgspec.structs.replace(config.model.arch, norm_eps=0.5)
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, arch=arch))


def with_other_cache(config: EngineConfig) -> EngineConfig:
    return msgspec.structs.replace(config, cache=msgspec.structs.replace(config.cache, cache_dtype="int8"))


def with_other_weights(config: EngineConfig) -> EngineConfig:
    os.utime(pathlib.Path(config.model.model) / "model.safetensors", (1, 1))
    return config


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (with_other_sizes, "are made anew: gears was 2,4, is 2,8"),
        (with_other_dtype, "are made anew: --dtype was float16, is bfloat16"),
        (with_other_cache, "are made anew: KV cache dtype was float16, is int8"),
        (with_other_config, "are made anew: config.json was "),
        (with_other_weights, "are made anew: weight files was "),
    ],
)
def test_others_are_made_anew(
    config: EngineConfig,
    tmp_path: pathlib.Path,
    package_log: pytest.LogCaptureFixture,
    change: Callable[[EngineConfig], EngineConfig],
    said: str,
) -> None:
    directory = tmp_path / "cache"
    assert not prepare(config, directory)
    changed = change(config)
    assert not prepare(changed, directory)
    assert said in package_log.text
    assert prepare(changed, directory)


def test_versions_count_and_what_is_half_made_does_not(
    config: EngineConfig, tmp_path: pathlib.Path, package_log: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "cache"
    assert not prepare(config, directory)
    assert not prepare(config, directory, {"CANN": "9.0"})
    assert "are made anew: CANN was 8.5, is 9.0" in package_log.text
    (directory / "fingerprint.json").write_text("{")
    assert not prepare(config, directory, {"CANN": "9.0"})
    (directory / "fingerprint.json").unlink()
    assert not prepare(config, directory, {"CANN": "9.0"})
