"""Base classes of the generating endpoints' requests and answers.

Requests are pydantic models: unknown fields are kept apart (`model_extra`) and only logged. Answers are msgspec
records, which encode an order of magnitude faster.

The models also have the fields of unsupported features, so that these are refused by
name instead of being ignored: see `ApiRequest.REFUSALS`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, model_validator

from ascend_vllm.entrypoints.http.request_ids import ChosenId
from ascend_vllm.entrypoints.http.streaming import encode_json
from ascend_vllm.entrypoints.openai.request_limits import check_beams
from ascend_vllm.entrypoints.openai.structured_fields import (
    ResponseFormat,
    StructuralTagFormat,
    StructuredOutputs,
    from_guided,
    from_response_format,
    from_structured_outputs,
)
from ascend_vllm.errors import RequestError
from ascend_vllm.logger import init_logger
from ascend_vllm.outputs import CompletionOutput, RequestOutput
from ascend_vllm.refusals import Refusal, first_refused
from ascend_vllm.sampling_params import RequestOutputKind, SamplingParams
from ascend_vllm.structured_outputs import StructuredOutputsParams

logger = init_logger(__name__)

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def unsupported_fields(**neutral: tuple[Any, ...]) -> dict[str, Refusal]:
    """Refusals of fields with the usual text; `neutral` maps names to the values that are accepted."""
    return {
        name: Refusal(f"`{name}` is not supported by this version of the server.", values)
        for name, values in neutral.items()
    }


# sampling fields and their values if neither the request nor the server's defaults set them
_SAMPLING: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "early_stopping": False,
}
# with beam search, which ignores the server's defaults; early_stopping=None means as in vLLM 0.6.3
_BEAM_SEARCH = _SAMPLING | {"temperature": 0.0, "early_stopping": None}

_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")

_logged_fields: set[str] = set()
# of a field's name
_MAX_LOGGED_CHARACTERS = 100
_MAX_LOGGED_AT_ONCE = 100
_MAX_LOGGED_FIELDS = 1000


def log_unknown_fields(names: Iterable[str]) -> None:
    """Log once per name that a field of a request is unknown and ignored."""
    # the limits keep a hostile client from filling memory and the log
    room = _MAX_LOGGED_FIELDS - len(_logged_fields)
    if room <= 0:
        return
    some = itertools.islice(names, _MAX_LOGGED_AT_ONCE)
    unknown = sorted({name[:_MAX_LOGGED_CHARACTERS] for name in some} - _logged_fields)[:room]
    if unknown:
        _logged_fields.update(unknown)
        logger.warning("Ignored fields of a request that this server does not know: %s", unknown)


def unix_time() -> int:
    """Now, in whole seconds since 1970."""
    return int(time.time())


class ApiRequest(BaseModel):
    """Root of all request bodies: unknown fields are accepted and logged once each.

    Attributes:
        REFUSALS: fields of unsupported features.
    """

    model_config = ConfigDict(extra="allow", protected_namespaces=())
    REFUSALS: ClassVar[Mapping[str, Refusal]] = {}

    @model_validator(mode="after")
    def _log_unknown_fields(self) -> ApiRequest:
        if self.model_extra:
            log_unknown_fields(self.model_extra)
        return self

    def check_supported(self) -> None:
        """Refuse fields whose feature is not available.

        Raises:
            RequestError: names the field.
        """
        if self.REFUSALS.keys().isdisjoint(self.model_fields_set):
            return
        if (found := first_refused(self.REFUSALS, vars(self))) is not None:
            raise RequestError(found.reason, found.name)


class StreamOptions(BaseModel):
    """`stream_options`: which chunks carry `usage`."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


TokenId = Annotated[int, Field(ge=0)]


