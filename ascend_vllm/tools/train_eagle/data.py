"""Texts to train on: files of conversations or plain text, as token ids."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from ascend_vllm.errors import ConfigError
from ascend_vllm.model_files import one_line
from ascend_vllm.tools.demo.corpus import build_conversations

# name of the texts that the demo model is made from
DEMO_DATA = "demo"
_SUFFIXES = (".jsonl", ".json", ".txt")
# ShareGPT's names of who speaks
_ROLES = {"human": "user", "gpt": "assistant"}

Message = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Sample:
    """One text.

    Attributes:
        token_ids: of the text.
        learned: of each token whether the model would generate it.
    """

    token_ids: list[int]
    learned: list[bool]


def read_samples(data: str, tokenizer: Any, max_length: int) -> list[Sample]:
    """Reads texts.

    Args:
        data: a file, a directory of files, or "demo". In .json (a list) and .jsonl (one on a line) texts are objects
            with `messages`, ShareGPT's `conversations`, `prompt` and `completion`, or `text`; .txt files are texts.
        tokenizer: of the model, as transformers loads it.
        max_length: most tokens of a sample; longer texts continue in another.

    Raises:
        ConfigError: there are no such files or no texts in them, or one has another form.
    """
    if data == DEMO_DATA:
        records: Iterator[tuple[str, Any]] = (
            (DEMO_DATA, {"messages": [{"role": turn.role, "content": turn.text} for turn in conversation.turns]})
            for conversation in build_conversations(0)
        )
    else:
        records = _records(pathlib.Path(data))
    samples = [
        Sample(sample.token_ids[start : start + max_length], sample.learned[start : start + max_length])
        for place, record in records
        for sample in [_sample(place, record, tokenizer)]
        for start in range(0, len(sample.token_ids), max_length)
    ]
    # a pair needs its own token and the next two
    samples = [sample for sample in samples if any(sample.learned[2:])]
    if not samples:
        raise ConfigError(f"--data {data}: there is no text to learn from")
    return samples


def _records(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
    """Texts, each with the place that it has, for messages."""
    if not path.exists():
        raise ConfigError(f"--data {path}: there is no such file or directory")
    paths = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES) if path.is_dir() else [path]
    for file in paths:
        try:
            text = file.read_text(encoding="utf-8")
            if file.suffix == ".jsonl":
                lines = [line for line in text.splitlines() if line.strip()]
                yield from ((f"{file}:{number}", json.loads(line)) for number, line in enumerate(lines, 1))
            elif file.suffix == ".json":
                yield from ((f"{file}[{index}]", record) for index, record in enumerate(json.loads(text)))
            else:
                yield str(file), {"text": text}
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"--data {file}: {one_line(error)}") from error


def _sample(place: str, record: Any, tokenizer: Any) -> Sample:
    try:
        match record:
            case {"messages": list(messages)}:
                return _conversation(
                    [{"role": str(m["role"]), "content": str(m["content"])} for m in messages], tokenizer
                )
            case {"conversations": list(turns)}:
                roles = [_ROLES.get(turn["from"], str(turn["from"])) for turn in turns]
                messages = [
                    {"role": role, "content": str(turn["value"])} for role, turn in zip(roles, turns, strict=True)
                ]
                return _conversation(messages, tokenizer)
            case {"prompt": str(prompt), "completion": str(completion)}:
                return _joined(_encode(tokenizer, prompt), _encode(tokenizer, completion))
            case {"text": str(text)}:
                return _joined([], _encode(tokenizer, text))
    except (KeyError, TypeError) as error:
        raise ConfigError(f"--data {place}: a message lacks {one_line(error)}") from error
    raise ConfigError(f"--data {place}: is no object with messages, conversations, prompt and completion, or text")


def _conversation(messages: Sequence[Message], tokenizer: Any) -> Sample:
    """A conversation as the chat template writes it, whose answers are to be learned."""
    whole = _encode(tokenizer, _rendered(tokenizer, messages, asks=False))
    learned = [False] * len(whole)
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before = _encode(tokenizer, _rendered(tokenizer, messages[:index], asks=True))
            behind = _encode(tokenizer, _rendered(tokenizer, messages[: index + 1], asks=False))
            # templates may leave out of earlier answers what they write of the last one
            if whole[: len(before)] == before:
                end = min(len(behind), len(whole))
                learned[len(before) : end] = [True] * (end - len(before))
    return Sample(whole, learned)


def _rendered(tokenizer: Any, messages: Sequence[Message], *, asks: bool) -> str:
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=asks))
    # templates raise anything
    except Exception as error:
        raise ConfigError(f"--data: the model's chat template refuses a conversation: {one_line(error)}") from error


def _joined(prompt: list[int], answer: list[int]) -> Sample:
    return Sample(prompt + answer, [False] * len(prompt) + [True] * len(answer))


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))
