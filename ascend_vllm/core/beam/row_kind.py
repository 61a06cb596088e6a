"""A beam search as the scheduler sees it: a request that waits, and its rows that run.

The request itself (the root) waits, ends and gets the outputs; while it runs each live beam is a row, a `Request`
with slot and blocks of its own. Rows share the blocks of what they have in common. A row that has sampled brings its
candidates and waits for the others; when all have theirs, `advance` decides which of them live on.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from ascend_vllm.core.beam.search import BeamSearch
from ascend_vllm.core.request import GroupStep, Request, RequestStatus, RowKind
from ascend_vllm.types.messages import BeamSearchSpec, BeamSequence, FinishReason
from ascend_vllm.types.step import StepLogprobs

# tokens of all sequences together
_EMITTED_IN_A_STEP = 65_536


class Beam(RowKind):
    """One beam search: the kind of its root and of its rows.

    Args:
        root: the request.
        spec: of the search.
        max_model_len: most tokens whose KV a sequence may hold.

    Attributes:
        root: the request.
        width: rows it may come to have, and slots that are kept for it.
        rows: its live beams while it runs or is swapped; in the order of the search.
        num_reserved_slots: free slots that are kept for it.
    """

    may_run_ahead = False
    title = "A beam search"
    prefers_swapping = True

    def __init__(self, root: Request, spec: BeamSearchSpec, max_model_len: int) -> None:
        self.root = root
        self.width = spec.width
        self.rows: list[Request] = []
        self.num_reserved_slots = 0
        self._spec = spec
        self._max_model_len = max_model_len
        self._serial = itertools.count()
        # row id → its most likely next tokens and their log-probabilities
        self._candidates: dict[str, tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]] = {}
        self._num_emitted = 0
        self._search = self._make_search()

    def unsupported_reason(self, max_num_seqs: int) -> str | None:
        """See `RowKind`."""
        if self.width <= max_num_seqs:
            return None
        return (
            f"a beam search of width {self.width} needs more sequences than --max-num-seqs ({max_num_seqs}) allows "
            "to run"
        )

    def root_of(self, row: Request) -> Request:  # noqa: ARG002 - all rows have the same
        """See `RowKind`."""
        return self.root

    def rows_of(self, request: Request) -> list[Request]:  # noqa: ARG002
        """The live beams."""
        return self.rows

    def first_row(self, request: Request) -> Request:  # noqa: ARG002
        """The first row, the prompt's; a search that ran before starts anew, and comes to the same results."""
        self._search = self._make_search()
        self._candidates.clear()
        row = self.root.make_row(self._next_id())
        row.sampling_params = self.root.sampling_params.clone(logprobs=self._search.num_candidates)
        self.rows = [row]
        return row

    def take(self, row: Request, token_ids: list[int], logprobs: StepLogprobs | None, index: int) -> None:  # noqa: ARG002
        """Collects a row's candidates, not what it sampled."""
        if logprobs is not None:
            stop = 1 + self._search.num_candidates
            candidates = logprobs.token_ids[index, 0, 1:stop], logprobs.logprobs[index, 0, 1:stop]
            self._candidates[row.request_id] = candidates

    def advance(self) -> GroupStep | None:
        """Makes the search's step; the rows' tokens grow, but slots and blocks are the caller's to change."""
        parents = self.rows
        if len(self._candidates) < len(parents):
            return None
        chosen = self._search.advance([self._candidates[row.request_id] for row in parents])
        self._candidates.clear()
        rows: list[Request] = []
        forks: list[tuple[Request, Request]] = []
        going_on: set[int] = set()
        for parent_index, _ in chosen:
            parent = parents[parent_index]
            if parent_index in going_on:
                row = parent.make_row(self._next_id())
                forks.append((row, parent))
            else:
                row = parent
                going_on.add(parent_index)
            rows.append(row)
        # only now: a row's tokens may have been copied by several of its children
        for row, (_, token_id) in zip(rows, chosen, strict=True):
            row.token_ids.append(token_id)
            row.num_tokens += 1
        dead = [row for index, row in enumerate(parents) if index not in going_on]
        self.rows = rows
        beams, end = self._new_beams(), None
        if self._search.is_done:
            has_stopped = beams is not None and bool(beams) and beams[0].finish_reason is FinishReason.STOP
            end = RequestStatus.FINISHED_STOPPED if has_stopped else RequestStatus.FINISHED_LENGTH
        return GroupStep(rows, dead, forks, beams, end)

    def finish(self, status: RequestStatus) -> list[BeamSequence] | None:
        """Where there is no room to go on the search ends with what it has."""
        if status is RequestStatus.FINISHED_LENGTH and self.rows:
            self._search.finish_live()
        return self._new_beams() if self._search.is_done else None

    def blocks_to_write(self, row: Request, count: int, block_size: int) -> range:
        """Those of its next tokens: a fork shares the block that its parent was writing."""
        first = row.num_computed_tokens
        return range(first // block_size, (first + count - 1) // block_size + 1)

    def drop_rows(self, request: Request) -> list[Request]:  # noqa: ARG002
        """Its rows, which are none of its own any more."""
        rows, self.rows = self.rows, []
        return rows

    def _new_beams(self) -> list[BeamSequence] | None:
        """What there is to emit: the best sequences at the end, and while they are short after each step of a stream.

        A search that started anew emits nothing until it is further than it was.
        """
        num_tokens = self._search.num_output_tokens
        # whole sequences are emitted: long ones less often, so that a step's share does not grow with them
        interval = 1 + num_tokens * self._spec.num_returned // _EMITTED_IN_A_STEP
        if not self._search.is_done and not (self._spec.stream and num_tokens >= self._num_emitted + interval):
            return None
        self._num_emitted = num_tokens
        return self._search.best()

    def _make_search(self) -> BeamSearch:
        root = self.root
        return BeamSearch(
            self._spec,
            root.num_prompt_tokens,
            root.max_num_tokens,
            frozenset(root.end_token_ids),
            root.eos_token_id,
            root.min_num_tokens,
            self._max_model_len,
        )

    def _next_id(self) -> str:
        return f"{self.root.request_id}#{next(self._serial)}"
