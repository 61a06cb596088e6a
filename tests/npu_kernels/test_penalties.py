"""penalties against the op's reference, whose order of operations it keeps."""

from __future__ import annotations

import pytest
import torch

from ascend_vllm.ops.registry import OPS
from ascend_vllm.ops.sampling import apply_penalties
from tests.npu_kernels.conftest import Kernels

SPEC = OPS[apply_penalties.name().split("::")[1]]


@pytest.mark.parametrize("cores", [1, 5])
@pytest.mark.parametrize("number", range(8))
def test_matches_reference(kernels: Kernels, number: int, cores: int) -> None:
    logits, token_ids, slots, prompt_lens, seq_lens, *factors = list(SPEC.inputs(torch.float32))[number]
    rows, vocab = logits.shape
    expected = logits.clone()
    SPEC.reference(expected, token_ids, slots, prompt_lens, seq_lens, *factors)
    # rows lie apart, as those of a padded vocabulary do
    padded = torch.full((rows, vocab + 3), 9.0)
    padded[:, :vocab] = logits
    numbers = (rows, vocab, vocab + 3, token_ids.shape[1])
    kernels.run("penalties", (token_ids, slots, prompt_lens, seq_lens, *factors), (padded,), numbers, cores=cores)
    torch.testing.assert_close(padded[:, :vocab], expected, rtol=1e-6, atol=1e-6)
    assert bool((padded[:, vocab:] == 9.0).all())


def test_long_row_over_tiles_of_vocabulary_and_tokens(kernels: Kernels) -> None:
    generator = torch.Generator().manual_seed(1)
    vocab, length = 9000, 5000
    logits = torch.randn(1, vocab, generator=generator)
    token_ids = torch.randint(-5, vocab + 5, (2, length), generator=generator, dtype=torch.int32)
    slots, prompt_lens, seq_lens = torch.tensor([1]), torch.tensor([1999]), torch.tensor([4500])
    lengths = (prompt_lens.to(torch.int32), seq_lens.to(torch.int32))
    factors = (torch.tensor([1.2]), torch.tensor([0.3]), torch.tensor([0.7]))
    expected = logits.clone()
    SPEC.reference(expected, token_ids, slots, *lengths, *factors)
    kernels.run("penalties", (token_ids, slots, *lengths, *factors), (logits,), (1, vocab, vocab, length))
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("numbers", "message"), [((1, 0, 1, 1), "vocab: 0 is not in"), ((1, 8, 7, 1), "logits_stride: rows overlap")]
)
def test_arguments_are_checked(kernels: Kernels, numbers: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernels.run("penalties", (torch.zeros(1),) * 7, (torch.zeros(1),), numbers)
