"""Sends a request of the tables; returns the parts of the answer to compare."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.compat.requests_common import Case

# headers to compare; the others depend on connections and dates
_HEADERS = ("content-type", "www-authenticate", "allow", "access-control-allow-origin", "location", "x-request-id")


def exchange(client: httpx.Client, case: Case) -> dict[str, Any]:
    """Send one request.

    Returns:
        ``status``, ``headers``, and one of ``body`` (JSON), ``text``, or ``events``: a list of ``[name, data]`` where
        name is null in streams without event names and data is JSON or the text of ``[DONE]``.
    """
    content: str | bytes | None = case.raw
    if case.raw is None and case.body is not None:
        content = json.dumps(case.body).encode()
    headers = dict(case.headers)
    if content is not None:
        headers.setdefault("content-type", "application/json")
    response = client.request(case.method, case.path, content=content, headers=headers)
    kept = {name: response.headers[name] for name in _HEADERS if name in response.headers}
    answer: dict[str, Any] = {"status": response.status_code, "headers": kept}
    content_type = response.headers.get("content-type", "")
    if content_type.startswith("text/event-stream"):
        answer["events"] = parse_events(response.text)
    elif content_type.startswith("application/json") and response.content:
        answer["body"] = response.json()
    else:
        answer["text"] = response.text
    return answer


def parse_events(text: str) -> list[list[Any]]:
    """The events of a stream as ``[name or null, data]``."""
    events = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "data" in fields:
            data = fields["data"]
            events.append([fields.get("event"), data if data == "[DONE]" else json.loads(data)])
    return events
