"""Texts of JSON schemas by the demo model, which has hardly seen JSON."""

from __future__ import annotations

import pytest

from tests.json_schemas import SPELLINGS, complete_schemas
from tests.server import Server


@pytest.mark.parametrize("library", ["xgrammar", "guidance"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_schema_comes_to_an_end(demo_server: Server, spelling: str, library: str) -> None:
    complete_schemas(demo_server.url, spelling, library)
