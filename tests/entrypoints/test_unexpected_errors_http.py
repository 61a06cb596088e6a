"""Unexpected exceptions become error responses, and the connection stays open."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator

import httpx
import pytest
from fastapi import FastAPI

from ascend_vllm.entrypoints.http.errors import AnswerErrorsMiddleware, error_response
from tests.entrypoints.conftest import KEY
from tests.server import Server

BODY = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 1})
HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}


@pytest.fixture
def connection(guarded_server: Server) -> Iterator[http.client.HTTPConnection]:
    """One connection, which is not opened again."""
    connection = http.client.HTTPConnection("127.0.0.1", guarded_server.port, timeout=30)
    connection.connect()
    connection.auto_open = False
    yield connection
    connection.close()


def complete(connection: http.client.HTTPConnection, **headers: str) -> tuple[int, str]:
    connection.request("POST", "/v1/completions", BODY, HEADERS | headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


@pytest.mark.parametrize("place", ["middleware", "route"])
def test_the_answer_is_500_and_the_connection_goes_on(
    place: str, connection: http.client.HTTPConnection, guarded_server: Server
) -> None:
    for _ in range(3):
        status, body = complete(connection, **{"X-Fail": place, "Origin": "http://elsewhere"})
        assert status == 500
        error = json.loads(body)["error"]
        assert (error["message"], error["type"], error["code"]) == (
            "Internal server error",
            "InternalServerError",
            500,
        )
        assert "secret" not in body
        assert complete(connection)[0] == 200
    assert f"a secret of the {place}" in guarded_server.log


def test_what_stands_before_the_middleware_still_holds(connection: http.client.HTTPConnection) -> None:
    assert complete(connection, **{"X-Fail": "middleware", "Authorization": "Bearer none"})[0] == 401


def test_an_answer_that_breaks_off_ends_the_connection(guarded_server: Server) -> None:
    with httpx.Client(base_url=guarded_server.url, headers=HEADERS, timeout=60) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            client.post("/v1/completions", content=BODY, headers={"X-Fail": "answer"})
        assert client.post("/v1/completions", content=BODY).status_code == 200


async def test_what_is_no_request_is_let_through() -> None:
    """An application that cannot start says so to its server."""

    async def broken(*_: object) -> None:
        raise LookupError

    guarded = AnswerErrorsMiddleware(broken, error_response)
    with pytest.raises(LookupError):
        await guarded({"type": "lifespan"}, FastAPI(), FastAPI())  # type: ignore[arg-type]
