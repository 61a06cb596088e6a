"""Tools and reasoning in /v1/chat/completions.

A tiny model calls no tools, so its outputs are written here by hand and passed to the real application as the
engine's outputs. What does not depend on the output is tested on a real server.
"""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from ascend_vllm.entrypoints.openai.api_server import make_parser, run_server
from tests.entrypoints.conftest import ENGINE_FLAGS
from tests.scripted_engine import ARGUMENTS, CALL, TEMPLATE, ScriptedEngine, client_of
from tests.server import OPENAI_SERVER, Server, running
from tests.tiny_models import tiny_model

TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
MESSAGES = [{"role": "user", "content": "Hello!"}]
BASE: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": [TOOL]}


async def ask(engine: ScriptedEngine, flags: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    async with client_of(engine, **(flags or {})) as client:
        response = await client.post("/v1/chat/completions", json=BASE | fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def ask_stream(
    engine: ScriptedEngine, flags: dict[str, Any] | None = None, **fields: Any
) -> list[dict[str, Any]]:
    async with client_of(engine, **(flags or {})) as client:
        response = await client.post("/v1/chat/completions", json=BASE | fields | {"stream": True})
    assert response.status_code == 200, response.text
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event)["choices"][0] for event in events[:-1]]


def joined(choices: list[dict[str, Any]], index: int = 0) -> tuple[str, str, list[list[str]], str]:
    """Reasoning, content, calls and finish reason of one choice of a stream."""
    content = reasoning = ""
    calls: list[list[str]] = []
    own = [choice for choice in choices if choice["index"] == index]
    for choice in own:
        content += choice["delta"].get("content") or ""
        reasoning += choice["delta"].get("reasoning") or ""
        for call in choice["delta"].get("tool_calls", []):
            if call["index"] == len(calls):
                assert call["id"].startswith("chatcmpl-tool-")
                assert call["type"] == "function"
                calls.append([call["function"]["name"], call["function"]["arguments"]])
            else:
                assert list(call) == ["index", "function"]
                assert list(call["function"]) == ["arguments"]
                calls[call["index"]][1] += call["function"]["arguments"]
    assert [choice["finish_reason"] for choice in own[:-1]] == [None] * (len(own) - 1)
    return reasoning, content, calls, own[-1]["finish_reason"]


async def test_a_call_in_a_whole_answer() -> None:
    engine = ScriptedEngine([CALL])
    (choice,) = (await ask(engine))["choices"]
    message = choice["message"]
    assert message["content"] is None
    assert message["reasoning"] is None
    assert message["tool_calls"] == [
        {
            "id": message["tool_calls"][0]["id"],
            "type": "function",
            "function": {"name": "find", "arguments": ARGUMENTS},
        }
    ]
    assert choice["finish_reason"] == "tool_calls"
    assert engine.params[0].skip_special_tokens


async def test_a_call_in_a_stream() -> None:
    choices = await ask_stream(ScriptedEngine(["I ", "look.\n", "<tool", *CALL.removeprefix("<tool")]))
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [choice["delta"] for choice in choices[1:3]] == [{"content": "I "}, {"content": "look.\n"}]
    opening = choices[3]["delta"]["tool_calls"][0]
    assert opening["function"] == {"name": "find", "arguments": ""} or opening["function"]["arguments"] == "{"
    assert len(choices) > 10  # the arguments came in chunks
    assert (choices[-1]["delta"], choices[-1]["finish_reason"]) == ({}, "tool_calls")
    assert joined(choices) == ("", "I look.\n", [["find", ARGUMENTS]], "tool_calls")


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"{CALL}\n{CALL}", "", 2),
        ("No <tool_call> here", "No <tool_call> here", 0),
        ("", "", 0),
    ],
)
async def test_streams_and_whole_answers_agree(text: str, content: str, calls: int) -> None:
    choices = await ask_stream(ScriptedEngine(list(text) or [""]), n=2)
    whole = await ask(ScriptedEngine([text]), n=2)
    assert len(whole["choices"]) == 2
    for index, choice in enumerate(whole["choices"]):
        message = choice["message"]
        made = [[call["function"]["name"], call["function"]["arguments"]] for call in message["tool_calls"]]
        assert made == [["find", ARGUMENTS]] * calls
        assert message["content"] == (content or (None if calls else ""))
        assert joined(choices, index) == ("", content, made, choice["finish_reason"])
        assert choice["finish_reason"] == ("tool_calls" if calls else "stop")


