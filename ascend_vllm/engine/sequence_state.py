"""The output side of one sequence: text, stop strings and log-probabilities."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from ascend_vllm.engine.detokenization import IncrementalDetokenizer, NoDetokenizer
from ascend_vllm.engine.metrics import FinishedSequence
from ascend_vllm.engine.stop_strings import make_stop_search
from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.outputs import CompletionOutput, Logprob, PositionLogprobs
from ascend_vllm.sampling_params import RequestOutputKind, SamplingParams
from ascend_vllm.types.messages import BeamSequence, EngineCoreOutput, FinishReason, TokenLogprobs

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class SequenceState:
    """Text, stop strings and log-probabilities of one sequence; makes its `CompletionOutput`s.

    Args:
        index: of the sequence in its request.
        params: the request's sampling parameters.
        prompt_token_ids: the prompt.
        tokenizer: None: no text.
        is_scored: emit the cumulative log-probability even if the request has no logprobs; the core must send those
            of the sampled tokens.

    Attributes:
        index: of the sequence in its request.
        token_ids: all tokens, the stop token included.
        text: all text, without the stop string or token unless include_stop_str_in_output is set.
        finish_reason: None while it runs.
        last_token_time: seconds of time.monotonic(); None before the first token.
    """

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        tokenizer: Tokenizer | None,
        is_scored: bool = False,
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.last_token_time: float | None = None
        self._tokenizer = tokenizer if params.detokenize else None
        # made when the first tokens come, off the event loop
        self._detokenizer: IncrementalDetokenizer | None = None
        self._make_detokenizer: Callable[[], IncrementalDetokenizer] = NoDetokenizer
        if self._tokenizer is not None:
            self._make_detokenizer = functools.partial(
                self._tokenizer.make_detokenizer,
                prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
        stops = params.stop_strings
        self._stops = make_stop_search(stops) if stops else None
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        # While it runs, the last characters are held back, as they may be the beginning of a stop string; with
        # include_stop_str_in_output nothing is.
        self._held_back = 0 if self._include_stop else max(map(len, stops), default=1) - 1
        self._num_logprobs = params.logprobs
        self._logprobs: list[PositionLogprobs] | None = None if params.logprobs is None else []
        self._is_scored = is_scored or params.logprobs is not None
        self._cumulative_logprob = 0.0
        self._num_sent_chars = 0
        self._num_sent_tokens = 0
        self._num_drafts = self._num_accepted_drafts = 0

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum over the tokens; None unless log-probabilities were requested or best_of needs them."""
        return self._cumulative_logprob if self._is_scored else None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_emitted(self) -> int:
        """Tokens that outputs have contained."""
        return self._num_sent_tokens

    def summaries(self) -> list[FinishedSequence]:
        """Its entry in the metrics, at its end."""
        return [FinishedSequence(str(self.finish_reason), len(self.token_ids))]

    def update(self, output: EngineCoreOutput) -> bool:
        """Appends the tokens of a step.

        Returns:
            Whether a stop string ended the sequence, so that the core must abort it.
        """
        detokenizer = self._detokenizer
        if detokenizer is None:
            detokenizer = self._detokenizer = self._make_detokenizer()
        token_ids, reason = output.new_token_ids, output.finish_reason
        if output.num_drafts:
            self._num_drafts += output.num_drafts
            self._num_accepted_drafts += output.num_accepted_drafts
        # STOP means that the last token ended the sequence: its text is not part of the text.
        num_with_text = len(token_ids) - (reason is FinishReason.STOP and not self._include_stop)
        if self._stops is not None or self._is_scored:
            for position, token_id in enumerate(token_ids):
                new_text = detokenizer.push((token_id,)) if position < num_with_text else ""
                self.text += new_text
                self.token_ids.append(token_id)
                if output.new_logprobs is not None:
                    self._append_logprobs(output.new_logprobs[position], new_text)
                elif self._logprobs is not None:
                    # left out by the engine, see `SpeculativeConfig.disables_logprobs`
                    self._append_logprobs(TokenLogprobs([token_id], [0.0], rank=-1), new_text)
                is_stop_token = reason is FinishReason.STOP and position == len(token_ids) - 1
                if new_text and not is_stop_token and self._find_stop(len(new_text)):
                    return True
        else:
            self.token_ids += token_ids
            if num_with_text:
                self.text += detokenizer.push(token_ids[:num_with_text])
        if reason is not None:
            new_text = detokenizer.finish()
            self.text += new_text
            if new_text and reason is not FinishReason.STOP and self._find_stop(len(new_text)):
                return True
            self.finish_reason, self.stop_reason = reason, output.stop_reason
        return False

    def end(self, reason: FinishReason) -> None:
        """Ends it early, for an abort or error; held-back bytes become text."""
        self.text += (self._detokenizer or self._make_detokenizer()).finish()
        self.finish_reason = reason

    def make_outputs(self, kind: RequestOutputKind) -> list[CompletionOutput]:
        """One output: the new part for DELTA, otherwise everything so far."""
        text, token_ids, logprobs = self.text, self.token_ids, self._logprobs
        end = len(text)
        if self.finish_reason is None:
            end = max(end - self._held_back, self._num_sent_chars)
        if kind is RequestOutputKind.DELTA:
            text = text[self._num_sent_chars : end]
            token_ids = token_ids[self._num_sent_tokens :]
            # emitted once only
            self._logprobs = None if logprobs is None else []
        else:
            text = text[:end]
            token_ids = token_ids.copy()
            logprobs = None if logprobs is None else logprobs.copy()
        self._num_sent_chars = end
        self._num_sent_tokens = len(self.token_ids)
        reason = self.finish_reason
        return [
            CompletionOutput(
                self.index,
                text,
                token_ids,
                self.cumulative_logprob,
                logprobs,
                None if reason is None else str(reason),
                self.stop_reason,
                num_drafts=self._num_drafts,
                num_accepted_drafts=self._num_accepted_drafts,
            )
        ]

    def _find_stop(self, num_new_chars: int) -> bool:
        """Looks for a stop string that ends in the new text; cuts the text there."""
        if self._stops is None:
            return False
        if len(self.token_ids) < self._min_tokens:
            self._stops.push(self.text, num_new_chars)
            return False
        found = self._stops.find(self.text, num_new_chars)
        if found is None:
            return False
        stop, start = found
        self.text = self.text[: start + len(stop) if self._include_stop else start]
        self.finish_reason, self.stop_reason = FinishReason.STOP, stop
        return True

    def _append_logprobs(self, entry: TokenLogprobs, new_text: str) -> None:
        """Shapes one position: the sampled token, then the most likely ones.

        A token that is part of a character is shown as the text it completed, or "", so that the tokens' texts
        join to the whole text.
        """
        self._cumulative_logprob += entry.logprobs[0]
        if self._logprobs is not None and self._num_logprobs is not None:
            self._logprobs.append(_shape_position(entry, self._num_logprobs, self._tokenizer, new_text))


