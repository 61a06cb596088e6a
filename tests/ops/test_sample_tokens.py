"""Samples follow their distributions and do not depend on other rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from ascend_vllm.ops.sampling import apply_penalties, philox4x32, philox_uniform, sample_tokens

LOGITS = [2.0, 1.5, -1.0, 0.0, 1.5, 3.0, -4.0, 0.5, 2.5, 1.0, -0.5, 2.0]
DRAWS = 20_000


pytestmark = pytest.mark.usefixtures("isa")


def _sample(
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seeds: torch.Tensor | int = 0,
    positions: torch.Tensor | int = 0,
) -> torch.Tensor:
    rows = logits.shape[0]
    seed_row = seeds if isinstance(seeds, torch.Tensor) else torch.full((rows,), seeds)
    position_row = positions if isinstance(positions, torch.Tensor) else torch.full((rows,), positions)
    return sample_tokens(
        logits,
        torch.full((rows,), temperature),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        seed_row,
        position_row,
    )


def _distribution(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Exact probabilities by the definition: one token at a time, in descending order."""
    scores = np.array(logits, dtype=np.float64) / temperature
    probabilities = np.exp(scores - scores.max())
    probabilities /= probabilities.sum()
    left = {i for i, p in enumerate(probabilities) if p >= min_p * probabilities.max()}
    if top_k > 0 and len(left) > top_k:
        kth = sorted((logits[i] for i in left), reverse=True)[top_k - 1]
        left = {i for i in left if logits[i] >= kth}
    if top_p < 1:
        total = sum(probabilities[i] for i in left)
        left = {i for i in left if sum(probabilities[j] for j in left if logits[j] > logits[i]) < top_p * total}
    kept = np.array([p if i in left else 0.0 for i, p in enumerate(probabilities)])
    return kept / kept.sum()


