"""The comparison of clients, end to end on a tiny model; the other client is this project's own command."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest

import ascend_vllm
from tests.benchmark_modules import load_benchmark
from tests.server import ROOT, Server


def test_two_clients_of_one_server(
    openai_server: Server, tiny_dir: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = load_benchmark("compare_clients")
    peer = tmp_path / "vllm"
    peer.write_text(f'#!/bin/sh\nexec {sys.executable} -m ascend_vllm.entrypoints.cli "$@"\n')
    peer.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["--model", tiny_dir, "--peer-program", str(peer), "--rounds", "1", "--num-prompts", "3"]
    words += [
        "--served-model-name",
        "tiny",
        "--concurrency",
        "2",
        "--input-len",
        "8",
        "--output-len",
        # a server that is ahead of its reader sends several tokens at once; so many never come as one piece
        "400",
        "--base-url",
        openai_server.url,
    ]
    monkeypatch.setattr("sys.argv", ["compare_clients.py", *words, "--json", str(tmp_path / "r.json")])
    program.main()
    content = json.loads((tmp_path / "r.json").read_text())
    assert tuple(content["figures"]) == program.FIGURES and content["machine"]["cpu"]
    assert content["kind"] == "clients" and content["peer_version"] == ascend_vllm.__version__
    assert content["sizes"] == {"num_prompts": 3, "concurrency": 2, "input_len": 8, "output_len": 400}
    assert "--concurrency 2" in content["command"] and str(tmp_path) not in content["command"]
    for row in content["figures"].values():
        assert row["readings"] == {"ours": [row["ours"]], "peer": [row["peer"]]}
        assert row["ours"] > 0 and row["peer"] > 0 and row["ratio"] == row["ours"] / row["peer"]


def test_a_client_that_fails(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = load_benchmark("compare_clients")
    monkeypatch.setattr("sys.argv", ["compare_clients.py", "--model", "m", "--peer-program", "false"])
    args = program._parse_args()
    with pytest.raises(program.LoadError, match="false bench serve ended with code 1"):
        program._peer_figures(args, "http://127.0.0.1:1", 0)
    with pytest.raises(program.LoadError, match="false --version ended with code 1"):
        program._peer_version(args)
