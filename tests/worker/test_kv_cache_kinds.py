"""Layers that cache other things than keys and values in the model's dtype, in a backend that lives here only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch

from ascend_vllm.attention.backend import (
    AttentionBackend,
    AttentionSpec,
    ForwardBatch,
    LatentSpec,
    LayerCache,
    RotaryStep,
)
from ascend_vllm.attention.cpu import CpuAttention
from ascend_vllm.config.arch import LayerPlan
from ascend_vllm.config.cache import CacheConfig, kv_cache_specs
from ascend_vllm.config.graphs import GraphConfig, GraphMode
from ascend_vllm.config.model import ModelConfig
from ascend_vllm.distributed.parallel_context import ParallelContext
from ascend_vllm.errors import ConfigError
from ascend_vllm.layers.attention import Attention
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.models.qwen2 import Qwen2ForCausalLM
from ascend_vllm.models.registry import MODELS, resolve_model_class
from ascend_vllm.ops.registry import define_op
from ascend_vllm.types.kv_cache import KEY_VALUE, KEYS_AND_VALUES, LATENT, KVCachePlan, KVCacheSpec
from ascend_vllm.worker.model_runner import ModelRunner
from ascend_vllm.worker.plugins import ATTENTION_BACKENDS
from ascend_vllm.worker.worker import Worker
from tests.models.paged_driver import make_model_config
from tests.tiny_models import FAMILIES, tiny_model
from tests.worker.taped_steps import note_taped_steps
from tests.worker.worker_driver import BLOCK_SIZE, GREEDY, Driver, generate, make_config, make_prompt, started_worker

SCALED = "scaled"
NUM_BLOCKS, NUM_SPARE = 32, 2
# of a layer: keys and values of 16 tokens in 2 heads of 16
NUMBERS = 2 * BLOCK_SIZE * 2 * 16
# float32; int8 with a float32 scale for each 16 numbers; bfloat16, the model's dtype
BLOCK_BYTES = 4 * NUMBERS + (NUMBERS + 4 * NUMBERS // 16) + 2 * NUMBERS


class ScaledAttention(Attention):
    """Caches 8-bit keys and values with a scale per token and head."""

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        shape = (2, block_size, self.spec.num_kv_heads, self.spec.head_size)
        return KVCacheSpec(SCALED, shape, "int8", shape[:-1])


class ToyForCausalLM(Qwen2ForCausalLM):
    """Three layers with three kinds of caches, the last of which is the ordinary one."""

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        first, second, third = self.attention_layers
        self.attention_layers = [
            Attention(first.spec, 0, torch.float32),
            ScaledAttention(second.spec, 1, torch.int8),
            third,
        ]
        for layer, attention in zip(self.decoder_layers, self.attention_layers, strict=True):
            layer.self_attn.attention = attention


@dataclasses.dataclass
class ScaledCache:
    """What ToyAttention makes of the memory of a layer with scales."""

    # [P, 2, S, K, D] int8, and [P, 2, S, K] float32
    numbers: torch.Tensor
    scales: torch.Tensor


def _toy_attention_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Two rows of one token each, the first and the third of their sequences, in one block each of three."""
    query, key, value = torch.linspace(-1, 1, 3 * 2 * 32).to(dtype).view(3, 2, 32)
    steps = torch.tensor([16, 34]), torch.tensor([0, 1, 2]), torch.tensor([1, 3]), torch.tensor([[1], [2]])
    shape = (3, 2, BLOCK_SIZE, 2, 16)
    yield query, key, value, torch.zeros(shape, dtype=dtype), None, *steps, 0.25
    yield query, key, value, torch.zeros(shape, dtype=torch.int8), torch.zeros(shape[:-1]), *steps, 0.25