SETTINGS = {
    "plain": (1.0, 0, 1.0, 0.0),
    "cold": (0.4, 0, 1.0, 0.0),
    "hot": (3.0, -1, 1.0, 0.0),
    "top_k": (1.0, 5, 1.0, 0.0),
    "top_k ends in a tie": (1.0, 6, 1.0, 0.0),
    "top_k of all": (1.0, 12, 1.0, 0.0),
    "top_p": (1.0, 0, 0.7, 0.0),
    "top_p of nearly all": (1.0, 0, 0.999, 0.0),
    "min_p": (1.0, 0, 1.0, 0.15),
    "all": (1.4, 8, 0.9, 0.05),
    "min_p leaves fewer than top_k": (0.8, 9, 0.95, 0.3),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("by", ["position", "seed"])
def test_draws_follow_the_exact_distribution(setting: str, by: str) -> None:
    temperature, top_k, top_p, min_p = SETTINGS[setting]
    count = torch.arange(DRAWS)
    logits = torch.tensor(LOGITS).to(torch.bfloat16).repeat(DRAWS, 1)
    drawn = _sample(
        logits,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seeds=count if by == "seed" else 1234,
        positions=count if by == "position" else 17,
    )
    expected = _distribution(LOGITS, temperature, top_k, top_p, min_p) * DRAWS
    observed = torch.bincount(drawn, minlength=len(LOGITS)).numpy()
    assert not observed[expected == 0].any(), "a token that the filters removed was drawn"
    kept = expected > 0
    assert stats.chisquare(observed[kept], expected[kept]).pvalue > 1e-3


def test_a_large_vocabulary_follows_the_exact_distribution() -> None:
    """Many blocks, a k beyond the number of blocks, and tokens far apart in the row."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(20_003, generator=generator) - 4
    heavy = torch.randperm(20_003, generator=generator)[:40]
    logits[heavy] += 9
    temperature, top_k, top_p, min_p = 1.3, 2000, 0.8, 0.001
    rows = 4_000
    drawn = _sample(
        logits.expand(rows, -1),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        positions=torch.arange(rows),
    )
    expected = _distribution(logits.tolist(), temperature, top_k, top_p, min_p) * rows
    observed = torch.bincount(drawn, minlength=len(expected)).numpy()
    assert not observed[expected == 0].any()
    common = expected >= 5
    rest = np.array([observed[~common].sum()]), np.array([expected[~common].sum()])
    observed = np.concatenate([observed[common], rest[0]])
    expected = np.concatenate([expected[common], rest[1]])
    present = expected > 0
    assert stats.chisquare(observed[present], expected[present]).pvalue > 1e-3


def test_philox_gives_the_known_answers() -> None:
    """Test vectors of the generator's authors (Random123, kat_vectors)."""

    def words(*values: int) -> list[torch.Tensor]:
        return [torch.tensor([value]) for value in values]

    def run(counter: list[torch.Tensor], key: list[torch.Tensor]) -> list[int]:
        return [int(word) for word in philox4x32(counter, key)]

    ones = 0xFFFFFFFF
    assert run(words(0, 0, 0, 0), words(0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert run(words(ones, ones, ones, ones), words(ones, ones)) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert run(words(0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), words(0xA4093822, 0x299F31D0)) == [
        0xD16CFE09,
        0x94FDCCEB,
        0x5001E420,
        0x24126EA1,
    ]
    zero = torch.zeros(1, dtype=torch.int64)
    assert float(philox_uniform(zero, zero)) == ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53


def test_uniform_numbers_are_uniform() -> None:
    count = torch.arange(DRAWS)
    same = torch.full((DRAWS,), 99)
    for seeds, positions in ((same, count), (count, same)):
        numbers = philox_uniform(seeds, positions)
        assert float(numbers.min()) >= 0 and float(numbers.max()) < 1
        assert stats.kstest(numbers.numpy(), "uniform").pvalue > 1e-3
        assert abs(float(torch.corrcoef(torch.stack([numbers[:-1], numbers[1:]]))[0, 1])) < 0.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [50, 40_001])
def test_a_row_depends_on_nothing_but_itself(dtype: torch.dtype, vocab: int) -> None:
    """Alone or in a batch, first or last, on one thread or more: the same token."""
    generator = torch.Generator().manual_seed(1)
    rows = 9
    logits = torch.randn(rows, vocab, generator=generator).to(dtype)
    arguments = [
        logits,
        torch.rand(rows, generator=generator) + 0.5,
        torch.tensor([0, 40, 0, 3, 0, 0, 7, 0, 300], dtype=torch.int32),
        torch.tensor([1.0, 1.0, 0.9, 0.9, 0.5, 1.0, 1.0, 0.99, 0.8]),
        torch.tensor([0, 0.0, 0, 0, 0, 0.1, 0.01, 0, 0]),
        torch.randint(0, 2**62, (rows,), generator=generator),
        torch.arange(rows) * 5,
    ]
    together = sample_tokens(*arguments)
    assert torch.equal(sample_tokens(*arguments), together)
    assert torch.equal(sample_tokens(*(argument.flip(0) for argument in arguments)).flip(0), together)
    alone = torch.cat([sample_tokens(*(argument[row : row + 1] for argument in arguments)) for row in range(rows)])
    assert torch.equal(alone, together)
    torch.set_num_threads(1 if torch.get_num_threads() > 1 else 2)
    assert torch.equal(sample_tokens(*arguments), together)


def test_another_seed_or_position_gives_other_tokens() -> None:
    logits = torch.zeros(64, 1000)
    count = torch.arange(64)
    first = _sample(logits, seeds=1, positions=count)
    assert torch.equal(first, _sample(logits, seeds=1, positions=count))
    assert (first == _sample(logits, seeds=2, positions=count)).sum() < 8
    assert (first == _sample(logits, seeds=1, positions=count + 64)).sum() < 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_temperature_zero_takes_the_first_largest(dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 5000, dtype=dtype)
    logits[0, 4321] = logits[0, 4999] = 1.0
    logits[1] = float("-inf")
    logits[1, 700] = -3.0
    logits[2, 10] = float("inf")
    assert _sample(logits, temperature=0.0).tolist() == [4321, 700, 10]
    # non-finite rows
    assert _sample(logits[2:], temperature=1.0).tolist() == [10]
    assert _sample(torch.full((1, 9), float("-inf")), temperature=1.0).tolist() == [0]


def test_strided_rows_are_read_where_they_are() -> None:
    wide = torch.randn(6, 100, generator=torch.Generator().manual_seed(3))
    view = wide[::2, 20:60]
    assert torch.equal(_sample(view, seeds=4), _sample(view.contiguous(), seeds=4))
    with pytest.raises(RuntimeError, match="logits must be contiguous in its last dimension"):
        _sample(wide.T)


def test_a_wrong_dtype_is_refused_by_name() -> None:
    with pytest.raises(RuntimeError, match="top_k must be a contiguous Int tensor"):
        sample_tokens(
            torch.zeros(1, 4),
            *[torch.ones(1)] * 4,
            torch.zeros(1, dtype=torch.int64),
            torch.zeros(1, dtype=torch.int64),
        )


def test_penalties_by_hand() -> None:
    logits = torch.tensor([[1.0, -1.0, 2.0, 4.0, 0.5], [1.0, 1.0, 1.0, 1.0, 1.0]])
    # slot 1: prompt [0, 1], output [2, 2, 0]; slot 0 is another request's; what lies past the length is stale
    token_ids = torch.tensor([[4, 4, 4, 4, 4, 4], [0, 1, 2, 2, 0, 3], [3, 3, 3, 3, 3, 3]], dtype=torch.int32)
    apply_penalties(
        logits,
        token_ids,
        torch.tensor([1, 2]),
        torch.tensor([2, 0], dtype=torch.int32),
        torch.tensor([5, 0], dtype=torch.int32),
        torch.tensor([2.0, 2.0]),
        torch.tensor([0.25, 1.0]),
        torch.tensor([0.5, 1.0]),
    )
    expected = [1.0 / 2 - 0.25 - 0.5, -1.0 * 2, 2.0 / 2 - 0.5 - 0.5, 4.0, 0.5]
    assert torch.allclose(logits[0], torch.tensor(expected))
    assert torch.equal(logits[1], torch.ones(5)), "an empty sequence is not penalised"
