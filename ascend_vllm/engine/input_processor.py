"""Makes the engine core's requests from callers' ones.

A prompt is tokenised, its length and the sampling parameters are checked against the model, and the request becomes
one `EngineCoreRequest` per sequence, or a single one for a beam search. An invalid request raises a `RequestError`
here, before anything is queued.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.engine.adapter_tokenizers import AdapterTokenizers
from ascend_vllm.engine.pooling import POOLED, resolve_pooling_params
from ascend_vllm.engine.stop_strings import StopAutomaton, prepare_stop_search
from ascend_vllm.engine.tokenization import Tokenizer, truncate, truncation_limit
from ascend_vllm.errors import RequestError
from ascend_vllm.lora.request import LoRARequest
from ascend_vllm.pooling_params import PoolingParams
from ascend_vllm.sampling_params import RequestOutputKind, SamplingParams
from ascend_vllm.types.messages import BeamSearchSpec, EngineCoreRequest

# range of integers in messages to the core
_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1

# A row's random stream is keyed by 63 bits.
_SEED_MASK = (1 << 63) - 1

# generation_config.json → SamplingParams
_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids; `prompt`, if given, is only repeated in the output."""

    prompt_token_ids: list[int]
    prompt: str


PromptType = str | TextPrompt | TokensPrompt


@dataclasses.dataclass
class ProcessedRequest:
    """A checked request.

    Attributes:
        request_id: the caller's id.
        prompt: its text; None when only token ids were given.
        prompt_token_ids: its ids.
        params: the caller's sampling parameters.
        arrival_time: seconds of time.monotonic().
        core_requests: one per sequence, in the order of their index, or a single one for a beam search. Their ids are
            never reused, so that late outputs of an aborted request are not taken for those of a new one.
        trace_headers: W3C headers of the caller's trace; None: there is none.
        tokenizer: of its texts; None under --skip-tokenizer-init.
        stops: keeps the stop strings' automaton, which was built off the event loop, alive for the sequences; None:
            they need none.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float
    core_requests: list[EngineCoreRequest]
    tokenizer: Tokenizer | None = None
    trace_headers: Mapping[str, str] | None = None
    stops: StopAutomaton | None = None


@dataclasses.dataclass
class _Draft:
    """A request whose fields are checked, but whose text may not be tokenised yet.

    Attributes:
        token_ids: None: `text` has yet to be tokenised.
        params: the caller's; pooling parameters have the model's defaults.
        tokenizer: the model's or the adapter's; None under --skip-tokenizer-init.
        vocab_size: of the model, with what adapters may add if it has one.
    """

    request_id: str
    text: str | None
    token_ids: list[int] | None
    params: SamplingParams | PoolingParams
    priority: int
    arrival_time: float
    cache_salt: str | None
    lora: LoRARequest | None
    tokenizer: Tokenizer | None
    vocab_size: int

    def need_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            RequestError: there is none.
        """
        if self.tokenizer is None:
            raise RequestError(
                "prompt must be given as prompt_token_ids: the engine runs with --skip-tokenizer-init", "prompt"
            )
        return self.tokenizer

    @property
    def content_keys(self) -> list[tuple[int, str]]:
        """Keys that are hashed with its KV blocks, beside their tokens."""
        keys = [] if self.cache_salt is None else [f"salt:{self.cache_salt}"]
        if self.lora is not None:
            keys.append(f"lora:{self.lora.key}")
        return [(0, key) for key in keys]

    def processed(
        self, token_ids: list[int], params: SamplingParams, core_requests: list[EngineCoreRequest]
    ) -> ProcessedRequest:
        return ProcessedRequest(
            self.request_id, self.text, token_ids, params, self.arrival_time, core_requests, self.tokenizer
        )


