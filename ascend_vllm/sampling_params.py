"""`SamplingParams`, with vLLM's fields, defaults and error messages.

The positional order of the fields is vLLM 0.6.3's; fields of other versions follow, keyword-only in practice.
Where 0.6.3 and today's vLLM disagree on a range, the wider one applies (top_k 0 disables, repetition_penalty
above 2 is allowed). The fields of beam search are 0.6.0's.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import math
from typing import Any

import msgspec

from ascend_vllm.logger import init_logger
from ascend_vllm.structured_outputs import StructuredOutputsParams

logger = init_logger(__name__)

# Below SAMPLING_EPS sampling is greedy; temperatures between it and MIN_TEMPERATURE are raised to that, since
# dividing logits by less loses precision (both values are vLLM's).
SAMPLING_EPS = 1e-5
MIN_TEMPERATURE = 1e-2

# Fields that change the distribution or need text, with the values that have no effect. Beam search allows only these
# values: it compares the model's own log-probabilities of token ids.
_NEUTRAL_FOR_BEAMS: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "min_p": (0.0,),
    "stop": ([],),
    "logprobs": (None,),
    "prompt_logprobs": (None,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "logits_processors": (None, []),
    "structured_outputs": (None,),
}

_INTEGERS = (
    *("best_of", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens"),
    "stream_interval",
)


class SamplingType(enum.IntEnum):
    """How the next token is chosen."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


