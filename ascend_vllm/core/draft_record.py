"""How often the drafts of a row, or of all rows, are right."""

from __future__ import annotations

import dataclasses

# what is left of counts after another step with drafts
KEPT = 0.85


@dataclasses.dataclass(slots=True)
class DraftRecord:
    """Counts in which the last drafts weigh most.

    Attributes:
        right: drafts that were right.
        wrong: drafts that were wrong, each after right ones.
        share: in how many of its steps a row has drafts at all, 0 … 1.
        watched: drafts that are not verified, but will be compared with the row's tokens.
        watched_at: place of the first of them in the row.
    """

    right: float = 0.0
    wrong: float = 0.0
    share: float = 1.0
    watched: list[int] = dataclasses.field(default_factory=list)
    watched_at: int = 0

    def note(self, num_right: int, *, is_wrong: bool, kept: float = KEPT) -> None:
        """Adds the drafts of a step.

        Args:
            num_right: right ones, before the first wrong one.
            is_wrong: there was a wrong one.
            kept: what is left of the counts so far, 0 … 1.
        """
        self.right = kept * self.right + num_right
        self.wrong = kept * self.wrong + is_wrong

    def note_share(self, *, has_drafts: bool, kept: float = KEPT) -> None:
        """Adds a step in which the row had drafts, or none."""
        self.share += (1 - kept) * (has_drafts - self.share)
