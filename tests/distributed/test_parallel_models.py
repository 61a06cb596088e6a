"""Sharded layers and models: the ranks together compute the same as a single one."""

from __future__ import annotations

import pathlib

import pytest
import torch
from safetensors.torch import save_file

from ascend_vllm.config.model import LoadConfig
from ascend_vllm.distributed.parallel_context import ParallelContext, Shard
from ascend_vllm.errors import ConfigError
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.layers.embedding import LMHead, VocabParallelEmbedding
from ascend_vllm.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear
from ascend_vllm.models.checkpoint import SafetensorsFile
from ascend_vllm.models.loader import load_model
from tests.distributed.thread_ranks import on_ranks
from tests.models.paged_driver import PagedDriver, make_model_config
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import make_prompt

# 4 heads each; KV heads: 2, 1, 2, 4
MODELS = ("odd", "llama-biases", "qwen3", "opt-post-norm")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_compute_what_one_computes(name: str, size: int, odd_model: str) -> None:
    config = make_model_config(odd_model if name == "odd" else tiny_model(name))
    prompts = {0: make_prompt(37, seed=1), 1: make_prompt(5, seed=2)}

    def run(context: BuildContext) -> list[torch.Tensor]:
        driver = PagedDriver(config, model=load_model(config, LoadConfig(use_tqdm=False), context))
        first = driver.step(prompts)
        second = driver.step({row: [int(logprobs[-1].argmax())] for row, logprobs in first.items()})
        return [*first.values(), *second.values()]

    (expected,) = on_ranks(1, run)
    by_rank = on_ranks(size, run)
    for results in by_rank:
        for result, one, of_first_rank in zip(results, expected, by_rank[0], strict=True):
            torch.testing.assert_close(result, one, rtol=1e-4, atol=1e-4)
            assert torch.equal(result, of_first_rank)


def _fill(layer: Linear | VocabParallelEmbedding) -> dict[str, torch.Tensor]:
    weights = {}
    for index, slot in enumerate(layer.slots()):
        weights[slot.name] = torch.randn(slot.shape, generator=torch.Generator().manual_seed(index))
        slot.fill(weights[slot.name])
    layer.after_load()
    return weights


def test_a_bias_is_added_once() -> None:
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(3))

    def run(context: BuildContext) -> tuple[torch.Tensor, torch.Tensor]:
        layer = RowParallelLinear(context, "down_proj", 24, 10, bias=True)
        weights = _fill(layer)
        part = x.chunk(context.parallel.tp_size, dim=-1)[context.parallel.tp_rank].contiguous()
        return layer.forward(part), x @ weights["down_proj.weight"].T + weights["down_proj.bias"]

    for result, expected in on_ranks(3, run):
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize(("vocab_size", "size"), [(397, 4), (384, 2), (5, 2), (33, 3)])
def test_head_and_embedding_of_any_vocabulary(vocab_size: int, size: int) -> None:
    ids = torch.arange(vocab_size)
    x = torch.randn(6, 24, generator=torch.Generator().manual_seed(3))

    def run(context: BuildContext) -> None:
        head = LMHead(context, "lm_head", 24, vocab_size, bias=True)
        weights = _fill(head)
        logits = head.forward(x)
        assert logits.is_contiguous()
        torch.testing.assert_close(logits, x @ weights["lm_head.weight"].T + weights["lm_head.bias"])
        embedding = VocabParallelEmbedding(context, "embed_tokens", vocab_size, 24)
        table = _fill(embedding)["embed_tokens.weight"]
        assert torch.equal(embedding.forward(ids), table)

    on_ranks(size, run)


@pytest.mark.parametrize(("total", "size"), [(397, 4), (151936, 8), (50257, 2), (5, 2), (48, 3)])
def test_parts_of_a_vocabulary_cover_it(total: int, size: int) -> None:
    shards = [ParallelContext(rank, size).shard_vocabulary(total) for rank in range(size)]
    assert [shard.start for shard in shards] == [sum(s.size for s in shards[:rank]) for rank in range(size)]
    assert sum(shard.size for shard in shards) == total
    assert max(shard.size for shard in shards) <= ParallelContext(0, size).padded_part(total)
    assert ParallelContext().shard_vocabulary(total) == Shard(0, total)


def test_a_vocabulary_with_nothing_for_the_last_rank_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 4 .* vocabulary of 5"):
        ParallelContext(0, 4).shard_vocabulary(5)


def test_a_row_s_sum_does_not_depend_on_the_rows_beside_it() -> None:
    x = torch.randn(9, 24, generator=torch.Generator().manual_seed(3))

    def run(context: BuildContext) -> tuple[torch.Tensor, torch.Tensor]:
        layer = RowParallelLinear(context, "down_proj", 24, 10)
        _fill(layer)
        part = x.chunk(context.parallel.tp_size, dim=-1)[context.parallel.tp_rank].contiguous()
        return layer.forward(part)[4:5], layer.forward(part[4:5])

    for together, alone in on_ranks(4, run):
        assert torch.equal(together, alone)


# ---- loading ----------------------------------------------------------------------------------------------


def _resident_bytes(path: pathlib.Path) -> int:
    """Pages of a file that this process has touched through its mappings."""
    total, inside = 0, False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        key, _, rest = line.partition(" ")
        if "-" in key and not key.endswith(":"):
            inside = rest.endswith(str(path))
        elif inside and key == "Rss:":
            total += int(rest.split()[0]) * 1024
    return total


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_a_rank_reads_its_part_of_a_file(
    kind: type[ColumnParallelLinear | RowParallelLinear], tmp_path: pathlib.Path
) -> None:
    """The kernel maps pages as they are touched, up to 2 MiB of their neighbours with them."""
    path = tmp_path / "model.safetensors"
    # 64 MiB, in two long rows where columns are split
    outputs, inputs = (2, 1 << 23) if kind is RowParallelLinear else (1 << 18, 64)
    save_file({"proj.weight": torch.ones(outputs, inputs)}, str(path))
    layer = kind(BuildContext(torch.float32, torch.device("cpu"), ParallelContext(1, 4)), "proj", inputs, outputs)
    (slot,) = layer.slots()
    read = []
    for name, tensor in SafetensorsFile(path).tensors(["proj.weight"]):
        read.append(name)
        assert _resident_bytes(path) < tensor.nbytes / 8
        slot.fill(tensor)
        assert tensor.nbytes / 4 <= _resident_bytes(path) < tensor.nbytes / 2
    assert read == ["proj.weight"]
