"""Keys and values in int8 on a simulated NPU: the backend against dense attention, engines against those on CPUs."""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.attention.ascend_bytes import AscendInt8Attention, Int8Cache
from ascend_vllm.attention.backend import AttentionSpec
from ascend_vllm.config.graphs import GraphMode
from ascend_vllm.engine.llm_engine import LLMEngine
from ascend_vllm.errors import ConfigError
from ascend_vllm.outputs import RequestOutput
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.kv_cache import KEYS_AND_VALUES, KV_CACHE_FORMATS, KVCacheFormat
from tests.npu.test_attention_backend import (
    CHUNKS,
    DECODE,
    MIXED,
    NPU,
    PROMPTS,
    Problem,
    Rows,
    make_problem,
    spec_of,
)
from tests.npu.test_graphs import PROMPTS as TEXTS
from tests.npu.test_graphs import decode_step_launches
from tests.tiny_models import tiny_model

BLOCK_SIZE = 64
# rows of drafts: the same number of tokens each
DRAFTED: Rows = [(3, 70), (3, 64), (3, 4)]


# ---- the backend ---------------------------------------------------------------------------------------------


def make_cache(
    backend: AscendInt8Attention, spec: AttentionSpec, num_blocks: int, device: str, *, has_scales: bool = True
) -> Int8Cache:
    wanted = KVCacheFormat("int8", has_scales, "float32")
    cache = KEYS_AND_VALUES.spec(BLOCK_SIZE, spec.num_kv_heads, spec.head_size, "float16", wanted)
    assert backend.unsupported_cache_reason(cache, torch.float16) is None
    memory = torch.zeros(num_blocks * cache.block_bytes, dtype=torch.uint8, device=device)
    return backend.make_cache(memory, num_blocks, cache)


def bound(problem: Problem) -> tuple[AscendInt8Attention, Int8Cache]:
    """A backend, and its cache with what the problem has cached."""
    backend = AscendInt8Attention(BLOCK_SIZE)
    cache = make_cache(backend, problem.spec, problem.cache.shape[1], "npu:0", has_scales=problem.spec.k_scale == 1)
    # [2, P, K, S, D]
    floats = problem.cache.transpose(2, 3).float()
    scales = floats.abs().amax(-1) / 127
    cache.numbers.copy_((floats / scales[..., None]).nan_to_num().round().to(torch.int8))
    if cache.scales is not None:
        # what nobody wrote must not be read
        cache.scales.copy_(scales)
    backend.bind([problem.spec], [cache], problem.num_blocks)
    return backend, cache


def check(problem: Problem) -> torch.Tensor:
    """Output and cache are right; returns the output."""
    backend, cache = bound(problem)
    output = backend.forward(
        problem.spec, *problem.parts(), cache, problem.batch, backend.prepare(problem.batch)
    ).cpu()
    error = float((output.double() - problem.truth).abs().max())
    assert error <= 2 * problem.plain_error, f"error {error}, a plain implementation's is {problem.plain_error}"
    slots = problem.batch.slot_mapping.cpu()
    kept = slots >= 0
    expected = problem.cache.clone()
    for half, part in zip(expected.unbind(0), problem.parts()[1:], strict=True):
        half.view(-1, problem.spec.num_kv_heads * problem.spec.head_size)[slots[kept]] = part.cpu()[kept]
    pool = slice(0, problem.num_blocks)
    scales = problem.spec.k_scale if cache.scales is None else cache.scales.cpu()[..., None]
    found, wanted = (cache.numbers.cpu() * scales).transpose(2, 3)[:, pool], expected[:, pool].float()
    wanted = wanted.nan_to_num() if cache.scales is None else wanted
    torch.testing.assert_close(found, wanted, equal_nan=True, atol=0, rtol=1e-6)
    return output


