"""POST /v1/messages and /v1/messages/count_tokens, by Anthropic's official client.

The client is imported by the tests that use it: it takes two seconds, and every worker of pytest collects this file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import httpx2
import pytest
from fastapi import FastAPI

from ascend_vllm.args.tables.server import FrontendArgs
from ascend_vllm.entrypoints.openai.app import build_app
from ascend_vllm.entrypoints.openai.chat_tools import ChatParsers
from ascend_vllm.entrypoints.parsers.tools import TOOL_PARSERS, ToolParser
from tests.entrypoints.conftest import KEY
from tests.scripted_engine import ARGUMENTS, CALL, TEMPLATE, ScriptedEngine
from tests.server import Server, is_idle, wait_until

if TYPE_CHECKING:
    import anthropic

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Hello!"}]
BASE: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
# the client has no argument for the temperature any more
ASKED: dict[str, Any] = {name: value for name, value in BASE.items() if name != "temperature"}
ASKED["extra_body"] = {"temperature": 0}
TOOL: dict[str, Any] = {
    "name": "find",
    "description": "finds",
    "input_schema": {"type": "object", "properties": {"text": {"type": "string"}}},
}


@pytest.fixture
def client(guarded_server: Server) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=guarded_server.url, api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def http(guarded_server: Server) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=guarded_server.url, timeout=60, headers=headers) as http:
        yield http


def chat_text(http: httpx.Client, messages: list[dict[str, Any]], **fields: Any) -> str:
    """What /v1/chat/completions answers."""
    body = {"model": "tiny", "messages": messages, "max_tokens": 24, "temperature": 0} | fields
    response = http.post("/v1/chat/completions", json=body).raise_for_status()
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


# ---- a real server -------------------------------------------------------------------------------------------


def test_a_message(client: anthropic.Anthropic, http: httpx.Client) -> None:
    message = client.messages.create(**ASKED, system="Be brief.", metadata={"user_id": "u"})
    (block,) = message.content
    assert block.type == "text"
    assert block.text == chat_text(http, [{"role": "system", "content": "Be brief."}, *MESSAGES])
    assert (message.role, message.type, message.model) == ("assistant", "message", "tiny")
    assert message.id.startswith("chatcmpl-")
    assert message.stop_reason == "max_tokens"
    counted = client.messages.count_tokens(model="tiny", messages=MESSAGES, system="Be brief.")  # type: ignore[arg-type]
    assert message.usage.input_tokens == counted.input_tokens
    assert message.usage.output_tokens == 24
    assert message.usage.cache_read_input_tokens == 0


def test_blocks_are_the_same_as_their_text(client: anthropic.Anthropic, http: httpx.Client) -> None:
    blocks = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    past = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Let me look."},
        {"type": "tool_use", "id": "t1", "name": "find", "input": {"text": "x"}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": blocks},
        {"type": "tool_result", "tool_use_id": "t2", "content": "three"},
        {"type": "tool_result", "tool_use_id": "t3"},
        {"type": "text", "text": "so?"},
    ]
    messages = [
        {"role": "user", "content": blocks},
        {"role": "assistant", "content": past},
        {"role": "user", "content": results},
    ]
    message = client.messages.create(**ASKED | {"messages": messages, "system": blocks})
    plain = [
        {"role": "system", "content": "onetwo"},
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": "Let me look."},
        {"role": "tool", "content": "one\ntwo"},
        {"role": "tool", "content": "three"},
        {"role": "tool", "content": ""},
        {"role": "user", "content": "so?"},
    ]
    (block,) = message.content
    assert block.type == "text"
    assert block.text == chat_text(http, plain)


def test_an_answer_that_was_begun_is_continued(client: anthropic.Anthropic, http: httpx.Client) -> None:
    for content in ("I am", [{"type": "text", "text": "I am"}]):
        messages = [*MESSAGES, {"role": "assistant", "content": content}]
        continued = chat_text(http, messages, continue_final_message=True)
        assert continued != chat_text(http, messages)
        asked = ASKED | {"messages": messages}
        message = client.messages.create(**asked)
        assert message.content[0].text == continued  # type: ignore[union-attr]
        with client.messages.stream(**asked) as stream:
            assert stream.get_final_message().content[0].text == continued  # type: ignore[union-attr]
        counted = client.messages.count_tokens(model="tiny", messages=messages)  # type: ignore[arg-type]
        assert counted.input_tokens == message.usage.input_tokens
    # there is nothing to continue
    for content in ("", " \n", [{"type": "tool_use", "id": "t1", "name": "find", "input": {}}]):
        messages = [*MESSAGES, {"role": "assistant", "content": content}]
        plain = [*MESSAGES, {"role": "assistant", "content": content if isinstance(content, str) else ""}]
        message = client.messages.create(**ASKED | {"messages": messages})
        assert message.content[0].text == chat_text(http, plain)  # type: ignore[union-attr]


def test_a_stream(client: anthropic.Anthropic) -> None:
    # a client that is slower than the model gets several tokens at once
    long = ASKED | {"max_tokens": 400}
    whole = client.messages.create(**long)
    with client.messages.stream(**long) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(pieces) > 1
    assert "".join(pieces) == whole.content[0].text  # type: ignore[union-attr]
    assert final.content[0].text == whole.content[0].text  # type: ignore[union-attr]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert final.usage.input_tokens == whole.usage.input_tokens


def test_the_events_of_a_stream(http: httpx.Client) -> None:
    response = http.post("/v1/messages", json=BASE | {"stream": True, "max_tokens": 4})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    # a keep-alive comment may come in between
    texts = response.text.removesuffix("\n\n").split("\n\n")
    events = [text.split("\n") for text in texts if not text.startswith(":")]
    names = [name.removeprefix("event: ") for name, _ in events]
    data = [json.loads(line.removeprefix("data: ")) for _, line in events]
    assert names == [event["type"] for event in data]
    assert names[:2] == ["message_start", "content_block_start"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    size = data[0]["message"]["usage"]["input_tokens"]
    assert data[0]["message"]["content"] == []
    assert data[0]["message"]["usage"]["output_tokens"] == 0
    assert data[1] == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert data[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert (data[-2]["usage"]["input_tokens"], data[-2]["usage"]["output_tokens"]) == (size, 4)


def test_stop_sequences(client: anthropic.Anthropic) -> None:
    text = client.messages.create(**ASKED).content[0].text  # type: ignore[union-attr]
    stop = text[len(text) // 2 :][:3]
    message = client.messages.create(**ASKED, stop_sequences=["never there", stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == text[: text.index(stop)]  # type: ignore[union-attr]
    with client.messages.stream(**ASKED, stop_sequences=[stop]) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", stop)
    assert final.content[0].text == message.content[0].text  # type: ignore[union-attr]


def test_cached_tokens_are_counted_apart(client: anthropic.Anthropic) -> None:
    usage = client.messages.create(**ASKED).usage
    assert (usage.cache_creation_input_tokens, usage.cache_read_input_tokens) == (0, 0)


async def test_the_asynchronous_client(guarded_server: Server, client: anthropic.Anthropic) -> None:
    import anthropic

    whole = client.messages.create(**ASKED)
    async with anthropic.AsyncAnthropic(base_url=guarded_server.url, auth_token=KEY, max_retries=0) as asynchronous:
        async with asynchronous.messages.stream(**ASKED) as stream:
            final = await stream.get_final_message()
        message = await asynchronous.messages.create(**ASKED)
    assert final.content[0].text == message.content[0].text == whole.content[0].text  # type: ignore[union-attr]


def test_keys(guarded_server: Server) -> None:
    for headers, status in (
        ({"x-api-key": KEY}, 200),
        ({"authorization": f"Bearer {KEY}"}, 200),
        ({"authorization": "Bearer wrong", "x-api-key": KEY}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({}, 401),
    ):
        body = {"model": "tiny", "messages": MESSAGES}
        url = f"{guarded_server.url}/v1/messages/count_tokens"
        response = httpx.post(url, json=body, headers=headers, timeout=60)
        assert response.status_code == status, headers
        # only there
        models = httpx.get(f"{guarded_server.url}/v1/models", headers={"x-api-key": KEY}, timeout=60)
        assert (models.status_code, models.json()) == (401, {"error": "Unauthorized"})


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
REFUSED: list[tuple[dict[str, Any], int, str, str]] = [
    ({"model": "nope"}, 404, "NotFoundError", "The model `nope` does not exist."),
    ({"model": ""}, 400, "Bad Request", "body.model"),
    ({"max_tokens": None}, 400, "Bad Request", "body.max_tokens"),
    ({"max_tokens": 0}, 400, "Bad Request", "max_tokens must be positive"),
    ({"max_tokens": 100000}, 400, "BadRequestError", "max_tokens=100000 cannot be greater than max_model_len=512"),
    ({"temperature": -1}, 400, "BadRequestError", "temperature must be non-negative, got -1.0."),
    ({"top_p": 0}, 400, "BadRequestError", "top_p must be in (0, 1], got 0.0."),
    ({"messages": []}, 400, "BadRequestError", "Provide at least one message."),
    ({"messages": [{"role": "user", "content": []}]}, 400, "BadRequestError", "Provide at least one message."),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "BadRequestError", "tiny is not a multimodal model"),
    ({"messages": [{"role": "robot", "content": "x"}]}, 400, "Bad Request", "body.messages.0.role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
        400,
        "Bad Request",
        "'text', 'image', 'tool_use'",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        400,
        "Bad Request",
        "text is required for text blocks",
    ),
    (
        {"messages": [{"role": "user", "content": "a " * 1000}]},
        400,
        "BadRequestError",
        "maximum context length is 512",
    ),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, 400, "Bad Request", "tool_choice.name is required"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}},
        400,
        "BadRequestError",
        "does not match any of the specified `tools`",
    ),
    ({"tools": [{"name": "find"}]}, 400, "Bad Request", "input_schema"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}}, 400, "Bad Request", "greater than or equal to 1024"),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        400,
        "BadRequestError",
        "thinking.budget_tokens must be less than max_tokens",
    ),
]


def test_errors_of_bad_requests(http: httpx.Client) -> None:
    for fields, status, kind, text in REFUSED:
        for stream in (False, True):
            response = http.post("/v1/messages", json=BASE | fields | {"stream": stream})
            assert response.status_code == status, (fields, response.text)
            answer = response.json()
            assert answer["type"] == "error"
            assert answer["error"]["type"] == kind, answer
            assert text in answer["error"]["message"], answer
    broken = http.post("/v1/messages", content=b"{", headers={"content-type": "application/json"})
    assert (broken.status_code, broken.json()["type"]) == (400, "error")
    counted = http.post("/v1/messages/count_tokens", json={"model": "nope", "messages": MESSAGES})
    assert (counted.status_code, counted.json()["error"]["type"]) == (404, "NotFoundError")
    assert wait_until(lambda: is_idle(http))


def test_the_client_knows_the_errors(client: anthropic.Anthropic) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(**ASKED | {"model": "nope"})
    with (
        pytest.raises(anthropic.BadRequestError, match="multimodal"),
        client.messages.stream(**ASKED | {"messages": [{"role": "user", "content": [IMAGE]}]}) as stream,
    ):
        stream.get_final_message()


def test_tools_that_are_not_called(client: anthropic.Anthropic, http: httpx.Client) -> None:
    for choice in ("auto", "none"):
        message = client.messages.create(**ASKED, tools=[TOOL], tool_choice={"type": choice})  # type: ignore[call-overload]
        assert message.content[0].text == chat_text(http, MESSAGES)


SCHEMA: dict[str, Any] = {"type": "object", "properties": {"q": {"type": "boolean"}}, "additionalProperties": False}


def test_a_tool_that_must_be_called(client: anthropic.Anthropic, http: httpx.Client) -> None:
    """A model with random weights may not complete its call; it must equal that of the chat endpoint."""
    tool = {"name": "find", "input_schema": SCHEMA}
    asked = ASKED | {"tools": [tool], "tool_choice": {"type": "tool", "name": "find"}}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        pieces = "".join(event.partial_json for event in stream if event.type == "input_json")
    chat_tool = {"type": "function", "function": {"name": "find", "parameters": SCHEMA}}
    choice = {"type": "function", "function": {"name": "find"}}
    answer = http.post("/v1/chat/completions", json=BASE | {"tools": [chat_tool], "tool_choice": choice})
    (call,) = answer.raise_for_status().json()["choices"][0]["message"]["tool_calls"]
    (block,) = whole.content
    assert (block.type, block.name) == ("tool_use", "find")
    assert pieces == call["function"]["arguments"]
    if whole.stop_reason == "max_tokens":
        assert block.input == {"INVALID_JSON": pieces}
    else:
        assert (whole.stop_reason, block.input) == ("tool_use", json.loads(pieces))


def test_structured_output(client: anthropic.Anthropic, http: httpx.Client) -> None:
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    message = client.messages.create(**ASKED, output_config=form)
    text = message.content[0].text  # type: ignore[union-attr]
    assert text == chat_text(
        http, MESSAGES, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    )
    assert text.lstrip().startswith("{")


# ---- scripted outputs, which a tiny model would not generate -------------------------------------------------------


def app_of(engine: ScriptedEngine, **flags: Any) -> FastAPI:
    """The real application on a scripted engine."""
    reasoning = flags.pop("reasoning_parser", None)
    args = FrontendArgs(**{"enable_auto_tool_choice": True, "tool_call_parser": "hermes", **flags})
    return build_app(engine, args, parsers=ChatParsers.from_flags(args, reasoning))  # type: ignore[arg-type]


async def ask(
    engine: ScriptedEngine, flags: dict[str, Any] | None = None, **fields: Any
) -> list[anthropic.types.Message]:
    """The whole answer, and what the client's helper makes of the stream."""
    import anthropic

    transport = httpx2.ASGITransport(app_of(engine, **(flags or {})))
    async with (
        httpx2.AsyncClient(transport=transport) as http,
        anthropic.AsyncAnthropic(base_url="http://test", api_key="none", http_client=http) as client,
    ):
        asked = ASKED | {"tools": [TOOL]} | fields
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            return [whole, await stream.get_final_message()]


