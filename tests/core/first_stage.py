"""A pipeline stage that does not sample: what it knows of the rows comes from the diffs alone."""

from __future__ import annotations

import collections

from ascend_vllm.types.step import SchedulerOutput


class FirstStage:
    """Takes steps as they are handed out, long before the last stage does.

    Attributes:
        inputs: of each step that the last stage has not computed: slot → the tokens that its row has computed then.
    """

    def __init__(self) -> None:
        self.inputs: collections.deque[dict[int, list[int]]] = collections.deque()
        self._token_ids: dict[int, list[int]] = {}
        self._num_computed: dict[int, int] = {}

    def take(self, step: SchedulerOutput) -> None:
        """Applies a step's diff and notes what it computes.

        Raises:
            KeyError: a slot is not taken.
            AssertionError: a token is to be computed that nobody has told of.
        """
        assert step.num_steps == 1
        for slot, token_id in step.sampled:
            self._token_ids[slot].append(token_id)
        for slot, _ in step.sampled:
            # what was computed for wrong drafts is void
            self._num_computed[slot] = min(self._num_computed[slot], len(self._token_ids[slot]) - 1)
        for slot in step.freed_slots:
            del self._token_ids[slot], self._num_computed[slot]
        for row in step.new_rows:
            self._token_ids[row.slot], self._num_computed[row.slot] = list(row.token_ids), row.num_computed_tokens
        known = {source: self._token_ids[source] for _, source, _ in step.forks}
        for slot, source, token_id in step.forks:
            self._num_computed[slot] = self._num_computed[source]
            self._token_ids[slot] = [*known[source][: self._num_computed[source]], token_id]
        inputs, drafts = {}, dict(step.drafts)
        for slot, count in zip(step.slots, step.num_scheduled_tokens, strict=True):
            self._num_computed[slot] += count
            inputs[slot] = [*self._token_ids[slot], *drafts.get(slot, [])][: self._num_computed[slot]]
            assert len(inputs[slot]) == self._num_computed[slot], "the first stage does not know the token"
        self.inputs.append(inputs)
