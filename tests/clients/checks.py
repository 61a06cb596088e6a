"""Runs a client's program, and compares what it saw with plain HTTP requests.

A program is `tests/clients/NAME/client.py`, or `client.mjs` for Node. It gets the URL of a server, that of one for
embeddings (empty: there is none) and a question, and prints what it saw as JSON on its last line: names of `CHECKS`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import httpx
import pytest

HERE = pathlib.Path(__file__).parent
QUESTION = "What does --port do?"
# what these libraries would otherwise fetch, report or keep
OFFLINE = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore",
    "NO_PROXY": "*",
}


@dataclasses.dataclass(frozen=True)
class Expected:
    """Answers to plain HTTP requests: of a chat, a completion, and an embedding if there is a server for it."""

    chat: dict[str, Any]
    brief: str
    completion: str
    embedding: list[float]


# of the chat that `Expected.brief` answers
SYSTEM = "be brief"


def ask(url: str, pooling_url: str) -> Expected:
    """The answers to `QUESTION`."""
    greedy = {"model": "demo", "temperature": 0}
    with httpx.Client(timeout=60) as http:

        def post(route: str, **fields: Any) -> dict[str, Any]:
            answer: dict[str, Any] = http.post(route, json=fields).raise_for_status().json()
            return answer

        messages = [{"role": "user", "content": QUESTION}]
        embedding = []
        if pooling_url:
            embedding = post(f"{pooling_url}/v1/embeddings", model="demo", input=QUESTION)["data"][0]["embedding"]
        brief = [{"role": "system", "content": SYSTEM}, *messages]
        route = f"{url}/v1/chat/completions"
        return Expected(
            post(route, messages=messages, max_tokens=40, **greedy),
            post(route, messages=brief, max_tokens=40, **greedy)["choices"][0]["message"]["content"],
            post(f"{url}/v1/completions", prompt=QUESTION, max_tokens=8, **greedy)["choices"][0]["text"],
            embedding,
        )


def _has_text(seen: Any, expected: Expected) -> None:
    assert seen == expected.chat["choices"][0]["message"]["content"]


def _follows_a_system_prompt(seen: Any, expected: Expected) -> None:
    assert seen == expected.brief


def _finishes(seen: Any, expected: Expected) -> None:
    assert seen == expected.chat["choices"][0]["finish_reason"]


def _streams_text(seen: Any, expected: Expected) -> None:
    _has_text("".join(seen), expected)
    assert sum(map(bool, seen)) > 1


def _completes(seen: Any, expected: Expected) -> None:
    assert seen == expected.completion


def _has_usage(seen: Any, expected: Expected) -> None:
    usage = expected.chat["usage"]
    assert seen == [usage["prompt_tokens"], usage["completion_tokens"]]


def _counts_the_prompt(seen: Any, expected: Expected) -> None:
    assert seen == expected.chat["usage"]["prompt_tokens"]


def _lists_the_model(seen: Any, _: Expected) -> None:
    assert seen == ["demo"]


def _calls_the_tool(seen: Any, _: Expected) -> None:
    assert seen["name"] == "weather" and list(seen["arguments"]) == ["city"]
    assert seen["arguments"]["city"] in ("Oslo", "Rome")


def _fits_the_schema(seen: Any, _: Expected) -> None:
    assert seen
    for found in seen:
        assert set(found) == {"word", "sure"}
        assert found["word"] in ("yes", "no") and isinstance(found["sure"], bool)


def _embeds(seen: Any, expected: Expected) -> None:
    assert seen == pytest.approx(expected.embedding, abs=1e-5)


def _is_measured(seen: Any, _: Expected) -> None:
    assert seen == {"successful": 4, "errored": 0, "output_tokens": 4 * [8]}


CHECKS: dict[str, Callable[[Any, Expected], None]] = {
    "chat": _has_text,
    "brief": _follows_a_system_prompt,
    "finish_reason": _finishes,
    "stream": _streams_text,
    "responses": _has_text,
    "completion": _completes,
    "usage": _has_usage,
    "counted": _counts_the_prompt,
    "models": _lists_the_model,
    "tool": _calls_the_tool,
    "structured": _fits_the_schema,
    "embedding": _embeds,
    "benchmark": _is_measured,
}


def run_command(command: list[str], home: pathlib.Path, **env: str) -> str:
    """What a command of a client's environment prints.

    Args:
        command: its words.
        home: home and working directory.
        env: further variables of the environment.
    """
    environment = os.environ | OFFLINE | {"HOME": str(home), "HF_HOME": str(home / "hf")} | env
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=home, timeout=300)
    assert done.returncode == 0, (
        f"{command} ended with {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    )
    return done.stdout


def run_client(name: str, environment: pathlib.Path, home: pathlib.Path, *arguments: str, **env: str) -> Any:
    """What a client's program saw.

    Args:
        name: its directory here.
        environment: a virtual environment, or the directory of node_modules.
        home: home and working directory.
        arguments: of the program.
        env: further variables of the environment.
    """
    program = HERE / name / "client.py"
    command = [str(environment / "bin" / "python"), str(program)]
    if not program.exists():
        # Node looks for packages beside the program
        command = ["node", shutil.copy(program.with_suffix(".mjs"), environment)]
    return json.loads(run_command([*command, *arguments], home, **env).strip().splitlines()[-1])


def check(seen: dict[str, Any], expected: Expected) -> None:
    """Compares everything that a client saw."""
    for name, value in seen.items():
        CHECKS[name](value, expected)
