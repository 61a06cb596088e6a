"""Long, deep, repeated and costly values in every field of every endpoint must not delay other clients.

The places are found in the schemas that the server itself publishes, so that a field is attacked as soon as there is
one. Meanwhile another process asks for /health and small completions.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import pathlib
import time
import types
import typing
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from pydantic import BaseModel

from ascend_vllm.entrypoints.generate.mindie import MindieRequest
from ascend_vllm.entrypoints.openai.app import _DOCUMENTED_BODIES
from ascend_vllm.entrypoints.openai.protocol_common import ApiRequest
from ascend_vllm.entrypoints.openai.protocol_responses import RetrieveQuery
from ascend_vllm.sampling_params import SamplingParams
from tests.fuzz.hostile_requests import ENDPOINTS, POOLING_ENDPOINTS
from tests.fuzz.http_wire import Connection
from tests.fuzz.long_shapes import SIZE, LongRequest, address_requests, requests_of
from tests.fuzz.probe import MODEL_NAME, Probe, probing
from tests.fuzz.schema_fields import Field, Schema, Walk
from tests.fuzz.test_fuzzed_requests import SERVER_ERROR
from tests.server import Server, is_idle, wait_until

NUM_CONNECTIONS = 4
# a request that is not answered by then never is
LONGEST_S = 60.0
# a process of the server that needs more is refused it: the machine is not only ours
MOST_MEMORY = 6 << 30
# "the server is busy" is an answer
BUSY = 503

# bodies whose fields the published schema does not have: those of another one are forwarded
_FORWARDED = {"/invocations": "CompletionRequest", "/v1/chat/completions/batch": "ChatCompletionRequest"}
_SAID = [{"role": "user", "content": "one two"}]
_BASES: dict[str, dict[str, Any]] = {
    **{path: needed | {"model": MODEL_NAME} for path, (needed, _) in (ENDPOINTS | POOLING_ENDPOINTS).items()},
    "/v1/chat/completions/batch": {"messages": [_SAID], "max_tokens": 2},
    "/tokenize": {"messages": _SAID},
    "/generate": {"prompt": "one two", "max_tokens": 2},
}
# endpoints whose bodies have fields in common, which the same code reads
_ALIKE = (
    ("/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/invocations"),
    ("/v1/messages", "/v1/messages/count_tokens"),
)
# fields of /generate that hold the same, under vLLM's old name and its new one
_SAME_FIELD = {"guided_decoding": "structured_outputs"}
_SAME_ROUTE = {"/v1/score": "/score", "/v1/rerank": "/rerank", "/v2/rerank": "/rerank"}


# ---- places ------------------------------------------------------------------------------------------------------


def body_schemas(document: Schema) -> dict[str, Schema]:
    """The schemas of the bodies that a server's OpenAPI document has, by path; those of two paths of a route once."""
    schemas: dict[str, Schema] = {}
    for path, methods in document["paths"].items():
        body = methods.get("post", {}).get("requestBody")
        if body is not None and path not in _SAME_ROUTE:
            schemas[path] = body["content"]["application/json"]["schema"]
    return schemas


def openai_fields(document: Schema) -> list[Field]:
    """The places in the bodies of a server's routes."""
    components = document["components"]["schemas"]
    walk = Walk(components)
    schemas = body_schemas(document)
    fields = [field for path, schema in schemas.items() for field in walk.fields(schema, path)]
    for path, name in _FORWARDED.items():
        if path in document["paths"]:
            known = {field.path for field in fields}
            forwarded = [field for field in walk.fields(components[name], path) if len(field.path) == 2]
            fields += [field for field in forwarded if field.path not in known]
    return fields


def struct_fields(struct: type[msgspec.Struct]) -> list[Field]:
    """The places in a body of /generate: the prompt, and what the program converts its fields to."""
    schema = msgspec.json.schema(struct)
    text: Schema = {"type": "object", "properties": {"prompt": {"type": "string"}, "stream": {"type": "boolean"}}}
    walk = Walk(schema["$defs"])
    found = {field.name: field for body in (text, schema) for field in walk.fields(body, "/generate")}
    return list(found.values())


def test_every_field_is_found() -> None:
    """What the walk through the JSON schemas finds, against the models' own fields."""
    for model in _DOCUMENTED_BODIES:
        schema = model.model_json_schema()
        walk = Walk(schema.get("$defs", {}))
        found = {field.path[1:] for field in walk.fields(schema, f"/{model.__name__}")}
        missing = set(declared_paths(model)) - found
        assert not missing, f"{model.__name__}: {missing}"


