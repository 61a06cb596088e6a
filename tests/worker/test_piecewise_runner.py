"""Padding of steps with prompts to the sizes of captures, on the CPU, where a replay computes the pass again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from ascend_vllm.attention.backend import ForwardBatch
from ascend_vllm.distributed.collectives import SingleRank
from ascend_vllm.layers.step_state import StepState, StepStateSpec
from ascend_vllm.platforms.interface import DeviceGraph, GraphRecorder
from ascend_vllm.worker.piecewise_runner import PiecewiseRunner

CPU = torch.device("cpu")
SIZES = (4, 8)
MAX_ROWS = 2


class Again(DeviceGraph):
    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def replay(self, host_arguments: Mapping[str, list[int]]) -> None:
        assert host_arguments == {}
        self._work()


class Recorder(GraphRecorder):
    def capture(self, work: Callable[[], None]) -> DeviceGraph:
        raise NotImplementedError

    def capture_pieces(self, work: Callable[[Callable[[], None]], None]) -> list[DeviceGraph]:
        work(lambda: None)
        return [Again(lambda: work(lambda: None))]


class Backend:
    """Of no attention layer."""

    def prepare(self, batch: ForwardBatch) -> None:
        """Of the step itself."""

    def prepare_split(self, batch: ForwardBatch, splitter: object) -> None:
        """Of a capture."""


class Pass:
    """A model without layers: a token's hidden state is what it can see of the step."""

    def __init__(self) -> None:
        self.outputs = {size: torch.zeros(size, 4) for size in SIZES}
        self.sizes: list[int] = []

    def __call__(self, batch: ForwardBatch, metadata: Any = None) -> torch.Tensor:  # noqa: ARG002 - there is no attention
        size = len(batch.input_ids)
        self.sizes.append(size)
        # as rotary positions find the row of a token that depend on its length
        rows = torch.searchsorted(batch.query_start[1:-1].long(), torch.arange(size), right=True)
        parts = (batch.input_ids, batch.slot_mapping, batch.seq_lens[rows], batch.state["scale"][rows])
        return self.outputs[size].copy_(torch.stack([part.float() for part in parts], dim=1))


def make_batch(lengths: list[int], state: Mapping[str, torch.Tensor]) -> ForwardBatch:
    """Rows of prompts."""
    ends, count = np.cumsum([0, *lengths]).astype(np.int32), sum(lengths)
    seq_lens = np.array(lengths, np.int32)
    return ForwardBatch(
        input_ids=torch.arange(100, 100 + count),
        positions=torch.arange(count),
        slot_mapping=torch.arange(32, 32 + count),
        query_start=torch.from_numpy(ends),
        seq_lens=torch.from_numpy(seq_lens),
        block_table=torch.zeros(len(lengths), 1, dtype=torch.int32),
        logits_indices=torch.from_numpy(ends[1:]).long() - 1,
        query_start_np=ends,
        seq_lens_np=seq_lens,
        max_query_len=max(lengths),
        max_seq_len=max(lengths),
        state=state,
    )


def make_runner(state: StepState, forward: Any, recorder: GraphRecorder) -> PiecewiseRunner:
    backend: Any = Backend()
    return PiecewiseRunner(SIZES, MAX_ROWS, CPU, state, backend, forward, recorder, SingleRank())


@pytest.fixture
def state() -> StepState:
    made = StepState(SIZES[-1], MAX_ROWS + 1, CPU)
    made.declare(StepStateSpec("scale", torch.float32, fill=1, is_per_row=True))
    return made


def test_padding_is_a_row_of_its_own(state: StepState) -> None:
    forward = Pass()
    runner = make_runner(state, forward, Recorder())
    runner.capture()
    forward.sizes.clear()
    # as many rows as there can be; then fewer, of which the last ones' entries are still there
    for lengths, scales in (([3, 2], [0.5, 0.25]), ([3], [2.0]), ([4], [3.0])):
        values = state.write({"scale": torch.tensor(scales)})
        state.is_plain = False
        hidden = runner.run(make_batch(lengths, values))
        assert hidden is not None and len(hidden) == sum(lengths)
        expected = [[length, scale] for length, scale in zip(lengths, scales, strict=True) for _ in range(length)]
        assert hidden[:, 2:].tolist() == expected
        assert hidden[:, 0].tolist() == list(range(100, 100 + sum(lengths)))
        padding = forward.outputs[forward.sizes[-1]][sum(lengths) :]
        assert padding[:, 1:].tolist() == [[-1, 1, 1]] * len(padding)
    assert forward.sizes == [8, 4, 4]
    assert runner.run(make_batch([5, 4], values)) is None


def test_where_one_pass_cannot_be_captured_nothing_is_replayed(
    state: StepState, package_log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> list[DeviceGraph]:
        raise RuntimeError("no streams are left")

    monkeypatch.setattr(Recorder, "capture_pieces", fails)
    runner = make_runner(state, Pass(), Recorder())
    runner.capture()
    assert "graphs of 8 tokens cannot be captured (no streams are left)" in package_log.text
    assert runner.output_bytes() == 0
    assert runner.run(make_batch([3], {})) is None