def contents(message: anthropic.types.Message) -> list[tuple[str, Any]]:
    """Type and contents of each block."""
    fields = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    return [(block.type, getattr(block, fields[block.type])) for block in message.content]


async def test_reasoning_text_and_calls_are_blocks() -> None:
    text = f"<think>hm</think>So: {CALL}{CALL}"
    engine = ScriptedEngine(list(text))
    for message in await ask(engine, {"reasoning_parser": "qwen3"}):
        arguments = json.loads(ARGUMENTS)
        assert contents(message) == [
            ("thinking", "hm"),
            ("text", "So: "),
            ("tool_use", arguments),
            ("tool_use", arguments),
        ]
        thinking, _, first, second = message.content
        assert thinking.type == "thinking"
        assert len(thinking.signature) == 32
        assert first.type == second.type == "tool_use"
        assert (first.name, message.stop_reason) == ("find", "tool_use")
        assert first.id != second.id


class BlankParser(ToolParser):
    """Finds calls, and passes on the white space around them."""

    def advance(self, text: str, final: bool) -> None:
        self.add_content("\n \n")
        if final:
            self.open_call("find")
            self.add_arguments(ARGUMENTS)
        elif text == "So":
            self.add_content(text)


async def test_no_text_of_white_space_before_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TOOL_PARSERS, "blank", f"{__name__}:BlankParser")
    flags = {"tool_call_parser": "blank", "reasoning_parser": "qwen3"}
    call = ("tool_use", json.loads(ARGUMENTS))
    for message in await ask(ScriptedEngine(["x"]), flags):
        assert contents(message) == [call]
    for message in await ask(ScriptedEngine(["<think>hm</think>", "x"]), flags):
        assert contents(message) == [("thinking", "hm"), call]
    for message in await ask(ScriptedEngine(["So"]), flags):
        assert contents(message) == [("text", "\n \nSo\n \n"), call]
    # white space alone is an answer
    for message in await ask(ScriptedEngine(["\n", " \n"])):
        assert contents(message) == [("text", "\n \n")]