async def test_one_call_only() -> None:
    text = f"{CALL}{CALL}"
    choices = await ask_stream(ScriptedEngine(list(text)), parallel_tool_calls=False)
    assert joined(choices)[2] == [["find", ARGUMENTS]]
    whole = await ask(ScriptedEngine([text]), parallel_tool_calls=False)
    assert len(whole["choices"][0]["message"]["tool_calls"]) == 1


async def test_a_call_cut_short() -> None:
    text = CALL[:50]
    assert joined(await ask_stream(ScriptedEngine(list(text), "length")))[3] == "length"
    (choice,) = (await ask(ScriptedEngine([text], "length")))["choices"]
    assert choice["finish_reason"] == "length"
    assert ARGUMENTS.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])


async def test_tool_choice_none_leaves_calls_in_the_text() -> None:
    engine = ScriptedEngine([CALL])
    assert joined(await ask_stream(engine, tool_choice="none")) == ("", CALL, [], "stop")
    (choice,) = (await ask(engine, tool_choice="none"))["choices"]
    assert (choice["message"]["content"], choice["message"]["tool_calls"]) == (CALL, [])


async def test_every_token_s_details_are_told() -> None:
    """A parser buffers text, but not the other fields of a token."""
    fields: dict[str, Any] = {"logprobs": True, "return_token_ids": True}
    choices = await ask_stream(ScriptedEngine(list(CALL)), **fields)
    told = [choice for choice in choices if choice["logprobs"]]
    assert sum(len(choice["logprobs"]["content"]) for choice in told) == len(CALL)
    assert sum(len(choice.get("token_ids", [])) for choice in choices) == len(CALL)


