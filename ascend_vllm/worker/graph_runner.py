"""Decoding by graphs: what a step launches is captured once for each gear and replayed, padded, from then on.

A gear is a number of rows. All graphs read the same static buffers, of which a smaller gear takes the front, so that
a step is brought in by a few copies. A row that pads a batch computes a token that nobody reads: it is stored
nowhere and sees one token of the cache's first block.

Letters: G rows of the largest gear, g of the gear at hand, R rows of a step, B most blocks of a row in a graph,
H hidden size.
"""

from __future__ import annotations

import bisect
import dataclasses
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
import tqdm

from ascend_vllm.attention.backend import AttentionBackend, ForwardBatch
from ascend_vllm.config.graphs import GraphConfig
from ascend_vllm.errors import ConfigError
from ascend_vllm.logger import init_logger
from ascend_vllm.platforms.interface import DeviceGraph, GraphRecorder

logger = init_logger(__name__)

# batch → [T, H] of its tokens
Forward = Callable[[ForwardBatch], torch.Tensor]

# where the token of a row that pads is stored: nowhere
_NOWHERE = -1


class StaticInputs:
    """The buffers that graphs read.

    Args:
        num_rows: G.
        num_blocks: B.
        device: of the buffers.
    """

    def __init__(self, num_rows: int, num_blocks: int, device: torch.device) -> None:
        # [G] int64 each
        self.input_ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.slot_mapping = torch.full((num_rows,), _NOWHERE, dtype=torch.int64, device=device)
        # [G] int32
        self.seq_lens = torch.ones(num_rows, dtype=torch.int32, device=device)
        # [G, B] int32
        self.block_table = torch.zeros(num_rows, num_blocks, dtype=torch.int32, device=device)
        # [G+1] int32: 0, 1, …
        self._query_start_np = np.arange(num_rows + 1, dtype=np.int32)
        self._query_start = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self._indices = torch.arange(num_rows, dtype=torch.int64, device=device)

    @property
    def num_blocks(self) -> int:
        """B."""
        return self.block_table.shape[1]

    def batch(self, gear: int) -> ForwardBatch:
        """The batch that a gear computes: views of the buffers, each row with the shortest length there is."""
        return ForwardBatch(
            input_ids=self.input_ids[:gear],
            positions=self.positions[:gear],
            slot_mapping=self.slot_mapping[:gear],
            query_start=self._query_start[: gear + 1],
            seq_lens=self.seq_lens[:gear],
            block_table=self.block_table[:gear],
            logits_indices=self._indices[:gear],
            query_start_np=self._query_start_np[: gear + 1],
            seq_lens_np=np.ones(gear, np.int32),
            max_query_len=1,
            max_seq_len=1,
        )

    def fill(self, batch: ForwardBatch, gear: int) -> None:
        """Brings a step in.

        Args:
            batch: R rows of one token each.
            gear: g, R or more.
        """
        num_rows, width = batch.block_table.shape
        self.input_ids[:num_rows].copy_(batch.input_ids)
        self.positions[:num_rows].copy_(batch.positions)
        self.slot_mapping[:num_rows].copy_(batch.slot_mapping)
        self.seq_lens[:num_rows].copy_(batch.seq_lens)
        # behind a row's blocks there may be those of a step before: nothing reads them
        self.block_table[:num_rows, :width].copy_(batch.block_table)
        if gear > num_rows:
            self.positions[num_rows:gear].zero_()
            self.slot_mapping[num_rows:gear].fill_(_NOWHERE)
            self.seq_lens[num_rows:gear].fill_(1)
            self.block_table[num_rows:gear, :1].zero_()


def padded_lens(batch: ForwardBatch, gear: int) -> list[int]:
    """[g] tokens of each row with this step's, padding included: on the host, for operators that want them there."""
    return [*batch.seq_lens_np.tolist(), *[1] * (gear - len(batch.seq_lens_np))]


@dataclasses.dataclass(frozen=True, slots=True)
class _CapturedGear:
    graph: DeviceGraph
    # [g, H]: what every replay writes
    hidden: torch.Tensor


class GraphRunner:
    """Replays captured graphs for decoding steps.

    Args:
        config: gears, and the longest sequence that graphs serve.
        backend: of the captured attention.
        forward: what is captured.
        recorder: captures it.
        block_size: tokens of a KV block.
        device: where everything computes.
    """

    def __init__(
        self,
        config: GraphConfig,
        backend: AttentionBackend,
        forward: Forward,
        recorder: GraphRecorder,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._gears = config.gears
        self._max_seq_len = config.max_seq_len
        self._backend = backend
        self._forward = forward
        self._recorder = recorder
        self._inputs = StaticInputs(config.gears[-1], -(-config.max_seq_len // block_size), device)
        self._captured: dict[int, _CapturedGear] = {}

    def capture(self, *, only_largest: bool = False) -> None:
        """Captures the graphs, the largest first, so that the others fit in the memory it took.

        Args:
            only_largest: for who wants to know that memory.

        Raises:
            ConfigError: the device refuses one.
        """
        start = time.monotonic()
        gears = [self._gears[-1]] if only_largest else list(reversed(self._gears))
        for gear in tqdm.tqdm(gears, desc="Capturing graphs", unit="graph", disable=only_largest):
            try:
                self._captured[gear] = self._capture_gear(gear)
            except RuntimeError as error:
                raise ConfigError(
                    f"The decoding graph of {gear} sequences cannot be captured: {error}. Use fewer or smaller "
                    "gears, a smaller --max-num-seqs or --gpu-memory-utilization, or --enforce-eager."
                ) from error
        if not only_largest:
            logger.info("Captured %d graphs in %.2f s", len(gears), time.monotonic() - start)

    def output_bytes(self) -> int:
        """Bytes that all graphs but the largest return, judged by the largest."""
        row = self._captured[self._gears[-1]].hidden[0]
        return sum(self._gears[:-1]) * row.nbytes

    def run(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Computes a decoding step by a graph.

        Returns:
            [R, H], valid until the next run; None if no graph serves the step: it has prompts, more rows than the
            largest gear or a sequence that is too long.
        """
        num_rows = batch.input_ids.shape[0]
        if batch.max_query_len > 1 or num_rows > self._gears[-1] or batch.max_seq_len > self._max_seq_len:
            return None
        gear = self._gears[bisect.bisect_left(self._gears, num_rows)]
        captured = self._captured[gear]
        self._inputs.fill(batch, gear)
        captured.graph.replay(self._host_arguments(padded_lens(batch, gear)))
        return captured.hidden[:num_rows]

    def _capture_gear(self, gear: int) -> _CapturedGear:
        batch = self._inputs.batch(gear)
        # what is made once, in the first call of an operator, must not become part of the graph
        self._forward(batch)
        outputs: list[torch.Tensor] = []
        graph = self._recorder.capture(lambda: outputs.append(self._forward(batch)))
        return _CapturedGear(graph, outputs[0])

    def _host_arguments(self, seq_lens: list[int]) -> Mapping[str, list[int]]:
        arguments = self._backend.replay_arguments(seq_lens)
        if arguments is None:
            raise RuntimeError(f"attention backend {self._backend.name} cannot be replayed")
        return arguments