class PromptLogprobsState:
    """Log-probabilities of a prompt as callers get them; the core sends them chunk by chunk.

    Args:
        prompt_token_ids: the prompt.
        num_logprobs: most likely tokens to show beside each token.
        tokenizer: None: no texts.

    Attributes:
        positions: one entry per token so far; None for the first, which has no context.
        is_awaited: the last chunk has not come yet.
    """

    def __init__(self, prompt_token_ids: Sequence[int], num_logprobs: int, tokenizer: Tokenizer | None) -> None:
        self.positions: list[PositionLogprobs | None] = [None]
        self.is_awaited = True
        self._token_ids = prompt_token_ids
        self._num_logprobs = num_logprobs
        self._tokenizer = tokenizer
        self._detokenizer: IncrementalDetokenizer = NoDetokenizer()
        if tokenizer is not None:
            self._detokenizer = tokenizer.make_detokenizer(skip_special_tokens=False)
        self._detokenizer.push(prompt_token_ids[:1])

    def take(self, entries: Sequence[TokenLogprobs], *, is_last: bool) -> None:
        first = len(self.positions)
        token_ids = self._token_ids[first : first + len(entries)]
        for token_id, entry in zip(token_ids, entries, strict=True):
            new_text = self._detokenizer.push((token_id,))
            self.positions.append(_shape_position(entry, self._num_logprobs, self._tokenizer, new_text))
        self.is_awaited = not is_last


