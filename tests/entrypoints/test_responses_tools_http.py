"""Tool calls and reasoning in /v1/responses, and failures of the engine.

A tiny model calls no tools, so its outputs are written here by hand, as in the tests of chat.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import openai
import pytest

from ascend_vllm.errors import EngineDeadError, RequestError
from ascend_vllm.outputs import RequestOutput
from tests.entrypoints.test_responses_http import ANSWERED, FIND, HELLO, WHO, events_of
from tests.scripted_engine import ARGUMENTS, CALL, TEMPLATE, ScriptedEngine, client_of

ASKED: dict[str, Any] = {"model": "tiny", "input": "Hello!", "tools": [FIND]}


async def ask(engine: Any, flags: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    async with client_of(engine, **(flags or {})) as client:
        response = await client.post("/v1/responses", json=ASKED | fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def ask_stream(
    engine: Any, flags: dict[str, Any] | None = None, **fields: Any
) -> list[tuple[str, dict[str, Any]]]:
    async with client_of(engine, **(flags or {})) as client:
        response = await client.post("/v1/responses", json=ASKED | fields | {"stream": True})
    assert response.status_code == 200, response.text
    events = events_of(response.text)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    return events


def outline(output: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Type and contents of each item."""
    return [
        (item["type"], item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        for item in output
    ]


def shorter(names: list[str]) -> list[str]:
    """Names of events without their common beginning, each run of the same once."""
    short = [name.removeprefix("response.") for name in names]
    return [name for index, name in enumerate(short) if index == 0 or short[index - 1] != name]


CALL_EVENTS = [
    "output_item.added",
    "function_call_arguments.delta",
    "function_call_arguments.done",
    "output_item.done",
]
TEXT_EVENTS = [
    "output_item.added",
    "content_part.added",
    "output_text.delta",
    "output_text.done",
    "content_part.done",
    "output_item.done",
]
THOUGHT_EVENTS = [name.replace("output_text", "reasoning_text") for name in TEXT_EVENTS]


async def test_a_call_in_a_response() -> None:
    answer = await ask(ScriptedEngine([CALL]))
    (item,) = answer["output"]
    assert item == {
        "arguments": ARGUMENTS,
        "call_id": item["call_id"],
        "name": "find",
        "type": "function_call",
        "id": item["id"],
        "status": "completed",
    }
    assert item["id"].startswith("fc_")
    assert (answer["status"], answer["tool_choice"]) == ("completed", "auto")
    assert answer["tools"] == [FIND | {"strict": None, "description": None}]


async def test_calls_in_a_stream() -> None:
    events = await ask_stream(ScriptedEngine(["Let me ", "look.", *CALL, "\n", *CALL]))
    assert shorter([name for name, _ in events]) == [
        "created",
        "in_progress",
        *TEXT_EVENTS,
        *CALL_EVENTS,
        *CALL_EVENTS,
        "completed",
    ]
    output = events[-1][1]["response"]["output"]
    assert outline(output) == [("message", "Let me look."), *[("function_call", ARGUMENTS)] * 2]
    added = [data for name, data in events if name == "response.output_item.added"]
    assert [data["output_index"] for data in added] == [0, 1, 2]
    assert added[1]["item"] == output[1] | {"arguments": "", "status": "in_progress"}
    for index, item in enumerate(output):
        own = [data for _, data in events if data.get("output_index") == index]
        assert {data["item_id"] for data in own if "item" not in data} == {item["id"]}
        text = "".join(data["delta"] for data in own if "delta" in data)
        assert (item["type"], text) == outline(output)[index]
        assert own[-1]["item"] == item
    done = [data for name, data in events if name == "response.function_call_arguments.done"]
    assert [(data["name"], data["arguments"]) for data in done] == [("find", ARGUMENTS)] * 2


@pytest.mark.parametrize(
    ("text", "fields", "expected"),
    [
        (f"{CALL}{CALL}", {"parallel_tool_calls": False}, [("function_call", ARGUMENTS)]),
        (CALL, {"tool_choice": "none"}, [("message", CALL)]),
        ("Nothing to call.", {}, [("message", "Nothing to call.")]),
        (f"So: {CALL}", {}, [("message", "So: "), ("function_call", ARGUMENTS)]),
        ("", {}, []),
    ],
)
async def test_streams_and_whole_responses_agree(
    text: str, fields: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    whole = await ask(ScriptedEngine([text]), **fields)
    events = await ask_stream(ScriptedEngine(list(text) or [""]), **fields)
    assert outline(whole["output"]) == outline(events[-1][1]["response"]["output"]) == expected


async def test_a_round_of_a_tool() -> None:
    """The call comes back with its result, by items and by the kept response."""
    template = TEMPLATE.replace("{{ message.content }}", "{{ message.role }}:{{ message.content }}:{{ message }};")
    engine = ScriptedEngine([f"So: {CALL}"])
    async with (
        client_of(engine, chat_template=template) as http,
        openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http) as client,  # type: ignore[arg-type]
    ):
        first = await client.responses.create(**ASKED)
        text, call = first.output
        assert (text.type, call.type) == ("message", "function_call")
        result: dict[str, Any] = {"type": "function_call_output", "call_id": call.call_id, "output": "found"}
        items: list[Any] = [HELLO, *first.output, result]
        await client.responses.create(**ASKED | {"input": items})
        await client.responses.create(**ASKED | {"input": [result]}, previous_response_id=first.id)
    by_items, by_id = engine.prompts[1:]
    assert by_items == by_id
    assert by_items.count("assistant:So: :") == 1
    assert f"'id': '{call.call_id}'" in by_items
    assert "'arguments': {'text': 'a \"b\"', 'count': 3}" in by_items
    assert f"'tool_call_id': '{call.call_id}'" in by_items


async def test_a_call_cut_short_does_not_end_the_conversation() -> None:
    engine = ScriptedEngine([CALL[:60]], "length")
    async with client_of(engine) as client:
        first = (await client.post("/v1/responses", json=ASKED)).json()
        (item,) = first["output"]
        assert (item["type"], item["status"], first["status"]) == ("function_call", "incomplete", "incomplete")
        assert ARGUMENTS.startswith(item["arguments"])
        result = {"type": "function_call_output", "call_id": item["call_id"], "output": "no"}
        body = ASKED | {"input": [result], "previous_response_id": first["id"]}
        assert (await client.post("/v1/responses", json=body)).status_code == 200


@pytest.mark.parametrize(
    ("text", "statuses"),
    [
        (CALL[:60], [("function_call", "incomplete")]),
        # nothing of the call is missing, or of the text before it
        ("So: " + CALL.removesuffix("\n</tool_call>"), [("message", "completed"), ("function_call", "completed")]),
        ("So", [("message", "incomplete")]),
        ("<think>hm", [("reasoning", "incomplete")]),
        ("<think>hm</think>So", [("reasoning", "completed"), ("message", "incomplete")]),
    ],
)
async def test_outputs_cut_off(text: str, statuses: list[tuple[str, str]]) -> None:
    flags = {"reasoning_parser": "qwen3"}
    whole = await ask(ScriptedEngine([text], "length"), flags)
    events = await ask_stream(ScriptedEngine(list(text), "length"), flags)
    name, data = events[-1]
    assert name == data["type"] == "response.incomplete"
    for response in (whole, data["response"]):
        assert (response["status"], response["incomplete_details"]["reason"]) == ("incomplete", "max_output_tokens")
    assert [(item["type"], item["status"]) for item in data["response"]["output"]] == statuses
    # reasoning that has ended has a status in streams only
    shown = [(kind, None if (kind, status) == ("reasoning", "completed") else status) for kind, status in statuses]
    assert [(item["type"], item["status"]) for item in whole["output"]] == shown
    done = [data["item"]["status"] for name, data in events if name == "response.output_item.done"]
    assert done == [status for _, status in statuses]


async def test_tools_in_the_prompt() -> None:
    engine = ScriptedEngine(["x"])
    other = FIND | {"name": "other"}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "other"}]}
    await ask(engine, {"chat_template": TEMPLATE}, tools=[FIND, other])
    answer = await ask(engine, {"chat_template": TEMPLATE}, tools=[FIND, other], tool_choice=allowed)
    assert engine.prompts == ["[find][other]Hello!", "[other]Hello!"]
    assert answer["tool_choice"] == allowed