class InputProcessor:
    """Makes core requests.

    Args:
        config: of the engine.
        tokenizer: None under --skip-tokenizer-init: prompts must be token ids then.
        max_bad_word_tokens: limit per request; None: none.

    Attributes:
        max_model_len: most tokens of a sequence; the engine lowers it if the KV cache holds less.
        tokenizers: of adapters.
    """

    def __init__(
        self, config: EngineConfig, tokenizer: Tokenizer | None, max_bad_word_tokens: int | None = None
    ) -> None:
        self._max_bad_word_tokens = max_bad_word_tokens
        self.max_model_len = config.scheduler.max_model_len
        self._tokenizer = tokenizer
        self.tokenizers = AdapterTokenizers(config, tokenizer)
        self._model = config.model
        self._has_adapters = config.lora is not None
        speculation = config.speculation
        self._is_speculative = speculation is not None
        self._has_logprobs = speculation is None or not speculation.disables_logprobs
        self._has_priorities = config.scheduler.policy == "priority"
        self._num_added_tokens = config.model.num_added_tokens
        self._vocab_size = config.model.vocab_size - self._num_added_tokens
        self._serial = itertools.count()
        eos_ids = config.model.eos_token_ids or ()
        primary = tokenizer.eos_token_id if tokenizer is not None else None
        self._eos_id = primary if primary is not None else next(iter(eos_ids), None)
        self._other_eos_ids = [id_ for id_ in eos_ids if id_ != self._eos_id]

    def process(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams,
        priority: int = 0,
        arrival_time: float | None = None,
        *,
        cache_salt: str | None = None,
        lora: LoRARequest | None = None,
    ) -> ProcessedRequest:
        """Checks a request and makes its core requests.

        Args:
            request_id: the caller's id.
            prompt: text, {"prompt": text} or {"prompt_token_ids": ids}.
            params: the caller's; not changed. With `PoolingParams` the prompt is pooled.
            priority: lower is served first; 0 unless the engine runs with --scheduling-policy priority.
            arrival_time: seconds of time.monotonic(); None: now.
            cache_salt: only requests with the same one share cached prefixes; None: all without one do.
            lora: the adapter to compute it with; None: the model as it is.

        Raises:
            RequestError: the request is invalid, or the model does not support it.
        """
        has_adapter = lora is not None and self._has_adapters
        tokenizer = self.tokenizers.of(lora) if has_adapter else self._tokenizer
        draft = self._draft(request_id, prompt, params, priority, arrival_time, cache_salt, lora, tokenizer)
        if draft.token_ids is None:
            text, tokenizer = _need_text(draft.text), draft.need_tokenizer()
            if draft.params.truncate_prompt_tokens is None:
                tokenizer.check_num_characters(text, self.max_model_len)
            draft.token_ids = tokenizer.encode(text)
        words = _with_and_without_space(draft.params)
        return self._build(draft, [draft.need_tokenizer().encode(word, add_special_tokens=False) for word in words])

    async def process_async(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams,
        priority: int = 0,
        arrival_time: float | None = None,
        *,
        cache_salt: str | None = None,
        lora: LoRARequest | None = None,
    ) -> ProcessedRequest:
        """`process`, with tokenisation off the event loop."""
        has_adapter = lora is not None and self._has_adapters
        tokenizer = await self.tokenizers.load(lora) if has_adapter else self._tokenizer
        draft = self._draft(request_id, prompt, params, priority, arrival_time, cache_salt, lora, tokenizer)
        if draft.token_ids is None:
            draft.token_ids = await draft.need_tokenizer().encode_async(
                _need_text(draft.text),
                max_tokens=self.max_model_len,
                any_length=draft.params.truncate_prompt_tokens is not None,
            )
        words = _with_and_without_space(draft.params)
        bad_words = [await draft.need_tokenizer().encode_async(word, add_special_tokens=False) for word in words]
        request = self._build(draft, bad_words)
        if request.params.stop_strings:
            request.stops = await prepare_stop_search(request.params.stop_strings)
        return request

    def _draft(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams,
        priority: int,
        arrival_time: float | None,
        cache_salt: str | None,
        lora: LoRARequest | None,
        tokenizer: Tokenizer | None,
    ) -> _Draft:
        """Checks everything that needs no token ids."""
        vocab_size = self._vocab_size + (0 if lora is None else self._num_added_tokens)
        arrival_time = time.monotonic() if arrival_time is None else arrival_time
        if isinstance(params, PoolingParams):
            params = resolve_pooling_params(params, self._model)
        elif self._model.pooler is not None:
            raise RequestError(
                "This model pools prompts and generates no text: the engine runs a pooling model (--runner pooling)."
            )
        else:
            self._check_params(params, vocab_size)
        self._check_routing(priority, cache_salt)
        if lora is not None and not self._has_adapters:
            raise RequestError(f"Got lora_request {lora} but LoRA is not enabled!", "lora_request")
        text, token_ids = _parse_prompt(prompt)
        return _Draft(
            request_id, text, token_ids, params, priority, arrival_time, cache_salt, lora, tokenizer, vocab_size
        )

    def _build(self, draft: _Draft, bad_words: list[list[int]]) -> ProcessedRequest:
        token_ids = draft.token_ids or []
        if isinstance(draft.params, PoolingParams):
            return self._build_pooling(draft, draft.params, token_ids)
        return self._build_generation(draft, draft.params, token_ids, bad_words)

    def default_sampling_params(self) -> dict[str, Any]:
        """Sampling defaults of the model's generation_config.json, as keywords of `SamplingParams`."""
        config = self._model.generation_config
        return {ours: config[theirs] for theirs, ours in _DEFAULTS.items() if config.get(theirs) is not None}

    def _build_generation(
        self, draft: _Draft, params: SamplingParams, token_ids: list[int], bad_words: list[list[int]]
    ) -> ProcessedRequest:
        bad_words = self._check_bad_words(bad_words, draft.vocab_size)
        if params.truncate_prompt_tokens is not None:
            empty_ids = [] if draft.text is None else draft.need_tokenizer().encode("")
            token_ids = truncate(token_ids, params.truncate_prompt_tokens, "left", empty_ids)
        self._check_prompt(token_ids, self.max_model_len - 1, draft.vocab_size)
        core_params = self._make_core_params(params, len(token_ids), draft.vocab_size)
        eos_id = None if params.ignore_eos else self._eos_of(draft.tokenizer)
        beam_search = _make_beam_search(params)
        # the sequences share the blocks of the first one's prompt
        first_id = f"{draft.request_id}.{next(self._serial)}"
        core_requests = [
            EngineCoreRequest(
                request_id=f"{draft.request_id}.{next(self._serial)}" if index else first_id,
                prompt_token_ids=token_ids,
                sampling_params=core_params.clone(
                    seed=derive_seed(params.seed, index),
                    # computed once: all sequences share the prompt
                    prompt_logprobs=None if index else params.prompt_logprobs,
                ),
                eos_token_id=eos_id,
                arrival_time=draft.arrival_time,
                priority=draft.priority,
                parent_id=first_id if index else None,
                is_further=index > 0,
                beam_search=beam_search,
                bad_words=bad_words,
                content_keys=draft.content_keys,
                lora=draft.lora,
            )
            for index in range(1 if beam_search is not None else params.num_sequences)
        ]
        return draft.processed(token_ids, params, core_requests)

    def _build_pooling(self, draft: _Draft, params: PoolingParams, token_ids: list[int]) -> ProcessedRequest:
        limit = params.truncate_prompt_tokens
        if limit is not None:
            limit = truncation_limit(limit, self.max_model_len)
            empty_ids = [] if draft.text is None else draft.need_tokenizer().encode("")
            token_ids = truncate(token_ids, limit, "right", empty_ids)
        self._check_prompt(token_ids, self.max_model_len, draft.vocab_size)
        core_request = EngineCoreRequest(
            request_id=f"{draft.request_id}.{next(self._serial)}",
            prompt_token_ids=token_ids,
            # the scheduler treats it as a request for one token
            sampling_params=POOLED,
            eos_token_id=None,
            arrival_time=draft.arrival_time,
            priority=draft.priority,
            content_keys=draft.content_keys,
            lora=draft.lora,
            pooling_params=params,
        )
        return draft.processed(token_ids, POOLED, [core_request])

    def _eos_of(self, tokenizer: Tokenizer | None) -> int | None:
        """The token that ends a text, by an adapter's own tokenizer if it has one."""
        if tokenizer is self._tokenizer or tokenizer is None or tokenizer.eos_token_id is None:
            return self._eos_id
        return tokenizer.eos_token_id

    def _make_core_params(self, params: SamplingParams, num_prompt_tokens: int, vocab_size: int) -> SamplingParams:
        """The core's sampling parameters, without stop strings and output format, which it does not handle."""
        room = self.max_model_len - num_prompt_tokens
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        stop_ids = dict.fromkeys(
            [*(params.stop_token_ids or []), *([] if params.ignore_eos else self._other_eos_ids)]
        )
        # the best sequences of best_of are chosen by cumulative log-probability
        is_scored = params.num_sequences > params.n and not params.use_beam_search
        num_logprobs = params.logprobs if self._has_logprobs else None
        return params.clone(
            n=1,
            best_of=None,
            logprobs=0 if is_scored and num_logprobs is None else num_logprobs,
            # these fields are sent in BeamSearchSpec
            use_beam_search=False,
            length_penalty=1.0,
            early_stopping=False,
            max_tokens=max_tokens,
            min_tokens=min(params.min_tokens, max_tokens),
            # top_k ≥ vocabulary size means all tokens; a larger value might not fit in the sampler's arrays
            top_k=params.top_k if params.top_k < vocab_size else -1,
            stop=[],
            # sent as ids in EngineCoreRequest.bad_words
            bad_words=None,
            # ids outside of the vocabulary are never sampled, and must not index the logits
            stop_token_ids=[id_ for id_ in stop_ids if 0 <= id_ < vocab_size],
            truncate_prompt_tokens=None,
            stream_interval=None,
        )

    def _check_routing(self, priority: int, cache_salt: str | None) -> None:
        if priority != 0 and not self._has_priorities:
            raise RequestError(f"Got priority {priority} but Priority scheduling is not enabled.", "priority")
        if type(priority) is not int or not _INT64_MIN <= priority <= _INT64_MAX:
            raise RequestError(f"priority must be a signed 64-bit integer, got {priority!r}.", "priority")
        if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
            raise RequestError("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
        if cache_salt is not None:
            _check_unicode("cache_salt", cache_salt)

    def _check_params(self, params: SamplingParams, vocab_size: int) -> None:
        self._check_supported(params)
        _check_token_fields(params, vocab_size)
        limit = self._model.max_logprobs
        for name, of, count in (
            ("logprobs", "sample", params.logprobs),
            ("prompt_logprobs", "prompt", params.prompt_logprobs),
        ):
            if count is not None and count > limit:
                raise RequestError(
                    f"Requested {of} logprobs of {count}, which is greater than max allowed: {limit}", name
                )
        if params.seed is not None and not _INT64_MIN <= params.seed <= _INT64_MAX:
            raise RequestError(f"seed must be a signed 64-bit integer, got {params.seed}.", "seed")
        if params.bad_words and self._tokenizer is None:
            raise RequestError("bad_words need a tokenizer: the engine runs with --skip-tokenizer-init", "bad_words")
        if self._tokenizer is None and params.detokenize:
            raise RequestError("detokenize must be false: the engine runs with --skip-tokenizer-init", "detokenize")

    def _check_supported(self, params: SamplingParams) -> None:
        """Refuses combinations of fields that the engine does not support."""
        is_search = params.use_beam_search or params.num_sequences > params.n
        if is_search and self._model.logprobs_mode.endswith("_logits"):
            raise RequestError(
                "Beam search and best_of need log-probabilities, and the server runs with --logprobs-mode "
                f"{self._model.logprobs_mode}.",
                "use_beam_search" if params.use_beam_search else "best_of",
            )
        if params.use_beam_search and self._is_speculative:
            raise RequestError("Speculative decoding does not support beam search.", "use_beam_search")
        # SamplingParams checks this, too, but output_kind is often set later
        is_delta = params.output_kind is RequestOutputKind.DELTA
        if is_delta and params.num_sequences != params.n and not params.use_beam_search:
            raise RequestError("best_of must equal n to use output_kind=DELTA", "best_of")

    def _check_bad_words(self, bad_words: list[list[int]], vocab_size: int) -> list[list[int]]:
        """The distinct, non-empty sequences of ids."""
        wrong = sorted({id_ for word in bad_words for id_ in word if id_ >= vocab_size})
        if wrong:
            raise RequestError(
                f"bad_words has token ids {wrong} that the model does not have. Vocabulary size: {vocab_size}",
                "bad_words",
            )
        distinct = [list(word) for word in dict.fromkeys(map(tuple, bad_words)) if word]
        limit, count = self._max_bad_word_tokens, sum(map(len, distinct))
        if limit is not None and count > limit:
            raise RequestError(
                f"bad_words have {count} tokens, with and without a space before each word; at most {limit} are "
                "possible. Leave some out.",
                "bad_words",
            )
        return distinct

    def _check_prompt(self, token_ids: list[int], limit: int, vocab_size: int) -> None:
        """Refuses a prompt that is empty, of more than `limit` tokens, or of ids that the model does not have."""
        if not token_ids:
            raise RequestError("Prompt cannot be empty", "prompt")
        if len(token_ids) > limit:
            raise RequestError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, your prompt contains "
                f"{len(token_ids)} input tokens, which exceeds this limit even without any output tokens. "
                "Please reduce the length of the input prompt.",
                "input_tokens",
            )
        for extreme in (max(token_ids), min(token_ids)):
            if not 0 <= extreme < vocab_size:
                raise RequestError(f"Token id {extreme} is out of vocabulary", "prompt")


