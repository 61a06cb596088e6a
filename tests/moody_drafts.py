"""Decisions about drafts that follow no reason, for tests that no token depends on them."""

from __future__ import annotations

import random

import numpy as np

from ascend_vllm.core.draft_costs import DecodingStep, DraftCosts
from ascend_vllm.core.step_costs import FloatArray, IntArray


class Moody(DraftCosts):
    """Changes its mind all the time, and watches drafts in between.

    Attributes:
        num_given: drafts that rows were given.
        num_watching: steps that asked for drafts only to watch them.
    """

    num_given = num_watching = 0

    def __init__(self, max_drafts: int, seed: int = 7) -> None:
        super().__init__(max_drafts)
        self._random = random.Random(seed)
        self._drafts_now = False

    @property
    def num_steps_unwatched(self) -> int:
        return 0

    @property
    def is_drafting(self) -> bool:
        return self._drafts_now

    def note(self, step: DecodingStep, token_s: float) -> None:
        assert step.num_accepted <= step.num_drafts
        assert min(step.seconds, step.draft_s, token_s) >= 0

    def takes_request(self, num_rows: int, num_tokens: int) -> bool:
        assert min(num_rows, num_tokens) >= 1
        return True

    def advance(self, num_rows: int, num_asked: int) -> None:
        assert num_rows >= 0
        self.decides = self._random.random() < 0.4
        if not self._drafts_now:
            self.num_wanted = self._random.choice([0, self._max_drafts])
        type(self).num_watching += num_asked > 0 and not self._drafts_now

    def decide(self, chances: FloatArray, shares: FloatArray) -> None:
        assert chances.shape == shares.shape
        self.decides, self._drafts_now = False, self._random.random() < 0.6
        self.num_wanted = self._max_drafts if self._drafts_now else 0

    def choose(self, chances: FloatArray, counts: IntArray) -> IntArray:
        assert chances.shape == counts.shape
        chosen = np.array([self._random.randint(0, count) for count in counts])
        type(self).num_given += int(chosen.sum())
        return chosen
