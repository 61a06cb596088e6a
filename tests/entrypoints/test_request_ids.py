"""Names that clients give their requests, and responses that belong to the key that made them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ascend_vllm.entrypoints.http.request_ids import MAX_ID_LENGTH
from tests.entrypoints.conftest import LONG_TOKENS
from tests.scripted_engine import PatientEngine, client_of
from tests.server import Server, is_idle, wait_until

HELLO = [{"role": "user", "content": "Hello!"}]
# path → a body for it
NAMED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": ["a", "b", "c"], "n": 2, "temperature": 1},
    "/v1/chat/completions": {"messages": HELLO, "n": 2, "temperature": 1},
    "/v1/chat/completions/batch": {"messages": [HELLO, HELLO]},
    "/v1/responses": {"input": "Hello!", "store": False},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", NAMED)
async def test_a_name_is_one_living_requests(path: str, stream: bool) -> None:
    """Two running requests once had the same id, and could not be distinguished."""
    if stream and path.endswith("batch"):
        pytest.skip("a batch has no stream")
    engine = PatientEngine(["a", "b"])
    body = NAMED[path] | {"model": "tiny", "request_id": "mine"}
    async with client_of(engine) as client:
        first = asyncio.create_task(client.post(path, json=body | ({"stream": True} if stream else {})))
        await engine.reached_end.acquire()
        for other, fields in NAMED.items():
            refused = await client.post(other, json=fields | {"model": "tiny", "request_id": "mine"})
            assert refused.status_code == 409, refused.text
            error = refused.json()["error"]
            assert error["message"].startswith("A request with the id 'mine' is running already.")
            assert (error["type"], error["param"], error["code"]) == ("ConflictError", "request_id", 409)
        engine.may_end.set()
        assert (await first).status_code == 200
        # it is free again
        assert (await client.post(path, json=body)).status_code == 200


async def test_a_name_is_free_again_when_its_request_failed() -> None:
    class FailingEngine(PatientEngine):
        async def generate(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("broken")
            yield

    async with client_of(FailingEngine([])) as client:
        for path, fields in NAMED.items():
            for _ in range(2):
                answer = await client.post(path, json=fields | {"model": "tiny", "request_id": "mine"})
                assert answer.status_code == 500
                # refused, after it has taken its name
                wrong = fields | {"model": "tiny", "request_id": "mine", "top_p": 7}
                assert (await client.post(path, json=wrong)).status_code == 400


async def test_a_header_may_come_again() -> None:
    """Proxies repeat it when they retry, and services forward it to all their backends."""
    engine = PatientEngine(["a", "b"])
    async with client_of(engine) as client:
        asked = [
            asyncio.create_task(client.post(path, json=NAMED[path], headers={"X-Request-Id": "same"}))
            for path in ("/v1/completions", "/v1/completions", "/v1/chat/completions")
        ]
        for _ in range(7):
            await engine.reached_end.acquire()
        engine.may_end.set()
        ids = [(await one).json()["id"] for one in asked]
    assert ids == ["cmpl-same", "cmpl-same", "chatcmpl-same"]


@pytest.mark.parametrize(
    ("name", "finding"),
    [
        ("x" * (MAX_ID_LENGTH + 1), "must have at most 256 characters, but has 257"),
        ("a\nb", "must consist of printable characters"),
        ("a\u202eb", "must consist of printable characters"),
    ],
)
async def test_what_a_name_may_be(name: str, finding: str) -> None:
    """Names come back in answers, in headers and in the log."""
    engine = PatientEngine(["a"])
    engine.may_end.set()
    async with client_of(engine) as client:
        for path, fields in NAMED.items():
            answer = await client.post(path, json=fields | {"request_id": name})
            assert answer.status_code == 400
            assert finding in answer.json()["error"]["message"]
            assert (await client.post(path, json=fields | {"request_id": "é" * MAX_ID_LENGTH})).status_code == 200
            if name.isascii() and "\n" not in name and path != "/v1/responses":
                headers = {"X-Request-Id": name}
                answer = await client.post(path, json=fields, headers=headers)
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Request-Id")
                assert finding in answer.json()["error"]["message"]


# ---- a server with two keys ----------------------------------------------------------------------------------

ENDLESS = {"model": "tiny", "max_tokens": LONG_TOKENS, "ignore_eos": True, "prompt": "Tick"}
ENDLESS_RESPONSE = {"model": "tiny", "max_output_tokens": LONG_TOKENS, "ignore_eos": True, "input": "Tick"}
SHORT: dict[str, Any] = {"model": "tiny", "prompt": "Hello!", "max_tokens": 2}
RESPONSE: dict[str, Any] = {"model": "tiny", "input": "Hello!", "max_output_tokens": 2}


@pytest.fixture
def callers(keyed_server: Server) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Two clients of one server, each with a key of its own."""
    one, two = (
        httpx.Client(base_url=keyed_server.url, timeout=60, headers={"Authorization": f"Bearer {key}"})
        for key in ("first", "second")
    )
    with one, two:
        yield one, two