async def test_reasoning_is_over_in_an_answer_that_was_begun() -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "I am"}]
    thinking = [*MESSAGES, {"role": "assistant", "content": "<think>I am"}]
    for parser in ("deepseek_r1", "qwen3"):
        flags = {"reasoning_parser": parser}
        for message in await ask(ScriptedEngine([" here", "."]), flags, messages=begun):
            assert contents(message) == [("text", " here.")]
        for message in await ask(ScriptedEngine([" here", "</think>Yes."]), flags, messages=thinking):
            assert contents(message) == [("thinking", " here"), ("text", "Yes.")]


async def test_one_call_at_a_time() -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    for message in await ask(ScriptedEngine(list(CALL + CALL)), tool_choice=choice):
        assert contents(message) == [("tool_use", json.loads(ARGUMENTS))]


async def test_a_call_cut_short() -> None:
    whole, streamed = await ask(ScriptedEngine(list(CALL[:60]), "length"))
    assert whole.stop_reason == streamed.stop_reason == "max_tokens"
    (block,) = whole.content
    assert block.type == "tool_use"
    assert ARGUMENTS.startswith(str(block.input["INVALID_JSON"]))


async def test_an_empty_answer() -> None:
    whole, streamed = await ask(ScriptedEngine([""]))
    assert contents(whole) == [("text", "")]
    assert contents(streamed) == []
    assert whole.stop_reason == streamed.stop_reason == "end_turn"


