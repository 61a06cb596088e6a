"""Bytes that the operators of a step move, by the simulator's count: what is needed, and little more."""

from __future__ import annotations

import pathlib

import msgspec
import pytest
import safetensors.torch

from ascend_vllm.config.graphs import GraphConfig, GraphMode
from ascend_vllm.worker.worker import Worker
from tests.npu.launches import Cost, costs_of
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import GREEDY, Driver, make_config, make_prompt

MODEL = tiny_model("qwen2-64")
BLOCK_SIZE = 128
PROMPT = 200
# blocks of a cache
POOLS = (8, 64)
LAYERS, HIDDEN_BYTES, KV_BYTES_PER_TOKEN = 3, 64 * 2, 2 * 2 * 64 * 2
MASK_BYTES = 2048 * 2048
ATTENDS, STORES, COPIES = "aclnnFusedInferAttentionScoreV3", "aclnnScatterPaKvCache", "aclnnInplaceIndexCopy"

EAGER = GraphConfig()

Costs = dict[str, Cost]


def make_worker(num_blocks: int, graphs: GraphConfig = EAGER) -> Worker:
    """A worker with model, a cache of so many blocks, and graphs."""
    config = make_config(
        MODEL, device="npu", dtype="float16", block_size=BLOCK_SIZE, num_gpu_blocks_override=num_blocks
    )
    worker = Worker(msgspec.structs.replace(config, graphs=graphs))
    worker.load_model()
    worker.initialize_cache(worker.determine_num_blocks())
    return worker


def moved(costs: Costs) -> tuple[int, int]:
    """Bytes that all operators read, and wrote."""
    return sum(cost.read for cost in costs.values()), sum(cost.written for cost in costs.values())


def weight_bytes() -> int:
    """Of all weights but the embeddings, of which a step reads a row per token, in float16."""
    sizes = 0
    for path in pathlib.Path(MODEL).glob("*.safetensors"):
        weights = safetensors.torch.load_file(path)
        sizes += sum(weight.numel() for name, weight in weights.items() if "embed" not in name)
    return 2 * sizes


def activation_bytes(num_tokens: int) -> int:
    """The most that layers may write for so many tokens: a token's hidden state 45 times each."""
    return 45 * LAYERS * num_tokens * HIDDEN_BYTES


def costs_by_kind(worker: Worker) -> dict[str, Costs]:
    """Of two prompts, a decoding step of both, and a step that copies a block before both decode."""
    with Driver(worker) as driver:
        for name in ("a", "b"):
            driver.add(name, make_prompt(PROMPT), GREEDY)
        costs = {"prompts": costs_of(driver.step)[1]}
        driver.step()
        costs["decode"] = costs_of(driver.step)[1]
        driver.free("b")
        driver.fork("b", "a", 5)
        costs["copy"] = costs_of(driver.step)[1]
        return costs


@pytest.fixture(scope="module")
def steps() -> dict[int, dict[str, Costs]]:
    """Of the number of blocks: costs by the kind of step."""
    return {num_blocks: costs_by_kind(make_worker(num_blocks)) for num_blocks in POOLS}


@pytest.mark.parametrize("kind", ["prompts", "decode", "copy"])
def test_steps_cost_the_same_whatever_the_size_of_the_cache(kind: str, steps: dict[int, dict[str, Costs]]) -> None:
    small, large = (steps[num_blocks][kind] for num_blocks in POOLS)
    assert small == large


def test_a_decoding_step_reads_weights_and_keys_once(steps: dict[int, dict[str, Costs]]) -> None:
    costs = steps[POOLS[0]]["decode"]
    read, written = moved(costs)
    keys = LAYERS * 2 * (PROMPT + 2) * KV_BYTES_PER_TOKEN
    # without a mask, which would be 4 MiB
    assert keys <= costs[ATTENDS].read < keys + 10_000
    assert weight_bytes() + keys <= read < 1.05 * (weight_bytes() + keys)
    assert costs[STORES].written == LAYERS * 2 * KV_BYTES_PER_TOKEN
    assert written < costs[STORES].written + activation_bytes(2)


def test_prompts_read_weights_once_and_the_mask_in_each_layer(steps: dict[int, dict[str, Costs]]) -> None:
    costs = steps[POOLS[0]]["prompts"]
    read, written = moved(costs)
    keys = LAYERS * 2 * PROMPT * KV_BYTES_PER_TOKEN
    assert costs[STORES].written == keys
    assert keys + LAYERS * MASK_BYTES <= costs[ATTENDS].read < 3 * keys + LAYERS * MASK_BYTES
    activations = activation_bytes(2 * PROMPT)
    assert read < LAYERS * MASK_BYTES + weight_bytes() + 3 * keys + activations
    assert written < keys + activations


def test_a_copy_of_a_block_moves_it_twice(steps: dict[int, dict[str, Costs]]) -> None:
    copy, decode = steps[POOLS[0]]["copy"], steps[POOLS[0]]["decode"]
    block = LAYERS * BLOCK_SIZE * KV_BYTES_PER_TOKEN
    assert copy[COPIES].written == block
    assert copy[COPIES].workspace == 0
    # into a buffer and out of it
    for more in (after - before for after, before in zip(moved(copy), moved(decode), strict=True)):
        assert 2 * block <= more < 2.1 * block


def test_a_replayed_step_moves_what_an_eager_one_does(steps: dict[int, dict[str, Costs]]) -> None:
    graphs = GraphConfig(mode=GraphMode.CAPTURED, capture_sizes=(2,), max_seq_len=2 * BLOCK_SIZE)
    replayed, eager = costs_by_kind(make_worker(POOLS[0], graphs))["decode"], steps[POOLS[0]]["decode"]
    for name in (ATTENDS, STORES, "aclnnMatmul", "aclnnSwiGlu"):
        assert (replayed[name].runs, replayed[name].read, replayed[name].written) == eager[name][1:4]
    # the host launches what follows the graph, and updates attention
    assert replayed[ATTENDS].launches == LAYERS
    assert (replayed["aclnnSwiGlu"].launches, eager["aclnnSwiGlu"].launches) == (0, LAYERS)