def test_a_name_is_free_again_when_its_client_goes(callers: tuple[httpx.Client, httpx.Client]) -> None:
    one, two = callers
    named = {"request_id": "mine"}
    with one.stream("POST", "/v1/completions", json=ENDLESS | named | {"stream": True}) as stream:
        # kept: the client would leave with the iterator
        lines = stream.iter_lines()
        next(lines)
        assert one.post("/v1/completions", json=SHORT | named).status_code == 409
        # another caller's names are its own
        assert two.post("/v1/completions", json=SHORT | named).status_code == 200
        assert one.post("/v1/completions", json=SHORT).status_code == 200
    assert wait_until(lambda: one.post("/v1/completions", json=SHORT | named).status_code == 200)
    assert wait_until(lambda: is_idle(one))


def test_a_name_lives_as_long_as_a_response_in_the_background(callers: tuple[httpx.Client, httpx.Client]) -> None:
    one, _ = callers
    named = {"request_id": "resp_mine"}
    begun = one.post("/v1/responses", json=ENDLESS_RESPONSE | named | {"background": True})
    assert begun.json()["id"] == "resp_mine"
    assert one.post("/v1/responses", json=RESPONSE | named).status_code == 409
    assert one.post("/v1/completions", json=SHORT | named).status_code == 409
    assert one.post("/v1/responses/resp_mine/cancel").json()["status"] == "cancelled"
    assert one.post("/v1/completions", json=SHORT | named).status_code == 200
    # as long as it can be asked for, no other response has its id
    again = one.post("/v1/responses", json=RESPONSE | named)
    assert (again.status_code, again.json()["error"]["message"]) == (
        400,
        "There is a response with the id 'resp_mine' already.",
    )
    assert wait_until(lambda: is_idle(one))


def test_a_response_belongs_to_the_key_that_made_it(callers: tuple[httpx.Client, httpx.Client]) -> None:
    """Any caller who knew the id of a response could once read it, cancel it and continue its conversation."""
    one, two = callers
    ended = one.post("/v1/responses", json=RESPONSE).json()["id"]
    background = {"background": True, "stream": True}
    with one.stream("POST", "/v1/responses", json=ENDLESS_RESPONSE | background) as stream:
        event = next(line for line in stream.iter_lines() if line.startswith("data: "))
        running_id = event.partition('"id":"')[2].partition('"')[0]
    for response_id in (ended, running_id):
        path = f"/v1/responses/{response_id}"
        for answer in (
            two.get(path),
            two.get(path, params={"stream": True}),
            two.post(f"{path}/cancel"),
            two.post("/v1/responses", json=RESPONSE | {"previous_response_id": response_id}),
        ):
            assert answer.status_code == 404
            assert answer.json()["error"]["message"] == f"Response with id '{response_id}' not found."
        # nor does it keep others from the id
        assert two.post("/v1/responses", json=RESPONSE | {"request_id": response_id}).json()["id"] == response_id
    assert one.get(f"/v1/responses/{ended}").json()["id"] == ended
    next_one = one.post("/v1/responses", json=RESPONSE | {"previous_response_id": ended})
    assert next_one.json()["previous_response_id"] == ended
    assert one.get(f"/v1/responses/{running_id}").json()["status"] in ("queued", "in_progress")
    assert one.post(f"/v1/responses/{running_id}/cancel").json()["status"] == "cancelled"
    assert wait_until(lambda: is_idle(one))


def test_responses_in_the_background_are_limited(callers: tuple[httpx.Client, httpx.Client]) -> None:
    """They were always kept, and as many as anybody liked to begin."""
    one, two = callers
    begun = []
    for _ in range(200):
        answer = one.post("/v1/responses", json=ENDLESS_RESPONSE | {"background": True})
        if answer.status_code != 200:
            break
        begun.append(answer.json()["id"])
    assert len(begun) == 128
    assert answer.status_code == 503
    error = answer.json()["error"]
    assert error["message"].startswith("At most 128 responses can be generated in the background at a time.")
    assert (error["type"], error["param"]) == ("ServiceUnavailableError", "background")
    # the other caller has room of its own
    theirs = two.post("/v1/responses", json=ENDLESS_RESPONSE | {"background": True})
    assert theirs.status_code == 200
    assert two.post(f"/v1/responses/{theirs.json()['id']}/cancel").status_code == 200
    for response_id in begun:
        assert one.post(f"/v1/responses/{response_id}/cancel").status_code == 200
    assert one.post("/v1/responses", json=RESPONSE | {"background": True}).status_code == 200
    assert wait_until(lambda: is_idle(one))