async def test_calls_made_of_special_tokens() -> None:
    engine = ScriptedEngine([f'[TOOL_CALLS][{{"name": "find", "arguments": {ARGUMENTS}}}]'])
    (choice,) = (await ask(engine, {"tool_call_parser": "mistral"}))["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    await ask(engine, {"tool_call_parser": "mistral"}, tool_choice="none")
    assert [params.skip_special_tokens for params in engine.params] == [False, True]


async def test_thoughts_then_a_call() -> None:
    text = f"<think>\nhm</think>\n\n{CALL}"
    flags = {"reasoning_parser": "qwen3"}
    assert joined(await ask_stream(ScriptedEngine(list(text)), flags)) == (
        "\nhm",
        "",
        [["find", ARGUMENTS]],
        "tool_calls",
    )
    (choice,) = (await ask(ScriptedEngine([text]), flags))["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("\nhm", None)
    assert len(choice["message"]["tool_calls"]) == 1


async def test_thoughts_without_tools() -> None:
    flags = {"reasoning_parser": "deepseek_r1", "tool_call_parser": None, "enable_auto_tool_choice": False}
    text = "hm</think>Yes"
    assert joined(await ask_stream(ScriptedEngine(list(text)), flags, tools=None)) == ("hm", "Yes", [], "stop")
    message = (await ask(ScriptedEngine([text]), flags, tools=None))["choices"][0]["message"]
    told = {key: value for key, value in message.items() if value is not None}
    assert told == {"role": "assistant", "content": "Yes", "tool_calls": [], "reasoning": "hm"}
    hidden = await ask(ScriptedEngine([text]), flags, tools=None, include_reasoning=False)
    message = hidden["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("Yes", None)
    silent = await ask_stream(ScriptedEngine(list(text)), flags, tools=None, include_reasoning=False)
    assert joined(silent) == ("", "Yes", [], "stop")


async def test_tools_in_the_prompt() -> None:
    engine = ScriptedEngine(["x"])
    template = {"chat_template": TEMPLATE}
    await ask(engine, template)
    await ask(engine, template, tool_choice="none")
    await ask(engine, template | {"exclude_tools_when_tool_choice_none": True}, tool_choice="none")
    await ask(engine, template, tools=[])
    assert engine.prompts == ["[find]Hello!", "[find]Hello!", "Hello!", "Hello!"]


async def test_the_official_client_streams() -> None:
    async with (
        client_of(ScriptedEngine(list(f"So: {CALL}"))) as http,
        openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http) as client,  # type: ignore[arg-type]
        client.chat.completions.stream(**BASE) as stream,
    ):
        answer = await stream.get_final_completion()
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("So: ", "tool_calls")
    assert choice.message.tool_calls is not None
    assert [call.function.arguments for call in choice.message.tool_calls] == [ARGUMENTS]


# ---- a real server -------------------------------------------------------------------------------------------


def add_end_of_thoughts(model: pathlib.Path) -> int:
    """Make the last token of a model's vocabulary the end of reasoning; returns its id."""
    path = model / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.__getitem__)
    id_: int = vocabulary.pop(last)
    tokenizer["model"]["merges"] = [pair for pair in tokenizer["model"]["merges"] if "".join(pair) != last]
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    tokenizer["added_tokens"].append({"id": id_, "content": "</think>", **plain})
    path.write_text(json.dumps(tokenizer))
    return id_


@pytest.fixture(scope="module")
def thinking_model(tiny_dir: str, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The tiny model with a token that ends reasoning."""
    directory = tmp_path_factory.mktemp("thinking") / "model"
    shutil.copytree(tiny_dir, directory)
    return directory


@pytest.fixture(scope="module")
def end_id(thinking_model: pathlib.Path) -> int:
    """The id of that token."""
    return add_end_of_thoughts(thinking_model)


@pytest.fixture(scope="module")
def tool_server(
    thinking_model: pathlib.Path, end_id: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server with parsers and a template that knows tools."""
    assert end_id
    template: pathlib.Path = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE)
    flags = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"]
    flags += ["--chat-template", str(template), "--structured-outputs-config", '{"disable_any_whitespace": true}']
    with running(
        OPENAI_SERVER, ["--model", str(thinking_model), "--served-model-name", "tiny", *flags, *ENGINE_FLAGS]
    ) as server:
        yield server


NAMED = {"type": "function", "function": {"name": "find"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "does not match any of the specified"),
    ({"tool_choice": {"type": "function"}}, "Incorrectly formatted `tool_choice`."),
    ({"tool_choice": "sometimes"}, '`tool_choice` must be "none", "auto", "required" or a named tool.'),
    ({"tool_choice": NAMED, "tools": None}, "When using `tool_choice`, `tools` must be set."),
    ({"tools": [{"type": "function", "function": {}}]}, "Each of `tools` must be like"),
]


def test_requests_on_a_server_with_parsers(tool_server: Server) -> None:
    with httpx.Client(base_url=tool_server.url, timeout=60) as http:
        for fields, text in REFUSED:
            response = http.post("/v1/chat/completions", json=BASE | fields)
            assert response.status_code == 400, response.text
            assert text in response.json()["error"]["message"]
        size = http.post("/tokenize", json={"prompt": "[find]Hello!"}).json()["count"]
        fields = {"messages": MESSAGES, "tools": [TOOL]}
        assert http.post("/tokenize", json=fields).json()["count"] == size
    with openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="none", max_retries=0) as client:
        for choice in ("auto", "none"):
            asked: dict[str, Any] = BASE | {"tool_choice": choice, "max_tokens": 8, "temperature": 0}
            answer = client.chat.completions.create(**asked)
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == size
            pieces = list(client.chat.completions.create(**asked, stream=True))
            text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
            assert text == answer.choices[0].message.content
            assert pieces[-1].choices[0].finish_reason == answer.choices[0].finish_reason


def test_constraints_hold_behind_the_thoughts(tool_server: Server, end_id: int) -> None:
    parameters = {
        "type": "object",
        "properties": {"kind": {"enum": ["cat", "dog"]}, "count": {"enum": [1, 2]}},
        "required": ["kind", "count"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "find", "parameters": parameters}}
    schema = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": parameters}}}
    thoughtless = {"logit_bias": {str(end_id): 100}}
    base = BASE | {"temperature": 0, "max_tokens": 60, "ignore_eos": True, "tools": [tool]}
    with httpx.Client(base_url=tool_server.url, timeout=60) as http:
        for fields in ({"tool_choice": NAMED}, {"tool_choice": "required"}, schema | {"tools": None}):
            # reasoning without an end: no constraint applies, and there is no content
            (choice,) = http.post("/v1/chat/completions", json=base | fields).json()["choices"]
            assert choice["finish_reason"] == "length"
            assert choice["message"]["reasoning"]
            assert (choice["message"]["content"] or "", choice["message"]["tool_calls"]) == ("", [])
            # reasoning ends: the text behind it matches the schema
            (choice,) = http.post("/v1/chat/completions", json=base | fields | thoughtless).json()["choices"]
            message = choice["message"]
            if fields.get("tools", True) is None:
                text = message["content"]
            else:
                assert message["content"] is None
                text = message["tool_calls"][0]["function"]["arguments"]
            value = json.loads(text)
            assert value["kind"] in ("cat", "dog")
            assert value["count"] in (1, 2)
            # the same in a stream
            asked = base | fields | thoughtless | {"stream": True}
            response = http.post("/v1/chat/completions", json=asked)
            events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line][:-1]
            _, content, calls, reason = joined([json.loads(event)["choices"][0] for event in events])
            assert reason == choice["finish_reason"]
            assert (calls[0][1] if calls else content) == text


