"""When rows have drafts, and how many, under costs and chances that are given: no time is measured here."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

import hypothesis
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_vllm.core.draft_costs import DecodingStep, DraftCosts
from ascend_vllm.core.step_costs import ProposingCosts, StepCosts


@dataclasses.dataclass
class Machine:
    """What steps cost, in seconds.

    Attributes:
        fixed_s: of a step, whatever its size.
        token_s: of each token beyond `num_free`.
        num_free: tokens that cost nothing, as where weights are streamed.
        wait_s: of a step that is not made ahead.
        propose_s: of proposing a draft of each row.
    """

    fixed_s: float = 0.02
    token_s: float = 0.001
    num_free: int = 8
    wait_s: float = 0.0003
    propose_s: float = 0.0

    def step_s(self, num_tokens: int) -> float:
        return self.fixed_s + self.token_s * max(0, num_tokens - self.num_free)

    def best_gain(self, num_rows: int, chance: float, max_drafts: int) -> float:
        """The best steady rate of tokens with 1 … k drafts for each row, as a multiple of the plain one."""
        plain = num_rows / self.step_s(num_rows)
        rates = []
        for count in range(1, max_drafts + 1):
            num_tokens = num_rows * sum(chance**place for place in range(count + 1))
            seconds = self.step_s(num_rows * (1 + count)) + self.wait_s + self.propose_s * count
            rates.append(num_tokens / seconds / plain)
        return max(rates)


class Traffic:
    """Rows that decode on such a machine for ever, under decisions of `DraftCosts`.

    Args:
        machine: what steps cost.
        max_drafts: of a row in a step.
        num_rows: rows.
        chance: that a draft is right, if those before it are.
        noise: steps take up to so much longer, as a share.
    """

    def __init__(
        self, machine: Machine, max_drafts: int, num_rows: int, chance: float, *, noise: float = 0.0, seed: int = 0
    ) -> None:
        self.costs = DraftCosts(max_drafts)
        self.machine, self.max_drafts = machine, max_drafts
        self.num_rows, self.chance, self.noise = num_rows, chance, noise
        self._random = random.Random(seed)
        self._counts = [0] * num_rows
        # whatever the chance is
        self.is_always_wrong = False
        self.num_tokens = 0
        self.seconds = self.plain_s = 0.0
        self.num_drafting = 0

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step()

    def _step(self) -> None:
        costs, machine, num_rows = self.costs, self.machine, self.num_rows
        num_asked, was_drafting = costs.num_wanted, costs.is_drafting
        self._counts = (self._counts + [0] * num_rows)[:num_rows] if was_drafting else [0] * num_rows
        num_drafts = sum(self._counts)
        num_accepted = sum(self._num_right(count) for count in self._counts)
        draft_s = machine.propose_s * num_asked
        seconds = machine.step_s(num_rows + num_drafts) + draft_s + (machine.wait_s if was_drafting else 0.0)
        seconds *= 1 + self.noise * self._random.random()
        self.num_tokens += num_rows + num_accepted
        self.seconds += seconds
        self.plain_s += machine.step_s(num_rows) * (1 + self.noise / 2) * (num_rows + num_accepted) / num_rows
        self.num_drafting += was_drafting
        costs.advance(num_rows, num_asked)
        costs.note(
            DecodingStep(num_rows, num_drafts, num_accepted, num_asked, was_drafting, seconds, draft_s),
            2 * machine.token_s,
        )
        # all that is known of chances, without having to learn it: that is the business of `Drafting`
        chances = np.full(num_rows, self.chance)
        if costs.decides:
            costs.decide(chances, np.ones(num_rows))
        self._counts = [0] * num_rows
        if costs.is_drafting and num_asked:
            self._counts = costs.choose(chances, np.full(num_rows, num_asked)).tolist()

    def _num_right(self, count: int) -> int:
        for place in range(count):
            if self.is_always_wrong or self._random.random() >= self.chance:
                return place
        return count

    @property
    def gain(self) -> float:
        """Tokens a second, as a multiple of what plain steps give."""
        return self.plain_s / self.seconds


def rows(values: Sequence[float]) -> np.ndarray:
    return np.array(values, np.float64)


def prepared(step_s: Callable[[int], float], num_rows: int, max_drafts: int = 4) -> DraftCosts:
    """One that knows plain steps of so many rows, and steps with drafts of all sizes."""
    costs = DraftCosts(max_drafts)
    for _ in range(3):
        costs.note(DecodingStep(num_rows, 0, 0, 0, False, step_s(num_rows), 0.0), 0.0)
    for num_drafts in range(1 + max_drafts * num_rows):
        costs._drafted.note(num_rows + num_drafts, step_s(num_rows + num_drafts), now=0)
    return costs


# ---- costs of steps --------------------------------------------------------------------------------------------


def test_costs_are_averages_by_size() -> None:
    costs = StepCosts()
    assert costs.at(5) == 0.0
    costs.note(4, 0.2, now=1)
    assert costs.at(1) == costs.at(9) == 0.2
    costs.note(8, 0.4, now=2)
    assert costs.at(6) == pytest.approx(0.3)
    assert costs.count(8, now=3) > 0
    assert costs.count(6, now=3) == 0
    for now in range(50):
        costs.note(8, 0.5, now)
    assert costs.at(8) == pytest.approx(0.5, rel=0.01)
    # sizes of one group
    costs.note(100, 1.0, now=50)
    assert costs.count(102, now=50) > 0
    assert costs.count(130, now=50) == 0


def test_one_slow_step_counts_little() -> None:
    costs = StepCosts()
    for now in range(10):
        costs.note(8, 0.1, now)
    costs.note(8, 100.0, now=10)
    assert costs.at(8) < 0.12


def test_the_first_steps_of_a_size_may_be_slow() -> None:
    costs = StepCosts()
    for now, seconds in enumerate((0.9, 0.1, 0.2, 0.1)):
        costs.note(8, seconds, now)
    assert costs.at(8) < 0.12


def test_old_costs_are_forgotten_the_sooner_the_fewer_there_were() -> None:
    costs = StepCosts()
    costs.note(2, 0.9, now=1)
    for _ in range(20):
        costs.note(3, 0.1, now=1)
    assert costs.count(2, now=101) > 0
    assert costs.count(2, now=102) == 0
    assert costs.count(3, now=102) > 0
    assert costs.points(now=102) == [(3, 0.1)]
    # what is known of plain steps, even if it is old, is better than nothing
    assert costs.at(2) == 0.9
    costs.note(2, 0.1, now=102)
    assert costs.at(2) == 0.1


def test_further_drafts_cost_less_than_the_first() -> None:
    costs, depths = ProposingCosts(6), np.arange(1, 7)
    assert costs.at(1, depths).tolist() == [0.0] * 6
    costs.note(1, 2, 0.003, now=1)
    # as far as one measurement tells
    assert costs.at(1, depths) == pytest.approx([0.00225, 0.003, 0.0045, 0.006, 0.0075, 0.009])
    costs.note(1, 4, 0.004, now=2)
    assert costs.at(1, depths) == pytest.approx([0.00225, 0.003, 0.0035, 0.004, 0.005, 0.006])
    # measured earlier, and dearer than more drafts are now
    costs.note(1, 3, 0.008, now=3)
    assert costs.at(1, depths) == pytest.approx([0.00225, 0.003, 0.004, 0.004, 0.005, 0.006])


# ---- the choice of drafts --------------------------------------------------------------------------------------


def test_free_tokens_are_all_used_and_dear_ones_are_not() -> None:
    chances, counts = rows([0.5, 0.5]), np.array([4, 2])
    free = prepared(lambda _: 0.1, 2)
    assert free.choose(chances, counts).tolist() == [4, 2]
    dear = prepared(lambda num_tokens: 0.1 * num_tokens, 2)
    assert dear.choose(chances, counts).tolist() == [0, 0]


def test_the_likeliest_drafts_come_first() -> None:
    # six tokens take as long as three, and more take far longer
    costs = prepared(lambda num_tokens: 0.1 if num_tokens <= 6 else 1.0, 3)
    # 0.9 0.81 0.73 against 0.75 and 0.1
    assert costs.choose(rows([0.9, 0.75, 0.1]), np.array([4, 4, 4])).tolist() == [2, 1, 0]
    # rows that have no drafts get none
    assert costs.choose(rows([0.9, 0.75, 0.1]), np.array([0, 1, 4])).tolist() == [0, 1, 2]


@given(
    st.lists(st.tuples(st.floats(0.001, 1.0), st.integers(0, 4)), min_size=1, max_size=5),
    st.lists(st.floats(0.0, 0.5), min_size=25, max_size=25),
)
def test_no_other_choice_yields_more(rows_: list[tuple[float, int]], growths: list[float]) -> None:
    """Of all numbers of drafts, with the likeliest ones of each number."""
    times = np.cumsum([0.1, *growths])
    num_rows = len(rows_)
    costs = prepared(lambda num_tokens: float(times[num_tokens - num_rows]), num_rows)
    costs._account.earned_s = 1000.0
    chances, counts = rows([chance for chance, _ in rows_]), np.array([count for _, count in rows_])
    found = costs.choose(chances, counts)
    assert (found <= counts).all()

    def rate(expected: float, num_drafts: int) -> float:
        return (num_rows + expected) / float(times[num_drafts])

    def expected(chosen: np.ndarray) -> float:
        return sum(
            chance**place for chance, count in zip(chances, chosen, strict=True) for place in range(1, count + 1)
        )

    # sizes above 16 are measured in groups
    hypothesis.assume(num_rows + sum(count for _, count in rows_) <= 16)
    likely = sorted((chance**place for chance, count in rows_ for place in range(1, count + 1)), reverse=True)
    best = max(rate(sum(likely[:number]), number) for number in range(len(likely) + 1))
    assert rate(expected(found), int(found.sum())) == pytest.approx(best)


# ---- decisions over time ---------------------------------------------------------------------------------------


def test_hopeless_drafts_cost_little_from_the_first_step() -> None:
    """As long as an answer, for a batch whose steps take five times as long with all drafts."""
    for num_rows in (1, 8, 32):
        traffic = Traffic(Machine(), 5, num_rows, 0.05)
        traffic.run(256)
        assert traffic.gain > 0.96


def test_good_drafts_pay_at_once() -> None:
    traffic = Traffic(Machine(), 4, 1, 0.9)
    traffic.run(100)
    assert traffic.gain > 0.9 * traffic.machine.best_gain(1, 0.9, 4) > 3


def test_a_larger_batch_gets_fewer_drafts_or_none() -> None:
    wanted = []
    for num_rows in (1, 4, 8, 64):
        traffic = Traffic(Machine(propose_s=0.0005), 5, num_rows, 0.7)
        traffic.run(400)
        wanted.append(traffic.costs.num_wanted if traffic.costs.is_drafting else 0)
    assert wanted == sorted(wanted, reverse=True)
    assert wanted[0] == 5
    assert wanted[-1] == 0


def test_it_follows_chances_that_change() -> None:
    traffic = Traffic(Machine(), 4, 2, 0.001)
    traffic.run(500)
    assert not traffic.costs.is_drafting
    traffic.chance = 0.9
    traffic.run(80)
    assert traffic.costs.is_drafting
    traffic.chance = 0.001
    traffic.run(80)
    assert not traffic.costs.is_drafting


def test_it_follows_the_size_of_the_batch() -> None:
    traffic = Traffic(Machine(num_free=12), 4, 2, 0.7)
    traffic.run(200)
    assert traffic.costs.is_drafting
    traffic.num_rows = 64
    before = traffic.plain_s, traffic.seconds
    traffic.run(400)
    # what was gained before is spent on trying it a few times
    assert not traffic.costs.is_drafting
    assert traffic.plain_s - before[0] > 0.96 * (traffic.seconds - before[1])
    traffic.num_rows = 2
    traffic.costs.note_request()
    traffic.run(80)
    assert traffic.costs.is_drafting


def test_a_machine_that_becomes_slower_is_not_held_against_drafts() -> None:
    """As when another process begins: plain steps are measured again at once, and take as much longer."""
    traffic = Traffic(Machine(), 4, 2, 0.8)
    traffic.run(200)
    for factor in (3, 1 / 3, 2):
        traffic.machine.fixed_s *= factor
        traffic.machine.token_s *= factor
        before = traffic.num_drafting
        traffic.run(200)
        assert traffic.num_drafting - before > 180


def test_wrong_estimates_are_stopped_by_what_they_cost() -> None:
    """Drafts that are taken to be right nearly always, and never are."""
    traffic = Traffic(Machine(), 5, 8, 0.95)
    traffic.is_always_wrong = True
    traffic.run(3000)
    assert traffic.num_drafting > 0
    assert traffic.gain > 0.96


def test_a_new_request_is_watched_soon() -> None:
    costs = Traffic(Machine(), 4, 2, 0.01)
    costs.run(500)
    costs.costs.note_request()
    asked = []
    for _ in range(6):
        costs.run(1)
        asked.append(costs.costs.num_wanted)
    assert 4 in asked


@settings(max_examples=20, deadline=None)
@given(
    machine=st.builds(
        Machine,
        fixed_s=st.floats(0.001, 0.1),
        token_s=st.floats(0.00001, 0.00025),
        num_free=st.sampled_from([0, 1, 4, 16]),
        wait_s=st.floats(0.0, 0.002),
    ),
    # a draft takes up to half of a step
    propose_share=st.sampled_from([0.0, 0.1, 0.5]),
    max_drafts=st.integers(1, 6),
    num_rows=st.sampled_from([1, 2, 8, 32]),
    chance=st.floats(0.0, 1.0),
    noise=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 5),
)
def test_it_converges_to_the_best_and_never_costs_much(
    machine: Machine,
    propose_share: float,
    max_drafts: int,
    num_rows: int,
    chance: float,
    noise: float,
    seed: int,
) -> None:
    machine.token_s *= machine.fixed_s / 0.001
    machine.propose_s = propose_share * machine.fixed_s
    traffic = Traffic(machine, max_drafts, num_rows, chance, noise=noise, seed=seed)
    traffic.run(256)
    assert traffic.gain > 0.95
    traffic.run(1000)
    assert traffic.gain > 0.955
    best = machine.best_gain(num_rows, chance, max_drafts)
    if best > 1.2:
        assert traffic.gain > 0.85 * best
    elif best < 0.95:
        assert traffic.num_drafting < 0.2 * 1256


# ---- beside prompts --------------------------------------------------------------------------------------------


def beside_prompts(num_accepted: int) -> DraftCosts:
    """Two rows with four drafts each in steps with prompts, of which so many are right."""
    costs = prepared(lambda num_tokens: 0.1 + 0.01 * num_tokens, 2)
    costs._enter(costs._mode.DRAFTING, 1000, 4)
    for _ in range(20):
        costs.advance(2, 4)
        if costs.decides:
            break
        costs.note_beside_prompts(DecodingStep(2, 8, num_accepted, 4, True, 0.5, 0.01))
    return costs


def test_wrong_drafts_end_in_steps_with_prompts_too() -> None:
    costs = beside_prompts(0)
    assert costs.decides
    costs.decide(rows([0.9, 0.9]), rows([1.0, 1.0]))
    assert not costs.is_drafting


def test_right_drafts_go_on_in_steps_with_prompts() -> None:
    # eight drafts cost 0.09 seconds, and save 0.48
    assert not beside_prompts(8).decides
    # one saves 0.06
    assert beside_prompts(1).decides
