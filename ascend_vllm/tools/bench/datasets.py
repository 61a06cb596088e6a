"""Datasets for benchmarks: random tokens, shared prefixes, verse, conversations and prompts from files."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.errors import ConfigError
from ascend_vllm.logger import init_logger

logger = init_logger(__name__)

# how often a random text is adjusted and tokenised again to get the requested number of tokens
_MAX_MENDING = 10
# limits in tokens for usable ShareGPT conversations
_MIN_TOKENS, _MAX_PROMPT_TOKENS, _MAX_TOKENS = 4, 1024, 2048
# verse written for this dataset, which no model was trained on
_VERSES = pathlib.Path(__file__).with_name("verses.txt")
_SONNET_TASK = "Choose as many lines as you can from the following ones and arrange them into a poem:\n"


@dataclasses.dataclass(frozen=True)
class SampleRequest:
    """One request of a benchmark.

    Attributes:
        prompt: text, or token ids without a tokenizer.
        prompt_len: number of its tokens, without those that the server adds.
        output_len: number of tokens to request.
    """

    prompt: str | list[int]
    prompt_len: int
    output_len: int


class PromptMaker:
    """Makes random prompts with an exact number of tokens.

    Args:
        tokenizer: of the model; None: prompts are token ids.
        vocab_size: limit of token ids without a tokenizer.
        chooser: the random generator.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, chooser: random.Random) -> None:
        self._tokenizer = tokenizer
        self._chooser = chooser
        if tokenizer is None:
            self._ids: Sequence[int] = range(min(1000, vocab_size // 2), vocab_size)
        else:
            special = set(tokenizer.hf.all_special_ids)
            self._ids = [i for i in range(tokenizer.vocab_size) if i not in special]

    def ids(self, count: int) -> list[int]:
        """`count` random token ids, none of them special."""
        return self._chooser.choices(self._ids, k=count)

    def request(self, ids: list[int], output_len: int) -> SampleRequest:
        """A request for these tokens, or for a similar text that the tokenizer splits into the same number."""
        if self._tokenizer is None:
            return SampleRequest(ids, len(ids), output_len)
        count = len(ids)
        text, found = "", ids
        # the text of random tokens may be tokenised into more or fewer tokens
        for _ in range(_MAX_MENDING):
            text = self._tokenizer.hf.decode(ids)
            found = encode(self._tokenizer, text)
            if len(found) == count:
                break
            ids = found[:count] + self.ids(count - len(found))
        return SampleRequest(text, len(found), output_len)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text, without special tokens around it."""
    return tokenizer.encode(text, add_special_tokens=False)


def count_tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> list[int]:
    """The number of tokens of each text."""
    return [len(encode(tokenizer, text)) for text in texts]


# ---- the datasets --------------------------------------------------------------------------------------------


def _range_ratios(text: str) -> tuple[float, float]:
    """--random-range-ratio for inputs and for outputs."""
    try:
        value = json.loads(text)
        pair = (value, value) if isinstance(value, int | float) else (value["input"], value["output"])
        ratios = float(pair[0]), float(pair[1])
    except (ValueError, TypeError, KeyError) as err:
        raise ConfigError(
            f'--random-range-ratio takes a number or {{"input": A, "output": B}}, got {text!r}.'
        ) from err
    if not all(0 <= ratio < 1 for ratio in ratios):
        raise ConfigError(f"--random-range-ratio must be at least 0 and below 1, got {text}.")
    return ratios


def _around(chooser: random.Random, length: int, ratio: float) -> int:
    return chooser.randint(math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio)))


def random_requests(args: argparse.Namespace, maker: PromptMaker, chooser: random.Random) -> list[SampleRequest]:
    """Prompts of random tokens, after a common prefix of --random-prefix-len tokens."""
    ratios = _range_ratios(args.random_range_ratio)
    prefix = maker.ids(args.random_prefix_len)
    made = []
    for _ in range(args.num_prompts):
        input_len = max(_around(chooser, args.random_input_len, ratios[0]), 0 if prefix else 1)
        output_len = max(_around(chooser, args.random_output_len, ratios[1]), 1)
        made.append(maker.request(prefix + maker.ids(input_len), output_len))
    return made


def prefix_repetition_requests(
    args: argparse.Namespace, maker: PromptMaker, chooser: random.Random
) -> list[SampleRequest]:
    """Prompts with several prefixes, each shared by many prompts."""
    num_prefixes = args.prefix_repetition_num_prefixes
    each = args.num_prompts // num_prefixes
    if not each:
        raise ConfigError(
            f"--num-prompts {args.num_prompts} must be at least --prefix-repetition-num-prefixes ({num_prefixes})."
        )
    made = []
    for _ in range(num_prefixes):
        prefix = maker.ids(args.prefix_repetition_prefix_len)
        for _ in range(each):
            ids = prefix + maker.ids(args.prefix_repetition_suffix_len)
            made.append(maker.request(ids, args.prefix_repetition_output_len))
    if not args.disable_shuffle:
        chooser.shuffle(made)
    return made


def sonnet_requests(args: argparse.Namespace, tokenizer: Tokenizer, chooser: random.Random) -> list[SampleRequest]:
    """Lines of verse in random order, after a common prefix of --sonnet-prefix-len tokens."""
    lines = [line + "\n" for line in _lines_of_file(args.dataset_path or str(_VERSES))]
    lengths = dict(zip(lines, count_tokens(tokenizer, lines), strict=True))
    task_len = count_tokens(tokenizer, [_SONNET_TASK])[0]
    if args.sonnet_input_len < task_len or args.sonnet_prefix_len > args.sonnet_input_len:
        raise ConfigError(
            f"--sonnet-input-len ({args.sonnet_input_len}) must be at least --sonnet-prefix-len "
            f"({args.sonnet_prefix_len}) and at least {task_len}, the tokens of the task."
        )
    prefix, budget = [], args.sonnet_prefix_len - task_len
    for line in lines:
        if lengths[line] > budget:
            break
        prefix.append(line)
        budget -= lengths[line]
    prefix_len = task_len + sum(lengths[line] for line in prefix)
    made = []
    for _ in range(args.num_prompts):
        chosen, left = [], args.sonnet_input_len - prefix_len
        while (line := chooser.choice(lines)) and lengths[line] <= left:
            chosen.append(line)
            left -= lengths[line]
        prompt = _SONNET_TASK + "".join(prefix + chosen)
        made.append(SampleRequest(prompt, count_tokens(tokenizer, [prompt])[0], args.sonnet_output_len))
    return made


def sharegpt_requests(args: argparse.Namespace, tokenizer: Tokenizer, chooser: random.Random) -> list[SampleRequest]:
    """The first turns of conversations; the requested length is that of the recorded answer."""
    conversations = _json_file(args.dataset_path)
    if not isinstance(conversations, list):
        raise ConfigError(f"--dataset-path {args.dataset_path} must hold a JSON list of conversations.")
    turns = [entry.get("conversations", entry.get("conversation", [])) for entry in conversations]
    pairs = [(str(turn[0]["value"]), str(turn[1]["value"])) for turn in turns if len(turn) >= 2]
    if not args.disable_shuffle:
        chooser.shuffle(pairs)
    made: list[SampleRequest] = []
    for prompt, answer in pairs:
        if len(made) == args.num_prompts:
            break
        prompt_len, answer_len = count_tokens(tokenizer, [prompt, answer])
        output_len = args.sharegpt_output_len or answer_len
        is_short = prompt_len < _MIN_TOKENS or (args.sharegpt_output_len is None and answer_len < _MIN_TOKENS)
        if not is_short and prompt_len <= _MAX_PROMPT_TOKENS and prompt_len + output_len <= _MAX_TOKENS:
            made.append(SampleRequest(prompt, prompt_len, output_len))
    return _enough(made, args, chooser)


def custom_requests(args: argparse.Namespace, tokenizer: Tokenizer, chooser: random.Random) -> list[SampleRequest]:
    """The prompts of a JSONL file, rendered with the tokenizer's chat template unless the endpoint does so."""
    made: list[SampleRequest] = []
    has_template = bool(getattr(tokenizer.hf, "chat_template", None))
    is_chat = getattr(args, "backend", "") == "openai-chat"
    for number, line in enumerate(_lines_of_file(args.dataset_path), 1):
        entry = _custom_entry(args.dataset_path, number, line)
        prompt, output_len = entry["prompt"], args.custom_output_len
        if output_len is None or output_len == -1:
            if "output_tokens" not in entry:
                raise ConfigError(
                    f"--dataset-path {args.dataset_path} line {number} needs 'output_tokens', since no "
                    "--custom-output-len is given."
                )
            output_len = int(entry["output_tokens"])
        if has_template and not is_chat and not args.skip_chat_template:
            prompt = tokenizer.hf.apply_chat_template(
                [{"role": "user", "content": prompt}],
                add_generation_prompt=True,
                tokenize=False,
                **(getattr(args, "chat_template_kwargs", None) or {}),
            )
        made.append(SampleRequest(prompt, count_tokens(tokenizer, [prompt])[0], output_len))
    if not args.disable_shuffle:
        chooser.shuffle(made)
    return _enough(made[: args.num_prompts], args, chooser)


def _custom_entry(path: str, number: int, line: str) -> Mapping[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as err:
        raise ConfigError(f"--dataset-path {path} line {number} is not JSON: {err}") from err
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
        raise ConfigError(f"--dataset-path {path} line {number} must be an object with the text 'prompt'.")
    return entry


def _enough(made: list[SampleRequest], args: argparse.Namespace, chooser: random.Random) -> list[SampleRequest]:
    """Repeats requests if there are fewer than --num-prompts."""
    if not made:
        raise ConfigError(f"--dataset-path {args.dataset_path} holds no usable prompt.")
    missing = args.num_prompts - len(made)
    if missing <= 0 or args.no_oversample:
        return made
    logger.info("The dataset has %d usable prompts; some are sent again to make %d.", len(made), args.num_prompts)
    return made + chooser.choices(made, k=missing)


def _lines_of_file(path: str) -> list[str]:
    return [line for line in _read(path).splitlines() if line.strip()]


def _json_file(path: str) -> Any:
    try:
        return json.loads(_read(path))
    except ValueError as err:
        raise ConfigError(f"--dataset-path {path} is not JSON: {err}") from err


def _read(path: str | None) -> str:
    if path is None:
        raise ConfigError("This --dataset-name needs a file: give its path with --dataset-path.")
    try:
        return pathlib.Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as err:
        raise ConfigError(f"--dataset-path {path} cannot be read: {err.strerror}.") from err


_OF_TOKENS: dict[str, Callable[[argparse.Namespace, PromptMaker, random.Random], list[SampleRequest]]] = {
    "random": random_requests,
    "prefix_repetition": prefix_repetition_requests,
}
_OF_TEXT: dict[str, Callable[[argparse.Namespace, Tokenizer, random.Random], list[SampleRequest]]] = {
    "sharegpt": sharegpt_requests,
    "sonnet": sonnet_requests,
    "custom": custom_requests,
}
DATASET_NAMES = (*_OF_TOKENS, *_OF_TEXT)


def sample_requests(args: argparse.Namespace, tokenizer: Tokenizer | None, seed: int) -> list[SampleRequest]:
    """The requests of a benchmark; the same seed gives the same ones.

    Args:
        args: parsed with `add_dataset_arguments`.
        tokenizer: of the model; None under --skip-tokenizer-init.
        seed: of all random draws.

    Raises:
        ConfigError: an option is invalid, the file cannot be used, or the dataset needs a tokenizer.
    """
    if args.num_prompts < 1:
        raise ConfigError(f"--num-prompts must be at least 1, got {args.num_prompts}.")
    chooser = random.Random(seed)
    if args.dataset_name in _OF_TOKENS:
        return _OF_TOKENS[args.dataset_name](args, PromptMaker(tokenizer, args.vocab_size, chooser), chooser)
    if tokenizer is None:
        raise ConfigError(f"--dataset-name {args.dataset_name} needs a tokenizer; leave --skip-tokenizer-init out.")
    return _OF_TEXT[args.dataset_name](args, tokenizer, chooser)


# option → default, lowest value, help
_LENGTHS: dict[str, tuple[int | None, int, str]] = {
    "random_input_len": (1024, 1, "random: tokens of a prompt (default: 1024)"),
    "random_output_len": (128, 1, "random: tokens to generate (default: 128)"),
    "random_prefix_len": (0, 0, "random: tokens before them that all share (default: 0)"),
    "sharegpt_output_len": (None, 1, "sharegpt: tokens to generate; default: as in the conversation"),
    "sonnet_input_len": (550, 1, "sonnet: tokens of a prompt (default: 550)"),
    "sonnet_output_len": (150, 1, "sonnet: tokens to generate (default: 150)"),
    "sonnet_prefix_len": (200, 0, "sonnet: tokens that all prompts share (default: 200)"),
    "prefix_repetition_num_prefixes": (10, 1, "beginnings (default: 10)"),
    "prefix_repetition_prefix_len": (256, 0, "tokens of each beginning (default: 256)"),
    "prefix_repetition_suffix_len": (256, 1, "tokens after it (default: 256)"),
    "prefix_repetition_output_len": (128, 1, "tokens to generate (default: 128)"),
    "custom_output_len": (256, 1, "custom: tokens to generate, -1: the file's (256)"),
}


def add_dataset_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the dataset and its lengths."""
    add = parser.add_argument_group("dataset").add_argument
    add("--dataset-name", choices=DATASET_NAMES, default="random", help="what is sent (default: %(default)s)")
    add("--dataset-path", metavar="FILE", help="of sharegpt (JSON), custom (JSONL) and, if given, sonnet (lines)")
    add("--input-len", type=int, help="the tokens of prompts, whatever the dataset calls them")
    add("--output-len", type=int, help="the tokens to generate, whatever the dataset calls them")
    add("--disable-shuffle", action="store_true", help="keep the order of the dataset")
    add("--no-oversample", action="store_true", help="send fewer requests where the dataset holds fewer")
    add("--skip-chat-template", action="store_true", help="custom: send prompts as they are")
    add("--vocab-size", type=int, default=2000, help="random ids without a tokenizer are below it (default: 2000)")
    for name, (default, _, text) in _LENGTHS.items():
        add(f"--{name.replace('_', '-')}", type=int, default=default, help=text)
    add(
        "--random-range-ratio",
        default="0.0",
        metavar="R",
        help='random: lengths are drawn within 1 - R and 1 + R of these; {"input": A, "output": B} for each '
        "(default: 0.0)",
    )


def apply_general_lengths(args: argparse.Namespace) -> None:
    """Applies --input-len and --output-len to the options of every dataset.

    Raises:
        ConfigError: a length is out of range.
    """
    for name, (_, lowest, _) in _LENGTHS.items():
        for general in ("input_len", "output_len"):
            if name.endswith(f"_{general}") and getattr(args, general) is not None:
                setattr(args, name, getattr(args, general))
        value = getattr(args, name)
        is_of_file = name == "custom_output_len" and value == -1
        if value is not None and value < lowest and not is_of_file:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {lowest}, got {value}.")
