"""A pipeline stage that does not sample: it knows the rows only from the steps' diffs."""

from __future__ import annotations

import collections

from ascend_vllm.types.step import SchedulerOutput


class FirstStage:
    """Processes steps when they are handed out, long before the last stage does.

    Attributes:
        inputs: for each step that the last stage has not computed: slot → all tokens of its row computed by then.
    """

    def __init__(self) -> None:
        self.inputs: collections.deque[dict[int, list[int]]] = collections.deque()
        self._token_ids: dict[int, list[int]] = {}
        self._num_computed: dict[int, int] = {}

    def take(self, step: SchedulerOutput) -> None:
        """Applies a step's diff and records what it computes.

        Raises:
            KeyError: a slot is not taken.
            AssertionError: a step computes a token that was not sent.
        """
        assert step.num_steps == 1
        for slot, token_id in step.sampled:
            self._token_ids[slot].append(token_id)
        for slot, _ in step.sampled:
            # KV of rejected drafts does not count
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
