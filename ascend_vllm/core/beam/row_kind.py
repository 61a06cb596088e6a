"""The row kind of beam searches: a request that waits, and a row for each live beam while it runs.

The request itself (the root) waits, ends and gets the outputs; while it runs each live beam is a row, a `Request`
with a slot and a block table. Rows share the blocks of common prefixes. `take` collects a row's candidates from a
step's outputs; once all rows have theirs, `advance` decides which beams continue.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from ascend_vllm.core.beam.search import BeamSearch
from ascend_vllm.core.request import GroupStep, Request, RequestStatus, RowKind
from ascend_vllm.types.messages import BeamSearchSpec, BeamSequence, FinishReason
from ascend_vllm.types.step import StepLogprobs

# tokens of all returned sequences together
_MAX_EMITTED_TOKENS = 65_536


class Beam(RowKind):
    """One beam search: the kind of its root and of its rows.

    Args:
        root: the request.
        spec: of the search.
        max_model_len: most tokens whose KV a sequence may hold.

    Attributes:
        root: the request.
        width: most rows it can have, for which slots are reserved.
        rows: its live beams while it runs or is swapped; in the order of the search.
    """

    may_run_ahead = False
    may_draft = False
    title = "A beam search"
    prefers_swapping = True

    def __init__(self, root: Request, spec: BeamSearchSpec, max_model_len: int) -> None:
        self.root = root
        self.width = spec.width
        self.rows: list[Request] = []
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
        """The row that computes the prompt; a preempted search restarts, and reaches the same results."""
        self._search = self._make_search()
        self._candidates.clear()
        row = self.root.make_row(self._next_id())
        row.sampling_params = self.root.sampling_params.clone(logprobs=self._search.num_candidates)
        self.rows = [row]
        return row

    def take(self, row: Request, token_ids: list[int], logprobs: StepLogprobs | None, index: int) -> None:  # noqa: ARG002
        """Collects a row's candidates; sampled tokens are not used."""
        if logprobs is not None:
            stop = 1 + self._search.num_candidates
            candidates = logprobs.token_ids[index, 0, 1:stop], logprobs.logprobs[index, 0, 1:stop]
            self._candidates[row.request_id] = candidates

    def advance(self) -> GroupStep | None:
        """Makes the search's step: appends the rows' tokens. The caller changes slots and blocks."""
        parents = self.rows
        if len(self._candidates) < len(parents):
            return None
        chosen = self._search.advance([self._candidates[row.request_id] for row in parents])
        self._candidates.clear()
        rows: list[Request] = []
        forks: list[tuple[Request, Request]] = []
        continued: set[int] = set()
        for parent_index, _ in chosen:
            parent = parents[parent_index]
            if parent_index in continued:
                row = parent.make_row(self._next_id())
                forks.append((row, parent))
            else:
                row = parent
                continued.add(parent_index)
            rows.append(row)
        # not in the loop above: children must copy their parent's tokens without the new one
        for row, (_, token_id) in zip(rows, chosen, strict=True):
            row.token_ids.append(token_id)
            row.num_tokens += 1
        dead = [row for index, row in enumerate(parents) if index not in continued]
        self.rows = rows
        beams, end = self._new_beams(), None
        if self._search.is_done:
            has_stopped = beams is not None and bool(beams) and beams[0].finish_reason is FinishReason.STOP
            end = RequestStatus.FINISHED_STOPPED if has_stopped else RequestStatus.FINISHED_LENGTH
        return GroupStep(rows, dead, forks, beams, end)

    def finish(self, status: RequestStatus) -> list[BeamSequence] | None:
        """See `RowKind`; if there is no room for more tokens the live beams are finished as they are."""
        if status is RequestStatus.FINISHED_LENGTH and self.rows:
            self._search.finish_live()
        return self._new_beams() if self._search.is_done else None

    def blocks_to_write(self, row: Request, count: int, block_size: int) -> range:
        """The blocks of its next tokens: a fork shares its parent's partial block."""
        first = row.num_computed_tokens
        return range(first // block_size, (first + count - 1) // block_size + 1)

    def drop_rows(self, request: Request) -> list[Request]:  # noqa: ARG002
        """See `RowKind`."""
        rows, self.rows = self.rows, []
        return rows

    def _new_beams(self) -> list[BeamSequence] | None:
        """The best sequences, if they are to be emitted now: at the end, and of a stream also in between.

        A search that was restarted emits nothing until it has more tokens than it has emitted before.
        """
        num_tokens = self._search.num_output_tokens
        # sequences are emitted whole: long ones less often, so that tokens per step stay limited
        interval = 1 + num_tokens * self._spec.num_returned // _MAX_EMITTED_TOKENS
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
