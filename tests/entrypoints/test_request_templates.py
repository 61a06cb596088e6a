"""Templates that come with requests: the same text as the server's own, and limits that hold against hostile ones."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import psutil
import pytest

from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.entrypoints.templates import process
from ascend_vllm.entrypoints.templates.chat_template import render_chat
from ascend_vllm.entrypoints.templates.pool import Limits, TemplatePool, limits_for
from ascend_vllm.errors import EngineBusyError, RequestError
from tests.entrypoints.conftest import ENGINE_FLAGS
from tests.raw_requests import post_raw
from tests.server import OPENAI_SERVER, Server, is_alive, wait_until
from tests.tiny_models import tiny_model

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
# the same in one call of C, which nothing in the process can interrupt
STUCK = "{{ (messages|length * 9) ** 99999999 > 1 }}"
MEMORY = "{{ 'a' * 10 ** 10 }}"
LONG_TEXT = "{% for i in range(99999) %}{% for j in range(99999) %}" + "a" * 500 + "{% endfor %}{% endfor %}"
RANGE = "{{ range(10 ** 10)|list }}"
MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "dé", "parameters": {"b": 1, "a": [2.5]}}}]
TALK = [
    {"role": "system", "content": "Be kind.", "name": None},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b 日"}]},
    {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]},
    {"role": "tool", "content": "5", "tool_call_id": "c"},
    {"role": "assistant", "content": " So it is "},
]  # fmt: skip
CONTINUED = {"messages": TALK, "add_generation_prompt": False, "continue_final_message": True}
PRINT_ALL = "{% for m in messages %}{{ m | tojson(indent=1) }}\n{% endfor %}{{ tools | tojson }}{{ documents }}"

# options of `render_chat`; without a template the server's own is sent as the request's
CASES: dict[str, dict[str, Any]] = {
    "own": {},
    "own, tools": {"tools": TOOLS},
    "own, continued": CONTINUED,
    "own, open end": {"messages": TALK, "add_generation_prompt": False},
    "own as parts": {"messages": TALK, "content_format": "openai"},
    "all": {"messages": TALK, "chat_template": PRINT_ALL, "tools": TOOLS},
    "nothing": {"chat_template": PRINT_ALL},
    "documents": {"chat_template": PRINT_ALL, "template_kwargs": {"documents": [{"title": "t", "text": "d"}]}},
    "wrong documents": {"chat_template": PRINT_ALL, "template_kwargs": {"documents": ["d"]}},
    "variables": {
        "chat_template": "{{ x }} {{ y }} {{ eos_token }} {{ pad_token }} {{ bos_token }} {{ padding }}",
        "template_kwargs": {"x": [1.5, float("nan"), 10**30, None, True], "y": {"é": "ß"}, "padding": 1},
    },
    "special token given": {"chat_template": "{{ eos_token }}", "template_kwargs": {"eos_token": "mine"}},
    "wrong variable": {"template_kwargs": {"tokenize": True}},
    "thoughts": {"messages": TALK, "chat_template": "{{ messages[2] }} {{ messages[2].thinking }}"},
    "parts": {
        "messages": TALK,
        "chat_template": "{% for m in messages %}{% for p in m['content'] %}{{ p.text }}{% endfor %}{% endfor %}",
    },
    "continued parts": CONTINUED
    | {"chat_template": "{% for m in messages %}{% for p in m['content'] %}{{ p.text }}|{% endfor %}{% endfor %}"},
    "continued, trimmed": CONTINUED
    | {"chat_template": "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}"},
    "loop controls": {"chat_template": "{% for i in 'xyz' %}{{ i }}{% break %}{% endfor %}"},
    "blocks": {"chat_template": "{% if true %}\n  {% set a = 1 %}\n  x {{ a }}\n{% endif %}\n"},
    "generation": {"chat_template": "{% generation %}{{ messages[0].content }}{% endgeneration %}!"},
    "namespace": {"chat_template": "{% set n = namespace(self=1) %}{% set n.y = 2 %}{{ n.self }}{{ n.y }}"},
    "dict": {"chat_template": "{{ dict(a=1) | tojson }}{{ dict.fromkeys('ab', 1) }}"},
    "macro": {"chat_template": "{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(messages[0].role) }}{{ f('\u2028') }}"},
    "date": {"chat_template": "{{ strftime_now('%d %B %Y') }}"},
    "developer": {"messages": [{"role": "developer", "content": "x"}, *MESSAGES]},
    "refused": {"chat_template": "{{ raise_exception('roles must alternate') }}"},
    "undefined": {"chat_template": "{{ messages[7].content }}"},
    "syntax": {"chat_template": "a\n{% for %}"},
    "unknown tag": {"chat_template": "{% frobnicate %}"},
    "unknown filter": {"chat_template": "{{ 1 | frobnicate }}"},
    "no type": {"chat_template": "{{ 1 + 'a' }}"},
    "not JSON": {"chat_template": "{{ range | tojson }}"},
    "unsafe": {"chat_template": "{{ ''.__class__.__mro__[1].__subclasses__() }}"},
    "changes": {"chat_template": "{{ messages.append(1) }}"},
    "range": {"chat_template": RANGE},
    "no messages": {"messages": []},
    "no role": {"messages": [{"content": "hi"}]},
    "both ends": {"continue_final_message": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(tiny_model("qwen2-tied"))


@contextlib.contextmanager
def pool_of(**limits: Any) -> Iterator[TemplatePool]:
    """A pool with limits of its own, of which no process is left."""
    pool = TemplatePool(Limits(**limits))
    seen: set[int] = set()
    try:
        yield pool
        seen.update(pool.pids)
    finally:
        pool.close()
    assert not any(psutil.pid_exists(pid) for pid in seen)


def is_ready(pid: int) -> bool:
    """Whether a process has nothing open but its socket, and nothing in the place of the standard streams."""
    names = set()
    for link in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        # what it closes meanwhile
        with contextlib.suppress(FileNotFoundError):
            names.add(str(link.readlink()))
    return len(names) == 2 and os.devnull in names


def wait_busy(pids: Iterable[int]) -> bool:
    """Whether all of these processes, which are ready, come to compute something."""
    used = {process: process.cpu_times().user for process in map(psutil.Process, pids)}
    return wait_until(lambda: all(process.cpu_times().user > before + 0.05 for process, before in used.items()))


async def render(pool: TemplatePool, template: str, **options: Any) -> str:
    usual = {"messages": MESSAGES, "model_name": "tiny", "chat_template": template}
    return await pool.render({"eos_token": "E"}, usual | options)


def test_the_same_text_as_in_the_server(tokenizer: Tokenizer) -> None:
    own = tokenizer.chat_template
    assert isinstance(own, str)

    async def both(options: dict[str, Any]) -> tuple[object, object]:
        options = {"messages": MESSAGES, "model_name": "tiny", "chat_template": own} | options
        outcomes: list[object] = []
        for rendering in (asyncio.to_thread(render_chat, tokenizer, **options), asked.render(special, options)):
            try:
                outcomes.append(await rendering)
            except RequestError as error:
                outcomes.append((str(error), error.param))
        return outcomes[0], outcomes[1]

    async def all_cases() -> dict[str, tuple[object, object]]:
        return {name: await both(options) for name, options in CASES.items()}

    special = tokenizer.special_tokens
    with pool_of(wall_s=30.0) as asked:
        outcomes = asyncio.run(all_cases())
    assert {name: theirs for name, (_, theirs) in outcomes.items()} == {
        name: ours for name, (ours, _) in outcomes.items()
    }
    texts = [name for name, (ours, _) in outcomes.items() if isinstance(ours, str)]
    assert len(texts) == 22, texts


async def test_limits_name_the_template_and_what_was_exceeded() -> None:
    with pool_of(wall_s=30.0, cpu_s=1, memory_bytes=96 << 20, max_characters=200_000) as pool:
        for template, words in {
            ENDLESS: "took more than 1 s of CPU time",
            MEMORY: "needed more than 96 MiB of memory",
            LONG_TEXT: "made more than 200000 characters",
        }.items():
            with pytest.raises(RequestError, match=words) as error:
                await render(pool, template)
            assert error.value.param == "chat_template"
        # a request that is itself too large for the process
        with pytest.raises(RequestError, match="needed more than 96 MiB"):
            await render(pool, "x", messages=[{"role": "user", "content": "日" * 8_000_000}])
        assert await render(pool, "{{ eos_token }}") == "E"
        assert len(pool.pids) == 2


async def test_who_cancels_ends_the_rendering_and_frees_its_place() -> None:
    with pool_of(wall_s=30.0) as pool:
        assert await render(pool, "x") == "x"
        first = set(pool.pids)
        assert wait_until(lambda: all(map(is_ready, first)))
        tasks = [asyncio.ensure_future(render(pool, ENDLESS)) for _ in range(5)]
        assert await asyncio.to_thread(wait_busy, first)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(task.cancelled() for task in tasks)
        # both processes rendered, and both are gone; the three that waited had none
        assert await asyncio.to_thread(wait_until, lambda: not any(map(psutil.pid_exists, first)))
        assert await render(pool, "y") == "y"
        # those that end without an answer, and those that were ended while they were idle
        assert wait_until(lambda: all(map(is_ready, pool.pids)))
        ended = pool.pids
        tasks = [asyncio.ensure_future(render(pool, ENDLESS)) for _ in ended]
        assert await asyncio.to_thread(wait_busy, ended)
        for pid in ended:
            os.kill(pid, signal.SIGTERM)
        for task in tasks:
            with pytest.raises(RequestError, match=r"broke its process \(exit code -15\)"):
                await task
        idle = list(map(psutil.Process, pool.pids))
        for process in idle:
            process.kill()
        assert wait_until(lambda: not any(map(is_alive, idle)))
        assert await asyncio.gather(*(render(pool, str(i)) for i in range(4))) == ["0", "1", "2", "3"]


async def test_too_many_wait() -> None:
    pool = TemplatePool(Limits(wall_s=30.0), num_processes=1, max_open=2)
    tasks = [asyncio.ensure_future(render(pool, ENDLESS)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(EngineBusyError, match="2 requests with a `chat_template` of their own"):
        await render(pool, "x")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert await render(pool, "x") == "x"
    pool.close()


def test_long_models_may_have_long_prompts() -> None:
    assert limits_for(4096) == Limits()
    assert limits_for(1 << 20).max_characters == 16 << 20
    assert limits_for(1 << 20).memory_bytes > Limits().memory_bytes


def test_the_process_is_small_and_inherits_nothing() -> None:
    heavy = ("torch", "transformers", "numpy", "fastapi")
    code = f"import sys, {process.__name__}; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
    with pathlib.Path(__file__).open() as inheritable, pool_of() as pool:
        os.set_inheritable(inheritable.fileno(), True)
        assert asyncio.run(render(pool, "x")) == "x"
        assert wait_until(lambda: all(map(is_ready, pool.pids)))


@pytest.fixture(scope="module")
def server(tiny_dir: str) -> Iterator[Server]:
    """A server that trusts the templates of requests; the last test ends it by force."""
    server = Server(
        OPENAI_SERVER,
        ["--model", tiny_dir, "--served-model-name", "tiny", "--trust-request-chat-template", *ENGINE_FLAGS],
    )
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def chat(client: httpx.Client, template: str | None, **fields: Any) -> httpx.Response:
    body = {"messages": MESSAGES, "max_tokens": 3, "temperature": 0, "chat_template": template}
    return client.post("/v1/chat/completions", json=body | fields)


def renderers(server: Server) -> list[psutil.Process]:
    """The processes that render."""
    return server.find(process.__name__)


def test_the_servers_own_template_sent_as_a_requests(
    server: Server, client: httpx.Client, tokenizer: Tokenizer
) -> None:
    assert chat(client, None).status_code == 200
    assert renderers(server) == []  # nobody needed them
    own = {"messages": MESSAGES, "tools": TOOLS}
    body = own | {"chat_template": tokenizer.chat_template}
    assert client.post("/tokenize", json=body).json() == client.post("/tokenize", json=own).json()
    assert len(renderers(server)) == 2
    answer = chat(client, str(tokenizer.chat_template)).json()
    assert answer["choices"] == chat(client, None).json()["choices"]
    batch = {"messages": [MESSAGES, MESSAGES], "max_tokens": 3, "temperature": 0}
    answers = [
        client.post("/v1/chat/completions/batch", json=batch | template).json()["choices"]
        for template in ({}, {"chat_template": tokenizer.chat_template})
    ]
    assert answers[0] == answers[1]
    error = chat(client, "{% for %}").json()["error"]
    assert (error["code"], error["param"]) == (400, "messages")
    assert "Expected an expression" in error["message"]


def test_twenty_hostile_requests_leave_the_server_healthy(server: Server, client: httpx.Client) -> None:
    hostile = [ENDLESS, *[MEMORY, LONG_TEXT, RANGE] * 6]
    with concurrent.futures.ThreadPoolExecutor(20) as threads:
        answers = [threads.submit(chat, client, template) for template in hostile]
        # the twentieth client does not wait
        with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=server.url, timeout=0.3) as hasty:
            chat(hasty, ENDLESS)
        # others go on
        while not answers[0].done():
            assert chat(client, None).status_code == 200
            assert client.get("/health").status_code == 200
        errors = [answer.result().json()["error"] for answer in answers]
    assert [error["code"] for error in errors] == [400] * 19
    words = {
        ENDLESS: "took longer than 3 s",
        MEMORY: "needed more than 384 MiB of memory",
        LONG_TEXT: "made more than 4194304 characters",
        RANGE: "Range too big",
    }
    for error, template in zip(errors, hostile, strict=True):
        assert words[template] in error["message"]
        assert error["param"] == ("messages" if template == RANGE else "chat_template"), error
    answer = chat(client, "{{ messages[0].content }}")
    assert answer.status_code == 200
    assert len(renderers(server)) == 2


def test_a_client_that_leaves_ends_its_rendering(server: Server, client: httpx.Client) -> None:
    assert chat(client, "x").status_code == 200
    processes = renderers(server)
    before = {process.pid for process in processes}
    assert wait_until(lambda: all(map(is_ready, before)))
    used = sum(process.cpu_times().user for process in processes)
    num_late = server.log.count("took longer than 3 s")
    with post_raw(server, "/tokenize", {"messages": MESSAGES, "chat_template": STUCK}):
        assert wait_until(lambda: sum(process.cpu_times().user for process in processes) > used)
    assert wait_until(lambda: len(before & {process.pid for process in renderers(server)}) == 1)
    assert server.log.count("took longer than 3 s") == num_late


def test_nothing_is_left_of_a_server_that_is_killed(server: Server, client: httpx.Client) -> None:
    # the test before has killed one
    assert wait_until(lambda: len(renderers(server)) == 2)
    busy = renderers(server)
    assert wait_until(lambda: all(is_ready(process.pid) for process in busy))
    with pytest.raises(httpx.TransportError), concurrent.futures.ThreadPoolExecutor(2) as threads:
        answers = [threads.submit(chat, client, template) for template in (ENDLESS, STUCK)]
        assert wait_busy(process.pid for process in busy)
        server.process.kill()
        answers[0].result()
    assert len(busy) == 2
    assert wait_until(lambda: not any(map(is_alive, busy)), timeout_s=2.0)
    assert server.orphans() == []
