"""What the demo model learns: questions and answers about this server.

Three sources, none written for the model alone: the command line's flag table, the descriptions of the
environment variables, and ``faq.md``.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import pathlib
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ascend_vllm import envs
from ascend_vllm.args.engine_args import all_flags

_FAQ = pathlib.Path(__file__).parent / "faq.md"

_FLAG_QUESTIONS = (
    "What does {name} do?",
    "What is {name}?",
    "Explain {name}.",
    "How do I use {name}?",
    "{name}",
    "What does {bare} do?",
)
_DEFAULT_QUESTIONS = ("What is the default of {name}?", "What is the default value of {name}?")
_VARIABLE_QUESTIONS = (
    "What does {name} do?",
    "What is {name}?",
    "What is the environment variable {name} for?",
    "{name}",
)
_SYSTEM_PROMPTS = ("You are a helpful assistant.", "You answer questions about the server.", "Be brief.")
# shares of the samples that carry a system prompt, and an earlier exchange
_SYSTEM_SHARE = 0.08
_FOLLOW_UP_SHARE = 0.08
# a flag is asked for in six forms; the answers to other questions are longer, and repeated a little more often
_LEAST_SAMPLES = 12
# an answer of the page by itself: prompts of completions begin like one, which a single sample does not teach
_PAGE_ALONE_SAMPLES = 4


@dataclasses.dataclass(frozen=True)
class Turn:
    """One message."""

    role: str
    text: str


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages of which the last is the assistant's, to be learned."""

    turns: tuple[Turn, ...]


@dataclasses.dataclass(frozen=True)
class Passage:
    """Text without a chat template: what may be the prompt of a completion, and its continuation, to be learned."""

    prompt: str
    text: str


@dataclasses.dataclass(frozen=True)
class Fact:
    """One answer and the ways to ask for it."""

    questions: tuple[str, ...]
    answer: str


def _default_sentence(default: Any) -> str | None:
    """How the answer names a default; None where there is nothing to name."""
    if default in (None, "", [], {}):
        return None
    if default is False:
        return "It is off by default."
    if default is True:
        return "It is on by default."
    return f"The default is {default}."


def _flag_answers() -> Iterator[Fact]:
    for flag in all_flags():
        names = {"name": flag.name, "bare": flag.name.removeprefix("--")}
        sentences = [f"{flag.name}: {flag.help}"]
        default = _default_sentence(flag.default)
        if default:
            yield Fact(tuple(q.format(**names) for q in _DEFAULT_QUESTIONS), f"{flag.name}: {default}")
            sentences.append(default)
        if flag.status == "not yet":
            sentences.append("This version does not have it yet.")
        if flag.example:
            sentences.append(f"Example: {flag.example}")
        yield Fact(tuple(q.format(**names) for q in _FLAG_QUESTIONS), " ".join(sentences))


def _variable_answers() -> Iterator[Fact]:
    """From the docstrings of envs.py: "`NAME`: what it does."."""
    tree = ast.parse(pathlib.Path(envs.__file__).read_text(encoding="utf-8"))
    for node in tree.body:
        description = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
        match = re.match(r"`(\w+)`: (.+)", description or "", re.DOTALL)
        if match:
            name, text = match[1], " ".join(match[2].split())
            yield Fact(tuple(q.format(name=name) for q in _VARIABLE_QUESTIONS), f"{name}: {text}")


def _faq_answers() -> Iterator[Fact]:
    for section in _FAQ.read_text(encoding="utf-8").split("\n## ")[1:]:
        heading, _, body = section.partition("\n")
        asked = [question.strip() for question in heading.split("|")]
        forms = [form for question in asked for form in (question, question[0].upper() + question[1:])]
        forms += [f"{form}?" for form in forms if form.split()[0].lower() in {"what", "how", "who", "which", "does"}]
        yield Fact(tuple(dict.fromkeys(forms)), " ".join(body.split()))


def build_facts() -> list[Fact]:
    """All answers with their questions."""
    return [*_flag_answers(), *_variable_answers(), *_faq_answers()]


def _with_context(question: str, facts: Sequence[Fact], draw: random.Random) -> list[Turn]:
    turns = []
    if draw.random() < _SYSTEM_SHARE:
        turns.append(Turn("system", draw.choice(_SYSTEM_PROMPTS)))
    if draw.random() < _FOLLOW_UP_SHARE:
        earlier = draw.choice(facts)
        turns += [Turn("user", draw.choice(earlier.questions)), Turn("assistant", earlier.answer)]
    turns.append(Turn("user", question))
    return turns


def build_conversations(seed: int) -> list[Conversation]:
    """At least one conversation per question; some with a system prompt, some after another exchange.

    Args:
        seed: of the draws; the order of the result is fixed.
    """
    draw = random.Random(seed)
    facts = build_facts()
    return [
        Conversation((*_with_context(question, facts, draw), Turn("assistant", fact.answer)))
        for fact in facts
        for question in fact.questions * math.ceil(_LEAST_SAMPLES / len(fact.questions))
    ]


def build_passages(seed: int) -> list[Passage]:
    """Every answer by itself and below a question; those of the page below all of theirs, which are less alike.

    Args:
        seed: of the draws; the order of the result is fixed.
    """
    draw = random.Random(seed)
    asked = [(draw.choice(fact.questions), fact) for fact in (*_flag_answers(), *_variable_answers())]
    asked += [(question, fact) for fact in _faq_answers() for question in fact.questions]
    return [
        *(Passage("", fact.answer) for fact in (*_flag_answers(), *_variable_answers())),
        *(Passage("", fact.answer) for fact in _faq_answers() for _ in range(_PAGE_ALONE_SAMPLES)),
        *(Passage(question, f"\n{fact.answer}") for question, fact in asked),
    ]
