"""Our answers beside the real vLLM's, request by request.

What may differ stands in `differences.DIFFERENCES`, with a reason in docs/compatibility.md.
"""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.compat.comparison import differences
from tests.compat.differences import DIFFERENCES
from tests.compat.exchange import exchange
from tests.compat.requests_common import Case
from tests.compat.servers import COMMON, MODEL, RECORDED, SERVERS, make_classifier
from tests.server import OPENAI_SERVER, ROOT, running

_CASES = [
    pytest.param(server, table, case, id=case.name)
    for server, spec in SERVERS.items()
    for table, cases in spec.tables.items()
    for case in cases
]
# name of a request that was sent → the entries of DIFFERENCES that its answer needed
_needed: dict[str, set[int]] = {}


@functools.cache
def _recorded(table: str) -> dict[str, Any]:
    records: dict[str, Any] = json.loads((RECORDED / f"{table}.json").read_text(encoding="utf-8"))
    return records


class _Servers:
    """The server that is asked, one at a time: the tests of each come in a row.

    Args:
        scratch: where a model that is made for the tests goes.
    """

    def __init__(self, scratch: pathlib.Path) -> None:
        self._scratch = scratch
        self._name = ""
        self._client: httpx.Client | None = None
        self._open = contextlib.ExitStack()

    def client(self, name: str) -> httpx.Client:
        """A client of the server of that name, which is started unless it runs."""
        if self._client is None or name != self._name:
            self.close()
            spec = SERVERS[name]
            model = MODEL
            if spec.classifier:
                model = self._scratch / "classifier"
                make_classifier(model)
            flags = ["--model", str(model), *COMMON, *spec.flags, *spec.ours]
            server = self._open.enter_context(running(OPENAI_SERVER, flags))
            self._client = self._open.enter_context(httpx.Client(base_url=server.url, timeout=60))
            self._name = name
        return self._client

    def close(self) -> None:
        """End the server."""
        self._client = None
        self._open.close()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Servers]:
    """The servers, none of them left running."""
    with contextlib.closing(_Servers(tmp_path_factory.mktemp("compat"))) as servers:
        yield servers


@pytest.mark.parametrize(("server", "table", "case"), _CASES)
def test_answer_is_the_recorded_one(servers: _Servers, server: str, table: str, case: Case) -> None:
    recorded = _recorded(table)[case.name]
    assert recorded["request"] == case.to_json(), "the request has changed: record its answer again"
    found = differences(recorded, exchange(servers.client(server), case), case.sampled)
    entries = {index: entry for index, entry in enumerate(DIFFERENCES) if entry.covers(case.name)}
    unexpected = [text for text in found if not any(entry.allows(text) for entry in entries.values())]
    assert unexpected == []
    _needed[case.name] = {index for index, entry in entries.items() if any(map(entry.allows, found))}


def test_every_allowed_difference_is_needed() -> None:
    if len(_needed) != len(_CASES):
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
