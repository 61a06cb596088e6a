"""The output side of a beam search: texts of its best sequences.

A beam search is one request of the engine core, which sends whole sequences: another beam may lead after every step,
so that there is nothing to append to.
"""

from __future__ import annotations

from collections.abc import Sequence

from ascend_vllm.engine.request_stats import FinishedSequence
from ascend_vllm.engine.sequence_state import SequenceState
from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.outputs import CompletionOutput
from ascend_vllm.sampling_params import RequestOutputKind, SamplingParams
from ascend_vllm.types.messages import BeamSequence, EngineCoreOutput, FinishReason


class BeamSearchState:
    """Holds the best sequences that the engine core sent last; the counterpart of a `SequenceState`.

    Args:
        params: the request's sampling parameters.
        prompt_token_ids: the prompt.
        tokenizer: None: no text.

    Attributes:
        finish_reason: of the search; None while it runs.
        last_token_time: seconds of time.monotonic(); None before the first sequences came.
    """

    __slots__ = (
        "_beams",
        "_cumulative_logprobs",
        "_params",
        "_prompt_token_ids",
        "_tokenizer",
        "finish_reason",
        "last_token_time",
    )

    def __init__(self, params: SamplingParams, prompt_token_ids: Sequence[int], tokenizer: Tokenizer | None) -> None:
        self.finish_reason: FinishReason | None = None
        self.last_token_time: float | None = None
        self._params = params
        self._prompt_token_ids = prompt_token_ids
        self._tokenizer = tokenizer
        # best first; their log-probabilities are told, but not the single tokens'
        self._beams: list[SequenceState] = []
        self._cumulative_logprobs: list[float | None] = []

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest sequence."""
        return max((len(beam.token_ids) for beam in self._beams), default=0)

    @property
    def num_generation_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(len(beam.token_ids) for beam in self._beams)

    def update(self, output: EngineCoreOutput) -> bool:
        """Takes the sequences of a step in the place of those before.

        Returns:
            False: nothing here ends a search of which the core does not know.
        """
        if output.beams is not None:
            self._beams = [self._read(rank, beam) for rank, beam in enumerate(output.beams)]
            self._cumulative_logprobs = [beam.cumulative_logprob for beam in output.beams]
        if output.finish_reason is not None:
            self.end(output.finish_reason)
        return False

    def end(self, reason: FinishReason) -> None:
        """Ends it; sequences that might have grown end for its reason.

        If it had no sequence yet, as many as were asked for are returned, without a token.
        """
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
        """What the metrics count of it at its end: each sequence that is returned."""
        return [summary for beam in self._beams for summary in beam.summaries()]

    def _read(self, rank: int, beam: BeamSequence) -> SequenceState:
        """A sequence's text, by the rules that hold for any sequence."""
        state = SequenceState(rank, self._params, self._prompt_token_ids, self._tokenizer)
        state.update(
            EngineCoreOutput("", beam.token_ids, finish_reason=beam.finish_reason, stop_reason=beam.stop_reason)
        )
        return state