class RequestOutputKind(enum.IntEnum):
    """Contents of each RequestOutput of a running request."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams(msgspec.Struct, omit_defaults=True, dict=True):
    """Sampling parameters of one request.

    Args:
        n: sequences to return.
        best_of: sequences to generate, of which the best `n` by cumulative log-probability are returned; with beam
            search the number of beams. None: `n`.
        presence_penalty: −2 … 2, subtracted once from every token generated before.
        frequency_penalty: −2 … 2, subtracted for each time a token was generated before.
        repetition_penalty: > 0, divides (multiplies, if negative) the logits of tokens in prompt or output.
        temperature: ≥ 0; 0 is greedy.
        top_p: (0, 1], smallest set of most likely tokens that reaches this probability.
        top_k: the k most likely tokens; 0 or −1 disables.
        min_p: 0 … 1, drops tokens less likely than this times the most likely one.
        seed: makes the request's samples repeat; −1 is None.
        stop: strings that end the text (they are not part of it).
        stop_token_ids: ids that end the text.
        ignore_eos: continue after the end-of-sequence token.
        max_tokens: maximum tokens to generate; None: up to the model's limit.
        min_tokens: minimum tokens before the text may end.
        logprobs: return this many most likely tokens' log-probabilities beside the sampled one's.
        prompt_logprobs: the same for each prompt token.
        detokenize: return text as well as ids.
        skip_special_tokens: omit special tokens from the text.
        logits_processors: functions (output_ids, logits) or (prompt_ids, output_ids, logits) that return changed
            logits of a row, [V] float32, before any other processing. For `LLM` and `LLMEngine`, whose model runs in
            the same process.
        include_stop_str_in_output: keep the stop string in the text.
        logit_bias: added to the logits of these ids, each within −100 … 100.
        allowed_token_ids: only these ids can be sampled.
        bad_words: texts that are not generated: the last token of each, with or without a space before it, cannot
            follow the others.
        structured_outputs: constraint on the text.
        guided_decoding: the same, with vLLM 0.6.3's name.
        use_beam_search: search for the most likely sequences instead of sampling. Needs temperature=0 and at least 2
            beams, and excludes log-probabilities, `stop` and the fields that change probabilities.
        length_penalty: beams are compared by cumulative log-probability / length ** length_penalty, the length being
            that of prompt and output.
        early_stopping: when to stop once as many sequences as beams have ended: True: at once; False: when no beam is
            better now; "never": when none can become better; None: when all beams have ended, as in vLLM 0.6.3's
            `LLM.beam_search`, which also allows a single beam.
        stream_interval: number of tokens that are streamed together, after the first one; at least the engine's own
            interval.

    Raises:
        ValueError: a value is out of range; the message names the field.
        TypeError: a value has the wrong type; likewise.

    Example::

        SamplingParams(temperature=0.8, top_p=0.95, max_tokens=64)
        SamplingParams(use_beam_search=True, n=4, temperature=0, length_penalty=0.5)
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logits_processors: list[Any] | None = None
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    guided_decoding: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str | None = False
    bad_words: list[str] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    stream_interval: int | None = None

    def __post_init__(self) -> None:
        self._normalize()
        self._verify()
        if self.use_beam_search:
            self._verify_beam_search()
            self._make_greedy()
            return
        self._verify_no_beam_search()
        if self.temperature < SAMPLING_EPS:
            if self.num_sequences > 1:
                raise ValueError(f"n must be 1 when using greedy sampling, got {self.num_sequences}.")
            self._make_greedy()

    @property
    def num_sequences(self) -> int:
        """Sequences to generate, of which `n` are returned; with beam search the number of beams."""
        return self.best_of or self.n

    @property
    def sampling_type(self) -> SamplingType:
        """Greedy, random, or random with the request's own seed."""
        if self.temperature < SAMPLING_EPS:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def stop_strings(self) -> list[str]:
        return self.stop if isinstance(self.stop, list) else []

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, not validated again."""
        new = copy.copy(self)
        for name, value in changes.items():
            setattr(new, name, value)
        return new

    def _normalize(self) -> None:
        if self.stop is None:
            self.stop = []
        elif isinstance(self.stop, str):
            self.stop = [self.stop]
        if self.stop_token_ids is None:
            self.stop_token_ids = []
        if self.seed == -1:
            self.seed = None
        self._join_structured_outputs()
        if self.logprobs is True:
            self.logprobs = 1
        if self.prompt_logprobs is True:
            self.prompt_logprobs = 1
        if SAMPLING_EPS <= self.temperature < MIN_TEMPERATURE:
            logger.warning(
                "temperature %s is raised to %s: dividing by less loses precision.", self.temperature, MIN_TEMPERATURE
            )
            self.temperature = MIN_TEMPERATURE

    def _join_structured_outputs(self) -> None:
        """Moves `guided_decoding` to `structured_outputs`, and drops it if it has no constraint."""
        for name in ("structured_outputs", "guided_decoding"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, StructuredOutputsParams):
                raise TypeError(f"{name} must be StructuredOutputsParams, got {type(value).__name__}")
        if self.guided_decoding is not None:
            if self.structured_outputs is not None:
                raise ValueError("guided_decoding and structured_outputs are two names of one field; give one.")
            self.structured_outputs, self.guided_decoding = self.guided_decoding, None
        if self.structured_outputs is not None and self.structured_outputs.is_empty:
            self.structured_outputs = None

    def _verify(self) -> None:
        self._verify_counts()
        self._verify_penalties()
        self._verify_filters()
        self._verify_lengths()
        self._verify_stop()
        if type(self.use_beam_search) is not bool:
            raise TypeError(f"use_beam_search must be a bool, got {type(self.use_beam_search).__name__}")
        if not math.isfinite(self.length_penalty):
            raise ValueError(f"length_penalty must be a finite number, got {self.length_penalty}.")

    def _verify_counts(self) -> None:
        if not isinstance(self.n, int):
            raise ValueError(f"n must be an int, but is of type {type(self.n)}")
        if self.n < 1:
            raise ValueError(f"n must be at least 1, got {self.n}.")
        for name in _INTEGERS:
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
        if self.stream_interval is not None and self.stream_interval < 1:
            raise ValueError(f"stream_interval must be at least 1, got {self.stream_interval}.")
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(
                f"best_of must be greater than or equal to n, got n={self.n} and best_of={self.best_of}."
            )

    def _verify_penalties(self) -> None:
        if not -2.0 <= self.presence_penalty <= 2.0:
            raise ValueError(f"presence_penalty must be in [-2, 2], got {self.presence_penalty}.")
        if not -2.0 <= self.frequency_penalty <= 2.0:
            raise ValueError(f"frequency_penalty must be in [-2, 2], got {self.frequency_penalty}.")
        if not 0.0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty must be greater than zero, got {self.repetition_penalty}.")

    def _verify_filters(self) -> None:
        if not math.isfinite(self.temperature):
            raise ValueError(f"temperature must be a finite number, got {self.temperature}.")
        if self.temperature < 0.0:
            raise ValueError(f"temperature must be non-negative, got {self.temperature}.")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}.")
        if not isinstance(self.top_k, int):
            raise TypeError(f"top_k must be an integer, got {type(self.top_k).__name__}")
        if self.top_k < -1:
            raise ValueError(f"top_k must be -1 (disable), or at least 1, got {self.top_k}.")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}.")

    def _verify_lengths(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}.")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens must be greater than or equal to 0, got {self.min_tokens}.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be less than or equal to max_tokens={self.max_tokens}, got {self.min_tokens}."
            )
        if self.logprobs is not None and self.logprobs < 0:
            raise ValueError(f"logprobs must be non-negative, got {self.logprobs}.")
        if self.prompt_logprobs is not None and self.prompt_logprobs < 0:
            raise ValueError(f"prompt_logprobs must be non-negative, got {self.prompt_logprobs}.")
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens < 1:
            raise ValueError(f"truncate_prompt_tokens must be >= 1, got {self.truncate_prompt_tokens}")

    def _verify_stop(self) -> None:
        if not all(isinstance(stop, str) for stop in self.stop_strings):
            raise TypeError("stop must be a string or a list of strings")
        for name in ("stop_token_ids", "allowed_token_ids"):
            if not all(type(token_id) is int for token_id in getattr(self, name) or ()):
                raise TypeError(f"{name} must be a list of integers")
        if not all(callable(function) for function in self.logits_processors or ()):
            raise TypeError("logits_processors must be a list of functions")
        if not all(isinstance(word, str) for word in self.bad_words or ()):
            raise TypeError("bad_words must be a list of strings")
        if any(not word for word in self.bad_words or ()):
            raise ValueError(f"bad_words cannot contain an empty string, got {self.bad_words}.")
        if any(not stop for stop in self.stop_strings):
            raise ValueError("stop cannot contain an empty string.")
        if self.stop_strings and not self.detokenize:
            raise ValueError(
                "stop strings are only supported when detokenize is True. Set detokenize=True to use stop."
            )

    def _verify_no_beam_search(self) -> None:
        if self.early_stopping is not False:
            raise ValueError("early_stopping is not effective and must be False when not using beam search.")
        if self.length_penalty != 1.0:
            raise ValueError(
                "length_penalty is not effective and must be the default value of 1.0 when not using beam search."
            )
        if self.output_kind is RequestOutputKind.DELTA and self.num_sequences != self.n:
            raise ValueError("best_of must equal n to use output_kind=DELTA")

    def _verify_beam_search(self) -> None:
        if self.num_sequences == 1 and self.early_stopping is not None:
            raise ValueError("best_of must be greater than 1 when using beam search. Got 1.")
        if self.temperature >= SAMPLING_EPS:
            raise ValueError("temperature must be 0 when using beam search.")
        if self.top_p < 1.0 - SAMPLING_EPS:
            raise ValueError("top_p must be 1 when using beam search.")
        if self.top_k not in (-1, 0):
            raise ValueError("top_k must be -1 when using beam search.")
        rule = self.early_stopping
        if not (rule is None or isinstance(rule, bool) or rule == "never"):
            raise ValueError(f"early_stopping must be True, False, or 'never', got {rule}.")
        for name, neutral in _NEUTRAL_FOR_BEAMS.items():
            if getattr(self, name) not in neutral:
                raise ValueError(f"{name} cannot be used with beam search.")

    def _make_greedy(self) -> None:
        self.temperature = 0.0
        self.top_p = 1.0
        self.top_k = -1
        self.min_p = 0.0


@dataclasses.dataclass
class BeamSearchParams:
    """Parameters of `LLM.beam_search`, with vLLM's names and order.

    Args:
        beam_width: number of beams, and of sequences to return.
        max_tokens: maximum tokens to generate.
        ignore_eos: continue after the end-of-sequence token.
        temperature: must be 0, since beams are compared by the model's own probabilities.
        length_penalty: sequences are compared by cumulative log-probability / length ** length_penalty.
        include_stop_str_in_output, skip_special_tokens: of the engine's texts; `LLM.beam_search` returns the text of
            all tokens, as vLLM's does.
        early_stopping: when to stop once `beam_width` sequences have ended, see `SamplingParams`; None, as in today's
            vLLM: when all beams have ended.

    Raises:
        ValueError: a value is out of range; the message names the field.
        TypeError: a value has the wrong type; likewise.

    Example::

        llm.beam_search(["Hello, my name is"], BeamSearchParams(beam_width=4, max_tokens=32))
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    _: dataclasses.KW_ONLY
    skip_special_tokens: bool = True
    early_stopping: bool | str | None = None

    def __post_init__(self) -> None:
        if type(self.beam_width) is not int:
            raise TypeError(f"beam_width must be an integer, got {type(self.beam_width).__name__}")
        if self.beam_width < 1:
            raise ValueError(f"beam_width must be at least 1, got {self.beam_width}.")
        self.to_sampling_params()

    def to_sampling_params(self) -> SamplingParams:
        return SamplingParams(
            use_beam_search=True,
            n=self.beam_width,
            best_of=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            length_penalty=self.length_penalty,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            early_stopping=self.early_stopping,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
