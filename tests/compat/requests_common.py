"""One request of the tables in this room, and the servers that they are sent to."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Case:
    """One request.

    Attributes:
        name: unique in its table.
        path: where it goes.
        body: sent as JSON; None: no body, unless there is `raw`.
        method: of HTTP.
        raw: sent as it is instead of `body`.
        headers: beside httpx's own; "content-type" is application/json unless it is given.
        sampled: its tokens are drawn, so that only the shape of the answer can be compared.
    """

    name: str
    path: str
    body: Any = None
    method: str = "POST"
    raw: str | None = None
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    sampled: bool = False

    def to_json(self) -> dict[str, Any]:
        """As it is kept beside its answer: what differs from the defaults."""
        fields = {field.name: field for field in dataclasses.fields(self)}
        values = {name: getattr(self, name) for name in fields if name != "name"}
        usual = {"body": None, "method": "POST", "raw": None, "headers": {}, "sampled": False}
        return {name: value for name, value in values.items() if name == "path" or value != usual[name]}


def completion(name: str, prompt: Any = "One two three", sampled: bool = False, **fields: Any) -> Case:
    """A greedy completion of up to eight tokens; a field that is ... is left out."""
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 8, **fields}
    return Case(f"completion-{name}", "/v1/completions", _given(body), sampled=sampled)


def chat(name: str, content: Any = "Hello!", sampled: bool = False, **fields: Any) -> Case:
    """A greedy chat answer of up to 24 tokens; `messages` replaces the one of the user."""
    messages = [{"role": "user", "content": content}]
    body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 24, **fields}
    return Case(f"chat-{name}", "/v1/chat/completions", _given(body), sampled=sampled)


def _given(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not ...}
