"""Limits on the size of the parts of a request, and on the number of its sequences.

The time and memory that a request costs are linear in its size, which these limits bound. They are
far above what clients send, are checked before anything else is done with a body, and hold for the servers only:
`LLM` and `SamplingParams` have no such limits. What exceeds one is refused with a `RequestError` that names the limit
and the field.

A message and each part of its content take at least one token, so that more of them than the model's length cannot be
a prompt. What templates may print of the rest (tools, documents, arguments of past calls) is limited in its size
and its depth: Python's recursive functions are limited by its stack.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from ascend_vllm import envs
from ascend_vllm.errors import RequestError
from ascend_vllm.sampling_params import SamplingParams

# fields at the top level of a body; unknown ones are kept and logged
MAX_FIELDS = 1024
# prompts, texts or conversations in a list, whatever --max-sequences-per-request is
MAX_PROMPTS = 65_536
# messages, parts, tools, properties of schemas: entries of all that is nested in a body, together
MAX_NESTED_ENTRIES = 65_536
# log-probabilities of prompt tokens in an answer, of about 70 bytes each
MAX_PROMPT_LOGPROBS = 1 << 20
# tokens of prompts, by text or by id
MAX_REPEATED_TOKENS = 1 << 23
# entries of the lists that sampling reads, summed over the prompts of a request: each prompt has its own copy
MAX_SAMPLING_ENTRIES = 1 << 20
# candidates that stop_token_ids add to a step of a beam search: their number for each pair of beams
MAX_ADDED_CANDIDATES = 1 << 18
# limits of a conversation: characters and values together (the greater of fixed, and per token of the model's length)
_MAX_SIZE = 4 * 1024 * 1024
_SIZE_PER_TOKEN = 8
_MAX_DEPTH = 128
# Python types of JSON's arrays and objects
_NESTED = frozenset({list, dict})
# fields with many prompts; a list of numbers is one prompt
_PROMPTS = frozenset(
    {"prompt", "input", "text_1", "text_2", "data_1", "data_2", "queries", "documents", "items", "tokens"}
)


@dataclasses.dataclass(frozen=True)
class _Limit:
    """Limits of one field.

    Attributes:
        entries: most entries of the list or object.
        what: what the entries are, for errors.
        characters: most characters of the string, or of all strings in the list together.
    """

    entries: int
    what: str
    characters: int | None = None


LIMITS: dict[str, _Limit] = {
    "stop": _Limit(1024, "strings", 65_536),
    "stop_sequences": _Limit(1024, "strings", 65_536),
    "bad_words": _Limit(1024, "words", 65_536),
    "stop_token_ids": _Limit(1024, "token ids"),
    "logit_bias": _Limit(16_384, "token ids"),
    # the size of the largest vocabularies
    "allowed_token_ids": _Limit(1 << 19, "token ids"),
    "cache_salt": _Limit(1, "text", 4096),
    "user": _Limit(1, "text", 65_536),
    "model": _Limit(1, "name", 4096),
}
# fields that are sent to the engine with each prompt
_PER_PROMPT = ("stop", "bad_words", "stop_token_ids", "logit_bias", "allowed_token_ids")


def n_limit(max_sequences: int) -> int:
    """Most sequences of a prompt: of a request (--max-sequences-per-request), or less by VLLM_MAX_N_SEQUENCES."""
    return min(max_sequences, envs.max_n_sequences() or max_sequences)


def check_sizes(fields: Mapping[str, Any]) -> None:
    """Refuses a body with a part that is too large.

    Args:
        fields: of the body, decoded from JSON.
    """
    if len(fields) > MAX_FIELDS:
        raise RequestError(f"The request has {len(fields)} fields; it may have at most {MAX_FIELDS}.")
    room = MAX_NESTED_ENTRIES
    for name, value in fields.items():
        limit = LIMITS.get(name)
        if limit is not None:
            _check_field(name, value, limit)
        elif isinstance(value, list | dict):
            if name in _PROMPTS and isinstance(value, list) and _are_prompts(name, value):
                continue
            room = _room_after(value, room)
            if room < 0:
                raise RequestError(
                    f"{name} makes the request too large: lists and objects in it may have at most "
                    f"{MAX_NESTED_ENTRIES} entries in all.",
                    name,
                )


def check_sequences(num_prompts: int, n: int | None, best_of: int | None, limit: int, field: str = "prompt") -> None:
    """Refuses a request for too many sequences, before anything is made for them.

    Args:
        num_prompts: prompts, texts, pairs of texts or conversations.
        n, best_of: of the request; their ranges are checked elsewhere.
        limit: --max-sequences-per-request.
        field: of the prompts.
    """
    name, per_prompt = max((("n", n or 1), ("best_of", best_of or 1)), key=lambda pair: pair[1])
    if per_prompt > limit:
        raise RequestError(f"{name} must be at most {limit}, got {per_prompt}.", name)
    total = num_prompts * max(1, per_prompt)
    if total > limit:
        each = f"{num_prompts} prompts with {name}={per_prompt} are {total}" if per_prompt > 1 else f"got {total}"
        raise RequestError(
            f"A request may ask for at most {limit} sequences (--max-sequences-per-request), {each}. Send several "
            "requests.",
            field,
        )


def check_lists(fields: Any, num_prompts: int) -> None:
    """Refuses long lists together with many prompts: each prompt gets a copy of the lists.

    Args:
        fields: any request; it need not have all fields in `_PER_PROMPT`.
        num_prompts: number of prompts in the request.
    """
    lengths = {
        name: len(value) for name in _PER_PROMPT if isinstance(value := getattr(fields, name, None), list | dict)
    }
    total = num_prompts * sum(lengths.values())
    if total > MAX_SAMPLING_ENTRIES:
        name = max(lengths, key=lambda one: lengths[one])
        raise RequestError(
            f"{name} has {lengths[name]} entries for each of {num_prompts} prompts; lists may have at most "
            f"{MAX_SAMPLING_ENTRIES} entries over all prompts of a request. Send several requests.",
            name,
        )


def check_request(request: Any, num_prompts: int, max_sequences: int, max_n: int, field: str = "prompt") -> None:
    """Refuses a request for too many sequences, or with long lists for many prompts, before it is processed.

    Args:
        request: of a client, with `n` and `best_of`.
        num_prompts: its prompts or conversations.
        max_sequences: --max-sequences-per-request.
        max_n: most sequences of one prompt.
        field: of the prompts or conversations.
    """
    check_sequences(1, request.n, request.best_of, max_n)
    check_sequences(num_prompts, request.n, request.best_of, max_sequences, field)
    check_lists(request, num_prompts)


def check_beams(num_beams: int, num_stop_ids: int) -> None:
    """Refuses a beam search with too many candidates per step: their number grows with the square of the beams.

    Args:
        num_beams: beams of the search.
        num_stop_ids: token ids that end a beam, beside the end-of-sequence token.
    """
    most = MAX_ADDED_CANDIDATES // max(1, num_beams * num_beams)
    if num_stop_ids > most:
        raise RequestError(
            f"stop_token_ids may have at most {most} ids in a beam search with {num_beams} beams, got "
            f"{num_stop_ids}.",
            "stop_token_ids",
        )


def check_repeated_prompts(
    num_prompt_tokens: int, num_choices: int, num_logprobs: int | None, *, are_repeated: bool
) -> None:
    """Refuses an answer far larger than its request, as each choice repeats its prompt or the prompt's logprobs.

    Args:
        num_prompt_tokens: tokens of all prompts.
        num_choices: choices of each prompt.
        num_logprobs: most likely tokens returned per prompt token; None: no prompt logprobs.
        are_repeated: whether choices contain their prompts' texts or ids.
    """
    total = num_prompt_tokens * num_choices
    if are_repeated and total > MAX_REPEATED_TOKENS:
        raise RequestError(
            f"{num_choices} choices, each with its prompt, repeat {total} tokens of {num_prompt_tokens}; an answer "
            f"may have at most {MAX_REPEATED_TOKENS}. Ask for fewer, or send several requests.",
            "n",
        )
    if num_logprobs is not None and total * (1 + num_logprobs) > MAX_PROMPT_LOGPROBS:
        raise RequestError(
            f"{1 + num_logprobs} log-probabilities of each of {num_prompt_tokens} prompt tokens, for {num_choices} "
            f"choices, are {total * (1 + num_logprobs)}; an answer may have at most {MAX_PROMPT_LOGPROBS}. Ask for "
            "fewer, or send several requests.",
            "prompt_logprobs",
        )


def check_params(params: SamplingParams, max_n: int) -> None:
    """Refuses sampling parameters of one prompt that ask for too much; `max_n`: most sequences of the prompt."""
    check_sequences(1, params.n, params.best_of, max_n)
    if params.use_beam_search:
        check_beams(params.num_sequences, len(params.stop_token_ids or ()))


def check_max_tokens(name: str, requested: int | None, limit: int) -> None:
    """Refuses a number of output tokens above `limit`, the most tokens of prompt and output together."""
    if requested is not None and requested > limit:
        raise RequestError(
            f"{name}={requested} cannot be greater than max_model_len={limit}. Please request fewer output tokens.",
            name,
        )


def limit_tokens(limit: int, num_prompt_tokens: int, requested: int | None, clamp: bool = False) -> int:
    """`max_tokens` for a prompt.

    Args:
        limit: most tokens of prompt and output together.
        num_prompt_tokens: tokens of the prompt.
        requested: by the request; None: all that fits.
        clamp: lower `requested` to what fits instead of refusing it.
    """
    head = f"This model's maximum context length is {limit} tokens. However, you requested"
    room = limit - num_prompt_tokens
    if num_prompt_tokens == 0:
        raise RequestError("The decoder prompt cannot be empty", param="prompt")
    if room < 1:
        raise RequestError(
            f"{head} {num_prompt_tokens} tokens in the messages, Please reduce the length of the messages.",
            param="input_tokens",
        )
    if requested is None or (clamp and requested > room):
        return room
    if requested > room:
        raise RequestError(
            f"{head} {num_prompt_tokens + requested} tokens ({num_prompt_tokens} in the messages, {requested} in "
            "the completion). Please reduce the length of the messages or completion.",
            param="max_tokens",
        )
    return requested


def has_more_entries(value: Any, most: int) -> bool:
    """Whether all lists and objects in a value together have more than `most` entries; stops counting there."""
    return _room_after(value, most) < 0


def _check_field(name: str, value: Any, limit: _Limit) -> None:
    if isinstance(value, list | dict) and len(value) > limit.entries:
        raise RequestError(f"{name} may have at most {limit.entries} {limit.what}, got {len(value)}.", name)
    if limit.characters is None:
        return
    texts = value if isinstance(value, list) else [value]
    size = sum(len(text) for text in texts if isinstance(text, str))
    if size > limit.characters:
        raise RequestError(f"{name} may have at most {limit.characters} characters in all, got {size}.", name)


def _are_prompts(name: str, value: list[Any]) -> bool:
    """Whether a list is one prompt of token ids, or a list of texts or such prompts; refuses too many of them."""
    if not value or isinstance(value[0], int | float):
        return True
    if not isinstance(value[0], str | list):
        return False
    if len(value) > MAX_PROMPTS:
        raise RequestError(f"{name} may have at most {MAX_PROMPTS} entries, got {len(value)}.", name)
    return True


def _room_after(value: Any, room: int) -> int:
    """`room` less the entries of all lists and objects in a value; stops counting when it is negative."""
    stack = [value] if isinstance(value, list | dict) else []
    while stack:
        item = stack.pop()
        room -= len(item)
        if room < 0:
            break
        stack += [one for one in (item.values() if isinstance(item, dict) else item) if type(one) in _NESTED]
    return room


def check_number(number: int, max_model_len: int, param: str = "messages") -> None:
    """Refuse more messages, parts of contents, or tools than any prompt can hold.

    Args:
        number: of messages, parts or tools.
        max_model_len: the model's length in tokens.
        param: their field in the request.
    """
    if number > max_model_len:
        what = "tools" if param == "tools" else "messages and parts of their contents"
        raise RequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, your request has {number} "
            f"{what}. Please reduce their number.",
            param,
        )


def check_conversation(
    messages: Sequence[BaseModel],
    max_model_len: int,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    template_kwargs: Mapping[str, Any] | None = None,
    any_length: bool = False,
) -> int:
    """Refuse a conversation too long for any prompt; returns its size, characters and values together.

    Args:
        messages: each with a content.
        max_model_len: the model's length in tokens.
        tools: functions that the model may call.
        template_kwargs: further variables of the template.
        any_length: the prompt is truncated or not generated from, so that it may exceed the model's length.
    """
    if not any_length:
        contents = (getattr(message, "content", None) for message in messages)
        num_parts = sum(len(content) for content in contents if isinstance(content, list))
        check_number(max(len(messages), num_parts), max_model_len)
        check_number(len(tools), max_model_len, "tools")
    limit = max(_MAX_SIZE, _SIZE_PER_TOKEN * max_model_len)
    size = _measure(messages, limit, "messages")
    size += _measure(tools, limit, "tools")
    return size + _measure((template_kwargs or {}).values(), limit, "chat_template_kwargs")


def _measure(values: Iterable[Any], limit: int, param: str) -> int:
    """Number of characters and values in a field of a request."""
    size, level = 0, list(values)
    for _ in range(_MAX_DEPTH):
        size += len(level)
        inner: list[Any] = []
        for value in level:
            if isinstance(value, str):
                size += len(value)
            elif isinstance(value, Mapping):
                size += sum(len(key) for key in value if isinstance(key, str))
                inner.extend(value.values())
            elif isinstance(value, list | tuple):
                inner.extend(value)
            elif isinstance(value, BaseModel):
                inner.extend(value.__dict__.values())
                inner.extend((value.model_extra or {}).values())
            if size + len(inner) > limit:
                raise RequestError(
                    f"`{param}` has more than {limit} characters and values, which no prompt holds. Please reduce "
                    "its length.",
                    param,
                )
        if not inner:
            return size
        level = inner
    raise RequestError(f"`{param}` is nested too deeply: the limit is {_MAX_DEPTH} levels.", param)