class GenerationRequest(ApiRequest):
    """Fields that /v1/completions and /v1/chat/completions share.

    A sampling field that is null or absent takes the server's default (generation_config.json), then the
    usual one.
    """

    REFUSALS = unsupported_fields(
        kv_transfer_params=(None,),
        logprob_token_ids=(None, []),
        mm_processor_kwargs=(None, {}),
        prompt_embeds=(None,),
        repetition_detection=(None,),
        structural_tag=(None,),
        thinking_token_budget=(None,),
    ) | {"suffix": Refusal("suffix is not currently supported", (None, ""))}  # vLLM's words: it has none either

    model: str | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    n: int | None = None
    presence_penalty: float | None = None
    seed: Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None

    # vLLM's extensions
    best_of: int | None = None
    use_beam_search: bool | None = None
    early_stopping: bool | str | None = None
    length_penalty: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    # -1: the model's length less one
    truncate_prompt_tokens: Annotated[int, Field(ge=1)] | Literal[-1] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = False
    request_id: ChosenId | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: int | None = None
    response_format: ResponseFormat | StructuralTagFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None
    bad_words: list[str] | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    logprob_token_ids: list[int] | None = None
    repetition_detection: dict[str, Any] | None = None
    stream_interval: int | None = None
    structural_tag: Any = None
    thinking_token_budget: int | None = None
    # which end of the prompt truncate_prompt_tokens keeps: the last tokens unless "right", where they are cut off
    truncation_side: Literal["left", "right"] | None = None

    @model_validator(mode="after")
    def _check_shared_fields(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise RequestError("Stream options can only be defined when `stream=True`.", "stream_options")
        if self.prompt_logprobs is not None:
            if self.prompt_logprobs < 0:
                raise ValueError("`prompt_logprobs` must be a positive value.")
            if self.stream and self.prompt_logprobs > 0:
                raise ValueError("`prompt_logprobs` are not available when `stream=True`.")
        if len(self.guided()) > 1:
            raise ValueError(
                "You can only use one kind of guided decoding ('guided_json', 'guided_regex' or 'guided_choice')."
            )
        return self

    @property
    def include_usage(self) -> bool:
        """Whether the stream's last chunk carries the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk carries the usage so far, provided that the stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def requested_logprobs(self) -> int | None:
        """Number of most likely tokens to return per position; None: no log-probabilities."""
        raise NotImplementedError

    def requested_prompt_logprobs(self) -> int | None:
        """Number of most likely tokens to return per position of the prompt; None: no log-probabilities."""
        return self.prompt_logprobs

    def structured_outputs_params(self) -> StructuredOutputsParams | None:
        """The constraint on the output from whichever of its fields is set; None: no constraint.

        Raises:
            RequestError: it is invalid, or set by several fields.
        """
        options = self.guided_decoding_backend, self.guided_whitespace_pattern
        found: dict[str, StructuredOutputsParams | None] = {}
        if guided := self.guided():
            found["guided_*"] = from_guided(guided, *options)
        if self.structured_outputs is not None:
            found["structured_outputs"] = from_structured_outputs(self.structured_outputs)
        if self.response_format is not None:
            found["response_format"] = from_response_format(self.response_format, *options)
        given = [name for name, params in found.items() if params is not None]
        if len(given) > 1:
            raise RequestError(
                f"You can only use one kind of structured outputs constraint but multiple are specified: {given}",
                "structured_outputs",
            )
        return found[given[0]] if given else None

    @property
    def constraint_field(self) -> str:
        """The field that sets the constraint on the output, for errors."""
        if self.structured_outputs is not None:
            return "structured_outputs"
        return next(iter(self.guided()), "response_format")

    def guided(self) -> dict[str, Any]:
        """The `guided_*` fields of vLLM 0.6.3 that are set."""
        values = ((name, getattr(self, name)) for name in _GUIDED)
        return {name: value for name, value in values if value is not None and value is not False}

    def sampling_params(self, defaults: dict[str, Any], max_tokens: int, force_logprobs: bool) -> SamplingParams:
        """The request's sampling parameters for the engine.

        Args:
            defaults: the server's sampling defaults (generation_config.json).
            max_tokens: tokens to generate at most; already limited to the model's length.
            force_logprobs: compute log-probabilities even if the request does not return any.

        Raises:
            RequestError: a value is out of range; the text names the field.
        """
        if self.use_beam_search:
            check_beams(self.best_of or self.n or 1, len(self.stop_token_ids or ()))
        logprobs = self.requested_logprobs()
        if self.use_beam_search:
            # the server's defaults are for sampling, not for beam search
            usual = _BEAM_SEARCH
        else:
            usual = _SAMPLING | {name: defaults[name] for name in _SAMPLING.keys() & defaults.keys()}
            if logprobs is None and force_logprobs:
                logprobs = 0
        sampling = {
            name: default if (value := getattr(self, name)) is None else value for name, default in usual.items()
        }
        try:
            return SamplingParams(
                n=1 if self.n is None else self.n,
                best_of=self.best_of,
                use_beam_search=bool(self.use_beam_search),
                presence_penalty=self.presence_penalty or 0.0,
                frequency_penalty=self.frequency_penalty or 0.0,
                seed=self.seed,
                stop=self.stop,
                stop_token_ids=self.stop_token_ids,
                ignore_eos=self.ignore_eos,
                max_tokens=max_tokens,
                min_tokens=self.min_tokens,
                logprobs=logprobs,
                prompt_logprobs=self.requested_prompt_logprobs(),
                skip_special_tokens=self.skip_special_tokens,
                spaces_between_special_tokens=self.spaces_between_special_tokens,
                include_stop_str_in_output=self.include_stop_str_in_output,
                # the prompt is truncated already
                truncate_prompt_tokens=None if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens,
                output_kind=RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY,
                logit_bias=parse_logit_bias(self.logit_bias),
                allowed_token_ids=self.allowed_token_ids,
                bad_words=self.bad_words,
                structured_outputs=self.structured_outputs_params(),
                stream_interval=self.stream_interval,
                **sampling,
            )
        except (TypeError, ValueError) as error:
            if isinstance(error, RequestError):
                raise
            # the error texts begin with the field's name
            name = str(error).split(" ", 1)[0]
            raise RequestError(str(error), name if name in type(self).model_fields else None) from error


def parse_logit_bias(logit_bias: dict[str, float] | None) -> dict[int, float] | None:
    """JSON's string keys as token ids, values clamped to −100 … 100.

    Raises:
        RequestError: a key is not an integer.
    """
    if logit_bias is None:
        return None
    wrong = [key for key in logit_bias if not key.strip().lstrip("+-").isdecimal()]
    if wrong:
        wrong = [key[:_MAX_LOGGED_CHARACTERS] for key in wrong[:_MAX_LOGGED_AT_ONCE]]
        raise RequestError(
            f"logit_bias contains key(s) that cannot be converted to integer token IDs: {wrong}", param="logit_bias"
        )
    return {int(key): min(100.0, max(-100.0, value)) for key, value in logit_bias.items()}


# ---- answers -------------------------------------------------------------------------------------------------


class PromptTokensDetails(msgspec.Struct):
    """Part of `usage` under --enable-prompt-tokens-details."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """Part of `usage` with speculative decoding: the drafts that were right, and the others."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct):
    """`usage`: tokens of all prompts, each once, and of all choices."""

    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class UsageCounter:
    """Counts the tokens of a request while its outputs arrive.

    Prompts count once each, however many choices they have; choices count every generated token.

    Args:
        num_choices: of the whole request.
        shows_cached: show the cached tokens of prompts.
        shows_drafts: show how many drafts were right.
    """

    def __init__(self, num_choices: int, *, shows_cached: bool, shows_drafts: bool = False) -> None:
        self._completion_tokens = [0] * num_choices
        # per choice: drafts, and the accepted ones among them
        self._drafts = [(0, 0)] * num_choices
        self._prompts: dict[int, tuple[int, int]] = {}
        self._shows_cached = shows_cached
        self._shows_drafts = shows_drafts

    @property
    def started(self) -> bool:
        """Whether any prompt was counted."""
        return bool(self._prompts)

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Record a prompt's size; the caller calls `count` for its choices."""
        self._prompts[prompt_index] = (len(output.prompt_token_ids), output.num_cached_tokens)

    def count(self, choice_index: int, generated: CompletionOutput) -> None:
        """Count the new tokens of a choice."""
        self._completion_tokens[choice_index] += len(generated.token_ids)
        if self._shows_drafts:
            self._drafts[choice_index] = generated.num_drafts, generated.num_accepted_drafts

    def choice_usage(self, prompt_index: int, choice_index: int) -> Usage:
        """Usage so far of one choice, for its chunk."""
        return self._usage([self._prompts[prompt_index]], slice(choice_index, choice_index + 1))

    def total(self) -> Usage:
        """Usage of the whole request."""
        return self._usage(list(self._prompts.values()), slice(None))

    def _usage(self, prompts: list[tuple[int, int]], choices: slice) -> Usage:
        prompt_tokens = sum(size for size, _ in prompts)
        completion_tokens = sum(self._completion_tokens[choices])
        usage = Usage(prompt_tokens, prompt_tokens + completion_tokens, completion_tokens)
        if self._shows_cached:
            usage.prompt_tokens_details = PromptTokensDetails(sum(cached for _, cached in prompts))
        if self._shows_drafts:
            num_drafts, num_accepted = (sum(counts) for counts in zip(*self._drafts[choices], strict=True))
            usage.completion_tokens_details = CompletionTokensDetails(num_accepted, num_drafts - num_accepted)
        return usage


class ChunkWriter:
    """Encodes the events of a stream: the hot path of a streaming server.

    All events of a choice differ only in the token's text. The rest is encoded once, so that only the text is
    serialised for each token.

    Args:
        response_id, created, model, fingerprint: fields of all chunks.
        num_choices: choices of the whole request.
        usage_follows: the stream ends with a usage chunk, which has the fingerprint; otherwise each choice's last
            chunk has it.

    Attributes:
        OBJECT: the chunks' `object`.
        NULL_USAGE: chunks without usage always have ``"usage": null``, not only before a usage chunk.
        PLAIN_END: the end of a choice with text only, which goes on.
    """

    OBJECT: ClassVar[str]
    NULL_USAGE: ClassVar[bool]
    PLAIN_END: ClassVar[bytes]

    def __init__(
        self, response_id: str, created: int, model: str, fingerprint: str, num_choices: int, usage_follows: bool
    ) -> None:
        head = {"id": response_id, "object": self.OBJECT, "created": created, "model": model}
        self._head = b"data: " + encode_json(head)[:-1] + b',"choices":['
        self._choice_heads = [b'%b{"index":%d,' % (self._head, index) for index in range(num_choices)]
        self._fingerprint = b',"system_fingerprint":' + encode_json(fingerprint)
        self._end = b"]" if usage_follows else b"]" + self._fingerprint
        self._no_usage = b',"usage":null' if self.NULL_USAGE or usage_follows else b""
        self._plain_tail = self.PLAIN_END + self._tail(None)

    def _tail(self, usage: Usage | None, finished: bool = False) -> bytes:
        """The end of a chunk, after the last choice's closing brace."""
        end = self._end if finished else b"]"
        return end + (self._no_usage if usage is None else b',"usage":' + encode_json(usage)) + b"}\n\n"

    def usage_event(self, usage: Usage) -> bytes:
        """The last chunk: no choices, the usage of the whole request."""
        return self._head + b"]" + self._fingerprint + b',"usage":' + encode_json(usage) + b"}\n\n"