@define_op(
    inputs=_toy_attention_inputs,
    mutates=("numbers", "scales"),
    dtypes=(torch.float32,),
    # of tests alone
    devices=(),
    recordable=True,
)
def toy_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    numbers: torch.Tensor,
    scales: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Stores keys and values, and attends to all that are cached: see `ToyAttention`."""
    num_kv_heads, head_size = numbers.shape[-2:]
    new = torch.stack([part.unflatten(1, (num_kv_heads, head_size)) for part in (key, value)], dim=1)
    _store(new.float(), numbers, scales, slot_mapping)
    outputs = []
    for row, length in enumerate(seq_lens.tolist()):
        start, end = query_start[row : row + 2].tolist()
        keys, values = _load(numbers, scales, block_table[row].long(), length)
        queries = query[start:end].unflatten(1, (-1, head_size)).float().transpose(0, 1)
        shown = torch.ones(end - start, length, dtype=torch.bool).tril(length - (end - start))
        output = torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=shown, scale=scale, enable_gqa=True
        )
        outputs.append(output.transpose(0, 1).flatten(1))
    return torch.cat(outputs).to(query.dtype)


def _store(new: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor | None, slots: torch.Tensor) -> None:
    """new [T, 2, K, D] float32."""
    places = slots >= 0
    blocks, offsets = slots[places] // BLOCK_SIZE, slots[places] % BLOCK_SIZE
    new = new[places]
    if scales is not None:
        new_scales = new.abs().amax(-1).clamp_min(1e-6) / 127
        scales[blocks, :, offsets] = new_scales
        new = (new / new_scales[..., None]).round()
    numbers[blocks, :, offsets] = new.to(numbers.dtype)


def _load(
    numbers: torch.Tensor, scales: torch.Tensor | None, blocks: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a row, each [K, length, D] float32."""
    cached = numbers[blocks].float()
    if scales is not None:
        cached *= scales[blocks][..., None]
    keys, values = cached.transpose(0, 1).flatten(1, 2)[:, :length].transpose(1, 2).unbind(0)
    return keys, values


class ToyAttention(AttentionBackend):
    """Plain attention, computed in float32; blocks come first in its caches."""

    name = "toy"

    @classmethod
    def unsupported_reason(cls, spec: AttentionSpec, dtype: torch.dtype, block_size: int) -> str | None:  # noqa: ARG003
        return None

    @classmethod
    def unsupported_cache_reason(cls, cache: KVCacheSpec, dtype: torch.dtype) -> str | None:  # noqa: ARG003
        return None if cache.kind in (KEY_VALUE, SCALED) else f"kind {cache.kind} is unknown"

    def kv_cache_shape(self, num_blocks: int, cache: KVCacheSpec) -> tuple[int, ...]:
        return (num_blocks, *cache.block_shape)

    def make_cache(self, memory: torch.Tensor, num_blocks: int, cache: KVCacheSpec) -> LayerCache:
        if cache.scale_shape is None:
            return super().make_cache(memory, num_blocks, cache)
        blocks = memory.view(num_blocks, cache.block_bytes)
        num_numbers = torch.Size(cache.block_shape).numel()
        numbers = blocks[:, :num_numbers].view(torch.int8).unflatten(1, cache.block_shape)
        return ScaledCache(numbers, blocks[:, num_numbers:].view(torch.float32).unflatten(1, cache.scale_shape))

    def num_spare_blocks(self, max_num_tokens: int) -> int:  # noqa: ARG002
        return NUM_SPARE

    def bind(self, specs: Sequence[AttentionSpec], kv_caches: Sequence[LayerCache], num_blocks: int) -> None:
        self.bound = (specs, kv_caches, num_blocks)

    def copy_blocks(
        self, source: LayerCache, source_blocks: torch.Tensor, target: LayerCache, target_blocks: torch.Tensor
    ) -> None:
        if isinstance(source, ScaledCache):
            self.copy_blocks(source.scales, source_blocks, target.scales, target_blocks)
            source, target = source.numbers, target.numbers
        target[target_blocks] = source[source_blocks]

    def prepare(self, batch: ForwardBatch) -> None:
        pass

    def forward(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: LayerCache,
        batch: ForwardBatch,
        metadata: Any,  # noqa: ARG002
        rotary: RotaryStep | None = None,
    ) -> torch.Tensor:
        if rotary is not None:
            rotary.rotate(query, key, spec.head_size)
        cache = (kv_cache.numbers, kv_cache.scales) if isinstance(kv_cache, ScaledCache) else (kv_cache, None)
        step = batch.slot_mapping, batch.query_start, batch.seq_lens, batch.block_table
        output: torch.Tensor = toy_attention(query, key, value, *cache, *step, spec.scale)
        return output


