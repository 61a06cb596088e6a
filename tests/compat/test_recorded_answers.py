"""Compares our answers with the real vLLM's, request by request.

What may differ stands in `differences.DIFFERENCES`, with a reason in docs/compatibility.md. With --all what a model
answers is asked of engines with two workers as well: they have the same answers, as tests/distributed says of tokens.
"""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.compat.answer_differences import differences
from tests.compat.differences import DIFFERENCES
from tests.compat.exchange import exchange
from tests.compat.requests_common import Case
from tests.compat.servers import COMMON, MODEL, RECORDED, SERVERS, make_classifier, make_shareable
from tests.server import OPENAI_SERVER, ROOT, arrangement_params, arrangements, client_of_many, num_workers, running

# more than enough to fill steps
_NUM_AT_ONCE = 16
# a guard
_TIMEOUT_S = 180.0
_MAIN = next(iter(arrangements()))
# refusals come from the API server and do not depend on workers
_OF_THE_MODEL = {"tools": ("completions", "chat", "structured", "routes", "agents")}

_CASES = [
    pytest.param(
        *(arrangement, server, table, case),
        id=case.name if arrangement == _MAIN else f"{arrangement}-{case.name}",
        marks=marks,
    )
    for arrangement, marks in ((param.values[0], param.marks) for param in arrangement_params())
    for server, spec in SERVERS.items()
    for table, cases in spec.tables.items()
    if arrangement == _MAIN or table in _OF_THE_MODEL.get(server, ())
    for case in cases
]
# name of a request that was sent to the first arrangement → the entries of DIFFERENCES that its answer needed
_needed: dict[str, set[int]] = {}


@functools.cache
def _recorded(table: str) -> dict[str, Any]:
    records: dict[str, Any] = json.loads((RECORDED / f"{table}.json").read_text(encoding="utf-8"))
    return records


class _Servers:
    """The server that is asked, one at a time: the tests of each come in a row.

    Args:
        scratch: where models that are made for the tests go.
        ray_environment: gives the environment of servers whose workers are Ray's.
    """

    def __init__(self, scratch: pathlib.Path, ray_environment: Callable[[], dict[str, str]]) -> None:
        self._scratch = scratch
        self._ray_environment = ray_environment
        self._running: tuple[str, str] | None = None
        self._answers: dict[str, dict[str, Future[dict[str, Any]]]] = {}
        self._open = contextlib.ExitStack()

    def answer(self, arrangement: str, name: str, table: str, case: Case) -> dict[str, Any]:
        """What the server of that name says; it is started unless it runs.

        The first request of a table brings all others of the table with it, many at a time.
        """
        if self._running != (arrangement, name):
            self.close()
            self._start(arrangement, name)
        if table not in self._answers:
            cases = SERVERS[name].tables[table]
            self._answers[table] = {case.name: self._pool.submit(exchange, self._client, case) for case in cases}
        return self._answers[table][case.name].result()

    def _start(self, arrangement: str, name: str) -> None:
        spec = SERVERS[name]
        flags = [*COMMON, *spec.flags, *spec.ours, *arrangements()[arrangement]]
        env = self._ray_environment() if "ray" in flags else {}
        model = self._model(spec.classifier, num_workers(flags) > 1)
        server = self._open.enter_context(running(OPENAI_SERVER, ["--model", str(model), *flags], env, _TIMEOUT_S))
        self._client = self._open.enter_context(client_of_many(server))
        self._pool = self._open.enter_context(ThreadPoolExecutor(_NUM_AT_ONCE))
        self._running = (arrangement, name)

    def _model(self, is_classifier: bool, is_shared: bool) -> pathlib.Path:
        model = MODEL
        if is_shared:
            model = self._scratch / "shareable"
            if not model.exists():
                make_shareable(model)
        if is_classifier:
            make_classifier(self._scratch / "classifier", model)
            model = self._scratch / "classifier"
        return model

    def close(self) -> None:
        """End the server."""
        self._running = None
        self._answers.clear()
        self._open.close()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[_Servers]:
    """The servers, none of them left running."""
    scratch = tmp_path_factory.mktemp("compat")
    with contextlib.closing(_Servers(scratch, lambda: request.getfixturevalue("ray_environment"))) as servers:
        yield servers


@pytest.mark.parametrize(("arrangement", "server", "table", "case"), _CASES)
def test_answer_is_the_recorded_one(servers: _Servers, arrangement: str, server: str, table: str, case: Case) -> None:
    recorded = _recorded(table)[case.name]
    assert recorded["request"] == case.to_json(), "the request has changed: record its answer again"
    found = differences(recorded, servers.answer(arrangement, server, table, case), case.sampled)
    entries = {index: entry for index, entry in enumerate(DIFFERENCES) if entry.covers(case.name)}
    unexpected = [text for text in found if not any(entry.allows(text) for entry in entries.values())]
    assert unexpected == []
    if arrangement == _MAIN:
        _needed[case.name] = {index for index, entry in entries.items() if any(map(entry.allows, found))}


def test_every_allowed_difference_is_needed() -> None:
    if len(_needed) != sum(case.values[0] == _MAIN for case in _CASES):
        pytest.skip("only when all requests were sent and answered as they should be")
    unused = set(range(len(DIFFERENCES))) - set().union(*_needed.values())
    assert [DIFFERENCES[index] for index in sorted(unused)] == []
    # the aim is 200
    assert sum(not entries for entries in _needed.values()) >= 600


def test_every_allowed_difference_has_its_reason() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    headings = {line.removeprefix("### ") for line in page.splitlines() if line.startswith("### ")}
    assert {entry.reason for entry in DIFFERENCES} | {"In every answer"} == headings


def test_no_record_is_left_over() -> None:
    tables = {table: cases for spec in SERVERS.values() for table, cases in spec.tables.items()}
    assert {path.stem for path in RECORDED.glob("*.json")} == tables.keys()
    for table, cases in tables.items():
        assert _recorded(table).keys() - {"vllm"} == {case.name for case in cases}
