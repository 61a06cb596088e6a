"""Log-probabilities of the most likely tokens: the same in any batch and on any threads, with edge cases."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ascend_vllm.ops.sampling import token_logprobs

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


pytestmark = pytest.mark.usefixtures("isa")


def assert_as_defined(logits: torch.Tensor, token_ids: torch.Tensor, *nums_top: int) -> None:
    """Row by row, in float64, by sorting (logit, id) pairs, for several numbers of likeliest tokens."""
    vocab = logits.shape[1]
    truths = []
    for row, own in zip(logits.double().numpy(), token_ids.tolist(), strict=True):
        with np.errstate(all="ignore"):
            shifted = row - row.max()
            exact = shifted - np.log(np.exp(shifted).sum())
        is_distribution = not np.isnan(exact).any()
        order = np.lexsort((np.arange(vocab), -row)) if is_distribution else np.arange(vocab)
        truths.append((own, exact, order, 1 + (int((row > row[own]).sum()) if is_distribution else 0)))
    allowed = _log_softmax_error(logits)
    for num_top in nums_top:
        ids, logprobs, ranks = token_logprobs(logits, token_ids, num_top)
        width = 1 + min(num_top, vocab)
        assert ids.shape == logprobs.shape == (len(logits), width)
        assert (ids.dtype, logprobs.dtype, ranks.dtype) == (torch.int64, torch.float32, torch.int64)
        for (own, exact, order, rank), found_ids, found, found_rank in zip(truths, ids, logprobs, ranks, strict=True):
            assert found_ids.tolist() == [own, *order[: width - 1]]
            assert int(found_rank) == rank
            np.testing.assert_allclose(found.numpy(), exact[found_ids.numpy()], rtol=0, atol=allowed)


def _log_softmax_error(logits: torch.Tensor) -> float:
    """Twice the largest error of torch's float32 log_softmax, and a millionth for where it happens to have none."""
    difference = logits.float().log_softmax(-1).double() - logits.double().log_softmax(-1)
    difference = difference[difference.isfinite()].abs()
    return 2 * float(difference.max()) + 1e-6 if len(difference) else 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 255, 256, 257, 4097, 20_000, 151_936])
def test_all_sizes(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    for scale in (0.1, 3.0, 30.0):
        logits = (torch.randn(3, vocab, generator=generator) * scale).to(dtype)
        token_ids = torch.randint(0, vocab, (3,), generator=generator)
        assert_as_defined(logits, token_ids, 0, 1, 2, 7, 20, 300)


# few distinct values, so that most are ties, and non-finite values
VALUES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 80.0, -90.0, -torch.inf])
ODD_VALUES = st.one_of(VALUES, st.sampled_from([torch.inf, torch.nan, -torch.nan, 3e38]))


@given(
    st.lists(st.one_of(VALUES, ODD_VALUES), min_size=1, max_size=80),
    st.integers(1, 12),
    st.integers(0, 90),
    st.data(),
)
def test_ties_infinities_and_nan(row: list[float], copies: int, num_top: int, data: st.DataObject) -> None:
    logits = torch.tensor([row]).repeat(1, copies)
    own = data.draw(st.integers(0, logits.shape[1] - 1))
    assert_as_defined(logits, torch.tensor([own]), num_top)


def test_rising_falling_and_equal_logits() -> None:
    """All logits are candidates, at sizes where there is a bound and where there is none."""
    rising = torch.arange(20_001, dtype=torch.float32) / 1000
    steps = (rising * 3).floor()
    logits = torch.stack([rising, rising.flip(0), torch.zeros_like(rising), steps, steps.flip(0)])
    assert_as_defined(logits, torch.tensor([0, 1, 20_000, 777, 9999]), 3, 700, 20_001)


def test_masked_rows() -> None:
    """With fewer unmasked tokens than requested, the others follow in the order of their ids."""
    logits = torch.full((2, 3000), -torch.inf)
    logits[0, [2500, 40]] = torch.tensor([1.0, 0.0])
    logits[1, 2999] = -7.0
    ids, logprobs, ranks = token_logprobs(logits, torch.tensor([40, 5]), 4)
    assert ids.tolist() == [[40, 2500, 40, 0, 1], [5, 2999, 0, 1, 2]]
    assert ranks.tolist() == [2, 2]
    assert (logprobs[:, 3:] == -torch.inf).all() and logprobs[1, 0] == -torch.inf and logprobs[1, 1] == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [50, 40_001])
def test_a_row_depends_on_nothing_but_itself(dtype: torch.dtype, vocab: int) -> None:
    """Alone or in a batch, first or last, in wider rows, on one thread or more: the same bits."""
    generator = torch.Generator().manual_seed(1)
    rows = 9
    wide = (torch.randn(2 * rows, vocab + 3, generator=generator) * 2).to(dtype)
    logits, token_ids = wide[::2, 2:-1], torch.randint(0, vocab, (rows,), generator=generator)
    together = token_logprobs(logits, token_ids, 20)

    def assert_same(found: tuple[torch.Tensor, ...]) -> None:
        assert all(torch.equal(got, expected) for got, expected in zip(found, together, strict=True))

    assert_same(token_logprobs(logits.contiguous(), token_ids, 20))
    assert_same(tuple(part.flip(0) for part in token_logprobs(logits.flip(0), token_ids.flip(0), 20)))
    alone = [token_logprobs(logits[row : row + 1], token_ids[row : row + 1], 20) for row in range(rows)]
    assert_same(tuple(torch.cat(parts) for parts in zip(*alone, strict=True)))
    for other in (1, 2, 3):
        torch.set_num_threads(other)
        assert_same(token_logprobs(logits, token_ids, 20))


def test_wrong_arguments_are_refused_by_name() -> None:
    logits = torch.zeros(1, 4)
    with pytest.raises(IndexError, match="token 4 is outside the vocabulary of 4"):
        token_logprobs(logits, torch.tensor([4]), 1)
    with pytest.raises(IndexError, match="token -1 is outside"):
        token_logprobs(logits, torch.tensor([-1]), 1)
    with pytest.raises(RuntimeError, match="num_top must not be negative"):
        token_logprobs(logits, torch.tensor([0]), -1)
    with pytest.raises(RuntimeError, match="token_ids must be a contiguous Long tensor of 1 elements"):
        token_logprobs(logits, torch.tensor([0, 1]), 1)
    with pytest.raises(RuntimeError, match="logits must be contiguous in its last dimension"):
        token_logprobs(torch.zeros(4, 3).T, torch.tensor([0, 0, 0]), 1)
