"""Notes which steps are computed from tapes, while an engine of the same process runs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ascend_vllm.attention.backend import ForwardBatch
from ascend_vllm.types.step import SchedulerOutput, StepOutput
from ascend_vllm.worker.plain_decoding import PlainDecoder
from ascend_vllm.worker.sampling.columns import Int64Array
from ascend_vllm.worker.tape_runner import TapeRunner


@dataclasses.dataclass
class TapedSteps:
    """Steps that were replayed or recorded, in the order in which they ran.

    Attributes:
        layers: rows and tokens of each row, of steps whose layers alone were.
        whole: rows of steps that were with head and sampler.
    """

    layers: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    whole: list[int] = dataclasses.field(default_factory=list)

    @property
    def num_rows(self) -> list[int]:
        """Rows of both kinds of steps."""
        return [*(rows for rows, _ in self.layers), *self.whole]


def note_taped_steps(monkeypatch: pytest.MonkeyPatch) -> TapedSteps:
    """Notes the steps of all engines until the end of the test."""
    steps = TapedSteps()
    run_layers, run_whole = TapeRunner.run, PlainDecoder.run

    def note_layers(self: TapeRunner, batch: ForwardBatch) -> torch.Tensor | None:
        hidden = run_layers(self, batch)
        if hidden is not None:
            steps.layers.append((len(batch.seq_lens), batch.max_query_len))
        return hidden

    def note_whole(self: PlainDecoder, step: SchedulerOutput, slots: Int64Array) -> StepOutput | None:
        output = run_whole(self, step, slots)
        if output is not None:
            steps.whole.append(len(slots))
        return output

    monkeypatch.setattr(TapeRunner, "run", note_layers)
    monkeypatch.setattr(PlainDecoder, "run", note_whole)
    return steps