def _check_token_fields(params: SamplingParams, size: int) -> None:
    bad = [id_ for id_ in params.logit_bias or () if not 0 <= id_ < size]
    if bad:
        raise RequestError(
            f"token_id(s) {bad} in logit_bias contain out-of-vocab token ids. Vocabulary size: {size}",
            "logit_bias",
        )
    if params.allowed_token_ids is not None:
        if not params.allowed_token_ids:
            raise RequestError("allowed_token_ids is not None and empty!", "allowed_token_ids")
        if not all(0 <= id_ < size for id_ in params.allowed_token_ids):
            raise RequestError("allowed_token_ids contains out-of-vocab token id!", "allowed_token_ids")


def refuse_adapters(**fields: Any) -> None:
    """Refuses arguments of unsupported features, passed by name.

    Raises:
        RequestError: one of them is set.
    """
    for name, value in fields.items():
        if value is not None:
            raise RequestError(f"{name} is not supported in this version.", name)


def derive_seed(seed: int | None, index: int) -> int | None:
    """Seed of a request's sequence: the request's own for the first, derived ones for the others.

    Adding the index would not do: sequence 1 of seed 0 would repeat sequence 0 of seed 1.
    """
    if seed is None:
        return None
    if index == 0:
        return seed & _SEED_MASK
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) & _SEED_MASK


