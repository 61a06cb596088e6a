"""When drafts pay, and how many: by how often they are right, and by what steps of so many tokens cost.

A step of R rows without drafts gives R tokens. With drafts it gives, for each row, as many more as are right; it
costs what R tokens and all drafts cost, and what it takes to propose the next ones. All of it is measured: seconds of
steps by their number of tokens, apart for plain steps, which are made ahead while another one is computed, and for
steps with drafts, which cannot be. Rows are given those drafts with which a step is expected to yield most tokens a
second, the likeliest first, and none where plain steps yield more.

Estimates may be wrong, and what was never done is not known. So all that drafts cost in vain is booked: every step
earns a small share of its time; a step with drafts pays the time that it took longer than plain steps would have
taken for its tokens, and earns the time that it was faster. Sizes of steps that have not been measured are tried
where that may pay and what has been earned covers their cost at the worst. While more was paid than there is, steps
are plain. What reading costs is booked apart (core/draft_reading.py).
"""

from __future__ import annotations

import collections
import dataclasses
import enum

import numpy as np

from ascend_vllm.core.draft_reading import ReadingBudget
from ascend_vllm.core.step_costs import EXACT_TOKENS, GROUP, FloatArray, IntArray, ProposingCosts, StepCosts

# share of all time that drafts may cost in vain
_LOST_SHARE = 0.008
# in plain steps: most that the share is saved up to, and that a step counts as lost; most that gains are saved up to;
# and what must be there for drafts to be watched
_MOST_SHARED, _MOST_GAINED, _LEAST_EARNED = 3.0, 30.0, 1.0
# steps with drafts after which losses count: the first one only proposes
_GRACE_STEPS = 3
# plain steps that take more than so many times what they took have become slower
_MOST_SAME = 1.2
# by how much drafts must be expected to pay where they do not yet
_ENTRY_GAIN = 1.05
# plain steps in a row that measure them; the first one is not made ahead
_PLAIN_STEPS = 4
# steps with drafts after which plain ones are measured again: so many for each one that was measured, and at most
_DRAFTING_FOR_EACH, _MOST_DRAFTING = 16, 256
# steps with drafts after which it is decided again
_DECISION_STEPS = 8
# most plain steps after which it is looked again whether drafts would be right
_MOST_WATCH_STEPS = 64
# plain steps after which it is looked again whether drafts can be watched that could not be paid for
_LATE_STEPS = 16
# what is known of steps of a size is worked out again after each of the first ones
_FEW_NOTES = 3
# the core and a single worker are threads of one process: Python code of the one delays the other by about as much
_DELAYED_THREADS = 2
# share of a plain step that proposing may take for all drafts to be watched, not only the first one
_CHEAP_SHARE = 0.25


@dataclasses.dataclass(slots=True)
class DecodingStep:
    """A step and its outputs.

    Attributes:
        num_rows: its rows, 1 or more.
        num_drafts: tokens that it verified.
        num_accepted: those of them that were right.
        num_asked: drafts that were proposed for each row, at most.
        was_drafting: rows were to have drafts: the step was not made ahead, nor was the next one.
        seconds: from the outputs of the step before to its own, or of the step itself if it computed prompts; without
            what reading took.
        draft_s: of these, what proposing took.
    """

    num_rows: int
    num_drafts: int
    num_accepted: int
    num_asked: int
    was_drafting: bool
    seconds: float
    draft_s: float


@dataclasses.dataclass(slots=True)
class _Account:
    """What drafts cost and gain in steps of about so many rows.

    Attributes:
        earned_s: what steps with drafts may lose; None: plain steps have not been measured yet.
        gained_s: that drafts saved since reading was booked; below 0: lost.
        doubted_s: of plain steps before they were measured again since drafts had cost too much; 0: they were not.
        reading: what reading may cost.
    """

    earned_s: float | None = None
    gained_s: float = 0.0
    doubted_s: float = 0.0
    reading: ReadingBudget = dataclasses.field(default_factory=ReadingBudget)


