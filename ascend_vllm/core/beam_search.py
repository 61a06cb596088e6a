"""Beam search: which continuations of a prompt live on, which have ended, and when to stop.

The algorithm alone, on token ids and log-probabilities. Whoever uses it computes each live beam's most likely next
tokens and moves the beams' KV blocks.

A step extends every live beam by each of its candidates. Candidates that end go to the finished sequences, of which
the `width` best are kept; of the others the `width` most likely live on. Two rules are known:

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
from collections.abc import Sequence

from ascend_vllm.types.messages import BeamSearchSpec, BeamSequence, FinishReason

# A penalty beyond this is taken as this: lengths alone decide at either, and a power of a length would overflow.
_MAX_LENGTH_PENALTY = 32.0


def beam_score(cumulative_logprob: float, length: int, length_penalty: float) -> float:
    """What sequences are compared by: cumulative_logprob / length ** length_penalty; higher is better.

    Above 0 the penalty favours long sequences, since log-probabilities are negative. (Wu et al., "Google's Neural
    Machine Translation System", 2016, section 7, in the form of Hugging Face's `BeamHypotheses` and of vLLM.)

    Args:
        cumulative_logprob: sum of the output tokens' natural log-probabilities, at most 0.
        length: tokens of prompt and output, at least 1; a final end-of-sequence token does not count.
        length_penalty: beyond −32 … 32 it is taken as the nearer end.
    """
    divisor: float = float(length) ** max(-_MAX_LENGTH_PENALTY, min(length_penalty, _MAX_LENGTH_PENALTY))
    return cumulative_logprob / divisor


@dataclasses.dataclass(slots=True)
class _Beam:
    """A live beam: what it has generated."""

    token_ids: list[int]
    cumulative_logprob: float


@dataclasses.dataclass(slots=True)
class _Finished:
    """A sequence that has ended."""

    score: float
    sequence: BeamSequence


class BeamSearch:
    """One search, from the prompt to its best sequences.

    Ties are decided the same way every time: the better parent first, then the lower token id; of finished sequences
    the one that ended first.

    Args:
        spec: width, number of sequences to return, length penalty and rule of early stopping.
        num_prompt_tokens: at least 1.
        max_num_tokens: tokens of prompt and output at which a sequence ends with LENGTH.
        end_token_ids: ids that end a sequence with STOP, `eos_token_id` among them.
        eos_token_id: the one of them that is no stop reason and not counted in a score's length; None: there is none.
        min_num_tokens: tokens of prompt and output below which nothing ends; until then candidates among
            `end_token_ids` are left out.
        max_model_len: for the greatest possible length of early_stopping "never".

    Attributes:
        num_candidates: most likely next tokens that each live beam must bring to `advance`. No more of them end than
            beams live times len(end_token_ids), so that `width` others are always left.
        is_done: the search is over.
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
        self._end_token_ids = end_token_ids
        self._eos_token_id = eos_token_id
        self._min_num_tokens = min_num_tokens
        self._max_length = max(max_num_tokens, max_model_len)
        self.num_candidates = max(2, 1 + len(end_token_ids)) * spec.width
        self.is_done = False
        # both best first
        self._live = [_Beam([], 0.0)]
        self._finished: list[_Finished] = []
        self._num_output_tokens = 0

    @property
    def num_live(self) -> int:
        """Beams to be continued: 1, the prompt, before the first step; then up to `width`; 0 at the end."""
        return len(self._live)

    @property
    def num_output_tokens(self) -> int:
        """Tokens that each live beam has generated; at the end, the steps that were made."""
        return self._num_output_tokens

    def output_token_ids(self, index: int) -> list[int]:
        """Tokens that a live beam has generated (a copy)."""
        return self._live[index].token_ids.copy()

    def advance(self, candidates: Sequence[tuple[Sequence[int], Sequence[float]]]) -> list[tuple[int, int]]:
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
        ending, going_on = self._select(candidates)
        if not ending and not going_on:
            # nothing can follow, e.g. all of a small vocabulary ends and min_tokens forbids it
            self.finish_live()
            return []
        parents = self._live
        self._num_output_tokens += 1
        for negative_logprob, parent, token_id in ending:
            self._finish([*parents[parent].token_ids, token_id], -negative_logprob, FinishReason.STOP)
        self._live = [
            _Beam([*parents[parent].token_ids, token_id], -negative_logprob)
            for negative_logprob, parent, token_id in going_on
        ]
        if self._num_prompt_tokens + self._num_output_tokens >= self._max_num_tokens:
            self.finish_live()
        elif not self._live or self._stops_early():
            self._end()
        return [] if self.is_done else [(parent, token_id) for _, parent, token_id in going_on]

    def finish_live(self) -> None:
        """Ends the search with its live beams as they are: they finish with LENGTH, and compete with the others."""
        for beam in self._live:
            self._finish(beam.token_ids, beam.cumulative_logprob, FinishReason.LENGTH)
        self._end()

    def best(self) -> list[BeamSequence]:
        """The `num_returned` best sequences so far by score, best first; live ones have no finish_reason.

        Fewer if there are not so many. The lists are the search's own: they are not to be changed.
        """
        ranked = self._finished + [
            _Finished(
                self._score(beam.cumulative_logprob, self._num_prompt_tokens + len(beam.token_ids)),
                BeamSequence(beam.token_ids, beam.cumulative_logprob),
            )
            for beam in self._live
        ]
        ranked.sort(key=_rank)
        return [entry.sequence for entry in ranked[: self._spec.num_returned]]

    def _select(
        self, candidates: Sequence[tuple[Sequence[int], Sequence[float]]]
    ) -> tuple[list[tuple[float, int, int]], list[tuple[float, int, int]]]:
        """Candidates that end, and the `width` that live on: (−cumulative log-probability, parent, token id)."""
        can_end = self._num_prompt_tokens + self._num_output_tokens + 1 >= self._min_num_tokens
        end_token_ids = self._end_token_ids
        # (1 + number of ends) · width² small tuples for the host at most; a search's width is a handful
        ranked = sorted(
            (-(beam.cumulative_logprob + logprob), parent, token_id)
            for parent, (beam, (token_ids, logprobs)) in enumerate(zip(self._live, candidates, strict=True))
            for token_id, logprob in zip(token_ids, logprobs, strict=True)
            # not true of NaN either
            if logprob > -math.inf and (can_end or token_id not in end_token_ids)
        )
        if self._spec.early_stopping is not None:
            del ranked[self.num_candidates :]
        ending = [candidate for candidate in ranked if candidate[2] in end_token_ids]
        going_on = [candidate for candidate in ranked if candidate[2] not in end_token_ids]
        return ending, going_on[: self._spec.width]

    def _finish(self, token_ids: list[int], cumulative_logprob: float, reason: FinishReason) -> None:
        """Adds a sequence to the finished ones; only the `width` best stay."""
        length = self._num_prompt_tokens + len(token_ids)
        stop_reason = None
        if reason is FinishReason.STOP:
            if token_ids[-1] == self._eos_token_id:
                length -= 1
            else:
                stop_reason = token_ids[-1]
        sequence = BeamSequence(token_ids, cumulative_logprob, reason, stop_reason)
        self._finished.append(_Finished(self._score(cumulative_logprob, length), sequence))
        # stable: of equals the one that came first stays
        self._finished.sort(key=_rank)
        del self._finished[self._spec.width :]

    def _stops_early(self) -> bool:
        """Whether the rule of early stopping ends the search while beams live."""
        rule = self._spec.early_stopping
        if rule is None or len(self._finished) < self._spec.width:
            return False
        if rule is True:
            return True
        length = self._num_prompt_tokens + self._num_output_tokens
        if rule == "never" and self._spec.length_penalty > 0.0:
            length = self._max_length
        return self._finished[-1].score >= self._score(self._live[0].cumulative_logprob, length)

    def _score(self, cumulative_logprob: float, length: int) -> float:
        return beam_score(cumulative_logprob, length, self._spec.length_penalty)

    def _end(self) -> None:
        self._live = []
        self.is_done = True


def _rank(entry: _Finished) -> float:
    return -entry.score
