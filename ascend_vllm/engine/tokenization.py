"""The tokenizer of a model, with calls that leave the event loop free. `hf_tokenizer` reads its files."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ascend_vllm.config.model import ModelConfig
from ascend_vllm.engine.detokenization import (
    ByteDetokenizer,
    IncrementalDetokenizer,
    WindowDetokenizer,
)
from ascend_vllm.errors import RequestError
from ascend_vllm.hf_tokenizer import bytes_of_token, is_byte_level, load_hf_tokenizer
from ascend_vllm.logger import init_logger

logger = init_logger(__name__)

T = TypeVar("T")

# The longest UTF-8 character has 4 bytes; a prompt's last 4 tokens hold all that may be incomplete at its end.
_BYTE_PROMPT_TAIL = 4
# largest id that the tokenizers library takes
_UINT32_MAX = 2**32 - 1


class Tokenizer:
    """Wraps a transformers tokenizer.

    Args:
        hf_tokenizer: any transformers tokenizer, fast or slow.

    Attributes:
        hf: the wrapped tokenizer.
        is_fast: whether the `tokenizers` library does the work.
        vocab_size: number of tokens including added ones; ids may have gaps.
        eos_token_id: id that ends a text, or None.
        bos_token_id: id that begins a text, or None.
        all_special_ids: ids that skip_special_tokens hides.
    """

    def __init__(self, hf_tokenizer: Any) -> None:
        self.hf = hf_tokenizer
        self.is_fast: bool = bool(hf_tokenizer.is_fast)
        self._backend = hf_tokenizer.backend_tokenizer if self.is_fast else None
        if self._backend is not None:
            # What a file says about batching must never cut or pad a prompt.
            self._backend.no_truncation()
            self._backend.no_padding()
        self.vocab_size: int = len(hf_tokenizer)
        self.eos_token_id: int | None = hf_tokenizer.eos_token_id
        self.bos_token_id: int | None = hf_tokenizer.bos_token_id
        # Slow decoders fail on ids without a token, fast ones on ids of more than 32 bits. Only the slow ones need
        # the list, for a large vocabulary takes time.
        self._max_token_id = _UINT32_MAX if self.is_fast else max(hf_tokenizer.get_vocab().values(), default=-1)
        self._special_ids = frozenset(self._find_special_ids())
        self._byte_tables = _make_byte_tables(self._backend, self._special_ids)
        self._token_texts: dict[int, str] = {}
        # One thread: the slow tokenizers are not thread-safe, and the fast ones use all cores on a long text.
        self._executor = concurrent.futures.ThreadPoolExecutor(1, "tokenizer")

    @classmethod
    def from_config(cls, config: ModelConfig) -> Tokenizer:
        """Loads the tokenizer that a model's configuration names."""
        return cls.from_directory(
            config.tokenizer, slow=config.tokenizer_mode == "slow", trust_remote_code=config.trust_remote_code
        )

    @classmethod
    def from_directory(cls, directory: str, *, slow: bool = False, trust_remote_code: bool = False) -> Tokenizer:
        """Loads a tokenizer.

        Args:
            directory: where tokenizer.json, tokenizer_config.json and so on are.
            slow: take the Python implementation where transformers has one.
            trust_remote_code: run the directory's own tokenizer code, if it has any.

        Raises:
            ModelLoadError: no tokenizer there, a broken file, or one that needs code which is not trusted.
        """
        return cls(load_hf_tokenizer(directory, slow=slow, trust_remote_code=trust_remote_code))

    @property
    def all_special_ids(self) -> frozenset[int]:
        """Ids that skip_special_tokens hides."""
        return self._special_ids

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """The model's own chat template, or several by name."""
        template: str | dict[str, str] | None = getattr(self.hf, "chat_template", None)
        return template

    @property
    def special_tokens(self) -> dict[str, str]:
        """The special tokens that have a name, such as ``bos_token``: what chat templates know of a tokenizer."""
        return dict(self.hf.special_tokens_map)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text, never truncated.

        Args:
            text: any text; special tokens written in it become their ids.
            add_special_tokens: add what the model expects around a text, like a beginning-of-text token.
        """
        if self._backend is not None:
            # Past the wrapper: it would take and set the shared truncation state, and is several times slower.
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            return ids
        return list(self.hf(text, add_special_tokens=add_special_tokens).input_ids)

    def check_num_characters(self, text: str, max_tokens: int) -> None:
        """Refuse a text that `max_tokens` tokens cannot hold, without the time that its ids would take.

        Raises:
            RequestError: it has more characters than so many of the longest token.
        """
        # the longest token is looked for only if it matters: a token has at least one character
        if len(text) <= max_tokens or len(text) <= (most := max_tokens * self._longest_token):
            return
        raise RequestError(
            f"This model's maximum context length is {max_tokens} tokens. However, your prompt contains {len(text)} "
            f"characters (more than {most} characters, which is the upper bound for {max_tokens} input tokens). "
            "Please reduce the length of the input prompt.",
            "prompt",
        )

    @functools.cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token; a byte-level vocabulary writes at least one for each byte."""
        return max(map(len, self.hf.get_vocab()), default=1)

    def encode_pair(self, first: str, second: str, limit: int | None = None, side: str = "right") -> list[int]:
        """Ids of two texts in one prompt, with what the model expects around and between them.

        Args:
            first: any text.
            second: any text.
            limit: most ids; the longer text is cut until it is as long as the other one, then both are.
            side: "right": the ends of the texts are cut off; "left": their beginnings. Python tokenizers know one
                side only.
        """
        if self._backend is None:
            return list(self.hf(first, text_pair=second, truncation=limit is not None, max_length=limit).input_ids)
        encoding = self._backend.encode(first, second)
        ids: list[int] = encoding.ids
        if limit is None or len(ids) <= limit:
            return ids
        return _cut_pair(ids, encoding.sequence_ids, limit, side)

    def shorten(self, text: str, max_tokens: int) -> str:
        """The beginning of a text, whole characters of so many tokens at most, those around every text not counted.

        Args:
            text: any text.
            max_tokens: ≥ 1.
        """
        if self._backend is None:
            ids = self.encode(text, add_special_tokens=False)
            return text if len(ids) <= max_tokens else self.decode(ids[:max_tokens])
        while True:
            encoding = self._backend.encode(text, add_special_tokens=False)
            if len(encoding.ids) <= max_tokens:
                return text
            # a character whose bytes are several tokens goes as a whole; what is left may become other tokens, so
            # it is looked at again, and is shorter each time
            end = min(encoding.offsets[max_tokens - 1][1], encoding.offsets[max_tokens][0])
            text = text[: min(end, len(text) - 1)]

    def decode(
        self,
        token_ids: Sequence[int],
        skip_special_tokens: bool = False,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Text of ids; ids without a token give nothing.

        Args:
            token_ids: ids ≥ 0.
            skip_special_tokens: leave special tokens out.
            spaces_between_special_tokens: only slow tokenizers know it.
        """
        # the backend takes ids of 32 bits, and tokenizers in Python none that they do not know
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
        return [token or "" for token in self.hf.convert_ids_to_tokens(list(token_ids))]

    def token_text(self, token_id: int) -> str:
        """Text of one token in the middle of a text, special or not; cached.

        Bytes that are no complete character are U+FFFD.
        """
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self._make_token_text(token_id)
        return text

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> str:
        """The prompt's text for a conversation.

        Args:
            conversation: messages with at least a role, as the template wants them.
            kwargs: chat_template, tools, documents, add_generation_prompt, continue_final_message, and what else
                the template knows.

        Raises:
            Exception: whatever the template or transformers raises; `entrypoints.chat_template` makes request
                errors of them.
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
            prompt_token_ids: what comes before the output.
            skip_special_tokens: leave special tokens out.
            spaces_between_special_tokens: only slow tokenizers know it.
        """
        if self._byte_tables is not None:
            table = self._byte_tables[skip_special_tokens]
            return ByteDetokenizer(table.__getitem__, prompt_token_ids[-_BYTE_PROMPT_TAIL:])
        decode = functools.partial(
            self.decode,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        return WindowDetokenizer(decode, prompt_token_ids)

    async def encode_async(
        self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """`encode` off the event loop, after `check_num_characters` if `max_tokens` is given."""
        if max_tokens is not None:
            await self._run(self.check_num_characters, text, max_tokens)
        return await self._run(self.encode, text, add_special_tokens)

    async def encode_pair_async(
        self, first: str, second: str, limit: int | None = None, side: str = "right"
    ) -> list[int]:
        """`encode_pair` off the event loop."""
        return await self._run(self.encode_pair, first, second, limit, side)

    async def shorten_async(self, text: str, max_tokens: int) -> str:
        """`shorten` off the event loop."""
        return await self._run(self.shorten, text, max_tokens)

    async def decode_async(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """`decode` off the event loop."""
        return await self._run(self.decode, token_ids, skip_special_tokens)

    async def apply_chat_template_async(self, conversation: list[dict[str, Any]], **kwargs: Any) -> str:
        """`apply_chat_template` off the event loop."""
        return await self._run(functools.partial(self.apply_chat_template, conversation, **kwargs))

    def close(self) -> None:
        """Ends the thread; the synchronous calls keep working."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _run(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)

    def _find_special_ids(self) -> set[int]:
        if self._backend is None:
            return set(self.hf.all_special_ids)
        return {id_ for id_, token in self._backend.get_added_tokens_decoder().items() if token.special}

    def _make_token_text(self, token_id: int) -> str:
        if self._byte_tables is not None:
            return self._byte_tables[False][token_id].decode("utf-8", "replace")
        # Decoded after a letter, since decoders strip the space before the first word of a text.
        letter = self.encode("a", add_special_tokens=False)
        return self.decode([*letter, token_id])[len(self.decode(letter)) :]


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


def _make_byte_tables(backend: Any, special_ids: frozenset[int]) -> dict[bool, _ByteTable] | None:
    """Tables by skip_special_tokens, or None if the vocabulary is not byte-level."""
    if backend is None or not is_byte_level(backend):
        return None
    return {True: _ByteTable(backend, special_ids), False: _ByteTable(backend, frozenset())}


def _cut_pair(ids: list[int], owners: list[int | None], limit: int, side: str) -> list[int]:
    """Two texts in one prompt, cut as tokenizers' own strategy "longest_first" does.

    Args:
        ids: the prompt's.
        owners: which text each belongs to, 0 or 1; None: what is around them, which stays.
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
