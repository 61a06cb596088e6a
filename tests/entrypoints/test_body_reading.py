"""How long bodies are read: in parts, one at a time, outside the event loop, and no further than necessary."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from starlette.requests import Request
from starlette.types import Message

from ascend_vllm.entrypoints.http import validation
from ascend_vllm.entrypoints.http.errors import BodyError, shown_params
from ascend_vllm.entrypoints.http.streaming import ClientDisconnectedError
from ascend_vllm.entrypoints.http.validation import check_num_values, decode_json, read_by
from ascend_vllm.entrypoints.openai.protocol_completion import CompletionRequest
from ascend_vllm.errors import RequestError
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.structured_outputs import StructuredOutputsParams

LONG = b"x" * (2 << 20)


class Client:
    """A client that sends a body and may disconnect.

    Attributes:
        request: of the client.
        leave: set when it goes.
    """

    def __init__(self, body: bytes) -> None:
        self.request = Request({"type": "http", "method": "POST", "headers": []}, self._receive)
        self.leave = asyncio.Event()
        self._messages: list[Message] = [{"type": "http.request", "body": body}]

    async def _receive(self) -> Message:
        if self._messages:
            return self._messages.pop()
        await self.leave.wait()
        return {"type": "http.disconnect"}


def counted(value: Any) -> dict[str, int]:
    """What a value of JSON has, one by one; a text with a colon or the like counts once."""
    counts = dict.fromkeys(("lists and objects", "members of objects", "texts", "values"), 0)
    if isinstance(value, str):
        counts["texts"] = 1
    inner: list[Any] = []
    if isinstance(value, list | dict):
        counts["lists and objects"], counts["values"] = 1, max(len(value), 1)
        inner = value if isinstance(value, list) else [*value, *value.values()]
        counts["members of objects"] = len(value) if isinstance(value, dict) else 0
    for one in map(counted, inner):
        counts = {name: count + one[name] for name, count in counts.items()}
    return counts


@pytest.mark.parametrize("part", [1, 2, 3, 7, 64])
def test_values_are_counted_wherever_a_part_ends(monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    """Between a backslash and its quotation mark, within a text, behind one."""
    text = '\\\\"[{:,\\\\\\" \\ "'
    value = {"a": [1, 2, [], {}, text], text: {"b": text * 3, "\\": ["\\\\", '"', "", 5]}, "c": {"d": [[["[,"]]]}}
    body = json.dumps(value).encode()
    expected = counted(value)
    monkeypatch.setattr(validation, "_PART", part)
    monkeypatch.setattr(validation, "_MOST", expected)
    check_num_values(body)
    for name, count in expected.items():
        monkeypatch.setattr(validation, "_MOST", expected | {name: count - 1})
        with pytest.raises(BodyError, match=f"too many {name}; it may have at most {count - 1}"):
            check_num_values(body)


@pytest.mark.parametrize("body", [b"[" * 10_000_000, b'{"x":1,' * 2_000_000, b'"",' * 4_000_000])
def test_a_body_of_too_many_values_is_read_no_further(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    """Ten megabytes of them took hundreds of milliseconds, and the interpreter with them."""
    parts = validation._parts
    num_read = 0

    def counting(body: bytes) -> Iterator[bytes]:
        nonlocal num_read
        for part in parts(body):
            num_read += len(part)
            yield part

    monkeypatch.setattr(validation, "_parts", counting)
    with pytest.raises(BodyError, match="too many"):
        check_num_values(body)
    assert num_read < 1_000_000


@pytest.mark.parametrize(
    ("fields", "is_refused"),
    [
        ({"messages": [{"role": "user", "content": "a"}] * 40_000}, True),
        ({"tags": [{"begin": "a", "schema": {"type": "object"}, "end": "b"}] * 20_000}, True),
        ({"logit_bias": {str(number): 1 for number in range(100_000)}}, True),
        ({"stop": ["a"] * 1_000_000}, True),
        ({"prompt": [[5]] * 100_000}, True),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}] * 8000}, False),
        ({"properties": {str(number): {"type": "string", "enum": ["a"]} for number in range(5000)}}, False),
        ({"logit_bias": {str(number): 1 for number in range(16_384)}}, False),
        ({"prompt": ["a"] * 65_536}, False),
        ({"prompt": [[5]] * 65_536}, False),
        ({"prompt": [5] * 1_000_000}, False),
    ],
)
def test_what_would_be_refused_by_its_entries_is_not_even_decoded(fields: dict[str, Any], is_refused: bool) -> None:
    body = json.dumps(fields).encode()
    if not is_refused:
        check_num_values(body)
        return
    with pytest.raises(BodyError, match="Send several requests"):
        check_num_values(body)


async def test_long_bodies_are_read_one_at_a_time_and_those_of_clients_that_left_not_at_all() -> None:
    clients = [Client(LONG) for _ in range(4)]
    begun, go_on = threading.Event(), threading.Event()
    read: list[int] = []
    running = 0
    most = 0

    def hold(_body: bytes, number: int) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        begun.set()
        go_on.wait(60)
        running -= 1
        read.append(number)
        return threading.current_thread().name

    waiting = [asyncio.ensure_future(read_by(client.request, hold, number)) for number, client in enumerate(clients)]
    assert await asyncio.to_thread(begun.wait, 60)
    clients[2].leave.set()
    with pytest.raises(ClientDisconnectedError):
        await waiting[2]
    # one of medium length does not wait for them, a short one for nobody
    medium = Client(b"x" * (1 << 20))
    assert await read_by(medium.request, lambda _body: threading.current_thread().name) == "medium-bodies_0"
    assert await read_by(Client(b"x").request, lambda _body: threading.current_thread()) is threading.main_thread()
    go_on.set()
    names = await asyncio.gather(waiting[0], waiting[1], waiting[3])
    assert set(names) == {"long-bodies_0"}
    assert (most, read) == (1, [0, 1, 3])


@pytest.mark.parametrize(
    "text",
    [
        '{"prompt": [1, -2, 3.5, 4e5,\n 678901234567], "a": [1, [2, 3], "4, 5, 6"], "b": {"c": [1, 2, 3, 4]}}',
        '{"a": [1], "a": [22222222222222222222222222222222222, 1]}',
        '{"a": [              ], "b": [], "c": [1   ,2], "d": [     1     ,2], "e": null, "f": "[1,2,3,4,5,6,7,8]"}',
        "[1, 2, 3, 4, 5, 6, 7, 8]",
        '"text"',
        "17",
    ],
)
def test_json_in_parts_says_what_it_says_at_once(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    for part in range(1, 40):
        monkeypatch.setattr(validation, "_PART", part)
        assert validation.decode_in_parts(text.encode()) == json.loads(text)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": [1,,2]}',
        '{"a": [1, 2 3, 4]}',
        '{"a": [01, 2, 3]}',
        '{"a": [1, 2, 3}',
        '{"a": [1, 2, 3,]}',
        '{"a": [1, 2, 3, NaN]}',
        '{"a": 1, "b": "\\ud800"}',
        '{"a": [1, 1e999, 2]}',
    ],
)
def test_json_in_parts_is_as_wrong_as_at_once(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    with pytest.raises(msgspec.DecodeError) as expected:
        msgspec.json.decode(text)
    for part in range(1, 20):
        monkeypatch.setattr(validation, "_PART", part)
        with pytest.raises(msgspec.DecodeError, match=re.escape(str(expected.value))):
            validation.decode_in_parts(text.encode())


def test_long_lists_of_numbers_are_decoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding a million ids at once blocked the interpreter for tens of milliseconds."""
    sizes: list[int] = []
    decode = msgspec.json.decode

    def watched(data: bytes) -> Any:
        sizes.append(len(memoryview(data)))
        return decode(data)

    ids = list(range(1_000_000))
    body = json.dumps({"prompt": ids, "model": "m"}).encode()
    monkeypatch.setattr(msgspec.json, "decode", watched)
    assert decode_json(body) == {"prompt": ids, "model": "m"}
    assert sum(sizes) > 6_000_000
    assert max(sizes) < 100_000


