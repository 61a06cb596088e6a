"""Text from token ids, one step at a time.

A token may end in the middle of a UTF-8 character, and some decoders treat the first token of a text differently. An
`IncrementalDetokenizer` therefore holds back incomplete characters. The concatenation of its results is the text of
all ids; text that was returned never changes.
"""

from __future__ import annotations

import abc
import codecs
from collections.abc import Callable, Sequence

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_make_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer(abc.ABC):
    """State of one growing sequence."""

    @abc.abstractmethod
    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens and returns the text that is certain now, "" while a character is incomplete."""

    @abc.abstractmethod
    def finish(self) -> str:
        """What was held back; bytes that never became a character are U+FFFD. Nothing is pushed afterwards."""


class NoDetokenizer(IncrementalDetokenizer):
    """For requests with detokenize=False."""

    def push(self, token_ids: Sequence[int]) -> str:  # noqa: ARG002
        return ""

    def finish(self) -> str:
        return ""


class ByteDetokenizer(IncrementalDetokenizer):
    """For byte-level vocabularies (GPT-2, Llama 3, Qwen, ...): every token is a string of bytes.

    The text of a sequence is its tokens' bytes decoded as UTF-8, so an incremental UTF-8 decoder is all the state.

    Args:
        token_bytes: bytes of a token id; b"" for ids without text.
        prompt_tail: the last few ids of the prompt: a character that begins there ends in the output.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], prompt_tail: Sequence[int] = ()) -> None:
        self._token_bytes = token_bytes
        self._decode = _make_utf8_decoder("replace").decode
        self.push(prompt_tail)

    def push(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) == 1:
            return self._decode(self._token_bytes(token_ids[0]))
        return self._decode(b"".join(map(self._token_bytes, token_ids)))

    def finish(self) -> str:
        """U+FFFD if a character is incomplete."""
        return self._decode(b"", True)


class WindowDetokenizer(IncrementalDetokenizer):
    """For any vocabulary: decodes a short window of the last tokens and returns by how much its text grew.

    The window holds the tokens whose text was returned last, as context, and the pending ones. Its length is bounded:
    bytes that never become a character are emitted as U+FFFD, and tokens without text are dropped.

    Args:
        decode: text of a list of ids.
        prompt_ids: the prompt; the window starts in its last few tokens.
        is_whole: whether ids end with a whole character, asked if the prompt's text ends with U+FFFD, which is either
            a character of the prompt or bytes of one that the output may complete.
    """

    # Tokens of the prompt that give the first output token its context.
    _PROMPT_TAIL = 5
    # Longer windows, and more pending tokens, are made shorter; so many tokens are context enough then.
    _MAX_LENGTH = 32
    _CONTEXT = 8
    # tokens that may be the beginning of a character
    _MAX_INCOMPLETE = 3

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        prompt_ids: Sequence[int] = (),
        is_whole: Callable[[Sequence[int]], bool] = lambda _: False,
    ) -> None:
        self._decode = decode
        tail = self._PROMPT_TAIL
        self._window = list(prompt_ids[-tail:])
        self._prefix = decode(self._window)
        # After a context without text (special tokens only) the next token would be decoded as the first of a text;
        # a context that starts within a character would corrupt the characters after it.
        while self._prefix[:1] in ("", _REPLACEMENT) and tail < len(prompt_ids):
            tail *= 2
            self._window = list(prompt_ids[-tail:])
            self._prefix = decode(self._window)
        # Bytes of an incomplete character at the end of the prompt belong to the output.
        if self._prefix.endswith(_REPLACEMENT) and not is_whole(prompt_ids):
            self._prefix = self._prefix.rstrip(_REPLACEMENT)
        self._num_returned = len(self._window)

    def push(self, token_ids: Sequence[int]) -> str:
        window = self._window
        window.extend(token_ids)
        text = self._decode(window)
        num_pending = len(window) - self._num_returned
        if text.endswith(_REPLACEMENT):
            return self._emit_incomplete() if num_pending > self._MAX_LENGTH else ""
        new_text = self._growth(text)
        if not new_text:
            if num_pending > self._MAX_LENGTH and self._decode(window[: -self._CONTEXT]) == text:
                del window[-self._CONTEXT :]
            return ""
        pending = window[self._num_returned :]
        prefix = self._decode(pending)
        if prefix:
            self._window, self._prefix = pending, prefix
        else:  # text that appears only in context, like a lone space: keep the context
            self._prefix = text
            self._shorten()
        self._num_returned = len(self._window)
        return new_text

    def _emit_incomplete(self) -> str:
        """The text of pending bytes that are too many to be the beginning of a character."""
        end = len(self._window) - self._MAX_INCOMPLETE
        new_text = self._growth(self._decode(self._window[:end]), end)
        start = end - self._CONTEXT
        self._window = self._window[start:]
        self._num_returned = end - start
        self._prefix = self._decode(self._window[: self._num_returned])
        return new_text

    def _shorten(self) -> None:
        """Keep no more context than is needed."""
        tail = self._window[-self._CONTEXT :]
        if len(self._window) > self._MAX_LENGTH and (text := self._decode(tail)) and text[0] != _REPLACEMENT:
            self._window, self._prefix = tail, text

    def finish(self) -> str:
        return self._growth(self._decode(self._window))

    def _growth(self, text: str, end: int | None = None) -> str:
        """What is new in the text of the window, or of its tokens up to an end."""
        if text.startswith(self._prefix):
            return text[len(self._prefix) :]
        # In vocabularies with byte fallback an invalid byte changes how the characters next to it are decoded. Those
        # have been returned already; only the pending tokens' text is new.
        return self._decode(self._window[self._num_returned : end])
