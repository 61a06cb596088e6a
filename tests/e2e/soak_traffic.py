"""Traffic for the soak test: clients that use every feature of a server, in a seeded random order."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import random
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import httpx

from tests.fuzz.hostile_requests import ENDPOINTS, GENERATE_ENDPOINTS, POOLING_ENDPOINTS, hostile_request
from tests.fuzz.http_wire import Connection
from tests.server import Server

MODEL = "tiny"
# whatever is not answered by then never is
LONGEST_S = 120.0
_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "one", "two", "three", "four", "five")
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
}
_FUNCTION = {"name": "find", "description": "Finds things.", "parameters": _SCHEMA}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_CALL = r'<tool_call>\n\{"name": "find", "arguments": \{"name": "[a-z]{1,40}"\}\}\n</tool_call>'
_CONSTRAINTS: list[dict[str, Any]] = [
    {"guided_json": _SCHEMA},
    {"guided_regex": "[a-z]{2,5}( [a-z]{2,5}){1,4}"},
    {"guided_choice": ["yes", "no", "perhaps"]},
    {"guided_grammar": 'root ::= ("a" | "b")+ "."'},
    {"structured_outputs": {"grammar": 'start: WORD (" " WORD)*\nWORD: /[a-z]+/\n'}},
    {"structured_outputs": {"json": _SCHEMA, "disable_any_whitespace": True}},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA}}},
    {
        "response_format": {
            "type": "structural_tag",
            "structures": [{"begin": "<f>", "schema": _SCHEMA, "end": "</f>"}],
            "triggers": ["<f>"],
        }
    },
]


class WrongAnswer(Exception):  # noqa: N818 - what a client found
    """A valid request got a wrong answer."""


class Client:
    """A client that sends requests until it is cancelled.

    Args:
        server: of which it asks.
        seed: of everything that it does.
        context: for a server with TLS.
        counts: what was asked for, and how often; shared by all clients.
        wrong: what was found, likewise.

    A subclass names its kinds of requests, which are methods that ask once, its routes and its pages.
    """

    KINDS: tuple[str, ...] = ()
    PAGES: tuple[str, ...] = ("/health", "/metrics", "/v1/models", "/version")
    PRIORITIES: tuple[int, ...] = (0,)
    ENDPOINTS: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        server: Server,
        seed: str,
        context: ssl.SSLContext | None,
        counts: collections.Counter[str],
        wrong: list[str],
    ) -> None:
        self._server = server
        self._context = context
        self.rng = random.Random(seed)
        # A busy machine may stop a client for seconds, between choosing a connection and asking over it. One that it
        # keeps for nearly as long as the server does would be closed by then.
        limits = httpx.Limits(keepalive_expiry=1.0)
        self._http = httpx.AsyncClient(base_url=server.url, timeout=LONGEST_S, verify=context or True, limits=limits)
        self._counts = counts
        self._wrong = wrong

    async def run(self) -> None:
        """Sends all kinds of requests repeatedly, in another order each time."""
        async with self._http:
            while True:
                for kind in self.rng.sample(self.KINDS, len(self.KINDS)):
                    ask: Callable[[], Awaitable[None]] = getattr(self, kind)
                    try:
                        await asyncio.wait_for(ask(), LONGEST_S)
                    except (WrongAnswer, httpx.HTTPError, TimeoutError) as error:
                        self._wrong.append(f"{kind}: {type(error).__name__} {error}"[:600])
                        if len(self._wrong) > 20:
                            return
                    self._counts[kind] += 1

    # ---- how they ask --------------------------------------------------------------------------------------------

    async def post(self, path: str, body: dict[str, Any], *also: int) -> Any:
        """A whole answer, which must have status 200 or one of `also`."""
        answer = await self._http.post(path, json=body)
        if answer.status_code != 200 and answer.status_code not in also:
            raise WrongAnswer(f"{answer.status_code} {answer.text[:300]} for {path} {json.dumps(body)[:300]}")
        return answer.json()

    async def stream(self, path: str, body: dict[str, Any], *, end: bytes, pause_s: float = 0.0) -> None:
        """A streamed answer, which must end as it should."""
        last = b""
        async with self._http.stream("POST", path, json=body | {"stream": True}) as answer:
            if answer.status_code != 200:
                raise WrongAnswer(f"{answer.status_code} {(await answer.aread())[:300]!r} for {path} {body}"[:600])
            async for piece in answer.aiter_raw():
                last = (last + piece)[-400:]
                await asyncio.sleep(pause_s)
        if end not in last or b'"error"' in last:
            raise WrongAnswer(f"the stream of {path} {body} ended with {last!r}"[:600])

    async def leave(self, path: str, body: dict[str, Any]) -> None:
        """A request whose client disconnects before or during the answer."""
        with_stream = self.rng.random() < 0.7
        with contextlib.suppress(TimeoutError):
            async with (
                asyncio.timeout(self.rng.choice([0.0, 0.01, 0.05, 0.3])),
                self._http.stream("POST", path, json=body | {"stream": with_stream}) as answer,
            ):
                async for _ in answer.aiter_raw():
                    pass

    def text(self, most: int = 30) -> str:
        """Some words."""
        return " ".join(self.rng.choices(_WORDS, k=self.rng.randint(1, most)))

    def sampling(self) -> dict[str, Any]:
        """Random fields that all generating routes have."""
        fields: dict[str, Any] = {
            "temperature": self.rng.choice([0, 0.7, 1.5]),
            "max_tokens": self.rng.randint(1, 40),
        }
        options = {
            "top_p": 0.9,
            "top_k": 20,
            "seed": self.rng.randrange(99),
            "priority": self.rng.choice(self.PRIORITIES),
        }
        return fields | {name: value for name, value in options.items() if self.rng.random() < 0.4}

    async def hostile(self) -> None:
        """An invalid or extreme request."""
        if self._context is not None:
            answer = await self._http.post(next(iter(self.ENDPOINTS)), content=b'{"prompt":', headers=_JSON)
            status = answer.status_code
        else:
            connection = Connection("127.0.0.1", self._server.port)
            with contextlib.closing(connection):
                status = (await connection.ask(hostile_request(self.rng.randrange(10**6), self.ENDPOINTS))).status
        if not 200 <= status < 500:
            raise WrongAnswer(f"{status} for a hostile request")

    async def look(self) -> None:
        """Requests of operators and monitoring."""
        for path in self.PAGES:
            answer = await self._http.get(path)
            if answer.status_code != 200:
                raise WrongAnswer(f"{answer.status_code} for {path}")


_JSON = {"Content-Type": "application/json"}


class OpenAIClient(Client):
    """A client of the routes that generate."""

    ENDPOINTS = ENDPOINTS
    KINDS = (
        *("completion", "completion_stream", "choices", "beams", "logprobs", "chat", "chat_stream", "batch"),
        *("constrained", "tools", "tools_stream", "response", "response_stream", "background", "conversation"),
        *("message", "message_stream", "tokens", "abort", "abort", "slow", "hostile", "hostile", "look"),
    )

    def _prompt(self) -> dict[str, Any]:
        return {"model": MODEL, "prompt": self.text(60), **self.sampling()}

    def _chat(self) -> dict[str, Any]:
        turns = self.rng.randint(0, 2)
        said = [{"role": role, "content": self.text()} for _ in range(turns) for role in ("user", "assistant")]
        return {"model": MODEL, "messages": [*said, {"role": "user", "content": self.text()}], **self.sampling()}

    async def completion(self) -> None:
        await self.post("/v1/completions", self._prompt() | {"echo": self.rng.random() < 0.3, "stop": ["zz", "qq"]})

    async def completion_stream(self) -> None:
        options = {"stream_options": {"include_usage": True, "continuous_usage_stats": self.rng.random() < 0.5}}
        await self.stream("/v1/completions", self._prompt() | options, end=b"[DONE]")

    async def choices(self) -> None:
        n = self.rng.randint(2, 6)
        body = self._prompt() | {"temperature": 1.0, "n": n, "prompt": [self.text(), self.text()]}
        if self.rng.random() < 0.5:
            await self.stream("/v1/completions", body, end=b"[DONE]")
            return
        answer = await self.post("/v1/completions", body | {"best_of": n + 1})
        if len(answer["choices"]) != 2 * n:
            raise WrongAnswer(f"{len(answer['choices'])} choices of {2 * n}")

    async def beams(self) -> None:
        body = {"model": MODEL, "prompt": self.text(), "use_beam_search": True, "n": 3, "temperature": 0}
        await self.post("/v1/completions", body | {"max_tokens": self.rng.randint(1, 20)})

    async def logprobs(self) -> None:
        body = self._prompt() | {"logprobs": 5, "prompt_logprobs": 3, "echo": self.rng.random() < 0.5}
        body |= {"logit_bias": {"5": -100, "7": 3}, "repetition_penalty": 1.2, "bad_words": ["fox", "the dog"]}
        await self.post("/v1/completions", body)

    async def chat(self) -> None:
        await self.post("/v1/chat/completions", self._chat() | {"logprobs": True, "top_logprobs": 2})

    async def chat_stream(self) -> None:
        await self.stream("/v1/chat/completions", self._chat(), end=b"[DONE]")

    async def batch(self) -> None:
        said = [[{"role": "user", "content": self.text()}] for _ in range(3)]
        await self.post("/v1/chat/completions/batch", {"model": MODEL, "messages": said, **self.sampling()})

    async def constrained(self) -> None:
        # the last one has not been compiled before
        fresh = {"guided_regex": f"[a-z]{{1,9}}{self.rng.randrange(10**6)}"}
        body = self._chat() | self.rng.choice([*_CONSTRAINTS, fresh])
        if self.rng.random() < 0.5:
            await self.stream("/v1/chat/completions", body, end=b"[DONE]")
        else:
            await self.post("/v1/chat/completions", body)

    def _tools(self) -> dict[str, Any]:
        choices: list[dict[str, Any]] = [
            {"tool_choice": "auto"},
            {"tool_choice": "auto", "structured_outputs": {"regex": _CALL}},
            {"tool_choice": "required"},
            {"tool_choice": {"type": "function", "function": {"name": "find"}}},
            {"tool_choice": "none"},
        ]
        return self._chat() | {"tools": _TOOLS, **self.rng.choice(choices)}

    async def tools(self) -> None:
        await self.post("/v1/chat/completions", self._tools())

    async def tools_stream(self) -> None:
        await self.stream("/v1/chat/completions", self._tools(), end=b"[DONE]")

    def _response(self) -> dict[str, Any]:
        body: dict[str, Any] = {"model": MODEL, "input": self.text(), "max_output_tokens": self.rng.randint(1, 40)}
        if self.rng.random() < 0.3:
            body |= {"tools": [{"type": "function", **_FUNCTION}], "tool_choice": "required"}
        if self.rng.random() < 0.3:
            body |= {"store": False, "instructions": self.text()}
        return body

    async def response(self) -> None:
        await self.post("/v1/responses", self._response())

    async def response_stream(self) -> None:
        await self.stream("/v1/responses", self._response(), end=b'"sequence_number"')

    async def background(self) -> None:
        """A background response that is polled or cancelled."""
        body = self._response() | {"background": True, "store": True, "max_output_tokens": 100, "ignore_eos": True}
        path = f"/v1/responses/{(await self.post('/v1/responses', body))['id']}"
        if self.rng.random() < 0.5:
            # it may be complete by now, and cannot be cancelled then
            await self.post(f"{path}/cancel", {}, 400)
            return
        while (await self._http.get(path)).json()["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.05)

    async def conversation(self) -> None:
        """Responses that continue each other."""
        previous: dict[str, Any] = {}
        for _ in range(3):
            body = {"model": MODEL, "input": self.text(6), "max_output_tokens": 8, "truncation": "auto"}
            previous = {"previous_response_id": (await self.post("/v1/responses", body | previous))["id"]}

    def _message(self) -> dict[str, Any]:
        fields = self._chat() | {"system": self.text(5)}
        return {name: fields[name] for name in ("model", "messages", "max_tokens", "system")}

    async def message(self) -> None:
        await self.post("/v1/messages", self._message())
        await self.post("/v1/messages/count_tokens", self._message())

    async def message_stream(self) -> None:
        await self.stream("/v1/messages", self._message(), end=b"message_stop")

    async def tokens(self) -> None:
        text = self.text()
        found = await self.post("/tokenize", {"model": MODEL, "prompt": text})
        back = await self.post("/detokenize", {"model": MODEL, "tokens": found["tokens"]})
        if back["prompt"] != text:
            raise WrongAnswer(f"{text!r} came back as {back['prompt']!r}")

    async def abort(self) -> None:
        body = self.rng.choice([self._prompt(), self._prompt() | {"temperature": 1, "n": 4}])
        body |= {"max_tokens": 200, "ignore_eos": True}
        if self.rng.random() < 0.5:
            body |= {"guided_regex": f"[a-z ]{{100,200}}{self.rng.randrange(10**6)}"}
        await self.leave("/v1/completions", body)

    async def slow(self) -> None:
        body = self._prompt() | {"max_tokens": 60, "ignore_eos": True, "logprobs": 5}
        await self.stream("/v1/completions", body, end=b"[DONE]", pause_s=self.rng.choice([0.01, 0.1]))


class PriorityClient(OpenAIClient):
    """The same for a server that schedules by priority."""

    PRIORITIES = (-2, -1, 0, 1, 2)


class PoolingClient(Client):
    """A client of a pooling model."""

    ENDPOINTS = POOLING_ENDPOINTS
    KINDS = ("embeddings", "pooling", "score", "rerank", "abort", "hostile", "look")

    async def embeddings(self) -> None:
        texts = [self.text() for _ in range(self.rng.randint(1, 8))]
        body = {"model": MODEL, "input": texts, "encoding_format": self.rng.choice(["float", "base64"])}
        answer = await self.post("/v1/embeddings", body)
        if len(answer["data"]) != len(texts):
            raise WrongAnswer(f"{len(answer['data'])} vectors of {len(texts)} texts")

    async def pooling(self) -> None:
        await self.post("/pooling", {"model": MODEL, "input": self.text()})

    async def score(self) -> None:
        await self.post("/score", {"model": MODEL, "text_1": self.text(), "text_2": [self.text(), self.text()]})

    async def rerank(self) -> None:
        await self.post("/rerank", {"model": MODEL, "query": self.text(), "documents": [self.text()] * 5, "top_n": 2})

    async def abort(self) -> None:
        await self.leave("/v1/embeddings", {"model": MODEL, "input": [self.text(60) for _ in range(50)]})


class GenerateClient(Client):
    """A client of the /generate server."""

    ENDPOINTS = GENERATE_ENDPOINTS
    KINDS = ("whole", "frames", "constrained", "abort", "hostile", "look")
    PAGES = ("/health",)

    def _body(self) -> dict[str, Any]:
        fields = {"prompt": self.text(60), **self.sampling()}
        fields.pop("priority", None)
        return fields

    async def whole(self) -> None:
        await self.post("/generate", self._body() | {"n": 2, "temperature": 1.0})

    async def constrained(self) -> None:
        """With a regular expression that has not been compiled before, or a schema that has."""
        fresh = {"regex": f"[a-z]{{1,9}}{self.rng.randrange(10**6)}"}
        await self.post(
            "/generate", self._body() | {"structured_outputs": self.rng.choice([fresh, {"json": _SCHEMA}])}
        )

    async def frames(self) -> None:
        await self.stream("/generate", self._body(), end=b"\0")

    async def abort(self) -> None:
        await self.leave("/generate", self._body() | {"max_tokens": 200, "ignore_eos": True})