async def test_tools_and_thinking_reach_the_template() -> None:
    engine = ScriptedEngine(["x"])
    template = TEMPLATE + "{{ enable_thinking }}{{ reasoning_effort }}"
    for thinking, told in (({"type": "disabled"}, "Falsenone"), ({"type": "adaptive"}, "True")):
        await ask(engine, {"chat_template": template}, thinking=thinking)
        assert engine.prompts[-1] == f"[find]Hello!{told}"
    await ask(engine, {"chat_template": template}, output_config={"effort": "low"})
    assert engine.prompts[-1] == "[find]Hello!Truelow"


async def test_a_thinking_budget() -> None:
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}
    for parser, template, expected in (
        # the model may open its reasoning, or has it anyway
        ("qwen3", TEMPLATE, ("</think>", 1024, "<think>")),
        ("deepseek_r1", TEMPLATE, ("</think>", 1024, "")),
        ("qwen3", TEMPLATE + "<think>", ("</think>", 1024, "")),
        # there is no reasoning, or nothing that knows of it
        ("qwen3", TEMPLATE + "<think>\n\n</think>", None),
        (None, TEMPLATE, None),
    ):
        engine = ScriptedEngine(["x"])
        engine.max_model_len = 4096
        await ask(engine, {"reasoning_parser": parser, "chat_template": template}, **thinking)
        constraints = [params.structured_outputs for params in engine.params]
        found = [(one.begin_after, one.begin_within, one.begin_opener) for one in constraints if one is not None]
        assert found == ([] if expected is None else [expected] * 2)


async def test_an_error_within_a_stream() -> None:
    class FailingEngine(ScriptedEngine):
        async def generate(self, *arguments: Any, **fields: Any) -> Any:
            async for output in super().generate(*arguments, **fields):
                yield output
            raise RuntimeError("the details are not told")

    transport = httpx.ASGITransport(app_of(FailingEngine(["a", "b"], None)))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        response = await http.post("/v1/messages", json=BASE | {"stream": True})
    name, data = response.text.removesuffix("\n\n").split("\n\n")[-1].split("\n")
    assert name == "event: error"
    error = json.loads(data.removeprefix("data: "))
    assert error["type"] == "error"
    assert (error["error"]["type"], error["error"]["message"]) == ("InternalServerError", "Internal server error")