def test_long_bodies_are_held_against_the_standard() -> None:
    """Reading them once more by Python's json, which takes NaN, held the interpreter for longer than all else."""
    padding = b'{"a": "' + LONG + b'", '
    for end in (b'"temperature": NaN}', b"b"):
        with pytest.raises(BodyError, match="JSON decode error") as caught:
            decode_json(padding + end)
        assert caught.value.param == f"body.{len(padding) + (end.find(b'N') if b'N' in end else 0)}"
    for body in (padding + b'"b": "\xff"}', padding[:-3], padding + b'"b": "\\ud800"}'):
        with pytest.raises(BodyError, match=r"cannot be decoded|JSON decode error"):
            decode_json(body)


LARGE = {"type": "object", "properties": {f"property {number}": {"type": "string"} for number in range(8000)}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": LARGE}, "guided_json"),
        ({"guided_json": json.dumps(LARGE)}, "guided_json"),
        ({"structured_outputs": {"json": LARGE}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a" * 300_000}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": LARGE}}}, "response_format"),
    ],
)
def test_constraints_that_are_too_large_do_not_come_to_the_engine(fields: dict[str, Any], param: str) -> None:
    """They were logged whole, and sent to the engine core, which refused them between two steps."""
    request = CompletionRequest.model_validate({"prompt": "a"} | fields)
    with pytest.raises(RequestError, match=r"is too large: \d+ \w+, the limit is 262144 bytes") as caught:
        request.sampling_params({}, 1, False)
    assert caught.value.param == param


def test_parameters_in_the_log_are_cut() -> None:
    """Half a million ids were written out, and all but 8192 characters thrown away."""
    short = SamplingParams(stop=["a"], logit_bias={5: 1.0}, structured_outputs=StructuredOutputsParams(regex="a+"))
    assert shown_params(short) == repr(short)
    long = SamplingParams(
        allowed_token_ids=[12_345] * 500_000, structured_outputs=StructuredOutputsParams(json=LARGE)
    )
    text = shown_params(long)
    assert len(text) < 10_000
    assert "allowed_token_ids=[12345, 12345" in text and "json={'type': 'object'" in text
