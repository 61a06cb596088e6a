"""edit_and_sample against the op's reference, and against the CPU's own sampler: the same tokens."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from ascend_vllm.ops.fused_sampling import edit_and_sample
from ascend_vllm.ops.registry import OPS
from ascend_vllm.ops.sampling import sample_tokens
from tests.npu_kernels.conftest import Kernels, Work

SPEC = OPS[edit_and_sample.name().split("::")[1]]
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
NAMES = tuple(SPEC.reference.__annotations__)[:-2]


def run(kernels: Kernels, arguments: tuple[Any, ...], *, cores: int = 3) -> tuple[torch.Tensor, Work]:
    """The ids, [S]; rows of logits lie apart, as those of a padded vocabulary do."""
    logits, *tensors, nothing = arguments
    rows, vocab = logits.shape
    padded = torch.full((rows, vocab + 8), 1e4, dtype=logits.dtype)
    padded[:, :vocab] = logits
    bitmask = tensors[NAMES.index("bitmask") - 1]
    ids = torch.full((rows,), -7)
    numbers = (TYPES[logits.dtype], rows, vocab, vocab + 8, bitmask.shape[1], nothing)
    counts = tensors.pop(0)
    work = kernels.run("edit_and_sample", (padded, *tensors), (counts, ids), numbers, cores=cores)
    return ids, work


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_gives_the_reference_s_tokens_and_counts(kernels: Kernels, dtype: torch.dtype) -> None:
    # 16-bit logits differ in how they are loaded only
    for case, arguments in enumerate(
        itertools.islice(SPEC.inputs(dtype), 0, None, 1 if dtype == torch.float32 else 5)
    ):
        expected_counts = arguments[1].clone()
        expected = SPEC.reference(arguments[0], expected_counts, *arguments[2:])
        ids, _ = run(kernels, arguments, cores=1 + case % 4)
        assert torch.equal(ids, expected), f"input {case}"
        assert torch.equal(arguments[1], expected_counts), f"input {case}"


# filters of a row: temperature, top_k, top_p, min_p
FILTERS = {
    "plain": (1.0, 0, 1.0, 0.0),
    "cold": (0.3, 0, 1.0, 0.0),
    "top_k": (1.0, 50, 1.0, 0.0),
    "top_k of more than there are blocks": (1.0, 2500, 1.0, 0.0),
    "top_p": (0.8, 0, 0.9, 0.0),
    "top_p of nearly all": (1.5, 0, 0.9999, 0.0),
    "min_p": (1.0, 0, 1.0, 0.02),
    "all": (1.2, 40, 0.95, 0.01),
    "min_p leaves fewer than top_k": (0.8, 1000, 0.95, 0.2),
    "greedy": (0.0, 0, 1.0, 0.0),
}


def large_rows(
    rows: int, vocab: int, dtype: torch.dtype, filters: tuple[float, int, float, float]
) -> tuple[Any, ...]:
    """Logits as models have them: most far below a few."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(rows, vocab, generator=generator) * 2.5
    logits.scatter_add_(1, torch.randint(0, vocab, (rows, 60), generator=generator), torch.full((rows, 60), 9.0))
    none = torch.full((rows,), -1)
    ones = torch.ones(rows)
    temperature, top_k, top_p, min_p = (torch.full((rows,), value) for value in filters)
    return (
        logits.to(dtype),
        torch.zeros(1, vocab, dtype=torch.int16),
        *(none, none, ones, 0 * ones, 0 * ones),
        torch.zeros(1, -(-vocab // 32), dtype=torch.int32),
        none,
        *(temperature, top_k.to(torch.int32), top_p, min_p),
        torch.arange(rows) * 7919,
        torch.arange(rows) + 100,
        -1,
    )


@pytest.mark.parametrize("name", FILTERS)
def test_gives_the_tokens_of_the_cpu_s_sampler(kernels: Kernels, name: str) -> None:
    """Over several tiles, and for kept tokens that do not fit into the unified buffer."""
    arguments = large_rows(24, 20_003, torch.float32, FILTERS[name])
    ids, _ = run(kernels, arguments, cores=5)
    assert torch.equal(ids, sample_tokens(arguments[0], *arguments[9:15]))


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        ("greedy", 1.1),
        ("plain", 2.2),
        ("top_k", 2.2),
        ("top_p", 3.2),
        ("all", 2.2),
        ("top_k of more than there are blocks", 18),
    ],
)
def test_how_often_the_vocabulary_is_read(kernels: Kernels, name: str, passes: float) -> None:
    arguments = large_rows(1, 50_000, torch.bfloat16, FILTERS[name])
    _, work = run(kernels, arguments)
    assert 1.0 <= work.bytes_in / (50_000 * 2) <= passes
    assert work.bytes_out == 8


def test_a_token_s_count_stays_at_its_largest(kernels: Kernels) -> None:
    arguments = list(large_rows(1, 70, torch.float32, FILTERS["greedy"]))
    arguments[1][0, 5] = 2**15 - 1
    arguments[2], arguments[3] = torch.tensor([0]), torch.tensor([5])
    run(kernels, tuple(arguments))
    assert arguments[1].tolist() == [[0] * 5 + [2**15 - 1] + [0] * 64]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((0, 1, 0, 8, 1, -1), "vocab: 0 is not in"),
        ((0, 1, 2**18 + 1, 2**19, 2**14, -1), "vocab: 262145 is not in"),
        ((0, 1, 8, 7, 1, -1), "logits_stride: rows overlap"),
        ((0, 1, 33, 33, 1, -1), "mask_words: fewer bits than tokens"),
    ],
)
def test_arguments_are_checked(kernels: Kernels, numbers: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernels.run("edit_and_sample", (torch.zeros(1),) * 14, (torch.zeros(1),) * 2, numbers)