def declared_paths(
    annotation: Any, path: tuple[str, ...] = (), inside: tuple[Any, ...] = ()
) -> Iterator[tuple[str, ...]]:
    """The paths of what an annotation can hold, models that hold themselves to the second of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if inside.count(annotation) < 2:
            for name, info in annotation.model_fields.items():
                yield (*path, info.alias or name)
                yield from declared_paths(info.annotation, (*path, info.alias or name), (*inside, annotation))
        return
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        for argument in arguments:
            yield from declared_paths(argument, path, inside)
    elif origin is typing.Annotated:
        yield from declared_paths(arguments[0], path, inside)
    elif origin in (list, dict):
        step = "[]" if origin is list else "*"
        if arguments[-1] is not Any and not (origin is dict and arguments[-1] is object):
            yield (*path, step)
            yield from declared_paths(arguments[-1], (*path, step), inside)


def test_every_body_is_published() -> None:
    """Every route with a body has it in the OpenAPI schema, from which the paths are taken."""

    def leaves(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
        below = model.__subclasses__()
        yield from (leaf for sub in below for leaf in leaves(sub)) if below else [model]

    bases = {base for model in _DOCUMENTED_BODIES for base in model.__mro__}
    unknown = [model for model in leaves(ApiRequest) if model not in bases and "ascend_vllm" in model.__module__]
    assert not unknown


# ---- requests ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a request.

    Attributes:
        request: which.
        status: of its answer.
        body: the answer's beginning.
        start, end: on the clock of the probe.
    """

    request: LongRequest
    status: int
    body: bytes
    start: float
    end: float

    def __str__(self) -> str:
        return f"{self.end - self.start:6.2f} s  {self.status}  {self.request.name}  {self.body[:150]!r}"


async def send_all(server: Server, requests: Sequence[LongRequest]) -> list[Outcome]:
    """Sends requests, a few at a time, and reads their answers."""
    waiting = iter(requests)
    outcomes: list[Outcome] = []

    async def client() -> None:
        connection = Connection("127.0.0.1", server.port)
        for request in waiting:
            sent = request.make()
            start = time.perf_counter()
            try:
                answer = await asyncio.wait_for(connection.ask(sent), LONGEST_S)
                status, body = answer.status, answer.body
            except TimeoutError:
                connection.close()
                status, body = -1, b"no answer in time"
            if SERVER_ERROR.search(body) and b'"code":503' not in body:
                status = 500
            outcomes.append(Outcome(request, status, body[:400], start, time.perf_counter()))
        connection.close()

    await asyncio.gather(*(client() for _ in range(NUM_CONNECTIONS)))
    return outcomes


def limit_memory(server: Server) -> None:
    """From now on the server's processes get no more than MOST_MEMORY."""
    for process in [psutil.Process(server.process.pid), *server.children()]:
        process.rlimit(psutil.RLIMIT_DATA, (MOST_MEMORY, MOST_MEMORY))


def memory_mb(server: Server) -> float:
    """What the server's processes hold beside files, shared pages divided.

    How pages of files are divided depends on the other programs of this machine that have loaded torch.
    """
    total = 0.0
    for process in [psutil.Process(server.process.pid), *server.children()]:
        # one for grammars may end at any moment
        with contextlib.suppress(OSError):
            rollup = pathlib.Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            total += sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss_Anon:"))
    return total / 1e3


def check_pauses(quiet: Probe, probe: Probe, outcomes: Sequence[Outcome]) -> list[str]:
    """What the others noticed, with the requests that were under way."""
    wrong = []
    for work in ("health", "completion"):
        limit_s = 1.0 + 10 * quiet.longest(work)
        pauses = probe.pauses(work, limit_s)
        if pauses:
            start, end = max(pauses, key=lambda pause: pause[1] - pause[0])
            meanwhile = [one for one in outcomes if one.start < end and one.end > start]
            meanwhile.sort(key=lambda one: one.start - one.end)
            wrong.append(f"{len(pauses)} × {work} above {limit_s:.1f} s, up to {end - start:.1f} s, beside:")
            wrong += map(str, meanwhile[:5])
    return wrong


def attack(server: Server, kind: str, requests: Sequence[LongRequest]) -> list[Outcome]:
    """Sends all requests twice while a probe measures, and checks that the server is idle afterwards.

    Args:
        server: whose model has the probe's name.
        kind: what the probe asks.
        requests: to send.
    """
    limit_memory(server)
    with probing(server, kind) as quiet:
        time.sleep(1)
    wrong, held = [], []
    for _ in range(2):
        with probing(server, kind) as probe:
            outcomes = asyncio.run(send_all(server, requests))
        bad = [one for one in outcomes if not (200 <= one.status < 500 or one.status == BUSY)]
        wrong += [f"{len(bad)} answers that blame the server:", *map(str, bad[:40])] if bad else []
        wrong += check_pauses(quiet, probe, outcomes)
        wrong += [f"the probe got {probe.failures}"] if probe.failures else []
        if kind != "plain":
            with httpx.Client(base_url=server.url, timeout=30) as http:
                assert wait_until(lambda: is_idle(http)), http.get("/metrics").text
        held.append(memory_mb(server))
    if held[1] > 1.1 * held[0]:
        wrong.append(f"{held[0]:.0f} MB after the first round, {held[1]:.0f} MB after the second")
    slowest = sorted(outcomes, key=lambda one: one.start - one.end)[:8]
    print(f"{len(requests)} requests twice, {held[0]:.0f} and {held[1]:.0f} MB; the slowest:", *slowest, sep="\n")
    assert not wrong, "\n".join([*wrong, "log:", server.log[-2000:]])
    return outcomes