def _with_and_without_space(params: SamplingParams | PoolingParams) -> list[str]:
    """Each of bad_words as at the beginning of a text, and as within one."""
    words = [] if isinstance(params, PoolingParams) else params.bad_words or []
    for word in words:
        _check_unicode("bad_words", word)
    return [space + word.lstrip() for word in words for space in ("", " ")]


def _parse_prompt(prompt: Any) -> tuple[str | None, list[int] | None]:
    """Text and ids of a prompt; at least one is not None."""
    if isinstance(prompt, str):
        return prompt, None
    if not isinstance(prompt, dict):
        raise RequestError(
            'prompt must be a string, {"prompt": ...} or {"prompt_token_ids": ...}, '
            f"but is of type {type(prompt).__name__}",
            "prompt",
        )
    if prompt.get("multi_modal_data") is not None:
        raise RequestError("multi_modal_data is given, but this is not a multimodal model", "multi_modal_data")
    unknown = sorted(set(prompt) - {"prompt", "prompt_token_ids", "multi_modal_data"})
    if unknown:
        raise RequestError(f"unknown key(s) in the prompt: {', '.join(map(str, unknown))}", "prompt")
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise RequestError(f"prompt must be a string, but is of type {type(text).__name__}", "prompt")
    if token_ids is not None:
        return text, _check_ids(token_ids)
    if text is None:
        raise RequestError("the prompt has neither prompt nor prompt_token_ids", "prompt")
    return text, None


def _check_ids(token_ids: Any) -> list[int]:
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, str | bytes):
        raise RequestError(
            f"prompt_token_ids must be a list of integers, but is {type(token_ids).__name__}", "prompt"
        )
    wrong = next((id_ for id_ in token_ids if type(id_) is not int), None)
    if wrong is not None:
        raise RequestError(f"prompt_token_ids must be integers, but one is {wrong!r}", "prompt")
    return list(token_ids)


def _need_text(text: str | None) -> str:
    """The text of a prompt without ids, checked to be non-empty and valid Unicode."""
    if not text:
        raise RequestError("Prompt cannot be empty", "prompt")
    _check_unicode("prompt", text)
    return text


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is not valid Unicode text: {error}", name) from None


def _make_beam_search(params: SamplingParams) -> BeamSearchSpec | None:
    if not params.use_beam_search:
        return None
    return BeamSearchSpec(
        width=params.num_sequences,
        num_returned=params.n,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        stream=params.output_kind is RequestOutputKind.CUMULATIVE,
    )