def _shape_position(
    entry: TokenLogprobs, num_logprobs: int, tokenizer: Tokenizer | None, new_text: str
) -> PositionLogprobs:
    """One position: its own token, then the most likely ones.

    Args:
        entry: as the core sends it.
        num_logprobs: most likely tokens to show.
        tokenizer: None: no texts.
        new_text: what the token added to the text; its text if the token alone is not valid UTF-8.
    """

    def text_of(token_id: int) -> str | None:
        return None if tokenizer is None else tokenizer.token_text(token_id)

    own = entry.token_ids[0]
    text = text_of(own)
    if text is not None and _REPLACEMENT in text:
        text = new_text
    position = {own: Logprob(entry.logprobs[0], entry.rank, text)}
    for rank in range(1, min(num_logprobs + 1, len(entry.token_ids))):
        token_id = entry.token_ids[rank]
        if token_id not in position:
            position[token_id] = Logprob(entry.logprobs[rank], rank, text_of(token_id))
    return position


class BeamSearchState:
    """Holds the best sequences that the engine core sent last; the counterpart of a `SequenceState`.

    The engine core sends whole sequences for a beam search, not deltas, since another beam may lead after every step.

    Args:
        params: the request's sampling parameters.
        prompt_token_ids: the prompt.
        tokenizer: None: no text.

    Attributes:
        finish_reason: of the search; None while it runs.
        last_token_time: seconds of time.monotonic(); None before the first sequences came.
    """

    def __init__(self, params: SamplingParams, prompt_token_ids: Sequence[int], tokenizer: Tokenizer | None) -> None:
        self.finish_reason: FinishReason | None = None
        self.last_token_time: float | None = None
        self._params = params
        self._prompt_token_ids = prompt_token_ids
        self._tokenizer = tokenizer
        # best first; with cumulative log-probabilities, without those of single tokens
        self._beams: list[SequenceState] = []
        self._cumulative_logprobs: list[float | None] = []

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest sequence."""
        return max((len(beam.token_ids) for beam in self._beams), default=0)

    def update(self, output: EngineCoreOutput) -> bool:
        """Replaces the sequences by those of a step.

        Returns:
            False: stop strings do not end a beam search.
        """
        if output.beams is not None:
            self._beams = [self._read(rank, beam) for rank, beam in enumerate(output.beams)]
            self._cumulative_logprobs = [beam.cumulative_logprob for beam in output.beams]
        if output.finish_reason is not None:
            self.end(output.finish_reason)
        return False

    def end(self, reason: FinishReason) -> None:
        """Ends it, and its unfinished sequences for the same reason; before the first step, n empty ones are made."""
        self.finish_reason = reason
        if not self._beams:
            self._beams = [
                SequenceState(rank, self._params, self._prompt_token_ids, None) for rank in range(self._params.n)
            ]
            self._cumulative_logprobs = [None] * len(self._beams)
        for beam in self._beams:
            if beam.finish_reason is None:
                beam.end(reason)

    def make_outputs(self, kind: RequestOutputKind) -> list[CompletionOutput]:
        """The sequences, best first, numbered by their rank; for DELTA nothing before the end, then everything."""
        if kind is RequestOutputKind.DELTA and self.finish_reason is None:
            return []
        outputs: list[CompletionOutput] = []
        for beam, cumulative_logprob in zip(self._beams, self._cumulative_logprobs, strict=True):
            outputs += beam.make_outputs(RequestOutputKind.CUMULATIVE)
            outputs[-1].cumulative_logprob = cumulative_logprob
        return outputs

    def summaries(self) -> list[FinishedSequence]:
        """Its entries in the metrics, at its end: one for each returned sequence."""
        return [summary for beam in self._beams for summary in beam.summaries()]

    def _read(self, rank: int, beam: BeamSequence) -> SequenceState:
        """The state of one beam, made like that of any sequence."""
        state = SequenceState(rank, self._params, self._prompt_token_ids, self._tokenizer)
        state.update(
            EngineCoreOutput("", beam.token_ids, finish_reason=beam.finish_reason, stop_reason=beam.stop_reason)
        )
        return state