def test_a_thinking_budget(tool_server: Server, end_id: int) -> None:
    """The end of the reasoning is forced, only if there is reasoning and its budget is used up."""
    base = {"model": "tiny", "temperature": 0, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
    opened = [*MESSAGES, {"role": "assistant", "content": "<think>I"}]
    with httpx.Client(base_url=tool_server.url, timeout=60) as http:

        def ask(**fields: Any) -> tuple[list[int], dict[str, Any]]:
            response = http.post("/v1/chat/completions", json=base | {"messages": MESSAGES} | fields)
            (choice,) = response.raise_for_status().json()["choices"]
            return choice["token_ids"], choice["message"]

        open_reasoning = {"messages": opened, "continue_final_message": True}
        free, message = ask(**open_reasoning)
        assert end_id not in free
        assert message["content"] is None
        for budget in (0, 1, 7):
            ids, message = ask(**open_reasoning, thinking_token_budget=budget)
            assert ids[: budget + 1] == [*free[:budget], end_id]
            assert end_id not in ids[budget + 1 :]
            assert message["content"]
        # a text that does not begin with <think> has no reasoning
        plain, _ = ask()
        assert ask(thinking_token_budget=3)[0] == plain
        assert ask(**open_reasoning, thinking_token_budget=-1)[0] == free
        # the constraint begins behind the tag
        choice = {"choice": ["cat", "dog"]}
        _, message = ask(thinking_token_budget=3, structured_outputs=choice, ignore_eos=False)
        assert message["content"] in ("cat", "dog")
        refused = http.post("/v1/chat/completions", json=BASE | {"thinking_token_budget": -2})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "body.thinking_token_budget")


def test_requests_on_a_server_without_parsers(http: httpx.Client) -> None:
    fields = BASE | {"max_tokens": 4, "temperature": 0}
    for choice, text in (
        ("auto", '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'),
        ("required", 'tool_choice="required" requires --tool-call-parser to be set'),
    ):
        response = http.post("/v1/chat/completions", json=fields | {"tool_choice": choice})
        assert (response.status_code, text in response.text.replace("\\", "")) == (400, True), response.text
    answer = http.post("/v1/chat/completions", json=fields | {"tool_choice": "none"})
    plain = http.post("/v1/chat/completions", json=fields | {"tools": None})
    assert answer.status_code == 200
    # the tiny model's own template ignores tools
    assert answer.json()["choices"] == plain.json()["choices"]
    budget = http.post("/v1/chat/completions", json=fields | {"tools": None, "thinking_token_budget": 3})
    assert (budget.status_code, budget.json()["error"]["param"]) == (400, "thinking_token_budget")
    # a function that is named needs no parser: the output is its arguments
    named = http.post("/v1/chat/completions", json=fields | {"tool_choice": NAMED, "max_tokens": 12})
    (choice,) = named.raise_for_status().json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "find"
    assert call["function"]["arguments"].lstrip().startswith("{")
    assert choice["message"]["content"] is None
    streamed = http.post(
        "/v1/chat/completions", json=fields | {"tool_choice": NAMED, "max_tokens": 12, "stream": True}
    )
    events = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line][:-1]
    _, text, calls, _ = joined([json.loads(event)["choices"][0] for event in events])
    assert (text, calls) == ("", [["find", call["function"]["arguments"]]])


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--tool-call-parser", "nope"], "invalid tool call parser: nope (chose from { "),
        (["--reasoning-parser", "nope"], "invalid reasoning parser: nope"),
        (["--tool-parser-plugin", "/absent.py"], "--tool-parser-plugin: cannot load /absent.py"),
        (["--enable-auto-tool-choice"], "--enable-auto-tool-choice requires --tool-call-parser"),
    ],
)
def test_wrong_flags_end_the_start(flags: list[str], text: str, caplog: pytest.LogCaptureFixture) -> None:
    assert run_server(make_parser().parse_args(["--model", tiny_model("qwen2"), *flags])) == 2
    assert text in caplog.text
