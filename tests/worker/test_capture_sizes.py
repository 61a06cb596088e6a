"""The configuration of decoding graphs: capture sizes, their adjustments, flags and variables."""

from __future__ import annotations

import json
import pathlib

import msgspec
import pytest

from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.args.graphs import resolve_graph_config
from ascend_vllm.config.engine import DeviceConfig, EngineConfig, ParallelConfig
from ascend_vllm.config.graphs import (
    GraphConfig,
    GraphMode,
    default_capture_sizes,
    default_piece_sizes,
    fit_capture_sizes,
    parse_capture_sizes,
)
from ascend_vllm.config.model import PoolerConfig
from ascend_vllm.errors import ConfigError

HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "torch_dtype": "float16",
}
PIECE_SIZES = (16, 32, 64, 128, 256)


@pytest.mark.parametrize(
    ("sizes", "max_num_seqs", "expected", "changes"),
    [
        ([2, 4, 6, 8, 16, 32], 32, (2, 4, 6, 8, 16, 32), []),
        (
            [2, 4, 6, 8, 16, 32],
            10,
            (2, 4, 6, 8, 10),
            ["16, 32 left out, above --max-num-seqs 10", "10 added, so that --max-num-seqs 10 sequences fit"],
        ),
        ([4, 2, 4], 256, (2, 4, 256), ["256 added, so that --max-num-seqs 256 sequences fit"]),
        ([1, 4], 4, (4,), ["1 left out, single sequences are padded to 4"]),
        (
            [1],
            1,
            (2,),
            [
                "1 left out, single sequences are padded to 2",
                "2 added, so that --max-num-seqs 1 sequences fit",
            ],
        ),
        ([8], 8, (8,), []),
    ],
)
def test_sizes_are_fitted(sizes: list[int], max_num_seqs: int, expected: tuple[int, ...], changes: list[str]) -> None:
    assert fit_capture_sizes(sizes, max_num_seqs) == (expected, changes)


@pytest.mark.parametrize(
    ("max_num_seqs", "expected"), [(1, (2,)), (2, (2,)), (3, (2, 3)), (8, (2, 4, 8)), (20, (2, 4, 8, 16, 20))]
)
def test_default_sizes(max_num_seqs: int, expected: tuple[int, ...]) -> None:
    assert default_capture_sizes(max_num_seqs) == expected


def test_sizes_of_steps_with_prompts() -> None:
    assert default_piece_sizes(2048) == PIECE_SIZES
    assert default_piece_sizes(100) == (16, 32, 64)
    assert default_piece_sizes(15) == ()


def test_lists_are_read() -> None:
    assert parse_capture_sizes(" 8, 2,4", "LIST") == (8, 2, 4)
    for text in ("2,,4", "2;4", "0,2", "-2", "two", "2.5"):
        with pytest.raises(ConfigError, match="LIST must be numbers above 0 separated by commas"):
            parse_capture_sizes(text, "LIST")


