"""Beam search: which beams continue, which are finished, and when the search stops.

Only the algorithm, on token ids and log-probabilities. The caller computes each live beam's most likely next tokens
and shares the beams' KV blocks.

A step extends every live beam by each of its candidates. Candidates that end go to the finished sequences, of which
the `width` best are kept; of the others the `width` most likely become the live beams. There are two rules:

- vLLM 0.6.0's in-engine search (`early_stopping` True, False or "never"): only the `num_candidates` most likely
  candidates of *all* beams together count. As soon as `width` sequences have finished, `early_stopping` decides:
  True stops; False stops when no live beam is better now than the worst kept sequence; "never" stops when none could
  become better at its greatest possible length. Hugging Face's values of that name mean the same, but its lengths
  leave the prompt out, and only the `width` most likely candidates of a step may end.
- vLLM 0.6.3's search outside the engine (`early_stopping` None): all candidates of each beam count, and the search
  goes on until the beams are full.

Example::

    search = BeamSearch(BeamSearchSpec(2, 1), 3, 3 + 16, frozenset({2}), 2, 3, 512)
    while not search.is_done:
        candidates = [most_likely(search.output_token_ids(beam)) for beam in range(search.num_live)]
        for parent, token_id in search.advance(candidates):
            ...
    print(search.best()[0].token_ids)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ascend_vllm.types.messages import BeamSearchSpec, BeamSequence, FinishReason

# Larger penalties are clamped: from here on lengths alone decide, and a power of a length would overflow.
_MAX_LENGTH_PENALTY = 32.0


def beam_score(cumulative_logprob: float, length: int, length_penalty: float) -> float:
    """What sequences are compared by: cumulative_logprob / length ** length_penalty; higher is better.

    Above 0 the penalty favours long sequences, since log-probabilities are negative. (Wu et al., "Google's Neural
    Machine Translation System", 2016, section 7, in the form of Hugging Face's `BeamHypotheses` and of vLLM.)

    Args:
        cumulative_logprob: sum of the output tokens' natural log-probabilities, at most 0.
        length: tokens of prompt and output, at least 1; a final end-of-sequence token does not count.
        length_penalty: clamped to −32 … 32.
    """
    return cumulative_logprob / _length_divisor(length, length_penalty)


def _length_divisor(length: int, length_penalty: float) -> float:
    divisor: float = float(length) ** max(-_MAX_LENGTH_PENALTY, min(length_penalty, _MAX_LENGTH_PENALTY))
    return divisor


# a sequence as a linked list from its last token backwards, so that sequences share prefixes; None: no token
_Tokens = tuple[int, "_Tokens"] | None


def _to_list(tokens: _Tokens) -> list[int]:
    token_ids = []
    while tokens is not None:
        token_id, tokens = tokens
        token_ids.append(token_id)
    token_ids.reverse()
    return token_ids


@dataclasses.dataclass(slots=True)
class _Beam:
    """A live beam's output."""

    tokens: _Tokens
    cumulative_logprob: float


@dataclasses.dataclass(slots=True)
class _Finished:
    """A finished sequence."""

    score: float
    tokens: _Tokens
    cumulative_logprob: float
    reason: FinishReason
    stop_reason: int | None
    sequence: BeamSequence | None = None

    def to_message(self) -> BeamSequence:
        """The sequence as it is emitted; converted once."""
        if self.sequence is None:
            token_ids = _to_list(self.tokens)
            self.sequence = BeamSequence(token_ids, self.cumulative_logprob, self.reason, self.stop_reason)
        return self.sequence


@dataclasses.dataclass(frozen=True, slots=True)
class _Candidates:
    """C next tokens of the live beams."""

    # [C] float64: the negative of the cumulative log-probability with the token; lower is better
    costs: npt.NDArray[np.float64]
    # [C] int64: index of the live beam
    parents: npt.NDArray[np.int64]
    # [C] int64
    token_ids: npt.NDArray[np.int64]

    def take(self, which: npt.NDArray[np.bool_] | npt.NDArray[np.int64]) -> _Candidates:
        """Selects candidates by a mask or by indices."""
        return _Candidates(self.costs[which], self.parents[which], self.token_ids[which])

    def best(self, count: int) -> _Candidates:
        """The best ones, in order; ties: the better parent first, then the lower token id."""
        some = self
        if len(self.costs) > count:
            # all that can be among the best
            some = self.take(self.costs <= np.partition(self.costs, count - 1)[count - 1])
        return some.take(np.lexsort((some.token_ids, some.parents, some.costs))[:count])


class BeamSearch:
    """One search, from the prompt to its best sequences.

    Ties are broken deterministically: the better parent first, then the lower token id; of finished sequences the one
    that ended first.

    Args:
        spec: width, number of sequences to return, length penalty and rule of early stopping.
        num_prompt_tokens: at least 1.
        max_num_tokens: tokens of prompt and output at which a sequence ends with LENGTH.
        end_token_ids: ids that end a sequence with STOP, `eos_token_id` among them.
        eos_token_id: the one of them that is no stop reason and does not count in a score's length; or None.
        min_num_tokens: tokens of prompt and output below which nothing ends; until then candidates among
            `end_token_ids` are left out.
        max_model_len: for the greatest possible length of early_stopping "never".

    Attributes:
        num_candidates: most likely next tokens of each live beam that `advance` needs. At most `num_live` *
            len(end_token_ids) of them end their sequence, so at least `width` others are always left.
        is_done: the search is over.
        num_output_tokens: tokens that each live beam has generated; at the end, the steps that were made.
    """

    def __init__(
        self,
        spec: BeamSearchSpec,
        num_prompt_tokens: int,
        max_num_tokens: int,
        end_token_ids: frozenset[int],
        eos_token_id: int | None,
        min_num_tokens: int,
        max_model_len: int,
    ) -> None:
        self._spec = spec
        self._num_prompt_tokens = num_prompt_tokens
        self._max_num_tokens = max_num_tokens
        self._end_ids = np.array(sorted(end_token_ids), np.int64)
        self._eos_token_id = eos_token_id
        self._min_num_tokens = min_num_tokens
        self._max_length = max(max_num_tokens, max_model_len)
        self.num_candidates = max(2, 1 + len(end_token_ids)) * spec.width
        self.is_done = False
        # both best first
        self._live = [_Beam(None, 0.0)]
        self._finished: list[_Finished] = []
        self.num_output_tokens = 0

    @property
    def num_live(self) -> int:
        """Beams to be continued: 1, the prompt, before the first step; then up to `width`; 0 at the end."""
        return len(self._live)

    def output_token_ids(self, index: int) -> list[int]:
        """Tokens that a live beam has generated."""
        return _to_list(self._live[index].tokens)

    def advance(self, candidates: Sequence[tuple[npt.ArrayLike, npt.ArrayLike]]) -> list[tuple[int, int]]:
        """Makes a step.

        Args:
            candidates: for each live beam, in their order: token ids and log-probabilities of its `num_candidates`
                most likely next tokens; fewer if the vocabulary is smaller. Those of probability 0 are ignored.

        Returns:
            The new live beams, best first, as (index of the parent among the live beams before, token id); [] when
            the search is over.

        Raises:
            ValueError: the search is over, or candidates are not given for every live beam.
        """
        if self.is_done:
            raise ValueError("the beam search is over")
        if len(candidates) != len(self._live):
            raise ValueError(f"candidates of {len(candidates)} beams for {len(self._live)} live ones")
        ending, continuing = self._select(candidates)
        if not len(ending.costs) and not len(continuing.costs):
            # no candidate is allowed, e.g. all of a small vocabulary are end tokens and min_tokens forbids them
            self.finish_live()
            return []
        parents = self._live
        self.num_output_tokens += 1
        self._add_finished(ending)
        chosen = list(zip(continuing.parents.tolist(), continuing.token_ids.tolist(), strict=True))
        self._live = [
            _Beam((token_id, parents[parent].tokens), -cost)
            for (parent, token_id), cost in zip(chosen, continuing.costs.tolist(), strict=True)
        ]
        if self._num_prompt_tokens + self.num_output_tokens >= self._max_num_tokens:
            self.finish_live()
        elif not self._live or self._stops_early():
            self._end()
        return [] if self.is_done else chosen

    def finish_live(self) -> None:
        """Ends the search: the live beams finish with LENGTH, and compete with the finished ones."""
        length = self._num_prompt_tokens + self.num_output_tokens
        self._keep_best(
            _Finished(
                self._score(beam.cumulative_logprob, length),
                beam.tokens,
                beam.cumulative_logprob,
                FinishReason.LENGTH,
                None,
            )
            for beam in self._live
        )
        self._end()

    def best(self) -> list[BeamSequence]:
        """The `num_returned` best sequences so far by score, best first; live ones have no finish_reason.

        Fewer if there are not so many. Callers must not change the lists.
        """
        length = self._num_prompt_tokens + self.num_output_tokens
        ranked: list[tuple[float, _Finished | _Beam]] = [(entry.score, entry) for entry in self._finished]
        ranked += [(self._score(beam.cumulative_logprob, length), beam) for beam in self._live]
        ranked.sort(key=lambda scored: -scored[0])
        return [
            entry.to_message()
            if isinstance(entry, _Finished)
            else BeamSequence(_to_list(entry.tokens), entry.cumulative_logprob)
            for _, entry in ranked[: self._spec.num_returned]
        ]

    def _select(self, candidates: Sequence[tuple[npt.ArrayLike, npt.ArrayLike]]) -> tuple[_Candidates, _Candidates]:
        """Candidates that end their sequence, and the `width` that continue, both best first."""
        can_end = self._num_prompt_tokens + self.num_output_tokens + 1 >= self._min_num_tokens
        token_ids = [np.asarray(ids, np.int64) for ids, _ in candidates]
        counts = [len(ids) for ids in token_ids]
        logprobs = np.concatenate([np.asarray(values, np.float64) for _, values in candidates])
        before = np.repeat([beam.cumulative_logprob for beam in self._live], counts)
        every = _Candidates(
            -(before + logprobs), np.repeat(np.arange(len(counts)), counts), np.concatenate(token_ids)
        )
        # false for NaN, too
        every = every.take(logprobs > -math.inf)
        ends = np.isin(every.token_ids, self._end_ids)
        ending, continuing = every.take(ends), every.take(~ends).best(self._spec.width)
        if not can_end:
            return ending.take(np.zeros(0, np.int64)), continuing
        if self._spec.early_stopping is not None:
            ending = every.best(self.num_candidates)
            ending = ending.take(np.isin(ending.token_ids, self._end_ids))
        return ending.best(len(ending.costs)), continuing

    def _add_finished(self, ending: _Candidates) -> None:
        """Adds the candidates that end to the finished sequences."""
        length = self._num_prompt_tokens + self.num_output_tokens
        at_eos = ending.token_ids == self._eos_token_id
        scores = -ending.costs / np.where(at_eos, self._divisor(length - 1), self._divisor(length))
        # more cannot be kept
        some = np.sort(np.argsort(-scores, kind="stable")[: self._spec.width])
        best, live = ending.take(some), self._live
        self._keep_best(
            _Finished(
                score,
                (token_id, live[parent].tokens),
                -cost,
                FinishReason.STOP,
                None if token_id == self._eos_token_id else token_id,
            )
            for score, cost, parent, token_id in zip(
                *(column.tolist() for column in (scores[some], best.costs, best.parents, best.token_ids)), strict=True
            )
        )

    def _keep_best(self, finished: Iterable[_Finished]) -> None:
        """Adds finished sequences and keeps the `width` best of all."""
        self._finished += finished
        # stable: of equals the one that ended first is kept
        self._finished.sort(key=lambda entry: -entry.score)
        del self._finished[self._spec.width :]

    def _stops_early(self) -> bool:
        """Whether early stopping ends the search though there are live beams."""
        rule = self._spec.early_stopping
        if rule is None or len(self._finished) < self._spec.width:
            return False
        if rule is True:
            return True
        length = self._num_prompt_tokens + self.num_output_tokens
        if rule == "never" and self._spec.length_penalty > 0.0:
            length = self._max_length
        return self._finished[-1].score >= self._score(self._live[0].cumulative_logprob, length)

    def _score(self, cumulative_logprob: float, length: int) -> float:
        return cumulative_logprob / self._divisor(length)

    def _divisor(self, length: int) -> float:
        return _length_divisor(length, self._spec.length_penalty)

    def _end(self) -> None:
        self._live = []
        self.is_done = True
