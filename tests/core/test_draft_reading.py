"""What reading for drafts may cost: no time is measured here."""

from __future__ import annotations

import pytest

from ascend_vllm.core.draft_reading import ReadingBudget


def test_some_requests_are_read_before_anything_is_known() -> None:
    budget = ReadingBudget()
    taken = [budget.takes_another(100) for _ in range(32)]
    assert taken == [True] * 8 + [False] * 24
    budget.add(0.1, 0.0)
    assert budget.takes_another(100)


def test_few_long_requests_are_read_before_anything_is_known() -> None:
    budget = ReadingBudget()
    assert [budget.takes_another(count) for count in (900, 900, 900, 100, 100)] == [True, True, False, True, True]
    budget.add(0.1, 0.0)
    # one may have any length
    assert [budget.takes_another(count) for count in (100_000, 10)] == [True, False]


def test_what_was_lost_must_be_earned() -> None:
    budget = ReadingBudget()
    budget.add(1.0, -0.5)
    for _ in range(48):
        assert not budget.takes_another(100)
        budget.add(1.0, 0.0)
    budget.add(1.1, 0.0)
    assert budget.takes_another(100)
    budget.add(1.0, -0.5)
    assert not budget.takes_another(100)
    budget.add(0.1, 0.5)
    assert budget.takes_another(100)


@pytest.mark.parametrize(("reading", "gain", "least", "most"), [(0.1, 0.0, 0.05, 0.15), (0.1, 0.2, 1.0, 1.0)])
def test_requests_in_turn(reading: float, gain: float, least: float, most: float) -> None:
    """Reading takes a tenth of the time: one request in ten is read if drafts gain nothing, all if they do."""
    budget, num_read, lost_s, seconds = ReadingBudget(), 0, 0.0, 0.0
    for _ in range(400):
        is_read = budget.takes_another(100)
        num_read += is_read
        budget.add(1.0, is_read * (gain - reading))
        lost_s, seconds = lost_s + is_read * (reading - gain), seconds + 1.0
    assert least <= num_read / 400 <= most
    assert lost_s <= 0.01 * seconds + 0.1


def test_old_gains_are_no_credit_for_ever() -> None:
    budget = ReadingBudget()
    for _ in range(100):
        budget.add(1.0, 1.0)
    for _ in range(300):
        budget.add(1.0, 0.0)
    # after five minutes 0.6 seconds are left, which a minute's share makes up for
    budget.add(1.0, -2.0)
    assert not budget.takes_another(100)
