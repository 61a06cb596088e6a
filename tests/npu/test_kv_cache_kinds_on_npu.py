"""Layers that cache 8-bit keys and values on a simulated NPU, by a backend that lives here only."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch

from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.attention.ascend import AscendAttention, AscendStep
from ascend_vllm.attention.ascend_calls import LayerInput
from ascend_vllm.attention.backend import AttentionBackend, AttentionSpec, ForwardBatch, LayerCache, RotaryStep
from ascend_vllm.config.arch import LayerPlan
from ascend_vllm.config.graphs import GraphMode
from ascend_vllm.engine.llm_engine import LLMEngine
from ascend_vllm.types.kv_cache import KVCachePlan, KVCacheSpec
from ascend_vllm.worker.plugins import ATTENTION_BACKENDS
from tests.npu.test_graphs import PROMPTS, decode_step_launches, generate
from tests.tiny_models import tiny_model
from tests.toy_quantization import round_rows

SCALED = "scaled"
# the first layer is an ordinary one, and in front of the others' caches
LAYERS = (LayerPlan(), *[LayerPlan(kv_cache=KVCachePlan(SCALED, dtype="int8", has_scales=True))] * 2)
# so long that most of what decoding reads is cached
LONG = [prompt * 4 for prompt in PROMPTS[:2]]


@dataclasses.dataclass
class ScaledCache:
    """What ScaledAttention makes of the memory of a layer with scales."""

    # [2, P, S, K, D] int8, and [2, P, S, K, 1] float32
    numbers: torch.Tensor
    scales: torch.Tensor


def _store_and_read(
    key: torch.Tensor, value: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """key and value [T, K, D] go to the cache; returns all of it, [2*P, S, K*D] in their dtype, keys first."""
    for index, new in enumerate((key, value)):
        new_numbers, new_scales = round_rows(new, 127)
        numbers[index].flatten(0, 1).index_copy_(0, slots, new_numbers)
        scales[index].flatten(0, 1).index_copy_(0, slots, new_scales)
    # of three dimensions from the start: npugraph_ex takes no views of tensors that were made with five
    levels = numbers.view(-1, numbers.shape[2] * numbers.shape[3], numbers.shape[4])
    cached = (levels * scales.view(*levels.shape[:2], 1)).to(key.dtype)
    return cached.view(len(cached), numbers.shape[2], -1)


def _shape_of_read(key: torch.Tensor, _value: torch.Tensor, numbers: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(numbers, dtype=key.dtype).flatten(3).flatten(0, 1)


# one op for compilers, that does not say that it writes: as `ascend_store_and_take` of attention/ascend_calls.py
_library: Any = torch.library.Library("ascend_vllm_tests", "DEF")  # type: ignore[no-untyped-call]
_library.define("store_and_read(Tensor key, Tensor value, Tensor numbers, Tensor scales, Tensor slots) -> Tensor")
_library.impl("store_and_read", _store_and_read, "PrivateUse1")
_library.impl("store_and_read", _shape_of_read, "Meta")


class ScaledAttention(AscendAttention):
    """Serves a layer of 8-bit keys and values by giving the operators a cache in the model's dtype."""

    name = "scaled"

    @classmethod
    def unsupported_cache_reason(cls, cache: KVCacheSpec, dtype: torch.dtype) -> str | None:
        return None if cache.kind == SCALED else super().unsupported_cache_reason(cache, dtype)

    def make_cache(self, memory: torch.Tensor, num_blocks: int, cache: KVCacheSpec) -> LayerCache:
        if cache.scale_shape is None:
            return super().make_cache(memory, num_blocks, cache)
        shape = self.kv_cache_shape(num_blocks, cache)
        num_numbers = torch.Size(shape).numel()
        numbers, scales = memory.split([num_numbers, len(memory) - num_numbers])
        return ScaledCache(numbers.view(torch.int8).view(shape), scales.view(torch.float32).view(*shape[:-1], 1))

    def bind(self, specs: Sequence[AttentionSpec], kv_caches: Sequence[LayerCache], num_blocks: int) -> None:
        self.caches = kv_caches
        super().bind(specs, kv_caches[:1], num_blocks)

    def forward(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: LayerCache,
        batch: ForwardBatch,
        metadata: AscendStep,
        rotary: RotaryStep | None = None,
    ) -> torch.Tensor:
        if not isinstance(kv_cache, ScaledCache):
            return super().forward(spec, query, key, value, kv_cache, batch, metadata, rotary)
        if rotary is not None:
            rotary.rotate(query, key, spec.head_size)
        shape = (len(query), spec.num_kv_heads, spec.head_size)
        key, value = key.contiguous().view(shape), value.contiguous().view(shape)
        cached = torch.ops.ascend_vllm_tests.store_and_read(
            key, value, kv_cache.numbers, kv_cache.scales, metadata.slots
        )
        key_cache, value_cache = cached.chunk(2)
        queries = query.contiguous().view(len(query), spec.num_heads, spec.head_size)
        layer = LayerInput(spec, queries, key, value, key_cache, value_cache)
        assert self._mask is not None
        return torch.cat(
            [self._ops.attend(layer, part, self._mask).view(-1, query.shape[1]) for part in metadata.parts]
        )


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend is there, and no variables are set."""
    for name in ("INFER_MODE", "PTA_TORCHAIR_DECODE_GEAR_ENABLE", "PTA_TORCHAIR_DECODE_GEAR_LIST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:False")
    backends = (*ATTENTION_BACKENDS["npu"], f"{__name__}:{ScaledAttention.__name__}")
    monkeypatch.setitem(ATTENTION_BACKENDS, "npu", backends)


def make_engine(layers: tuple[LayerPlan, ...] = LAYERS, **options: Any) -> LLMEngine:
    args = EngineArgs(
        model=tiny_model("qwen2-64", "float16"),
        device="npu",
        swap_space=0,
        disable_log_stats=True,
        async_scheduling=False,
        max_num_seqs=2,
        max_model_len=512,
        num_gpu_blocks_override=12,
        **options,
    )
    config = args.create_engine_config()
    arch = msgspec.structs.replace(config.model.arch, layers=layers)
    return LLMEngine(msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, arch=arch)))


def backend_of(engine: LLMEngine) -> AttentionBackend:
    backends = engine.collective_rpc(lambda worker: worker._model_in_use.backend)
    backend: AttentionBackend = backends[0]
    return backend


def test_captured_graphs_read_and_write_them(package_log: pytest.LogCaptureFixture) -> None:
    eager = make_engine(enforce_eager=True)
    expected = generate(eager, LONG)
    backend = backend_of(eager)
    assert isinstance(backend, ScaledAttention)
    ordinary, *others = backend.caches
    assert ordinary.dtype == torch.float16
    for cache in others:
        assert bool(cache.numbers.any())
        # largest of each head's numbers
        assert int(cache.numbers.abs().amax()) == 127
    engine = make_engine()
    assert engine.config.graphs.mode == GraphMode.CAPTURED
    assert generate(engine, LONG) == expected
    assert decode_step_launches(engine, PROMPTS[:2]) == [False]
    # a capture in pieces would have the attention of layers with scales in it, with the rows of the capture
    assert "Captured 1 graphs" in package_log.text
    assert "pieces" not in package_log.text


def test_they_are_coarse_and_near_the_ordinary_ones() -> None:
    found = generate(make_engine(enforce_eager=True), LONG, max_tokens=2)
    # the first token is of the prompt alone, whose keys are read as they are
    assert found == generate(make_engine((LayerPlan(),) * 3, enforce_eager=True), LONG, max_tokens=2)


# the compiler, and what it is made of, have warnings of their own
@pytest.mark.filterwarnings("ignore")
def test_compiled_graphs_read_and_write_them(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = generate(make_engine(enforce_eager=True), LONG)
    monkeypatch.setenv("INFER_MODE", "PTA")
    monkeypatch.setenv("TORCHAIR_CACHE_HOME", str(tmp_path / "cache"))
    # it writes what tests never read, as long as anybody listens, which pytest does
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    engine = make_engine()
    assert engine.config.graphs.mode == GraphMode.COMPILED
    assert generate(engine, LONG) == expected
    assert decode_step_launches(engine, PROMPTS[:2]) == [False]
    (fingerprint,) = tmp_path.rglob("fingerprint.json")
    assert '"KV cache dtype": "float16, int8"' in fingerprint.read_text()
