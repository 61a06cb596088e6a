"""Reasoning parsers: reasoning and answer, however the text is split into chunks."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis
import pytest
from hypothesis import strategies as st

from ascend_vllm.entrypoints.parsers.reasoning import check_reasoning_parser, make_reasoning_parser
from ascend_vllm.errors import ConfigError

# format, prompt, text, reasoning, answer
CASES = [
    ("deepseek_r1", "", "<think>\nhm</think>\n\nYes", "\nhm", "\n\nYes"),
    ("deepseek_r1", "", "hm</think>Yes</think>", "hm", "Yes</think>"),
    ("deepseek_r1", "<think>\n", "hm </thin", "hm </thin", ""),
    ("deepseek_r1", "<think></think>", "Yes", "", "Yes"),
    ("qwen3", "", "<think>hm</think>Yes <think>", "hm", "Yes <think>"),
    ("qwen3", "", "\n<think>hm", "hm", ""),
    ("qwen3", "", "Yes</think>", "", "Yes</think>"),
    ("qwen3", "", "\n<thinking>", "", "\n<thinking>"),
    ("qwen3", "", " <th", "", " <th"),
    ("qwen3", "assistant\n<think>\n", "hm</think>Yes", "hm", "Yes"),
    ("qwen3", "assistant\n<think>\n\n</think>\n\n", "Yes", "", "Yes"),
    ("qwen3", "what is <think>?", "Yes", "", "Yes"),
    ("qwen3", "", "", "", ""),
]


def read(name: str, prompt: str, pieces: Sequence[str]) -> tuple[str, str]:
    parser = make_reasoning_parser(name, prompt)
    emitted = [*map(parser.feed, pieces), parser.finish()]
    return "".join(reasoning for reasoning, _ in emitted), "".join(answer for _, answer in emitted)


@pytest.mark.parametrize(("name", "prompt", "text", "reasoning", "answer"), CASES)
def test_every_split_point(name: str, prompt: str, text: str, reasoning: str, answer: str) -> None:
    assert read(name, prompt, [text]) == (reasoning, answer)
    assert read(name, prompt, list(text)) == (reasoning, answer)
    for at in range(1, len(text)):
        assert read(name, prompt, [text[:at], text[at:]]) == (reasoning, answer)


@hypothesis.given(st.lists(st.sampled_from(["<think>", "</think>", "<", "/th", "x", "\n"]), max_size=8), st.data())
def test_random_cuts(scraps: list[str], data: st.DataObject) -> None:
    text = "".join(scraps)
    name = data.draw(st.sampled_from(["deepseek_r1", "qwen3"]))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(name, "", pieces) == read(name, "", [text])


def test_unknown_names() -> None:
    check_reasoning_parser("qwen3")
    with pytest.raises(ConfigError, match=r"invalid reasoning parser: nope \(chose from \{ deepseek_r1, qwen3 \}\)"):
        check_reasoning_parser("nope")
