"""Compares parts of ascend-vllm with libraries that could replace them; docs/architecture.md has the outcome.

    python benchmarks/compare_libraries.py --tokenizer /models/Qwen2-0.5B [--tokens 4000] [--rounds 5] [--json FILE]

text        text of output tokens, one at a time: our detokeniser, and `tokenizers.decoders.DecodeStream`
arguments   arguments of a streamed tool call, a few characters at a time: our parser, which reads each character
            once, and libraries that parse incomplete JSON, which begin again with every chunk

It prints tokens per second of CPU time, the best of all rounds. The ways take turns, so that a busy machine slows all
of them. A library that is not installed is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pydantic_core
from tokenizers.decoders import DecodeStream

from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.entrypoints.parsers.tools_json import HermesToolParser

TEXT = "The quick brown fox jumps over the lazy dog: naïve façade, 日本語 😀.\n"
# characters of a token
CHUNK = 4


def ways_of_text(tokenizer: Tokenizer, num_tokens: int) -> dict[str, Callable[[], str]]:
    """Functions that return the text of so many tokens."""
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    ids = (ids * (num_tokens // len(ids) + 1))[:num_tokens]

    def ours() -> str:
        detokenizer = tokenizer.make_detokenizer(ids[:5])
        return "".join([detokenizer.push((token_id,)) for token_id in ids])

    def stream() -> str:
        backend, decode = tokenizer.hf.backend_tokenizer, DecodeStream(ids=ids[:5], skip_special_tokens=True)
        return "".join([decode.step(backend, token_id) or "" for token_id in ids])

    return {"ours": ours, "DecodeStream": stream}


def ways_of_arguments(num_tokens: int) -> dict[str, Callable[[], object]]:
    """Functions that read a call with so many tokens of arguments, and return these."""
    lines = [TEXT] * (CHUNK * num_tokens // len(TEXT) + 1)
    arguments = json.dumps({"lines": lines}, ensure_ascii=False)[: CHUNK * num_tokens]
    chunks = [arguments[start : start + CHUNK] for start in range(0, len(arguments), CHUNK)]

    def ours() -> object:
        parser = HermesToolParser()
        parser.feed('<tool_call>{"name": "f", "arguments": ')
        return "".join([delta.arguments for chunk in chunks for delta in parser.feed(chunk).calls])

    def from_json(text: str) -> object:
        return pydantic_core.from_json(text, allow_partial="trailing-strings")

    parsers: dict[str, Callable[[str], object]] = {"pydantic_core.from_json": from_json}
    with contextlib.suppress(ImportError):
        parsers["partial_json_parser"] = importlib.import_module("partial_json_parser").loads

    def again(parse: Callable[[str], object]) -> Callable[[], object]:
        def read() -> object:
            text, value = "", None
            for chunk in chunks:
                text += chunk
                value = parse(text)
            return value

        return read

    return {"ours": ours} | {name: again(parse) for name, parse in parsers.items()}


def rates(ways: Mapping[str, Callable[[], object]], num_tokens: int, num_rounds: int) -> Iterator[tuple[str, int]]:
    """Tokens per second of CPU time of each way, the best of several rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(num_rounds):
        for name, run in ways.items():
            started = time.process_time()
            run()
            seconds[name].append(time.process_time() - started)
    return ((name, round(num_tokens / min(each))) for name, each in seconds.items())


def measure(tokenizer: Tokenizer, sizes: Sequence[int], num_rounds: int) -> dict[str, Any]:
    """Rates of all ways, by what is made and from how many tokens."""
    return {
        "text": {size: dict(rates(ways_of_text(tokenizer, size), size, num_rounds)) for size in sizes},
        "arguments": {size: dict(rates(ways_of_arguments(size), size, num_rounds)) for size in sizes},
    }


def main() -> None:
    """Measures, and prints the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[500, 2000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    args = parser.parse_args()
    figures = measure(Tokenizer.from_directory(args.tokenizer), args.tokens, args.rounds)
    print(json.dumps(figures, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