async def test_thoughts_then_a_call() -> None:
    text = f"<think>\nhm</think>\n\n{CALL}"
    events = await ask_stream(ScriptedEngine(list(text)), {"reasoning_parser": "qwen3"})
    assert shorter([name for name, _ in events]) == [
        "created",
        "in_progress",
        *THOUGHT_EVENTS,
        *CALL_EVENTS,
        "completed",
    ]
    last = events[-1][1]["response"]
    assert outline(last["output"]) == [("reasoning", "\nhm"), ("function_call", ARGUMENTS)]
    reasoning = last["output"][0]
    part = {"text": "\nhm", "type": "reasoning_text"}
    expected = {"summary": [], "type": "reasoning", "content": [part], "encrypted_content": None}
    assert reasoning == expected | {"id": reasoning["id"], "status": "completed"}
    assert reasoning["id"].startswith("rs_")
    added = [data["item"] for name, data in events if name == "response.output_item.added"]
    assert added[0] == reasoning | {"content": None, "status": "in_progress"}
    assert 0 < last["usage"]["output_tokens_details"]["reasoning_tokens"] < last["usage"]["output_tokens"]


async def test_thoughts_then_text() -> None:
    flags = {"reasoning_parser": "deepseek_r1"}
    text = "hm</think>Yes"
    whole = await ask(ScriptedEngine([text]), flags)
    assert outline(whole["output"]) == [("reasoning", "hm"), ("message", "Yes")]
    assert whole["output"][0]["status"] is None
    assert outline((await ask(ScriptedEngine([text]), flags, include_reasoning=False))["output"]) == [
        ("message", "Yes")
    ]
    events = await ask_stream(ScriptedEngine(list(text)), flags, include_reasoning=False)
    assert shorter([name for name, _ in events]) == ["created", "in_progress", *TEXT_EVENTS, "completed"]
    # log-probabilities of the text are returned, and of the tag before it, which is not reasoning either
    logprobs = {"include": ["message.output_text.logprobs"]}
    pieces = ["hm", "</think>", "Yes", "!"]
    told = await ask(ScriptedEngine(pieces), flags, **logprobs)
    assert len(told["output"][1]["content"][0]["logprobs"]) == 3