@pytest.fixture
def toy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """A worker with the toy model in bfloat16, whose memory is 32 blocks and a bit; eager unless told otherwise."""
    monkeypatch.setitem(MODELS, "Qwen2ForCausalLM", ToyForCausalLM)
    monkeypatch.setitem(
        ATTENTION_BACKENDS, "cpu", (*ATTENTION_BACKENDS["cpu"], f"{__name__}:{ToyAttention.__name__}")
    )
    sizes = {
        "num_gpu_blocks_override": None,
        "kv_cache_memory_bytes": (NUM_BLOCKS + NUM_SPARE) * BLOCK_BYTES + 100,
        "swap_space_gib": 10 * BLOCK_BYTES / 2**30,
    }
    config = make_config(tiny_model("qwen2"), dtype="bfloat16", **sizes)
    graphs = GraphConfig(getattr(request, "param", GraphMode.EAGER))
    worker = Worker(msgspec.structs.replace(config, graphs=graphs))
    worker.load_model()
    worker.initialize_cache(worker.determine_num_blocks(), worker.determine_num_cpu_blocks())
    yield worker
    worker.shutdown()


def test_a_block_is_as_large_as_its_layers_say(toy: Worker) -> None:
    assert toy.determine_num_blocks() == NUM_BLOCKS
    assert toy.determine_num_cpu_blocks() == 10


def test_caches_are_bound_as_their_layers_want_them(toy: Worker) -> None:
    backend = toy._model_in_use.backend
    assert isinstance(backend, ToyAttention)
    specs, (wide, scaled, ordinary), num_blocks = backend.bound
    assert num_blocks == NUM_BLOCKS
    assert specs == [layer.spec for layer in toy.get_model().attention_layers]
    shape = (NUM_BLOCKS + NUM_SPARE, 2, BLOCK_SIZE, 2, 16)
    assert (wide.shape, wide.dtype) == (shape, torch.float32)
    assert (scaled.numbers.shape, scaled.numbers.dtype) == (shape, torch.int8)
    assert (scaled.scales.shape, scaled.scales.dtype) == (shape[:-1], torch.float32)
    assert (ordinary.shape, ordinary.dtype) == (shape, torch.bfloat16)
    for cache in (scaled.numbers, scaled.scales):
        cache.fill_(1)
    # each in memory of its own
    wide.fill_(0)
    ordinary.fill_(0)
    assert bool((scaled.numbers == 1).all())
    assert bool((scaled.scales == 1).all())


