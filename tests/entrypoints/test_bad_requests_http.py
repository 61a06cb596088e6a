"""The common bad requests of vLLM's users, one per row of a table, against a real server.

Each row has the answer of vLLM 0.6.3 or 0.32. If both refuse, the text must be one of theirs; if
one of them serves the request, so does this server, unless docs/compatibility.md gives the reason.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server import Server, is_idle, wait_until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BASES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "tiny", "prompt": "Hello", "max_tokens": 3, "temperature": 0},
    CHAT: {"model": "tiny", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 3, "temperature": 0},
}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "find"}}
BEAMS = {"use_beam_search": True, "n": 2}
# type of an error that the request's model finds, and of all others
SHAPE, BAD = "Bad Request", "BadRequestError"
LIMIT = "This model's maximum context length is 512 tokens. However, "


@dataclasses.dataclass(frozen=True)
class Row:
    """A request and what becomes of it.

    Attributes:
        name: the row of the table.
        path: of the endpoint.
        fields: what differs from a good request; `DROP` leaves a field out.
        text: part of the error's text; None: the request is served.
        type: of the error.
        status: of the answer.
        stream: None: the same with and without streaming.
    """

    name: str
    path: str
    fields: dict[str, Any]
    text: str | None
    type: str = BAD
    status: int = 400
    stream: bool | None = None


DROP = object()


def image(url: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


ROWS = [
    Row("unknown model", COMPLETIONS, {"model": "nope"}, "The model `nope` does not exist.", "NotFoundError", 404),
    Row("unknown model, chat", CHAT, {"model": "nope"}, "The model `nope` does not exist.", "NotFoundError", 404),
    Row("no model", COMPLETIONS, {"model": DROP}, None),
    Row("no model, chat", CHAT, {"model": DROP}, None),
    Row("no prompt", COMPLETIONS, {"prompt": DROP}, "Either prompt or prompt_embeds must be provided and non-empty."),
    Row(
        "prompt empty", COMPLETIONS, {"prompt": ""}, "Either prompt or prompt_embeds must be provided and non-empty."
    ),
    Row("prompt []", COMPLETIONS, {"prompt": []}, "You must pass at least one prompt"),
    Row("prompt [[]]", COMPLETIONS, {"prompt": [[]]}, "The decoder prompt cannot be empty"),
    Row("prompts of two kinds", COMPLETIONS, {"prompt": ["a", [1, 2]]}, "5 validation errors", SHAPE),
    Row("token id beyond the vocabulary", COMPLETIONS, {"prompt": [99999]}, "Token id 99999 is out of vocabulary"),
    Row("token id below 0", COMPLETIONS, {"prompt": [-1]}, "Input should be greater than or equal to 0", SHAPE),
    Row(
        "P+M > L",
        COMPLETIONS,
        {"prompt": [5] * 500, "max_tokens": 13},
        f"{LIMIT}you requested 513 tokens (500 in the messages, 13 in the completion). Please reduce the length of "
        "the messages or completion.",
    ),
    Row(
        "P >= L, max_tokens null",
        COMPLETIONS,
        {"prompt": [5] * 513, "max_tokens": None},
        f"{LIMIT}you requested 513 tokens in the messages, Please reduce the length of the messages.",
    ),
    Row(
        "more characters than L tokens have",
        COMPLETIONS,
        {"prompt": "a" * 20_000},
        f"{LIMIT}your prompt contains 20000 characters (more than 6656 characters, which is the upper bound for 512 "
        "input tokens). Please reduce the length of the input prompt.",
    ),
    Row(
        "more characters than L tokens have, chat",
        CHAT,
        {"messages": [{"role": "user", "content": "a" * 20_000}]},
        "(more than 6656 characters, which is the upper bound for 512 input tokens)",
    ),
    Row("as many characters, cut", COMPLETIONS, {"prompt": "a" * 20_000, "truncate_prompt_tokens": 4}, None),
    Row(
        "chat max_tokens > L",
        CHAT,
        {"max_tokens": 10_000},
        "max_tokens=10000 cannot be greater than max_model_len=512. Please request fewer output tokens.",
    ),
    Row("max_tokens 0", COMPLETIONS, {"max_tokens": 0}, "max_tokens must be at least 1, got 0."),
    Row("max_tokens 0, echo", COMPLETIONS, {"max_tokens": 0, "echo": True}, None),
    Row("max_tokens -1", COMPLETIONS, {"max_tokens": -1}, "max_tokens must be at least 1, got -1."),
    Row("max_tokens 0, chat", CHAT, {"max_tokens": 0}, "max_tokens must be at least 1, got 0."),
    Row("max_tokens null", COMPLETIONS, {"max_tokens": None}, None),
    Row("temperature -1", COMPLETIONS, {"temperature": -1}, "temperature must be non-negative, got -1.0."),
    Row("temperature 3", COMPLETIONS, {"temperature": 3}, None),
    Row("temperature x", COMPLETIONS, {"temperature": "x"}, "'type': 'float_parsing'", SHAPE),
    Row(
        "temperature NaN", COMPLETIONS, {"temperature": float("nan")}, "temperature must be a finite number, got nan."
    ),
    Row("top_p 0", COMPLETIONS, {"top_p": 0}, "top_p must be in (0, 1], got 0.0."),
    Row("top_p 1.5", COMPLETIONS, {"top_p": 1.5}, "top_p must be in (0, 1], got 1.5."),
    Row("top_k 0", COMPLETIONS, {"top_k": 0}, None),
    Row("top_k -2", COMPLETIONS, {"top_k": -2}, "top_k must be -1 (disable), or at least 1, got -2."),
    Row("min_p 2", COMPLETIONS, {"min_p": 2}, "min_p must be in [0, 1], got 2.0."),
    Row("n 0", COMPLETIONS, {"n": 0}, "n must be at least 1, got 0."),
    Row("n -1", COMPLETIONS, {"n": -1}, "n must be at least 1, got -1."),
    Row("n 2, temperature 0", COMPLETIONS, {"n": 2}, "n must be 1 when using greedy sampling, got 2."),
    Row(
        "best_of < n",
        COMPLETIONS,
        {"n": 2, "best_of": 1, "temperature": 1},
        "best_of must be greater than or equal to n, got n=2 and best_of=1.",
    ),
    Row(
        "best_of 2, temperature 0",
        COMPLETIONS,
        {"best_of": 2},
        "n must be 1 when using greedy sampling, got 2.",
        stream=False,
    ),
    Row(
        "best_of 3, n 1, stream",
        COMPLETIONS,
        {"best_of": 3, "temperature": 1},
        "best_of must equal n to use output_kind=DELTA",
        stream=True,
    ),
    Row("presence 3", COMPLETIONS, {"presence_penalty": 3}, "presence_penalty must be in [-2, 2], got 3.0."),
    Row("frequency 3", COMPLETIONS, {"frequency_penalty": 3}, "frequency_penalty must be in [-2, 2], got 3.0."),
    Row(
        "repetition_penalty 0",
        COMPLETIONS,
        {"repetition_penalty": 0},
        "repetition_penalty must be greater than zero, got 0.0.",
    ),
    Row("repetition_penalty 3", COMPLETIONS, {"repetition_penalty": 3}, None),
    Row(
        "min_tokens > max_tokens",
        COMPLETIONS,
        {"min_tokens": 10},
        "min_tokens must be less than or equal to max_tokens=3, got 10.",
    ),
    Row("min_tokens < 0", COMPLETIONS, {"min_tokens": -1}, "min_tokens must be greater than or equal to 0, got -1."),
    Row("seed > int64", COMPLETIONS, {"seed": 2**63}, "less than or equal to 9223372036854775807", SHAPE),
    Row("stop with an empty string", COMPLETIONS, {"stop": [""]}, "stop cannot contain an empty string."),
    Row(
        "logprobs 21",
        COMPLETIONS,
        {"logprobs": 21},
        "Requested sample logprobs of 21, which is greater than max allowed: 20",
    ),
    Row("logprobs -1", COMPLETIONS, {"logprobs": -1}, "`logprobs` must be a positive value.", BAD),
    Row(
        "prompt_logprobs -1",
        COMPLETIONS,
        {"prompt_logprobs": -1},
        "`prompt_logprobs` must be a positive value.",
        BAD,
    ),
    Row(
        "prompt_logprobs with stream",
        COMPLETIONS,
        {"prompt_logprobs": 1},
        "`prompt_logprobs` are not available when `stream=True`.",
        BAD,
        stream=True,
    ),
    Row("prompt_logprobs without stream", COMPLETIONS, {"prompt_logprobs": 1}, None, stream=False),
    Row(
        "chat top_logprobs without logprobs",
        CHAT,
        {"top_logprobs": 2},
        "when using `top_logprobs`, `logprobs` must be set to true.",
        BAD,
    ),
    Row(
        "chat top_logprobs -1",
        CHAT,
        {"logprobs": True, "top_logprobs": -1},
        "`top_logprobs` must be a positive value.",
        BAD,
    ),
    Row(
        "chat top_logprobs 21",
        CHAT,
        {"logprobs": True, "top_logprobs": 21},
        "Requested sample logprobs of 21, which is greater than max allowed: 20",
    ),
    Row(
        "logit_bias abc",
        COMPLETIONS,
        {"logit_bias": {"abc": 1}},
        "logit_bias contains key(s) that cannot be converted to integer token IDs: ['abc']",
    ),
    Row(
        "logit_bias beyond the vocabulary",
        COMPLETIONS,
        {"logit_bias": {"9999999": 1}},
        "token_id(s) [9999999] in logit_bias contain out-of-vocab token ids. Vocabulary size: 384",
    ),
    Row(
        "allowed_token_ids beyond the vocabulary",
        COMPLETIONS,
        {"allowed_token_ids": [99999]},
        "allowed_token_ids contains out-of-vocab token id!",
    ),
    Row("allowed_token_ids []", COMPLETIONS, {"allowed_token_ids": []}, "allowed_token_ids is not None and empty!"),
    Row("suffix", COMPLETIONS, {"suffix": "x"}, "suffix is not currently supported"),
    Row(
        "priority 1 under fcfs",
        COMPLETIONS,
        {"priority": 1},
        "Got priority 1 but Priority scheduling is not enabled.",
    ),
    Row(
        "truncate_prompt_tokens 0",
        COMPLETIONS,
        {"truncate_prompt_tokens": 0},
        "'greater_than_equal', 'loc': 'body.truncate_prompt_tokens",
        SHAPE,
    ),
    Row("truncate_prompt_tokens -1", COMPLETIONS, {"truncate_prompt_tokens": -1, "prompt": [5] * 700}, None),
    Row(
        "two of guided_json, guided_regex and guided_choice",
        COMPLETIONS,
        {"guided_regex": "a", "guided_choice": ["a"]},
        "You can only use one kind of guided decoding ('guided_json', 'guided_regex' or 'guided_choice').",
        BAD,
    ),
    Row(
        "structured_outputs with two",
        COMPLETIONS,
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        "You can only use one kind of structured outputs constraint but multiple are specified: "
        "{'regex': 'a', 'choice': ['a']}",
    ),
    Row(
        "structured_outputs with none",
        COMPLETIONS,
        {"structured_outputs": {}},
        "You must use one kind of structured outputs constraint but none are specified: {",
    ),
    Row(
        "unknown guided backend",
        COMPLETIONS,
        {"guided_regex": "a", "guided_decoding_backend": "zzz"},
        "Unknown guided decoding backend 'zzz'. Must be one of ",
    ),
    Row("guided_regex (", COMPLETIONS, {"guided_regex": "("}, "regex"),
    Row("guided_grammar broken", CHAT, {"guided_grammar": "root ::= ("}, "grammar"),
    Row(
        "guided_json not JSON",
        COMPLETIONS,
        {"guided_json": '{"type": x'},
        "Expecting value: line 1 column 10 (char 9)",
    ),
    Row(
        "response_format type xml",
        COMPLETIONS,
        {"response_format": {"type": "xml"}},
        "Input should be 'text', 'json_object' or 'json_schema'",
        SHAPE,
    ),
    Row(
        "response_format type xml, chat",
        CHAT,
        {"response_format": {"type": "xml"}},
        "Input should be 'text', 'json_object' or 'json_schema'",
        SHAPE,
    ),
    Row(
        "response_format json_schema without schema",
        CHAT,
        {"response_format": {"type": "json_schema"}},
        "When response_format type is 'json_schema', the 'json_schema' field must be provided.",
    ),
    Row(
        "stream_options without stream",
        COMPLETIONS,
        {"stream_options": {"include_usage": True}},
        "Stream options can only be defined when `stream=True`.",
        BAD,
        stream=False,
    ),
    Row("stream_options unknown key", COMPLETIONS, {"stream_options": {"zzz": 1}}, None, stream=True),
    Row(
        "messages []",
        CHAT,
        {"messages": []},
        "Cannot apply chat template to an empty conversation. Provide at least one message.",
    ),
    Row("messages is a string", CHAT, {"messages": "hi"}, "'type': 'list_type'", SHAPE),
    Row("messages without role", CHAT, {"messages": [{"content": "x"}]}, "'type': 'missing'", SHAPE),
    Row("role zzz", CHAT, {"messages": [{"role": "zzz", "content": "x"}]}, None),
    Row(
        "content part type zzz",
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "zzz"}]}]},
        "Unknown part type: zzz",
    ),
    Row("image on a text model", CHAT, {"messages": image("http://x/y.png")}, "tiny is not a multimodal model"),
    Row(
        "continue_final_message and add_generation_prompt",
        CHAT,
        {"continue_final_message": True, "add_generation_prompt": True},
        "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
        BAD,
    ),
    Row(
        "tools without --enable-auto-tool-choice",
        CHAT,
        {"tools": [TOOL]},
        '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
    ),
    Row("tool_choice none with tools", CHAT, {"tools": [TOOL], "tool_choice": "none"}, None),
    Row(
        "tool_choice required without a parser",
        CHAT,
        {"tools": [TOOL], "tool_choice": "required"},
        'tool_choice="required" requires --tool-call-parser to be set',
    ),
    Row("tool_choice named without a parser", CHAT, {"tools": [TOOL], "tool_choice": NAMED}, None),
    Row(
        "tool_choice without tools",
        CHAT,
        {"tool_choice": NAMED},
        "When using `tool_choice`, `tools` must be set.",
        BAD,
    ),
    Row(
        "tool_choice auto without tools",
        CHAT,
        {"tool_choice": "auto"},
        "When using `tool_choice`, `tools` must be set.",
        BAD,
    ),
    Row(
        "named tool not in tools",
        CHAT,
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        "The tool specified in `tool_choice` does not match any of the specified `tools`",
        BAD,
    ),
    Row(
        "named tool without name",
        CHAT,
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {}}},
        "Incorrectly formatted `tool_choice`. Should be like "
        '`{"type": "function", "function": {"name": "my_function"}}`',
        BAD,
    ),
    Row(
        "named tool and guided decoding",
        CHAT,
        {"tools": [TOOL], "tool_choice": NAMED, "guided_regex": "a"},
        "You can only either use guided decoding or tools, not both.",
        BAD,
    ),
    Row("tools []", CHAT, {"tools": []}, None),
    Row(
        "tool with wrong parameters",
        CHAT,
        {"tools": [{"type": "function", "function": {"name": "find", "parameters": "x"}}], "tool_choice": "none"},
        "The `parameters` of the tool 'find' must be a JSON schema",
        BAD,
    ),
    Row(
        "chat_template in request",
        CHAT,
        {"chat_template": "{{ 1 }}"},
        "Chat template is passed with request, but --trust-request-chat-template is not set.",
    ),
    # rules without rows in the contract's table
    Row("best_of 3, n 3", COMPLETIONS, {"best_of": 3, "n": 3}, "n must be 1 when using greedy sampling, got 3."),
    Row(
        "best_of 2, n 1, stream, chat",
        CHAT,
        {"best_of": 2, "temperature": 1},
        "best_of must equal n to use output_kind=DELTA",
        stream=True,
    ),
    Row("P = L", COMPLETIONS, {"prompt": [5] * 512}, f"{LIMIT}you requested 512 tokens in the messages"),
    Row("P+M > L, chat", CHAT, {"max_tokens": 510}, "Please reduce the length of the messages or completion."),
    Row(
        "P > L, chat",
        CHAT,
        {"messages": [{"role": "user", "content": "one two " * 300}]},
        "Please reduce the length of the messages",
    ),
    Row("beams, temperature 1", CHAT, BEAMS | {"temperature": 1}, "temperature must be 0 when using beam search."),
    Row("beams, top_p 0.9", COMPLETIONS, BEAMS | {"top_p": 0.9}, "top_p must be 1 when using beam search."),
    Row("beams, top_k 3", COMPLETIONS, BEAMS | {"top_k": 3}, "top_k must be -1 when using beam search."),
    Row("beams, logprobs", COMPLETIONS, BEAMS | {"logprobs": 1}, "logprobs cannot be used with beam search."),
    Row("beams, logprobs, chat", CHAT, BEAMS | {"logprobs": True}, "logprobs cannot be used with beam search."),
    Row(
        "one beam, early_stopping",
        COMPLETIONS,
        {"use_beam_search": True, "early_stopping": True},
        "best_of must be greater than 1 when using beam search.",
    ),
    Row(
        "beams, early_stopping x",
        COMPLETIONS,
        BEAMS | {"early_stopping": "x"},
        "early_stopping must be True, False, or 'never'",
    ),
    Row(
        "65 beams",
        COMPLETIONS,
        BEAMS | {"n": 65},
        "a beam search of width 65 needs more sequences than --max-num-seqs (64) allows to run",
    ),
    Row(
        "early_stopping without beams",
        CHAT,
        {"early_stopping": True},
        "early_stopping is not effective and must be False when not using beam search.",
    ),
    Row(
        "length_penalty without beams",
        COMPLETIONS,
        {"length_penalty": 2},
        "length_penalty is not effective and must be the default value of 1.0",
    ),
    Row(
        "a template among its variables",
        CHAT,
        {"chat_template_kwargs": {"tokenize": True, "x": 1, "chat_template": "{{ messages }}"}},
        "chat_template_kwargs must not contain chat_template, tokenize",
    ),
    Row(
        "cache_salt empty", CHAT, {"cache_salt": ""}, "Parameter 'cache_salt' must be a non-empty string if provided."
    ),
    Row(
        "echo, logprobs and prompt_logprobs -1",
        COMPLETIONS,
        {"echo": True, "logprobs": 1, "prompt_logprobs": -1},
        "`prompt_logprobs` must be a positive value.",
        BAD,
    ),
]
assert len({row.name for row in ROWS}) == len(ROWS)


@pytest.fixture(scope="module")
def asked(openai_server: Server) -> Iterator[httpx.Client]:
    """A client of the server, which must be well and hold nothing when all rows are done."""
    with httpx.Client(base_url=openai_server.url, timeout=60) as http:
        yield http
        assert http.get("/health").status_code == 200
        assert http.post(COMPLETIONS, json=BASES[COMPLETIONS]).status_code == 200
        assert wait_until(lambda: is_idle(http))


def check_error(response: httpx.Response, status: int, kind: str, text: str) -> None:
    """Checks that the error has both forms: today's nested one and the flat one of 0.6.3."""
    body = response.json()
    assert (response.status_code, body["code"], body["type"]) == (status, status, kind), body
    assert response.headers["content-type"] == "application/json"
    # quotes in a finding of pydantic's are escaped, for it is written as Python writes a string
    assert text in body["message"].replace("\\'", "'"), body
    assert body["object"] == "error"
    assert body["error"] == {key: body[key] for key in ("message", "type", "param", "code")}


