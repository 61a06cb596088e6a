"""The tokenizer of a model, with calls off the event loop. `hf_tokenizer` reads its files."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ascend_vllm.engine.detokenization import (
    ByteDetokenizer,
    IncrementalDetokenizer,
    WindowDetokenizer,
)
from ascend_vllm.engine.text_threads import MAX_WAITING, MEDIUM, SHORT, TextThread, TextThreads
from ascend_vllm.errors import RequestError
from ascend_vllm.hf_tokenizer import byte_of_token, bytes_of_token, is_byte_level, load_hf_tokenizer, slow_ids
from ascend_vllm.logger import init_logger

logger = init_logger(__name__)

T = TypeVar("T")

# A UTF-8 character has at most 4 bytes, so a prompt's last 4 tokens hold any incomplete character at its end.
_BYTE_PROMPT_TAIL = 4
# the character that stands for others' bytes
_REPLACEMENT_BYTES = "\N{REPLACEMENT CHARACTER}".encode()
# largest id that the tokenizers library accepts
_UINT32_MAX = 2**32 - 1

# Limit in bytes of UTF-8 of texts that are truncated or only tokenised, or _BYTES_PER_TOKEN for each token of
# max_model_len if that is more.
_ANY_LENGTH = 4 * 1024 * 1024
# the same for tokenizers in Python, which hold the GIL
_ANY_LENGTH_IN_PYTHON = 512 * 1024
_BYTES_PER_TOKEN = 8
# longest text that a fast tokenizer takes on the event loop: sooner than it could be passed to a thread and back
_AT_ONCE = 512
# limit of ids that are only detokenised, or max_model_len if that is more
_ANY_NUMBER_OF_IDS = 1024 * 1024
# characters of the chunks in which the tokens of a text that is probably too long are counted
_COUNT_CHARS = 64 * 1024


class Tokenizer:
    """Wraps a transformers tokenizer.

    Args:
        hf_tokenizer: any transformers tokenizer, fast or slow.
        one_thread: `encode` is not thread-safe; always true for slow tokenizers.

    Attributes:
        hf: the wrapped tokenizer.
        is_fast: whether it is a `tokenizers` tokenizer.
        vocab_size: number of tokens including added ones; ids may have gaps.
        eos_token_id: id that ends a text, or None.
        bos_token_id: id that begins a text, or None.
        all_special_ids: ids that skip_special_tokens hides.
    """

    def __init__(self, hf_tokenizer: Any, one_thread: bool = False) -> None:
        self.hf = hf_tokenizer
        self.is_fast: bool = bool(hf_tokenizer.is_fast)
        self._backend: Any = hf_tokenizer.backend_tokenizer if self.is_fast else None
        if self._backend is not None:
            # tokenizer.json may have settings for batches, which must not truncate or pad prompts
            self._backend.no_truncation()
            self._backend.no_padding()
        self.vocab_size: int = len(hf_tokenizer)
        self.eos_token_id: int | None = hf_tokenizer.eos_token_id
        self.bos_token_id: int | None = hf_tokenizer.bos_token_id
        vocabulary = hf_tokenizer.get_vocab()
        # Slow decoders fail on unknown ids, fast ones on ids of more than 32 bits. The vocabulary of a repository's
        # own tokenizer may lack the special tokens at its end, which the length counts.
        largest = max(vocabulary.values(), default=-1)
        self._max_token_id = _UINT32_MAX if self.is_fast else max(len(hf_tokenizer) - 1, largest)
        # characters of the longest token; byte-level vocabularies have at least one character per byte
        self._longest_token = max(map(len, vocabulary), default=1)
        self.all_special_ids = frozenset(self._find_special_ids())
        # by skip_special_tokens; None: the vocabulary is not byte-level
        self._byte_tables: dict[bool, _ByteTable] | None = None
        if self._backend is not None and is_byte_level(self._backend):
            hidden = {True: self.all_special_ids, False: frozenset[int]()}
            self._byte_tables = {skip: _ByteTable(self._backend, ids) for skip, ids in hidden.items()}
        self._token_texts: dict[int, str] = {}
        self._one_thread = one_thread or not self.is_fast
        self._threads = TextThreads("tokenizer", one=self._one_thread)
        self._templates = TextThread("chat-template", max_waiting=MAX_WAITING)

    @classmethod
    def from_directory(cls, directory: str, *, slow: bool = False, trust_remote_code: bool = False) -> Tokenizer:
        """Loads a tokenizer.

        Args:
            directory: where tokenizer.json, tokenizer_config.json and so on are.
            slow: take the Python implementation where transformers has one.
            trust_remote_code: run the directory's own tokenizer code, if it has any.

        Raises:
            ModelLoadError: there is no tokenizer, a file is broken, or it needs trust_remote_code.
        """
        return cls(load_hf_tokenizer(directory, slow=slow, trust_remote_code=trust_remote_code))

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """The model's own chat template, or several by name."""
        template: str | dict[str, str] | None = getattr(self.hf, "chat_template", None)
        return template

    @property
    def special_tokens(self) -> dict[str, str]:
        """The special tokens that have a name, such as ``bos_token``; chat templates may use them."""
        return dict(self.hf.special_tokens_map)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text, never truncated.

        Args:
            text: any text; special tokens written in it become their ids.
            add_special_tokens: add the tokens that the model expects around a text, such as beginning-of-text.
        """
        if self._backend is not None:
            # not through the wrapper, which modifies shared truncation state and is several times slower
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            return ids
        return slow_ids(self.hf, text, add_special_tokens=add_special_tokens)

    def check_num_characters(self, text: str, max_tokens: int) -> None:
        """Refuses a text that cannot fit into `max_tokens` tokens, without tokenising it.

        Raises:
            RequestError: it has more characters than `max_tokens` times the longest token.
        """
        if len(text) <= (most := max_tokens * self._longest_token):
            return
        raise RequestError(
            f"This model's maximum context length is {max_tokens} tokens. However, your prompt contains {len(text)} "
            f"characters (more than {most} characters, which is the upper bound for {max_tokens} input tokens). "
            "Please reduce the length of the input prompt.",
            "input_tokens",
        )

    def check_size(self, text: str, max_tokens: int) -> None:
        """Refuses a text that is too long even for a request that truncates its ids or only returns them.

        Args:
            text: any text.
            max_tokens: of the model.

        Raises:
            RequestError: the text is too long.
        """
        limit = max(_ANY_LENGTH_IN_PYTHON if self._one_thread else _ANY_LENGTH, _BYTES_PER_TOKEN * max_tokens)
        # a character has 1 … 4 bytes
        if len(text) * 4 > limit and (len(text) > limit or len(text.encode("utf-8", "surrogatepass")) > limit):
            raise RequestError(
                f"The text has {len(text)} characters and is too long to be tokenised: the limit is {limit} bytes of "
                "UTF-8. Please send it in parts.",
                "prompt",
            )

    def check_num_ids(self, token_ids: Sequence[int], max_tokens: int) -> None:
        """Refuses more ids than any prompt has, for requests that detokenise them.

        Raises:
            RequestError: there are too many.
        """
        limit = max(_ANY_NUMBER_OF_IDS, max_tokens)
        if len(token_ids) > limit:
            raise RequestError(
                f"The text of {len(token_ids)} tokens is too long to be written: the limit is {limit} tokens. Please "
                "send them in parts.",
                "tokens",
            )

    def encode_pair(self, first: str, second: str, limit: int | None = None, side: str = "right") -> list[int]:
        """Ids of two texts in one prompt, with the model's special tokens around and between them.

        Args:
            first: any text.
            second: any text.
            limit: most ids; the longer text is truncated to the length of the other one, then both are.
            side: "right": the ends of the texts are cut off; "left": their beginnings. Slow tokenizers ignore it.
        """
        if self._backend is None:
            return slow_ids(self.hf, first, second, truncation=limit is not None, max_length=limit)
        return _pair_ids_of(self._backend.encode(first, second), limit, side)

    def shorten(self, text: str, max_tokens: int) -> str:
        """The longest beginning of a text, in whole characters, of at most `max_tokens` tokens without special ones.

        Args:
            text: any text.
            max_tokens: ≥ 1.
        """
        if self._backend is None:
            ids = self.encode(text, add_special_tokens=False)
            return text if len(ids) <= max_tokens else self.decode(ids[:max_tokens])
        while True:
            (encoding,) = self._backend.encode_batch([text], add_special_tokens=False)
            if len(encoding) <= max_tokens:
                return text
            # cut before a character that straddles the limit; the rest may be tokenised differently, so it is checked
            # again, and gets shorter each time
            end = min(encoding.token_to_chars(max_tokens - 1)[1], encoding.token_to_chars(max_tokens)[0])
            text = text[: min(end, len(text) - 1)]

    def decode(
        self,
        token_ids: Sequence[int],
        skip_special_tokens: bool = False,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Text of ids; ids without a token are skipped.

        Args:
            token_ids: ids ≥ 0.
            skip_special_tokens: leave special tokens out.
            spaces_between_special_tokens: for slow tokenizers only.
        """
        # see `_max_token_id`
        known = [token_id for token_id in token_ids if token_id <= self._max_token_id]
        if self._backend is not None:
            return str(self._backend.decode(known, skip_special_tokens=skip_special_tokens))
        return str(
            self.hf.decode(
                known,
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
                spaces_between_special_tokens=spaces_between_special_tokens,
            )
        )

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Tokens as the vocabulary writes them; "" for ids without a token."""
        # each distinct id once; slow tokenizers fail on unknown ids
        distinct = [token_id for token_id in dict.fromkeys(token_ids) if token_id <= self._max_token_id]
        tokens = dict(zip(distinct, map(_shown_token, self.hf.convert_ids_to_tokens(distinct)), strict=True))
        return [tokens.get(token_id, "") for token_id in token_ids]

    def token_text(self, token_id: int) -> str:
        """Text of one token in the middle of a text, special or not; incomplete characters are U+FFFD. Cached."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self._make_token_text(token_id)
        return text

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> str:
        """The prompt's text for a conversation.

        Args:
            conversation: messages with at least a role, as the template wants them.
            kwargs: chat_template, tools, documents, add_generation_prompt, continue_final_message, and other
                variables of the template.

        Raises:
            Exception: whatever the template or transformers raises; `entrypoints.templates.chat_template` turns it
                into a RequestError.
        """
        return str(self.hf.apply_chat_template(conversation, tokenize=False, **kwargs))

    def make_detokenizer(
        self,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> IncrementalDetokenizer:
        """State that turns a sequence's output ids into text.

        Args:
            prompt_token_ids: the ids before the output.
            skip_special_tokens: leave special tokens out.
            spaces_between_special_tokens: for slow tokenizers only.
        """
        if self._byte_tables is not None:
            table = self._byte_tables[skip_special_tokens]
            return ByteDetokenizer(table.__getitem__, prompt_token_ids[-_BYTE_PROMPT_TAIL:])
        decode: Callable[[list[int]], str]
        if self._backend is not None:
            # without `self.decode`, which takes as long again: a model's ids fit into 32 bits
            decode = functools.partial(self._backend.decode, skip_special_tokens=skip_special_tokens)
        else:
            decode = functools.partial(
                self.decode,
                skip_special_tokens=skip_special_tokens,
                spaces_between_special_tokens=spaces_between_special_tokens,
            )
        return WindowDetokenizer(decode, prompt_token_ids, self._ends_with_whole_character)

    def _ends_with_whole_character(self, token_ids: Sequence[int]) -> bool:
        """Whether ids end with byte tokens, like <0xEF> or in a vocabulary of bytes, that make whole characters."""
        run: list[int] = []
        try:
            last = self.hf.convert_ids_to_tokens(list(token_ids[-len(_REPLACEMENT_BYTES) :]))
            if any(isinstance(token, bytes) for token in last):
                return b"".join(token for token in last if isinstance(token, bytes)).endswith(_REPLACEMENT_BYTES)
            for token_id in reversed(token_ids):
                byte = byte_of_token(self.hf.convert_ids_to_tokens(token_id))
                if byte is None:
                    break
                run.append(byte)
            return bytes(reversed(run)).decode() != ""
        except (ValueError, IndexError):
            # an incomplete character, or an id beyond the vocabulary of a slow tokenizer has no token
            return False

    async def encode_async(
        self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None, any_length: bool = False
    ) -> list[int]:
        """`encode` off the event loop, unless the text is short.

        Args:
            text, add_special_tokens: see `encode`.
            max_tokens: of the model: a text that certainly has more is refused before it is tokenised; None: no
                check.
            any_length: the ids are truncated or only returned, so the limit is that of `check_size`.

        Raises:
            RequestError: the text is too long.
            EngineBusyError: too many long texts are queued.
        """
        thread = self._threads.of(len(text))
        if max_tokens is not None and any_length:
            self.check_size(text, max_tokens)
        elif max_tokens is not None:
            self.check_num_characters(text, max_tokens)
            if len(text) > max(MEDIUM, _BYTES_PER_TOKEN * max_tokens):
                await thread.run(len(text), self._check_num_tokens, text, max_tokens)
        if self._one_thread:
            return await thread.run(len(text), self.encode, text, add_special_tokens)
        if len(text) <= _AT_ONCE:
            return _ids_of(self._encode(text, add_special_tokens))
        if thread is not self._threads.long:
            return await thread.run(len(text), lambda: _ids_of(self._encode(text, add_special_tokens)))
        # the list is made in another thread: one of low priority must not hold the GIL for long
        encoding = await thread.run(len(text), self._encode, text, add_special_tokens)
        return await self._threads.medium.run(0, _ids_of, encoding)

    async def encode_pair_async(
        self, first: str, second: str, limit: int | None = None, side: str = "right", max_tokens: int | None = None
    ) -> list[int]:
        """`encode_pair` off the event loop.

        Args:
            first, second, limit, side: see `encode_pair`.
            max_tokens: as in `encode_async`; with `limit` set, the limit of `check_size` applies instead.

        Raises:
            RequestError: the texts are too long.
            EngineBusyError: too many long texts are queued.
        """
        size = len(first) + len(second)
        thread = self._threads.of(size)
        if max_tokens is not None:
            check = self.check_num_characters if limit is None else self.check_size
            check(first + second, max_tokens)
        if self._one_thread:
            return await thread.run(size, self.encode_pair, first, second, limit, side)
        (encoding,) = await thread.run(size, self._backend.encode_batch, [(first, second)])
        thread = self._threads.medium if thread is self._threads.long else thread
        return await thread.run(0, _pair_ids_of, encoding, limit, side)

    async def shorten_async(self, text: str, max_tokens: int) -> str:
        """`shorten` off the event loop; raises `EngineBusyError` as `encode_async`."""
        return await self._threads.of(len(text)).run(len(text), self.shorten, text, max_tokens)

    async def decode_async(self, token_ids: Sequence[int]) -> str:
        """`decode` off the event loop; raises `EngineBusyError` as `encode_async`."""
        decode = self._decode if self._backend is not None else self.decode
        return await self._thread_of_ids(token_ids).run(len(token_ids), decode, token_ids)

    async def convert_ids_to_tokens_async(self, token_ids: Sequence[int]) -> list[str]:
        """`convert_ids_to_tokens` off the event loop; raises `EngineBusyError` as `encode_async`."""
        return await self._thread_of_ids(token_ids).run(len(token_ids), self.convert_ids_to_tokens, token_ids)

    async def render_async(self, size: int, render: Callable[[], T]) -> T:
        """Calls a function that renders a chat template off the event loop; returns its result.

        Args:
            size: characters and values of the conversation; long ones have a thread of their own.
            render: pure Python code, which shares the GIL with other threads.

        Raises:
            EngineBusyError: too many long ones are queued.
        """
        return await (self._threads.short if size <= SHORT else self._templates).run(size, render)

    def close(self) -> None:
        """Ends the threads; the synchronous calls keep working."""
        self._threads.close()
        self._templates.close()

    def _thread_of_ids(self, token_ids: Sequence[int]) -> TextThread:
        """The thread to detokenise in; not the one of low priority, since detokenisation mostly holds the GIL."""
        return self._threads.short if len(token_ids) <= SHORT else self._threads.medium

    def _encode(self, text: str, add_special_tokens: bool) -> Any:
        """A text's `tokenizers.Encoding`; releases the GIL."""
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding

    def _decode(self, token_ids: Sequence[int]) -> str:
        """`decode` of a fast tokenizer; releases the GIL."""
        known = [token_id for token_id in token_ids if token_id <= self._max_token_id]
        (text,) = self._backend.decode_batch([known], skip_special_tokens=False)
        return str(text)

    def _check_num_tokens(self, text: str, max_tokens: int) -> None:
        """Refuses a text that has more than `max_tokens` tokens, counted chunk by chunk.

        Since chunking changes the tokens at the cuts, only a text of more than twice as many is refused; counting
        stops there.

        Raises:
            RequestError: it has too many.
        """
        count = 0
        for start in range(0, len(text), _COUNT_CHARS):
            part = text[start : start + _COUNT_CHARS]
            count += len(self.encode(part, False) if self._one_thread else self._encode(part, False))
            if count > 2 * max_tokens:
                raise RequestError(
                    f"This model's maximum context length is {max_tokens} tokens. However, your prompt contains "
                    f"{len(text)} characters, and the first {start + len(part)} of them are more than {max_tokens} "
                    "input tokens. Please reduce the length of the input prompt.",
                    "input_tokens",
                )

    def _find_special_ids(self) -> set[int]:
        if self._backend is None:
            return set(self.hf.all_special_ids)
        return {id_ for id_, token in self._backend.get_added_tokens_decoder().items() if token.special}

    def _make_token_text(self, token_id: int) -> str:
        if self._byte_tables is not None:
            return self._byte_tables[False][token_id].decode("utf-8", "replace")
        # decoded after a letter, since decoders strip the space before the first word of a text
        letter = self.encode("a", add_special_tokens=False)
        return self.decode([*letter, token_id])[len(self.decode(letter)) :]


def truncation_limit(requested: int, max_model_len: int) -> int:
    """The limit that a prompt is truncated to.

    Args:
        requested: of the request; -1: max_model_len.
        max_model_len: most tokens of a sequence.

    Raises:
        RequestError: `requested` is above max_model_len.
    """
    if requested > max_model_len:
        raise RequestError(
            "truncate_prompt_tokens value is greater than max_model_len. Please request a smaller truncation size.",
            "truncate_prompt_tokens",
        )
    return max_model_len if requested == -1 else requested


def truncate(token_ids: list[int], limit: int, side: str, empty_ids: list[int]) -> list[int]:
    """Truncates a prompt; special tokens around the text (beginning or end of text) are kept.

    Args:
        token_ids: the prompt.
        limit: most tokens to keep.
        side: "right": the end is cut off; "left": the beginning is.
        empty_ids: tokens of an empty text.

    Example::

        truncate([1, 7, 8, 9, 2], 3, "right", [1, 2])  # [1, 7, 2]
    """
    if len(token_ids) <= limit:
        return token_ids
    num_kept, size = 0, len(token_ids)
    # special tokens at the end that is cut off
    around = empty_ids if side == "left" else empty_ids[::-1]
    end = token_ids[: len(around)] if side == "left" else token_ids[: -len(around) - 1 : -1]
    while num_kept < min(len(around), limit - 1) and end[num_kept] == around[num_kept]:
        num_kept += 1
    if side == "left":
        return token_ids[:num_kept] + token_ids[size - limit + num_kept :]
    return token_ids[: limit - num_kept] + token_ids[size - num_kept :]


def _shown_token(token: str | bytes | None) -> str:
    """A token as text; vocabularies of repositories' own tokenizers may consist of bytes."""
    return token.decode("utf-8", "replace") if isinstance(token, bytes) else token or ""


class _ByteTable(dict[int, bytes]):
    """Token id → bytes of a byte-level vocabulary, filled on first use.

    Args:
        backend: a `tokenizers.Tokenizer`.
        hidden_ids: ids without text.
    """

    def __init__(self, backend: Any, hidden_ids: frozenset[int]) -> None:
        super().__init__()
        self._backend = backend
        self._hidden_ids = hidden_ids

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        hidden = token is None or token_id in self._hidden_ids
        value = b"" if hidden else bytes_of_token(token)
        self[token_id] = value
        return value


def _ids_of(encoding: Any) -> list[int]:
    ids: list[int] = encoding.ids
    return ids


def _pair_ids_of(encoding: Any, limit: int | None, side: str) -> list[int]:
    """See `Tokenizer.encode_pair`."""
    ids = _ids_of(encoding)
    if limit is None or len(ids) <= limit:
        return ids
    return _cut_pair(ids, encoding.sequence_ids, limit, side)


def _cut_pair(ids: list[int], owners: list[int | None], limit: int, side: str) -> list[int]:
    """Truncates a pair of texts as the tokenizers library's strategy "longest_first" does.

    Args:
        ids: the prompt's.
        owners: which text each belongs to, 0 or 1; None: special tokens, which are kept.
        limit: most ids.
        side: where texts are cut, "right" or "left".
    """
    lengths = (owners.count(0), owners.count(1))
    room = max(0, limit - owners.count(None))
    shorter, longer = min(lengths), max(lengths)
    longer = min(longer, max(shorter, room - shorter))
    if shorter + longer > room:
        shorter = room // 2
        longer = room - shorter
    kept = (shorter, longer) if lengths[0] <= lengths[1] else (longer, shorter)
    result, seen = [], [0, 0]
    for id_, owner in zip(ids, owners, strict=True):
        if owner is None:
            result.append(id_)
            continue
        first = 0 if side == "right" else lengths[owner] - kept[owner]
        if first <= seen[owner] < first + kept[owner]:
            result.append(id_)
        seen[owner] += 1
    return result[:limit]