@pytest.mark.parametrize("toy", [GraphMode.EAGER, GraphMode.RECORDED], indirect=True)
def test_steps_compute_with_them(toy: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts at once, in chunks and beside others, and decoding, against the CPU's own backend and caches."""
    expected = {length: generate(_ordinary(), make_prompt(length), GREEDY, 12) for length in (40, 5)}
    taped = note_taped_steps(monkeypatch)
    with Driver(toy) as driver:
        driver.free_blocks = list(range(NUM_BLOCKS))
        driver.add("long", make_prompt(40))
        driver.step({"long": 17})
        driver.add("short", make_prompt(5))
        for _ in range(12):
            driver.step()
        assert driver.output("long") == expected[40]
        assert driver.output("short")[:12] == expected[5]
    runner = toy._runner
    assert isinstance(runner, ModelRunner)
    if toy._config.graphs.mode is GraphMode.RECORDED:
        assert 2 in taped.whole
    else:
        assert taped.num_rows == []


def test_blocks_come_back_from_cpu_memory(toy: Worker) -> None:
    expected = generate(_ordinary(), make_prompt(40), GREEDY, 12)
    with Driver(toy) as driver:
        driver.free_blocks = list(range(NUM_BLOCKS))
        driver.add("row", make_prompt(40))
        for _ in range(4):
            driver.step()
        gone = driver.swap_out("row", cpu_blocks=[9, 2, 5])
        # others write to the blocks that were the row's
        driver.add("other", make_prompt(100))
        driver.step()
        driver.free("other")
        driver.swap_in("row", gone, GREEDY, cpu_blocks=[9, 2, 5])
        for _ in range(8):
            driver.step()
        assert driver.output("row") == expected


def test_what_a_backend_cannot_cache_it_refuses(toy: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ATTENTION_BACKENDS, "cpu", ATTENTION_BACKENDS["cpu"][:1])
    with pytest.raises(ConfigError, match=r"\(cpu: it caches keys and values in torch.bfloat16, not"):
        toy.load_model()


def test_latent_attention_is_refused_where_there_is_none() -> None:
    class Plain(CpuAttention):
        supports_latent = False

    spec = AttentionSpec(4, 1, 40, 0.1, latent=LatentSpec(32, 8, 16, 16))
    cache = KVCachePlan(LATENT, num_vectors=1, num_heads=1, width=40).spec(16, 4, 24, "float32")
    reason = Plain.unsupported_reason(spec, torch.float32, 16)
    assert reason == "it has no latent attention (MLA), which this model needs"
    assert Plain.unsupported_cache_reason(cache, torch.float32) is not None


def test_blocks_of_layers_can_lie_one_behind_another() -> None:
    assert KVCacheSpec(SCALED, (16, 3), "int8", (16,)).block_bytes == 128
    assert KVCacheSpec(SCALED, (16, 3), "int8").block_bytes == 64
    assert KEYS_AND_VALUES.spec(16, num_kv_heads=2, head_size=24, dtype="float32").block_bytes == 2 * 16 * 2 * 24 * 4


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", [*FAMILIES, "deepseek-v3"])
def test_the_configuration_foresees_what_layers_report(name: str, size: int) -> None:
    config = make_model_config(tiny_model(name), "bfloat16")
    context = BuildContext(torch.bfloat16, torch.device("cpu"), ParallelContext(0, size))
    model = resolve_model_class(config.architecture)(config, context)
    reported = [layer.kv_cache_spec(32) for layer in model.attention_layers]
    assert kv_cache_specs(config, CacheConfig(32), size) == reported
    cache = CacheConfig(32, cache_dtype="int8")
    for layer in model.attention_layers:
        layer.set_cache_format(cache.format)
    assert kv_cache_specs(config, cache, size) == [layer.kv_cache_spec(32) for layer in model.attention_layers]


def test_layers_report_what_their_plans_say() -> None:
    config = make_model_config(tiny_model("qwen2"), "bfloat16")
    kinds = (
        KVCachePlan(dtype="float32"),
        KVCachePlan(SCALED, dtype="int8", has_scales=True),
        KVCachePlan(LATENT, num_vectors=1, num_heads=1, width=40),
    )
    layers = tuple(LayerPlan(kv_cache=kind) for kind in kinds)
    config = msgspec.structs.replace(config, arch=msgspec.structs.replace(config.arch, layers=layers))
    context = BuildContext(torch.bfloat16, torch.device("cpu"), ParallelContext(0, 2))
    reported = [layer.kv_cache_spec(32) for layer in Qwen2ForCausalLM(config, context).attention_layers]
    # one of two KV heads on each rank
    assert reported == [
        KVCacheSpec(KEY_VALUE, (2, 32, 1, 16), "float32"),
        KVCacheSpec(SCALED, (2, 32, 1, 16), "int8", (2, 32, 1)),
        KVCacheSpec(LATENT, (1, 32, 1, 40), "bfloat16"),
    ]
    assert kv_cache_specs(config, CacheConfig(32), 2) == reported


def _ordinary() -> Worker:
    return started_worker(tiny_model("qwen2", dtype="bfloat16"), dtype="bfloat16")
