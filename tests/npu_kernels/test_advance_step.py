"""advance_step against what it says it does, row by row."""

from __future__ import annotations

import pytest
import torch

from tests.npu_kernels.conftest import Kernels


@pytest.mark.parametrize(("rows", "cores"), [(1, 1), (31, 1), (33, 2), (100, 40), (1200, 2)])
@pytest.mark.parametrize("block_size", [64, 128])
def test_rows_move_on_or_stay(kernels: Kernels, rows: int, cores: int, block_size: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    max_blocks = 3
    limit = max_blocks * block_size
    positions = torch.randint(0, limit, (rows,), generator=generator)
    # the last of a block, and the last that there is room for
    positions[0] = block_size - 1
    positions[-1] = limit - 1
    seq_lens = (positions + 1).to(torch.int32)
    block_table = torch.randperm(rows * max_blocks, generator=generator).view(rows, max_blocks).to(torch.int32)
    stopped = torch.rand(rows, generator=generator) < 0.3
    sampled, input_ids = torch.randint(0, 1 << 40, (2, rows), generator=generator).unbind(0)
    input_ids = input_ids.clone()
    slots = torch.full((rows,), -7)
    outputs = [tensor.clone() for tensor in (input_ids, positions, seq_lens, slots)]
    numbers = (rows, block_size, max_blocks)
    kernels.run("advance_step", (sampled, block_table, stopped), outputs, numbers, cores=cores)
    moves = ~stopped & (positions + 1 < limit)
    after = torch.where(moves, positions + 1, positions)
    page = block_table.gather(1, (after // block_size)[:, None])[:, 0].long()
    assert torch.equal(outputs[0], torch.where(moves, sampled, input_ids))
    assert torch.equal(outputs[1], after)
    assert torch.equal(outputs[2], after.to(torch.int32) + 1)
    assert torch.equal(outputs[3], torch.where(moves, page * block_size + after % block_size, -1))


def test_no_rows(kernels: Kernels) -> None:
    kernels.run("advance_step", (torch.zeros(0),) * 3, (torch.zeros(0),) * 4, (0, 64, 1))


@pytest.mark.parametrize(("numbers", "name"), [((1, 0, 1), "block_size"), ((1, 64, 0), "max_blocks")])
def test_arguments_are_checked(kernels: Kernels, numbers: tuple[int, int, int], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        kernels.run("advance_step", (torch.zeros(1),) * 3, (torch.zeros(1),) * 4, numbers)
