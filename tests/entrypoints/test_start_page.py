"""What a server says of itself at its start, as far as it depends on flags alone."""

from __future__ import annotations

import argparse
import socket

import pytest

from ascend_vllm.args.tables.server import FrontendArgs, HttpArgs
from ascend_vllm.config.engine import ParallelConfig
from ascend_vllm.entrypoints.http.start_page import _workers, base_url, changed_flags
from ascend_vllm.entrypoints.openai.api_server import make_parser


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ([], {}),
        (["--port", "8000", "--disable-log-requests"], {}),
        (
            ["--model", "m", "--max-num-seqs", "8", "--api-key", "one", "two"],
            {"api_key": ["***", "***"], "model": "m", "max_num_seqs": 8},
        ),
        (["--enable-log-requests", "--disable-async-output-proc"], None),
        (["--no-enable-log-requests", "--served-model-name", "a"], {"served_model_name": ["a"]}),
    ],
)
def test_only_changed_flags_are_shown(words: list[str], changed: dict[str, object] | None) -> None:
    flags: argparse.Namespace = make_parser().parse_args(words)
    expected = {"enable_log_requests": True, "disable_async_output_proc": True} if changed is None else changed
    assert changed_flags(flags, FrontendArgs()) == expected


@pytest.mark.parametrize(
    ("options", "url"),
    [
        ({}, "http://localhost:{port}"),
        ({"host": "0.0.0.0"}, "http://localhost:{port}"),
        ({"host": "::1"}, "http://[::1]:{port}"),
        ({"host": "example.com", "ssl_certfile": "c.pem"}, "https://example.com:{port}"),
        ({"uds": "/run/x.sock"}, "http://localhost"),
    ],
)
def test_the_address_is_one_that_a_client_can_use(options: dict[str, str], url: str) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        assert base_url(HttpArgs(**options), sock) == url.format(port=sock.getsockname()[1])  # type: ignore[arg-type]


def test_how_many_workers_there_are() -> None:
    assert _workers(ParallelConfig()) == ""
    assert _workers(ParallelConfig(tensor_parallel_size=4)) == "; 4 workers"
    three = ParallelConfig(data_parallel_size=2, pipeline_parallel_size=3, tensor_parallel_size=4)
    assert _workers(three) == "; 2 engines of 3 pipeline stages of 4 workers"