# ---- servers -----------------------------------------------------------------------------------------------------

# fields that are long in earnest: their handlers must get what is sent, not the first check
REACHED = {
    "/v1/completions": (
        *("prompt:string", "prompt:array", "stop:array", "bad_words:array", "logit_bias:object"),
        *("stop_token_ids:array", "allowed_token_ids:array", "guided_choice:array", "guided_json:object"),
        *(
            "guided_json.properties:object",
            "guided_regex:string",
            "structured_outputs:object",
            "response_format:object",
        ),
    ),
    "/v1/chat/completions": (
        *(
            "messages:array",
            "messages.[].content:string",
            "messages.[].content:array",
            "tools:array",
            "tool_choice:object",
        ),
        *("messages.[].tool_calls:array", "tools.[].function.parameters:object", "chat_template_kwargs:object"),
    ),
    "/v1/chat/completions/batch": ("messages.[]:array", "messages.[].[].content:string", "stop:array"),
    "/v1/responses": (
        *("input:string", "input:array", "input.[].content:array", "instructions:string", "tools:array"),
        *("metadata:object", "text.format.schema:object", "stop:array", "logit_bias:object"),
    ),
    "/v1/messages": (
        *("messages:array", "messages.[].content:array", "messages.[].content.[].input:object", "system:string"),
        *("tools:array", "stop_sequences:array"),
    ),
    "/tokenize": ("prompt:string", "messages:array", "tools:array"),
    "/detokenize": ("tokens:array",),
    "/v1/embeddings": ("input:string", "input:array", "input.[]:array", "messages:array"),
    "/rerank": ("query:string", "documents:array"),
    "/score": ("text_2:string", "text_2:array"),
    "/generate": ("prompt:string", "stop:array", "stop_token_ids:array"),
}


def check_reached(outcomes: Sequence[Outcome], endpoints: Sequence[str]) -> None:
    """The small values were answered with what was asked for."""
    answered = {one.request.field.name for one in outcomes if one.request.shape == "small" and one.status == 200}
    wanted = {f"{path}.{name}" for path in REACHED if path in endpoints for name in REACHED[path]}
    assert wanted and wanted <= answered, wanted - answered


def one_of_those_alike(fields: Sequence[Field]) -> list[Field]:
    """All places, but of those that endpoints of `_ALIKE` or fields of `_SAME_FIELD` have in common one, of another
    endpoint or field each time.
    """
    places: dict[Any, list[Field]] = collections.defaultdict(list)
    for field in fields:
        endpoint, name, *place = field.path
        family = next((alike for alike in _ALIKE if endpoint in alike), endpoint)
        # the fields themselves are not alike: what is in them is
        common = _SAME_FIELD.get(name, name) if place else name
        places[family, common, *place, field.kind].append(field)
    return [found[zlib.crc32(repr(place).encode()) % len(found)] for place, found in places.items()]


def requests_to(fields: Sequence[Field], *, everywhere: bool, whole: bool) -> list[LongRequest]:
    """For each place a value that fits and a costly one, or every costly one there is.

    Args:
        fields: the places.
        everywhere: whether a place that several endpoints or fields have gets the values at each of them. What
            `REACHED` names gets the one that fits there in any case.
        whole: whether a place gets every costly value.
    """
    sizes = (10 * SIZE, SIZE) if whole else (None,)
    chosen = {field.name for field in (fields if everywhere or whole else one_of_those_alike(fields))}
    reached = {f"{path}.{name}" for path, names in REACHED.items() for name in names}
    return [
        request
        for field in fields
        for size in sizes
        for request in requests_of(field, _BASES[field.path[0]], size)
        if field.name in chosen or (request.shape == "small" and field.name in reached)
    ]


def requests_with_addresses(document: Schema) -> list[LongRequest]:
    """Long parameters of addresses and queries."""
    queries = {"/v1/responses/{response_id}": RetrieveQuery.model_fields}
    return [
        request
        for path, methods in document["paths"].items()
        if "{" in path
        for method in methods
        for request in address_requests(path, method.upper(), queries.get(path, ()))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["openai", "pooling"])
def test_openai_server(
    fuzzed_servers: Callable[[str], Server], kind: str, whole_product: bool, runs_all: bool
) -> None:
    server = fuzzed_servers(kind)
    document = httpx.get(f"{server.url}/openapi.json", timeout=30).json()
    requests = requests_to(openai_fields(document), everywhere=runs_all, whole=whole_product)
    requests += requests_with_addresses(document)
    outcomes = attack(server, "generate" if kind == "openai" else "pooling", requests)
    check_reached(outcomes, list(document["paths"]))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["generate", "mindie"])
def test_generate_server(
    fuzzed_servers: Callable[[str], Server], form: str, whole_product: bool, runs_all: bool
) -> None:
    fields = struct_fields(SamplingParams if form == "generate" else MindieRequest)
    requests = requests_to(fields, everywhere=runs_all, whole=whole_product)
    check_reached(attack(fuzzed_servers(form), "plain", requests), ["/generate"])