async def test_thoughts_reach_the_template() -> None:
    engine = ScriptedEngine(["x"])
    template = "{% for message in messages %}{{ message.reasoning_content }}|{{ message.content }};{% endfor %}"
    template += "{{ reasoning_effort }} {{ enable_thinking }}"
    reasoning = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    items = [HELLO, reasoning, ANSWERED, WHO]
    await ask(engine, {"chat_template": template}, input=items, reasoning={"effort": "low", "summary": "auto"})
    await ask(engine, {"chat_template": template}, input=items, reasoning={"effort": "none"})
    prompt = "|Hello!;hm|Yes.;|Who are you?;"
    assert engine.prompts == [f"{prompt}low True", f"{prompt}none False"]


async def test_the_official_client_streams_calls() -> None:
    async with (
        client_of(ScriptedEngine(list(f"So: {CALL}"))) as http,
        openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http) as client,  # type: ignore[arg-type]
        client.responses.stream(**ASKED) as stream,
    ):
        answer = await stream.get_final_response()
    text, call = answer.output
    assert answer.output_text == "So: "
    assert (text.type, call.type) == ("message", "function_call")
    assert call.arguments == ARGUMENTS


class FailingEngine(ScriptedEngine):
    """An engine that dies after its first outputs."""

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[RequestOutput, None]:
        async for output in super().generate(*args, **kwargs):
            yield output
        raise EngineDeadError("The engine is dead.")


async def test_an_engine_that_fails() -> None:
    engine = FailingEngine(["a", "b", "c"], finish_reason=None)  # type: ignore[arg-type]
    events = await ask_stream(engine)
    assert [name for name, _ in events][-1] == "response.failed"
    failed = events[-1][1]["response"]
    assert (failed["status"], failed["error"]) == (
        "failed",
        {"code": "server_error", "message": "The engine is dead."},
    )
    async with client_of(engine) as client:
        answer = await client.post("/v1/responses", json=ASKED)
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "The engine is dead."
        begun = (await client.post("/v1/responses", json=ASKED | {"background": True})).json()
        assert begun["status"] == "queued"
        streamed = await client.post("/v1/responses", json=ASKED | {"background": True, "stream": True})
        assert events_of(streamed.text)[-1][0] == "response.failed"
        ended = (await client.get(f"/v1/responses/{begun['id']}")).json()
        assert (ended["status"], ended["error"]) == ("failed", failed["error"])


class RefusingEngine(ScriptedEngine):
    """An engine that takes no request."""

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[RequestOutput, None]:
        async for output in super().generate(*args, **kwargs):
            yield output
        raise RequestError("No.", "structured_outputs")


async def test_an_engine_that_refuses() -> None:
    async with client_of(RefusingEngine([])) as client:
        for stream in (False, True):
            answer = await client.post("/v1/responses", json=ASKED | {"stream": stream})
            assert answer.status_code == 400
            assert answer.json()["error"]["message"] == "No."
        streamed = await client.post("/v1/responses", json=ASKED | {"background": True, "stream": True})
    (created, _), (failed, data) = events_of(streamed.text)
    assert (created, failed) == ("response.created", "response.failed")
    assert data["response"]["error"] == {"code": "invalid_prompt", "message": "No."}


async def test_without_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "0")
    async with client_of(ScriptedEngine(["x"])) as client:
        first = (await client.post("/v1/responses", json=ASKED)).json()
        assert (await client.get(f"/v1/responses/{first['id']}")).status_code == 404
        refused = await client.post("/v1/responses", json=ASKED | {"background": True})
    assert refused.status_code == 400
    assert "VLLM_ENABLE_RESPONSES_API_STORE=1" in refused.json()["error"]["message"]
    assert refused.json()["error"]["type"] == "invalid_request_error"
