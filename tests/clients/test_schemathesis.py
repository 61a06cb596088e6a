"""schemathesis draws requests from the description of the server's routes: answers are as it says, none is a 5xx."""

from __future__ import annotations

import re
from collections.abc import Callable

import httpx
import pytest

from tests.server import Server, is_idle, wait_until

# answers are of a type and a form that the document names
CHECKS = "not_a_server_error,content_type_conformance,response_schema_conformance"


@pytest.mark.slow
def test_described_routes_never_fail(
    client_command: Callable[..., str], clients_server: Server, runs_all: bool
) -> None:
    # nine of ten cases are each parameter's limits and missing values: tests/fuzz sends such, too
    phases = "examples,coverage,fuzzing,stateful" if runs_all else "fuzzing"
    max_examples, num_cases = 10, 500 if runs_all else 100
    output = client_command(
        "schemathesis",
        *["run", f"{clients_server.url}/openapi.json", "--checks", CHECKS, "--phases", phases],
        *["--max-examples", str(max_examples), "--seed", "1", "--no-color", "--suppress-health-check", "all"],
        # what a server of a tiny model does in far less
        *["--request-timeout", "30"],
    )
    assert "/v1/chat/completions" in httpx.get(f"{clients_server.url}/openapi.json", timeout=60).text
    cases = re.search(r"(\d+) generated, (\d+) passed", output)
    assert cases is not None and cases[1] == cases[2] and int(cases[1]) > num_cases, output
    with httpx.Client(base_url=clients_server.url, timeout=60) as http:
        assert http.get("/health").status_code == 200
        assert wait_until(lambda: is_idle(http)), http.get("/metrics").text