@pytest.mark.parametrize(
    ("rows", "window"),
    [(rows, window) for rows in (DECODE, PROMPTS, CHUNKS, MIXED, DRAFTED) for window in (None, 50)],
)
def test_rows_of_every_kind(rows: Rows, window: int | None) -> None:
    check(make_problem(rows, spec_of(window=window), block_size=BLOCK_SIZE, is_exact_in_int8=True))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "dtype"),
    [(4, 4, 32, torch.float16), (6, 2, 96, torch.bfloat16), (8, 1, 128, torch.float16)],
)
def test_shapes(heads: int, kv_heads: int, head_size: int, dtype: torch.dtype) -> None:
    check(make_problem(MIXED, spec_of(heads, kv_heads, head_size), dtype, BLOCK_SIZE, is_exact_in_int8=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_scales_of_layers(kv_heads: int, dtype: torch.dtype) -> None:
    spec = dataclasses.replace(spec_of(kv_heads=kv_heads), k_scale=1 / 64, v_scale=1 / 64)
    check(make_problem(MIXED, spec, dtype, BLOCK_SIZE, is_exact_in_int8=True))


def test_tokens_that_are_stored_nowhere() -> None:
    check(make_problem(DECODE, spec_of(), block_size=BLOCK_SIZE, void=(1, 3), is_exact_in_int8=True))


def test_long_contexts_are_gathered_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the memory for floats is limited."""
    monkeypatch.setattr("ascend_vllm.attention.ascend_plan.MAX_EXPANDED_TOKENS", 128)
    rows: Rows = [(20, 120), (20, 40), (20, 140), (20, 300)]
    problem = make_problem(rows, spec_of(), block_size=BLOCK_SIZE, is_exact_in_int8=True)
    backend, _ = bound(problem)
    assert len(backend.prepare(problem.batch).parts) == 3
    check(problem)


def test_blocks_are_copied_with_their_scales() -> None:
    backend, spec = AscendInt8Attention(BLOCK_SIZE), spec_of()
    device, host = make_cache(backend, spec, 4, "npu:0"), make_cache(backend, spec, 3, "cpu")
    assert device.scales is not None and host.scales is not None
    for part in device:
        part.copy_(torch.randint(-99, 99, part.shape))
    before = [part.cpu() for part in device]
    backend.copy_blocks(device, torch.tensor([2, 0], device=NPU), host, torch.tensor([1, 2]))
    backend.copy_blocks(host, torch.tensor([1]), device, torch.tensor([3], device=NPU))
    for part, on_host, old in zip(device, host, before, strict=True):
        assert torch.equal(on_host[:, 1], old[:, 2])
        assert torch.equal(on_host[:, 2], old[:, 0])
        assert torch.equal(part.cpu()[:, 3], old[:, 2])
        assert torch.equal(part.cpu()[:, :3], old[:, :3])


# ---- engines -------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INFER_MODE", "PTA_TORCHAIR_DECODE_GEAR_ENABLE", "PTA_TORCHAIR_DECODE_GEAR_LIST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:False")


SHARED = [7 + i % 90 for i in range(130)]
LONG = [[*SHARED, *range(9 * number, 14 * number + 5)] for number in range(3)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)


def make_engine(device: str, **options: Any) -> LLMEngine:
    settings: dict[str, Any] = {
        "dtype": "float16",
        "kv_cache_dtype": "int8",
        "block_size": 64,
        "num_gpu_blocks_override": 24,
        "max_num_seqs": 4,
        "max_model_len": 384,
        "swap_space": 0,
        "disable_log_stats": True,
        "async_scheduling": False,
    }
    return LLMEngine.from_engine_args(
        EngineArgs(model=tiny_model("qwen2-64", "float16"), device=device, **settings | options)
    )


def answers(
    engine: LLMEngine, prompts: Sequence[Sequence[int]], params: SamplingParams = PARAMS
) -> list[RequestOutput]:
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": list(prompt)}, params)
    found = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output for output in engine.step() if output.finished}
    return [found[str(number)] for number in range(len(prompts))]


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[list(one.token_ids) for one in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def expected() -> list[RequestOutput]:
    """Of an engine on the CPU, with its int8 cache."""
    return answers(make_engine("cpu", dtype="float32"), LONG)


def test_texts_are_those_of_a_cpu(expected: list[RequestOutput]) -> None:
    """Log-probabilities differ by what float16 and another rounding of scales make."""
    found = answers(make_engine("npu", enforce_eager=True), LONG)
    assert tokens(found) == tokens(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.outputs[0].cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob, abs=0.1)


@pytest.mark.parametrize(
    "options",
    [
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 64, "enable_prefix_caching": True},
        {"num_scheduler_steps": 4, "num_gpu_blocks_override": 7, "preemption_mode": "swap", "swap_space": 0.01},
    ],
    ids=["chunks of shared prompts", "swapping"],
)
def test_features_change_nothing(options: dict[str, Any]) -> None:
    params = SamplingParams(n=2, temperature=1.0, top_k=1, max_tokens=70, ignore_eos=True)
    plain, other = make_engine("npu", enforce_eager=True), make_engine("npu", enforce_eager=True, **options)
    assert tokens(answers(other, LONG, params)) == tokens(answers(plain, LONG, params))
    stats = other.call_utility("stats")
    assert stats["num_prefix_hits" if "enable_prefix_caching" in options else "num_preemptions"] > 0


def test_captured_graphs(expected: list[RequestOutput]) -> None:
    engine = make_engine("npu")
    assert engine.config.graphs.mode == GraphMode.CAPTURED
    assert tokens(answers(engine, LONG)) == tokens(expected)
    assert decode_step_launches(engine, TEXTS[:2]) == [False]


# the compiler, and what it is made of, have warnings of their own
@pytest.mark.filterwarnings("ignore")
def test_compiled_graphs(
    expected: list[RequestOutput], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFER_MODE", "PTA")
    monkeypatch.setenv("TORCHAIR_CACHE_HOME", str(tmp_path / "cache"))
    # it writes what tests never read, as long as anybody listens, which pytest does
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    engine = make_engine("npu", max_num_seqs=2)
    assert engine.config.graphs.mode == GraphMode.COMPILED
    assert tokens(answers(engine, LONG)) == tokens(expected)


def test_scales_of_a_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "scales.json"
    scales = {"0": {str(layer): 0.04 for layer in range(3)}}
    path.write_text(json.dumps({"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": scales}}))
    on_cpu = answers(make_engine("cpu", dtype="float32", quantization_param_path=str(path)), LONG)
    on_npu = answers(make_engine("npu", quantization_param_path=str(path)), LONG)
    for one, other in zip(on_npu, on_cpu, strict=True):
        # float16 rounds some numbers to the next byte
        assert one.outputs[0].token_ids[:5] == other.outputs[0].token_ids[:5]


@pytest.mark.parametrize("name", sorted(KV_CACHE_FORMATS))
def test_8_bit_floats_are_refused(name: str) -> None:
    args = EngineArgs(model=tiny_model("qwen2-64", "float16"), device="npu", kv_cache_dtype=name)
    if not name.startswith("fp8"):
        assert args.create_engine_config().cache.format == KVCacheFormat(
            "int8", has_scales=True, scale_dtype="float32"
        )
        return
    with pytest.raises(ConfigError, match=rf"--kv-cache-dtype {name} is not available on --device npu.*use int8"):
        args.create_engine_config()


def test_head_sizes_that_its_operators_do_not_take() -> None:
    reason = AscendInt8Attention.unsupported_reason(spec_of(head_size=80), torch.float16, BLOCK_SIZE)
    assert reason is not None and "multiple of 32" in reason