CASES = [
    pytest.param(row, stream, id=f"{row.name}-{'stream' if stream else 'whole'}")
    for row in ROWS
    for stream in (False, True)
    if row.stream in (None, stream)
]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": [5] * 512}, "input_tokens"),
        (COMPLETIONS, {"prompt": "a" * 20_000}, "input_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "a b " * 400}]}, "input_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 20_000}]}, "input_tokens"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a b " * 400}]}, "input_tokens"),
        ("/v1/responses", {"input": "a b " * 400}, "input_tokens"),
        (COMPLETIONS, {"prompt": [5] * 500, "max_tokens": 13}, "max_tokens"),
    ],
)
def test_the_field_of_a_prompt_that_is_too_long(
    asked: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    response = asked.post(path, json={"model": "tiny", "max_tokens": 4} | body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(("row", "stream"), CASES)
def test_row(asked: httpx.Client, row: Row, stream: bool) -> None:
    fields = BASES[row.path] | row.fields | {"stream": stream}
    # Python writes NaN, as its clients do
    content = json.dumps({name: value for name, value in fields.items() if value is not DROP})
    response = asked.post(row.path, content=content, headers={"content-type": "application/json"})
    if row.text is not None:
        check_error(response, row.status, row.type, row.text)
        return
    assert response.status_code == 200, response.text
    if stream:
        assert '"error"' not in response.text
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        assert response.json()["choices"][0]["finish_reason"] in ("stop", "length")


TURN = [{"role": "user", "content": "Hello!"}]
TOKENS: dict[str, tuple[str, dict[str, Any], int, str | None]] = {
    "neither prompt nor messages": (
        "/tokenize",
        {},
        400,
        "2 validation errors:\n  {'type': 'missing', 'loc': 'body.prompt', 'msg': 'Field required', 'input': {}}\n"
        "  {'type': 'missing', 'loc': 'body.messages'",
    ),
    "both prompt and messages": ("/tokenize", {"prompt": "x", "messages": TURN}, 400, "Exactly one of `prompt`"),
    "prompt of ids": ("/tokenize", {"prompt": [1, 2]}, 400, "Input should be a valid string"),
    "tool without a name": ("/tokenize", {"messages": TURN, "tools": [{"type": "function"}]}, 400, "Each of `tools`"),
    "no messages": ("/tokenize", {"messages": []}, 400, "Cannot apply chat template to an empty conversation."),
    "two endings": (
        "/tokenize",
        {"messages": TURN, "continue_final_message": True, "add_generation_prompt": True},
        400,
        "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
    ),
    "chat_template": ("/tokenize", {"messages": TURN, "chat_template": "x"}, 400, "--trust-request-chat-template"),
    "unknown model": ("/tokenize", {"model": "nope", "prompt": "x"}, 404, "The model `nope` does not exist."),
    "longer than the model": ("/tokenize", {"prompt": "a" * 20_000}, 200, None),
    "empty prompt": ("/tokenize", {"prompt": ""}, 200, None),
    "id below 0": ("/detokenize", {"tokens": [-1]}, 400, "Input should be greater than or equal to 0"),
    "no tokens": ("/detokenize", {}, 400, "'type': 'missing'"),
    "id beyond the vocabulary": ("/detokenize", {"tokens": [99999]}, 200, None),
}


@pytest.mark.parametrize("name", TOKENS)
def test_tokens(asked: httpx.Client, name: str) -> None:
    path, fields, status, text = TOKENS[name]
    response = asked.post(path, json=fields)
    if text is None:
        assert response.status_code == status, response.text
        answer = response.json()
        assert answer.get("prompt", "") == ""
        assert answer.get("count", 0) == len(answer.get("tokens", ""))
    else:
        kind = "NotFoundError" if status == 404 else response.json()["type"]
        check_error(response, status, kind, text)


BODIES = {
    "invalid JSON": (b"{x", "application/json", SHAPE, "'JSON decode error'"),
    "empty body": (b"", "application/json", SHAPE, "'msg': 'Field required'"),
    "JSON array body": (
        b'[{"prompt": "x"}]',
        "application/json",
        SHAPE,
        "valid dictionary or object to extract fields",
    ),
    "JSON string body": (b'"x"', "application/json", SHAPE, "valid dictionary or object to extract fields"),
    "no content-type": (
        b'{"prompt": "x"}',
        None,
        SHAPE,
        "Unsupported Media Type: Only 'application/json' is allowed",
    ),
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("name", BODIES)
def test_body(asked: httpx.Client, name: str, path: str) -> None:
    content, media_type, kind, text = BODIES[name]
    response = asked.post(path, content=content, headers={"content-type": media_type} if media_type else {})
    check_error(response, 400, kind, text)