@pytest.fixture
def config(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    """What a server of a small Llama on an NPU would have, without its graphs."""
    names = ("INFER_MODE", "PTA_TORCHAIR_DECODE_GEAR_ENABLE", "PTA_TORCHAIR_DECODE_GEAR_LIST")
    for name in (*names, "ASCEND_VLLM_ATTENTION_OPS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    made = EngineArgs(model=str(tmp_path), max_num_seqs=8, dtype="float16", device="cpu").create_engine_config()
    assert made.graphs == GraphConfig(GraphMode.RECORDED)
    made = msgspec.structs.replace(made, graphs=GraphConfig())
    return msgspec.structs.replace(made, device=DeviceConfig("npu"))


def test_llama_on_one_npu_has_captured_graphs(config: EngineConfig, package_log: pytest.LogCaptureFixture) -> None:
    assert resolve_graph_config(config, 8192) == GraphConfig(
        GraphMode.CAPTURED, (2, 4, 8), 4096, piece_sizes=PIECE_SIZES
    )
    assert "captured graphs of 2, 4, 8 sequences of up to 4096 tokens" in package_log.text
    assert resolve_graph_config(config, 100).max_seq_len == 100
    with pytest.raises(ConfigError, match="--max-seq-len-to-capture must be at least 1, got 0"):
        resolve_graph_config(config, 0)


def test_pta_compiles_the_listed_sizes(
    config: EngineConfig, package_log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFER_MODE", "PTA")
    monkeypatch.setenv("PTA_TORCHAIR_DECODE_GEAR_ENABLE", "1")
    monkeypatch.setenv("PTA_TORCHAIR_DECODE_GEAR_LIST", "2,6,16")
    assert resolve_graph_config(config, 8192) == GraphConfig(
        GraphMode.COMPILED, (2, 6, 8), 4096, piece_sizes=PIECE_SIZES
    )
    assert (
        "PTA_TORCHAIR_DECODE_GEAR_LIST=2,6,16; capture sizes: 2, 6, 8 (16 left out, above --max-num-seqs 8; "
        "8 added, so that --max-num-seqs 8 sequences fit)"
    ) in package_log.text
    monkeypatch.setenv("PTA_TORCHAIR_DECODE_GEAR_ENABLE", "0")
    assert resolve_graph_config(config, 8192).capture_sizes == (2, 4, 8)
    assert "LIST=2,6,16 has no effect without PTA_TORCHAIR_DECODE_GEAR_ENABLE=1" in package_log.text
    monkeypatch.setenv("PTA_TORCHAIR_DECODE_GEAR_ENABLE", "1")
    monkeypatch.delenv("PTA_TORCHAIR_DECODE_GEAR_LIST")
    assert resolve_graph_config(config, 8192).capture_sizes == (2, 4, 8)
    monkeypatch.setenv("PTA_TORCHAIR_DECODE_GEAR_LIST", "2,b")
    with pytest.raises(ConfigError, match="PTA_TORCHAIR_DECODE_GEAR_LIST must be numbers"):
        resolve_graph_config(config, 8192)
    monkeypatch.delenv("INFER_MODE")
    assert resolve_graph_config(config, 8192).mode == GraphMode.CAPTURED
    assert "LIST=2,b has no effect without INFER_MODE=PTA" in package_log.text


def with_model(config: EngineConfig, **changes: object) -> EngineConfig:
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, **changes))


@pytest.mark.parametrize("asks", [False, True])
def test_who_runs_eager_and_why(
    config: EngineConfig, package_log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, asks: bool
) -> None:
    if asks:
        monkeypatch.setenv("INFER_MODE", "PTA")
    for changed, reason in (
        (msgspec.structs.replace(config, device=DeviceConfig("cpu")), "no graphs are captured on CPU"),
        (with_model(config, enforce_eager=True), "--enforce-eager is set"),
        (with_model(config, pooler=PoolerConfig("embed", "embed")), "a pooling model does not decode"),
    ):
        package_log.clear()
        is_cpu = changed.device.device == "cpu"
        assert resolve_graph_config(changed, 100) == GraphConfig(GraphMode.RECORDED if is_cpu else GraphMode.EAGER)
        assert f"--max-seq-len-to-capture has no effect: {reason}" in package_log.text
        assert ("INFER_MODE=PTA has no effect: " + reason in package_log.text) == asks
    # collectives are captured and compiled with the rest
    two = msgspec.structs.replace(config, parallel=ParallelConfig(tensor_parallel_size=2))
    arch = msgspec.structs.replace(config.model.arch, captures_graphs=False)
    other = with_model(config, architecture="OPTForCausalLM", arch=arch)
    if not asks:
        assert resolve_graph_config(two, 8192).mode == GraphMode.CAPTURED
        assert resolve_graph_config(other, 8192) == GraphConfig()
        assert "OPTForCausalLM has them with INFER_MODE=PTA only" in package_log.text
        return
    assert resolve_graph_config(other, 8192).mode == resolve_graph_config(two, 8192).mode == GraphMode.COMPILED
    # what cannot be captured as a whole cannot be in pieces
    assert resolve_graph_config(two, 8192).piece_sizes == PIECE_SIZES
    assert resolve_graph_config(other, 8192).piece_sizes == ()
    stages = msgspec.structs.replace(config, parallel=ParallelConfig(pipeline_parallel_size=2))
    with pytest.raises(ConfigError, match="INFER_MODE=PTA with --pipeline-parallel-size 2"):
        resolve_graph_config(stages, 8192)


def test_who_records_on_cpu(config: EngineConfig) -> None:
    cpu = msgspec.structs.replace(config, device=DeviceConfig("cpu"))
    assert resolve_graph_config(with_model(cpu, architecture="OPTForCausalLM"), 8192).mode == GraphMode.RECORDED
    for without in (
        with_model(cpu, enforce_eager=True),
        with_model(cpu, pooler=PoolerConfig("embed", "embed")),
        msgspec.structs.replace(cpu, parallel=ParallelConfig(tensor_parallel_size=2)),
    ):
        assert resolve_graph_config(without, 8192) == GraphConfig()


def test_older_attention_operators_cannot_be_replayed(
    config: EngineConfig, package_log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCEND_VLLM_ATTENTION_OPS", "flash")
    assert resolve_graph_config(config, 8192) == GraphConfig()
    assert "the attention operators of ASCEND_VLLM_ATTENTION_OPS=flash cannot be replayed" in package_log.text
    monkeypatch.setenv("INFER_MODE", "PTA")
    with pytest.raises(ConfigError, match="does not go with ASCEND_VLLM_ATTENTION_OPS=flash"):
        resolve_graph_config(config, 8192)
    # with a reason that comes first, nothing asks for graphs
    assert resolve_graph_config(with_model(config, enforce_eager=True), 8192) == GraphConfig()


def test_experts_and_several_steps_exclude_each_other(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    arch = msgspec.structs.replace(config.model.arch, num_experts=8, captures_graphs=False)
    experts = with_model(config, architecture="MixtralForCausalLM", arch=arch)
    both = msgspec.structs.replace(
        experts, scheduler=msgspec.structs.replace(config.scheduler, num_scheduler_steps=8)
    )
    assert resolve_graph_config(both, 8192) == GraphConfig()
    monkeypatch.setenv("INFER_MODE", "PTA")
    assert resolve_graph_config(experts, 8192).mode == GraphMode.COMPILED
    with pytest.raises(ConfigError, match="--num-scheduler-steps above 1 for models with experts"):
        resolve_graph_config(both, 8192)
    monkeypatch.setenv("INFER_MODE", "GE")
    with pytest.raises(ConfigError, match="INFER_MODE must be PTA or unset, got 'GE'"):
        resolve_graph_config(config, 8192)
