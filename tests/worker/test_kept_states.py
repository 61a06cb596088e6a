"""Hidden states that are kept for EAGLE heads: the native call against a plain loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ascend_vllm.ops.kept_states import StateKeeper, copy_states
from ascend_vllm.ops.native import load_native_library

NUM_SLOTS, KEEPING, MOST, WIDTH, LAPSED = 6, 4, 3, 5, -1


@pytest.mark.skipif(not load_native_library(), reason="needs the compiled library")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_kept_while_there_is_room(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    kept = torch.zeros(KEEPING * MOST, WIDTH, dtype=dtype)
    counts, positions = np.zeros(NUM_SLOTS, np.int64), np.full(NUM_SLOTS, 7)
    positions[1] = LAPSED
    keeper = StateKeeper(kept, counts, positions, MOST, LAPSED)
    expected: dict[int, list[torch.Tensor]] = {slot: [] for slot in range(NUM_SLOTS)}
    for slots in ([0, 2, 5], [2, 1, 3], [2, 0], [3, 2]):
        states = torch.randn(len(slots), WIDTH, generator=generator).to(dtype)
        assert keeper.keep(np.array(slots), states)
        for slot, state in zip(slots, states, strict=True):
            expected[slot].append(state)
    # slot 1 had lapsed, slot 5 is not among those that are kept, slot 2 has had one too many
    assert positions.tolist() == [7, LAPSED, LAPSED, 7, 7, LAPSED]
    assert counts.tolist() == [2, 0, 3, 2, 0, 0]
    for slot in (0, 2, 3):
        count = counts[slot]
        assert torch.equal(kept[slot * MOST : slot * MOST + count], torch.stack(expected[slot][:count]))


def test_it_needs_contiguous_tensors_of_the_host() -> None:
    counts, slots, kept = np.zeros(2, np.int64), np.array([0, 1]), torch.zeros(4, 4)
    keeper = StateKeeper(kept, counts, counts.copy(), 2, LAPSED)
    states = torch.zeros(4, 2).T
    for wrong in (states, states.contiguous().to("meta"), torch.zeros(2, 4).half(), torch.zeros(2, 3)):
        assert not keeper.keep(slots, wrong)
    elsewhere = StateKeeper(kept.to("meta"), counts, counts.copy(), 2, LAPSED)
    assert not elsewhere.keep(slots, states.contiguous())
    assert not counts.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_copied_to_the_first_rows(dtype: torch.dtype) -> None:
    """Whatever their layout and dtype are; more rows than there is room for are refused."""
    states = torch.randn(6, 4, generator=torch.Generator().manual_seed(3)).to(dtype)
    for source in (states[:3], states[::2], states.float(), states.T.contiguous().T):
        target = torch.full((6, 4), 9.0, dtype=dtype)
        copy_states(target, source)
        assert torch.equal(target[: len(source)], source.to(dtype))
        assert (target[len(source) :] == 9.0).all()
    for wrong in (torch.zeros(7, 4, dtype=dtype), torch.zeros(2, 3, dtype=dtype)):
        with pytest.raises(RuntimeError):
            copy_states(torch.zeros(6, 4, dtype=dtype), wrong)