class _Mode(enum.Enum):
    # rows have no drafts; now and then a step asks for some, only to see whether they would be right
    PLAIN = enum.auto()
    # plain steps that are measured
    MEASURING = enum.auto()
    DRAFTING = enum.auto()


class DraftCosts:
    """Decides between plain steps and steps with drafts.

    Args:
        max_drafts: most drafts of a row, k.

    Attributes:
        num_wanted: drafts to ask for each row of the next step, 0 … k.
        decides: `decide` is to be called before the next step.
    """

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self.num_wanted = 1
        self.decides = False
        self._num_steps = 0
        self._mode = _Mode.PLAIN
        # of this mode, until it is decided again or, in PLAIN, until a step asks for drafts
        self._steps_left = 0
        self._watch_steps = max_drafts + 1
        # the last decision was to draft, so many steps ago
        self._pays = False
        self._num_drafting_steps = 0
        self._plain, self._drafted = StepCosts(), StepCosts()
        self._was_plain = False
        # seconds of the last step, if it was plain and made ahead
        self._last_plain_s: float | None = None
        self._proposing = ProposingCosts(max_drafts)
        # seconds of another token in a step, as far as prompts tell; 0: they have not
        self._token_s = 0.0
        # of the last step without prompts: its rows, and seconds of plain steps of as many; 0: unknown
        self._num_rows, self._plain_s = 0, 0.0
        # by rows and drafts of each: seconds of steps with 0, 1, … of them (`_times`); until it is decided again, or
        # something new has been measured
        self._known_times: dict[tuple[int, int], tuple[FloatArray, FloatArray]] = {}
        # by octaves of the number of rows: drafts that pay for one row do not make up for those of a full batch, and
        # what these have lost does not stop the others
        self._accounts: dict[int, _Account] = collections.defaultdict(_Account)
        # of the last step's number of rows
        self._account = self._accounts[0]
        # seconds of steps of rows that may have no drafts, by the same octaves, which are not booked yet
        self._idle_s: dict[int, float] = collections.defaultdict(float)

    @property
    def is_drafting(self) -> bool:
        """Whether rows are to have drafts."""
        return self._mode is _Mode.DRAFTING

    @property
    def num_steps_unwatched(self) -> int:
        """How many plain steps come at least before one that asks for drafts, as far as that matters."""
        if self._mode is not _Mode.PLAIN or self.num_wanted or self.decides:
            return 0
        # what has not been earned when it is due is looked for now and then
        return self._steps_left - 1 if self._steps_left > 0 else _LATE_STEPS

    @property
    def _num_to_watch(self) -> int:
        """Drafts that a plain step asks for: none while their cost is not earned."""
        earned_s = self._account.earned_s
        if earned_s is None or earned_s < _LEAST_EARNED * self._plain_s:
            return 0
        propose_s = float(self._proposing.at(self._num_rows, np.array([self._max_drafts]))[0])
        is_cheap = propose_s < _CHEAP_SHARE * self._plain_s
        return self._max_drafts if is_cheap else 1

    def takes_request(self, num_rows: int, num_tokens: int) -> bool:
        """Whether a request that begins may have drafts, as far as reading for them is paid for.

        Args:
            num_rows: rows that will run beside it, and it.
            num_tokens: that it has.
        """
        octave = num_rows.bit_length()
        reading = self._accounts[octave].reading
        if (idle_s := self._idle_s.pop(octave, 0.0)) > 0:
            reading.add(idle_s, 0.0)
        return reading.takes_another(num_tokens)

    def note_idle(self, num_rows: int, seconds: float) -> None:
        """Books a step of rows none of which may have drafts, instead of `advance`, `note` and `note_reading`."""
        self._idle_s[num_rows.bit_length()] += seconds

    def note_reading(self, num_rows: int, seconds: float, read_s: float) -> None:
        """Books a step, after `note` if that is called for it.

        Args:
            num_rows: its rows.
            seconds: that it took.
            read_s: of these, what was spent on tokens that are read for later drafts.
        """
        account = self._accounts[num_rows.bit_length()]
        account.reading.add(seconds, account.gained_s - read_s)
        account.gained_s = 0.0

    def note_taking(self, seconds: float) -> None:
        """Books what it took to look at the last step, which no other method knows of, as reading."""
        self._account.gained_s -= _DELAYED_THREADS * seconds

    def note_request(self) -> None:
        """A request has begun: its drafts are watched soon."""
        self._watch_steps = self._max_drafts + 1
        if self._mode is _Mode.PLAIN:
            self._steps_left = min(self._steps_left, self._watch_steps)

    def advance(self, num_rows: int, num_asked: int) -> None:
        """Goes on by a step; afterwards `decides` says what is to be done.

        Args:
            num_rows: its rows.
            num_asked: most drafts of each row that came with its outputs.
        """
        self._account = self._accounts[num_rows.bit_length()]
        self._num_steps += 1
        self._steps_left -= 1
        is_due = self._steps_left <= 0
        if self._mode is _Mode.PLAIN:
            self.decides = num_asked > 0
            self.num_wanted = self._num_to_watch if is_due and not self.num_wanted else 0
        else:
            self.decides = is_due
            self._num_drafting_steps += self.is_drafting

    def note(self, step: DecodingStep, token_s: float) -> None:
        """Adds what a step took.

        Args:
            step: without prompts.
            token_s: seconds of a token in steps with prompts, which another token of a step hardly exceeds; 0: it is
                unknown.
        """
        num_rows, seconds, now = step.num_rows, step.seconds, self._num_steps
        self._token_s = token_s
        if step.was_drafting:
            num_tokens = num_rows + step.num_drafts
            self._drafted.note(num_tokens, max(0.0, seconds - step.draft_s), now)
            if self._drafted.count(num_tokens, now) <= _FEW_NOTES:
                self._known_times.clear()
        elif self._was_plain and step.num_asked == 0:
            # outputs that were taken late make the next ones seem early
            last_s = seconds if self._last_plain_s is None else self._last_plain_s
            self._plain.note(num_rows, (seconds + last_s) / 2, now)
        is_ahead = self._was_plain and not step.was_drafting
        self._last_plain_s = max(0.0, seconds - step.draft_s) if is_ahead else None
        self._was_plain = not step.was_drafting
        if step.num_asked:
            self._proposing.note(num_rows, step.num_asked, step.draft_s, now)
        plain_s = self._plain_s = self._plain.at(num_rows)
        self._num_rows = num_rows
        if plain_s == 0:
            return
        gained_s = 0.0
        if step.was_drafting:
            # a step that took very long had another reason
            gained_s = -min(seconds - (1 + step.num_accepted / num_rows) * plain_s, _MOST_SHARED * plain_s)
        elif step.num_asked:
            gained_s = -step.draft_s
        self._book(plain_s, seconds, gained_s)

    def note_beside_prompts(self, step: DecodingStep) -> None:
        """Books a step that computed prompts, too: what its drafts cost follows from steps without prompts.

        Args:
            step: whose rows are those that decode and the prompts.
        """
        num_rows = step.num_rows
        plain_s = self._plain.at(num_rows)
        if plain_s == 0 or not (step.num_drafts or step.num_asked):
            return
        verifying_s = self._drafted.at(num_rows + step.num_drafts) - plain_s if step.num_drafts else 0.0
        gained_s = step.num_accepted / num_rows * plain_s - max(0.0, verifying_s) - step.draft_s
        self._book(plain_s, step.seconds, gained_s)

    def _book(self, plain_s: float, seconds: float, gained_s: float) -> None:
        """Books a step whose drafts saved so much; below 0: lost."""
        account, most = self._account, _MOST_SHARED * plain_s
        earned = most if account.earned_s is None else account.earned_s
        if earned < most:
            earned = min(earned + _LOST_SHARE * seconds, most)
        earned += gained_s
        account.gained_s += gained_s
        account.earned_s = min(earned, _MOST_GAINED * plain_s)
        if self.is_drafting and earned < (0 if self._num_drafting_steps > _GRACE_STEPS else -most):
            self.decides = True

    def decide(self, chances: FloatArray, shares: FloatArray) -> None:
        """Decides whether the next steps have drafts.

        Args:
            chances: [R] of each row, how likely a draft is right if those before it are.
            shares: [R] in how many of its steps the row has drafts at all; 0: it may have none.
        """
        self.decides = False
        self._known_times.clear()
        num_rows = len(chances)
        if not shares.any():
            # no row that is left may have drafts
            self._pays = False
            self._enter(_Mode.PLAIN, _MOST_WATCH_STEPS, 0)
            return
        num_measured = self._plain.count(num_rows, self._num_steps)
        if self._num_drafting_steps >= min(_DRAFTING_FOR_EACH * num_measured, _MOST_DRAFTING) or not num_measured:
            self._enter(_Mode.MEASURING, _PLAIN_STEPS, 0)
            return
        plain_s = self._plain.at(num_rows)
        account = self._account
        if 0 < _MOST_SAME * account.doubted_s < plain_s:
            # plain steps have become slower, too
            account.earned_s = _LEAST_EARNED * plain_s
        account.doubted_s = 0.0
        if account.earned_s is None or account.earned_s < 0:
            if self._pays:
                self._pays, account.doubted_s = False, plain_s
                self._plain.forget()
                self._enter(_Mode.MEASURING, _PLAIN_STEPS, 0)
            else:
                self._enter(_Mode.PLAIN, self._watch_steps, 0)
            return
        gain, depth = self._expected_gain(chances, shares)
        if gain > (1.0 if self._pays else _ENTRY_GAIN):
            self._pays = True
            self._enter(_Mode.DRAFTING, _DECISION_STEPS, depth)
        else:
            self._pays = False
            self._enter(_Mode.PLAIN, self._watch_steps, 0)
            self._watch_steps = min(2 * self._watch_steps, _MOST_WATCH_STEPS)

    def choose(self, chances: FloatArray, counts: IntArray) -> IntArray:
        """How many of its drafts each row is to have verified.

        Args:
            chances: [R] of each row, how likely a draft is right if those before it are.
            counts: [R] drafts that it has.

        Returns:
            [R].
        """
        num_rows = len(chances)
        times = self._known_times.get((num_rows, self.num_wanted))
        if times is None:
            numbers = np.arange(num_rows * self._max_drafts + 1)
            proposing = self._proposing.at(num_rows, np.full(len(numbers), self.num_wanted))
            times = self._times(num_rows, num_rows + numbers, proposing)
            self._known_times[num_rows, self.num_wanted] = times
        least, most = times
        if num_rows == 1:
            chosen = np.array([self._choose_of_one(float(chances[0]), int(counts[0]), least, most)])
        else:
            chosen = self._choose_of_many(chances, counts, least, most)
        if not chosen.any() and counts.any():
            # they were proposed in vain: it is decided again with the next step's outputs
            self._steps_left = 0
        return chosen

    def _choose_of_many(self, chances: FloatArray, counts: IntArray, least: FloatArray, most: FloatArray) -> IntArray:
        """`choose` for several rows, with the seconds of steps with 0, 1, … drafts at best and at worst."""
        num_rows = len(chances)
        places = np.arange(1, int(counts.max(initial=0)) + 1)
        likely = (chances[:, None] ** places) * (places <= counts[:, None])
        order, gains = _likeliest_first(likely)
        # from no draft to all of them
        num_drafts = int(counts.sum())
        gains = np.append(0.0, gains[:num_drafts])
        rates = self._rates(num_rows, gains, least[: num_drafts + 1], most[: num_drafts + 1])
        # without drafts nothing can be lost
        rates[0] = num_rows / least[0]
        return np.bincount(order[: int(np.argmax(rates))] % num_rows, minlength=num_rows)

    def _choose_of_one(self, chance: float, count: int, least: FloatArray, most: FloatArray) -> int:
        """`choose` for a row alone, whose steps are short: calls of NumPy would take a twentieth of them."""
        plain_s, earned_s = self._plain.at(1), self._account.earned_s or 0.0
        best, best_rate, expected, likely = 0, 1.0 / float(least[0]), 1.0, 1.0
        for number, (at_best_s, at_worst_s) in enumerate(zip(least[1:].tolist(), most[1:].tolist(), strict=True), 1):
            if number > count:
                break
            likely *= chance
            expected += likely
            if expected / at_best_s > best_rate and at_worst_s - expected * plain_s <= earned_s:
                best, best_rate = number, expected / at_best_s
        return best

    def _expected_gain(self, chances: FloatArray, shares: FloatArray) -> tuple[float, int]:
        """The best rate of steps with drafts as a multiple of plain ones', and the drafts to ask for."""
        num_rows = len(chances)
        likely = shares[:, None] * chances[:, None] ** np.arange(1, self._max_drafts + 1)
        order, gains = _likeliest_first(likely)
        num_tokens = num_rows + np.cumsum(shares[order % num_rows])
        depths = np.maximum.accumulate(order // num_rows + 1)
        rates = self._rates(num_rows, gains, *self._times(num_rows, num_tokens, self._proposing.at(num_rows, depths)))
        best = int(np.argmax(rates))
        return float(rates[best]) * self._plain.at(num_rows) / num_rows, int(depths[best])

    def _rates(self, num_rows: int, gains: FloatArray, least: FloatArray, most: FloatArray) -> FloatArray:
        """Tokens a second of steps with drafts, at best; 0 where they might cost more than was earned.

        Args:
            num_rows: rows of the steps.
            gains: drafts of each that are expected to be right.
            least: seconds that each takes at best.
            most: seconds that each takes at worst.
        """
        lost = most - self._plain.at(num_rows) * (num_rows + gains) / num_rows
        rates: FloatArray = (num_rows + gains) / least * (lost <= (self._account.earned_s or 0.0))
        return rates

    def _times(
        self, num_rows: int, num_tokens: FloatArray | IntArray, proposing: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Seconds of steps with drafts, at best and at worst.

        Args:
            num_rows: rows of the steps.
            num_tokens: tokens of each step, ascending, with the drafts.
            proposing: seconds that proposing its drafts takes.
        """
        plain_s = self._plain.at(num_rows)
        points = [point for point in self._drafted.points(self._num_steps) if point[0] >= num_rows]
        if not points or points[0][0] > num_rows:
            points.insert(0, (num_rows, plain_s))
        xs, ys = zip(*points, strict=True)
        # more tokens do not take less time: between two sizes that were measured a step takes as long as one of them,
        # and beyond them further tokens may be free, or as dear as in prompts
        seconds = np.maximum.accumulate(ys)
        above = np.searchsorted(xs, np.rint(num_tokens))
        beyond = above == len(xs)
        above[beyond] -= 1
        most = seconds[above] + (self._token_s or plain_s / num_rows) * beyond * (num_tokens - xs[-1]) + proposing
        # sizes of one group are one
        is_below = np.array(xs)[above] > np.where(num_tokens > EXACT_TOKENS, GROUP, 1.0) * np.rint(num_tokens)
        return seconds[np.maximum(above - is_below, 0)] + proposing, most

    def _enter(self, mode: _Mode, num_steps: int, num_wanted: int) -> None:
        if mode is not _Mode.DRAFTING:
            self._num_drafting_steps = 0
        self._mode, self._steps_left, self.num_wanted = mode, num_steps, num_wanted


def _likeliest_first(likely: FloatArray) -> tuple[IntArray, FloatArray]:
    """Drafts [R, k] by how likely they are right, and how many of the first 1, 2, … are expected to be.

    A draft never comes before one of the same row that precedes it. They are numbered place by place: draft p of row
    r is p * R + r.
    """
    flat = likely.T.ravel()
    order = np.argsort(-flat, kind="stable")
    return order, np.cumsum(flat[order])
