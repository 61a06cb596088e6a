"""`ascend-vllm bench`: the real command against real servers, and the figures it makes of known arrivals."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.server
import json
import math
import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.entrypoints.cli import main, make_parser
from ascend_vllm.errors import ConfigError
from ascend_vllm.tools.bench import arrivals, datasets, metrics, serve
from ascend_vllm.tools.bench.backends import BACKENDS
from ascend_vllm.tools.bench.http_client import HttpClient
from tests.server import ROOT, Server

# the keys of vLLM 0.32's result file, in its order
_KEYS = (
    "date endpoint_type backend label model_id tokenizer_id num_prompts request_rate burstiness max_concurrency "
    "duration completed failed total_input_tokens total_output_tokens request_throughput request_goodput "
    "output_throughput total_token_throughput latencies queue_times max_output_tokens_per_s "
    "max_concurrent_requests rtfx mean_ttft_ms median_ttft_ms std_ttft_ms p99_ttft_ms mean_tpot_ms median_tpot_ms "
    "std_tpot_ms p99_tpot_ms mean_itl_ms median_itl_ms std_itl_ms p99_itl_ms"
)
KEYS = _KEYS.split()
DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors")


def bench(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["bench", *words])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def options(*words: str) -> argparse.Namespace:
    args = make_parser("bench").parse_args(["bench", "serve", *words])
    serve._check(args)
    return args


# ---- a run against a server ----------------------------------------------------------------------------------


def test_serve(
    openai_server: Server, tiny_dir: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["serve", "--base-url", openai_server.url, "--num-prompts", "6", "--save-result", "--disable-tqdm"]
    words += ["--random-input-len", "12", "--random_output_len=5", "--result-dir", str(tmp_path / "new")]
    code, printed = bench(words, capsys)
    assert code == 0
    (file,) = (tmp_path / "new").iterdir()
    # model and tokenizer are those of /v1/models
    assert file.name.startswith(f"openai-infqps-{pathlib.Path(tiny_dir).name}-")
    result = json.loads(file.read_text())
    assert list(result) == KEYS
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (6, 0, 30)
    assert result["tokenizer_id"] == result["model_id"] == tiny_dir
    assert (result["request_rate"], result["max_concurrency"], result["request_goodput"]) == ("inf", None, None)
    assert 6 * 12 <= result["total_input_tokens"] <= 6 * 15
    assert 0 < result["median_ttft_ms"] <= result["p99_ttft_ms"] <= result["duration"] * 1e3
    assert result["output_throughput"] == pytest.approx(30 / result["duration"])
    assert result["max_concurrent_requests"] == 6
    assert "Total generated tokens:                  30        \n" in printed
    assert "----Time per Output Token (excl. 1st token)------\n" in printed


@pytest.mark.parametrize("backend", ["openai", "openai-chat", "generate"])
def test_details_of_every_backend(
    request: pytest.FixtureRequest,
    backend: str,
    tiny_dir: str,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server: Server = request.getfixturevalue("generate_server" if backend == "generate" else "openai_server")
    words = ["serve", "--backend", backend, "--base-url", server.url, "--num-prompts", "4", "--disable-tqdm"]
    words += ["--model", "tiny", "--tokenizer", tiny_dir, "--input-len", "9", "--output-len", "6"]
    words += ["--max-concurrency", "2", "--request-rate", "200", "--burstiness", "3", "--temperature", "0"]
    words += ["--percentile-metrics", "ttft,itl,e2el,client_queue_time", "--metric-percentiles", "50,99.9"]
    words += ["--goodput", "ttft:60000", "e2el:60000", "--metadata", "one=1", "two=b", "--label", "mine"]
    words += ["--num-warmups", "1", "--save-result", "--save-detailed", "--append-result"]
    words += ["--result-filename", str(tmp_path / "r.jsonl")]
    assert bench(words, capsys)[0] == 0
    assert bench(words, capsys)[0] == 0
    first, second = map(json.loads, (tmp_path / "r.jsonl").read_text().split("\n"))
    assert set(first) - set(KEYS) >= {*DETAILS, "one", "two", "p99.9_itl_ms", "mean_client_queue_time_ms"}
    assert not {name for name in first if "tpot" in name or name.startswith("p99_")}
    assert (first["one"], first["label"], first["request_rate"], first["max_concurrency"]) == ("1", "mine", 200.0, 2)
    assert first["request_goodput"] == pytest.approx(4 / first["duration"])
    assert first["output_lens"] == [6] * 4 and first["errors"] == [""] * 4
    # greedy, and the same seed draws the same prompts
    assert first["generated_texts"] == second["generated_texts"] and all(first["generated_texts"])
    for ttft, itls, latency in zip(first["ttfts"], first["itls"], first["latencies"], strict=True):
        assert ttft + sum(itls) == pytest.approx(latency)


def test_token_ids_without_a_tokenizer(
    openai_server: Server, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["serve", "--base-url", openai_server.url, "--model", "tiny", "--skip-tokenizer-init", "--disable-tqdm"]
    words += ["--vocab-size", "300", "--random-prefix-len", "20", "--random-input-len", "10", "--num-prompts", "5"]
    words += ["--random-output-len", "3", "--random-range-ratio", '{"input": 0, "output": 0.9}', "--ignore-eos"]
    words += ["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "20", "--ramp-up-end-rps", "60"]
    words += ["--probe-request-rate", "100", "--save-result", "--result-filename", str(tmp_path / "r.json")]
    code, printed = bench(words, capsys)
    assert code == 0
    result = json.loads((tmp_path / "r.json").read_text())
    # without text in between the lengths are exact
    assert result["total_input_tokens"] == 5 * 30
    assert [event["rps"] for event in result["rps_change_events"]] == list(range(20, 53))
    assert (result["ramp_up_strategy"], result["ramp_up_start_rps"], result["ramp_up_end_rps"]) == ("linear", 20, 60)
    assert result["probe_completed"] > 1 and result["probe_failed"] == 0
    assert 0 < result["probe_median_e2el_ms"] <= result["probe_max_e2el_ms"]
    assert "Max probe E2EL (ms):" in printed


def test_requests_that_fail(
    openai_server: Server, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["serve", "--base-url", openai_server.url, "--skip-tokenizer-init", "--vocab-size", "300"]
    words += ["--num-prompts", "2", "--disable-tqdm", "--random-input-len", "5", "--save-result", "--save-detailed"]
    words += ["--result-filename", str(tmp_path / "r.json")]
    code, printed = bench([*words, "--model", "nope"], capsys)
    assert code == 1
    assert "Error 1: HttpError: HTTP 404" in printed and "Failed requests:                         2" in printed
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["completed"], result["mean_ttft_ms"], result["ttfts"]) == (0, 0.0, [0.0, 0.0])
    code, printed = bench([*words, "--model", "nope", "--ready-check-timeout-sec", "0.1"], capsys)
    assert code == 1 and "answers no request: HttpError: HTTP 404" in printed
    code, printed = bench([*words, "--model", "tiny", "--profile"], capsys)
    assert code == 1 and "--profile: the server refuses to start its profiler: HTTP 404" in printed


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--port", "1"], ["--port", "1", "--model", "m", "--skip-tokenizer-init"]):
        code, printed = bench(["serve", *words, "--num-prompts", "1", "--ready-check-timeout-sec", "0.1"], capsys)
        assert code == 1
        assert printed.startswith("ascend-vllm: error: No server can be reached at http://127.0.0.1:1 (")
        assert "`ascend-vllm serve MODEL`" in printed and printed.count("\n") == 1
    with scripted_server([]) as (url, _):
        code, printed = bench(["serve", "--base-url", url, "--num-prompts", "1"], capsys)
        assert code == 1 and "name one with --model" in printed


# ---- what is sent, and how answers are read ------------------------------------------------------------------


@contextlib.contextmanager
def scripted_server(chunks: list[bytes]) -> Iterator[tuple[str, list[tuple[str, dict[str, str], dict[str, Any]]]]]:
    """A server that answers every POST with the same chunks; gives its address and what it was sent."""
    seen: list[tuple[str, dict[str, str], dict[str, Any]]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            seen.append((self.path, dict(self.headers), json.loads(body)))
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for chunk in [*chunks, b""]:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", seen
        finally:
            server.shutdown()
            thread.join()


SSE = [
    b'data: {"choices": [{"text": "a", "delta": {"content": "a"}}]}\n\ndata: {"choi',
    b'ces": [{"text": "b", "delta": {"content": "b"}}]}\n\n: still here\n\n',
    b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}\n\ndata: [DONE]\n\n',
]


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        (
            "openai",
            {
                "model": "name",
                "prompt": [100, 200],
                "repetition_penalty": 1.0,
                "max_tokens": 3,
                "logprobs": 2,
                "stream": True,
                "stream_options": {"include_usage": True},
                "ignore_eos": True,
                "top_k": 5,
                "more": [1],
            },
        ),
        (
            "openai-chat",
            {
                "model": "name",
                "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
                "max_completion_tokens": 3,
                "stream": True,
                "stream_options": {"include_usage": True},
                "top_k": 5,
                "more": [1],
            },
        ),
    ],
)
def test_bodies(
    backend: str,
    expected: dict[str, Any],
    tiny_dir: str,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bodies and headers are those that vLLM's own benchmark sends."""
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    (tmp_path / "d.jsonl").write_text('{"prompt": "Hi", "output_tokens": 3}\n')
    words = ["--skip-tokenizer-init", "--vocab-size", "201", "--random-input-len", "2", "--random-output-len", "3"]
    if backend == "openai-chat":
        words = ["--tokenizer", tiny_dir, "--dataset-name", "custom", "--dataset-path", str(tmp_path / "d.jsonl")]
        words += ["--custom-output-len", "-1"]
    with scripted_server(SSE) as (url, seen):
        words = [*words, "--base-url", url, "--model", "m", "--served-model-name", "name", "--num-prompts", "1"]
        words += ["--logprobs", "2", "--top-k", "5", "--extra-body", '{"more": [1]}', "--header", "x-a=b"]
        words += ["--request-id-prefix", "id-", "--save-result", "--save-detailed", "--backend", backend]
        words += ["--result-filename", str(tmp_path / "r.json"), "--disable-tqdm"]
        assert bench(["serve", *words], capsys)[0] == 0
    ((path, headers, body),) = seen
    assert path == BACKENDS[backend].path
    if backend == "openai":
        assert len(expected["prompt"]) == len(body["prompt"]) and all(100 <= i < 201 for i in body.pop("prompt"))
        del expected["prompt"]
    assert body == expected
    assert (headers["x-a"], headers["x-request-id"], headers["Authorization"]) == ("b", "id-0", "Bearer sesame")
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["input_lens"], result["output_lens"], result["generated_texts"]) == ([7], [3], ["ab"])
    assert len(result["itls"][0]) == 1


def read(backend: str, text: bytes) -> metrics.Outcome:
    outcome = metrics.Outcome(1.0, 4)
    BACKENDS[backend].read([(1.5, text)], outcome, datasets.SampleRequest("Hi", 1, 9), None, ignore_eos=False)
    return outcome


def test_errors_inside_streams() -> None:
    event = b'data: {"choices": [{"text": "a"}]}\n\ndata: {"error": {"message": "engine died"}}\n\ndata: [DONE]\n\n'
    assert read("openai", event).error == "engine died"
    assert read("openai", b"data: [DONE]\n\n").error == "The server sent no token."
    assert read("generate", b'{"text": ["Hia"]}\0{"error": "busy"}\0').error == "busy"
    # the model of a server without usage is counted by its events
    assert read("openai", b'data: {"choices": [{"text": "a"}]}\n\n').output_len == 1


def test_both_forms_of_generate() -> None:
    for event in (b'{"text": ["Hia"]}\0{"text": ["Hiabcd"]}\0', b'{"text": ["a"]}\0{"text": ["bcd"]}\0'):
        outcome = read("generate", event)
        assert (outcome.text, outcome.event_chars) == ("abcd", [1, 3])


async def test_connections_are_kept_unless_the_server_closes_them() -> None:
    sockets: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sockets.append(writer)
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        for _ in range(3):
            assert await client.get_json("/") == {}
        assert len(sockets) == 1
        (idle,) = client._idle
        sockets[0].close()
        await idle.reader.read()
        assert await client.get_json("/") == {}
        assert len(sockets) == 2
        client.close()
        for writer in sockets:
            writer.close()


def test_adapters_in_turn(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    with scripted_server(SSE) as (url, seen):
        words = ["serve", "--base-url", url, "--model", "m", "--skip-tokenizer-init", "--num-prompts", "4"]
        words += ["--lora-modules", "one", "two", "--lora-assignment", "round-robin", "--max-concurrency", "1"]
        assert bench([*words, "--disable-tqdm", "--random-input-len", "2"], capsys)[0] == 0
    assert [body["model"] for _, _, body in seen] == ["one", "two", "one", "two"]


# ---- figures -------------------------------------------------------------------------------------------------


def test_the_peak_counts_tokens_and_not_events() -> None:
    """Of steps of several tokens, and of a first event that has only the role."""
    outcome = metrics.Outcome(10.0, 5)
    event = b'data: {"choices": [{"delta": {"content": "%b"}}]}\n\n'
    usage = b'data: {"choices": [], "usage": {"completion_tokens": 16}}\n\n'
    chunks = [(10.1, event % b""), (10.2, event % b"12345678"), (11.5, event % b"12345678" + usage)]
    BACKENDS["openai-chat"].read(chunks, outcome, datasets.SampleRequest("Hi", 1, 16), None, ignore_eos=True)
    assert outcome.event_tokens.tolist() == [0, 8, 8]
    result = metrics.figures([outcome], 2.0, metrics=["ttft"], percentiles=[99], goodput={})
    assert (result["max_output_tokens_per_s"], result["max_concurrent_requests"]) == (8.0, 1)


def test_figures_of_known_arrivals() -> None:
    first = metrics.Outcome(10.0, 5, moments=[10.5, 10.6, 10.8], output_len=4)
    second = metrics.Outcome(10.2, 7, queued_s=0.2, moments=[11.2], output_len=1)
    broken = metrics.Outcome(10.0, 9, error="lost")
    result = metrics.figures(
        [first, broken, second],
        2.0,
        metrics=metrics.METRIC_NAMES,
        percentiles=[50, 90],
        goodput={"ttft": 600, "tpot": 100.1},
    )
    assert (result["completed"], result["failed"], result["errors"]) == (2, 1, ["", "lost", ""])
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (12, 5)
    assert (result["request_throughput"], result["output_throughput"], result["total_token_throughput"]) == (
        1,
        2.5,
        8.5,
    )
    assert result["request_goodput"] == 0.5  # the second needs a second to its first token
    assert result["mean_ttft_ms"] == pytest.approx(750)
    assert result["std_ttft_ms"] == pytest.approx(250)
    assert result["p90_ttft_ms"] == pytest.approx(950)
    assert result["mean_tpot_ms"] == pytest.approx(100)  # one token has none
    assert result["median_itl_ms"] == pytest.approx(150)
    assert result["mean_e2el_ms"] == pytest.approx(900)
    assert result["mean_client_queue_time_ms"] == pytest.approx(100)
    assert result["mean_e2el_including_client_queue_ms"] == pytest.approx(1000)
    # three events in the first second, one in the next; both requests in each of them or one
    assert (result["max_output_tokens_per_s"], result["max_concurrent_requests"]) == (4.0, 2)


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_arrivals(burstiness: float) -> None:
    args = options("--request-rate", "50", "--burstiness", str(burstiness))
    times, rates = arrivals.send_times(args, 4000, seed=1)
    assert times[-1] == pytest.approx(80) and set(rates) == {50.0}
    gaps = np.diff(times)
    # the variation of a gamma distribution is one over the root of its shape
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.1)
    assert arrivals.send_times(options(), 3, 0)[0] == [0.0, 0.0, 0.0]


def test_rates_grow() -> None:
    ramp = ["--ramp-up-start-rps", "2", "--ramp-up-end-rps", "32", "--ramp-up-strategy"]
    assert arrivals.send_times(options(*ramp, "linear"), 3, 0)[1] == pytest.approx([2, 12, 22])
    assert arrivals.send_times(options(*ramp, "exponential"), 4, 0)[1] == pytest.approx([2, 4, 8, 16])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--request-rate", "0"], "--request-rate must be above 0, got 0.0."),
        (["--burstiness", "0"], "--burstiness must be above 0, got 0.0."),
        (["--max-concurrency", "0"], "--max-concurrency must be at least 1, got 0."),
        (["--ramp-up-start-rps", "1"], "--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy."),
        (["--ramp-up-strategy", "linear"], "--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps."),
        (["--goodput", "ttft"], "--goodput 'ttft' is not NAME:MILLISECONDS."),
        (["--goodput", "itl:3"], "--goodput 'itl:3': the names are ttft, tpot, e2el, limits at least 0."),
        (["--percentile-metrics", "ttft,speed"], "--percentile-metrics: 'speed' is none of ttft, tpot, itl, e2el,"),
        (["--metric-percentiles", "101"], "--metric-percentiles must be between 0 and 100, got '101'."),
        (["--metric-percentiles", "x"], "--metric-percentiles takes numbers separated by commas, got 'x'."),
        (["--random-output-len", "0"], "--random-output-len must be at least 1, got 0."),
        (["--custom-output-len", "0"], "--custom-output-len must be at least 1, got 0."),
        (
            ["--skip-tokenizer-init", "--backend", "generate"],
            "--backend generate takes text, which needs a tokenizer",
        ),
        (["--tokenizer", "/no/where", "--model", "x"], "--tokenizer '/no/where': there is no such directory."),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_wrong_options(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = bench(["serve", "--port", "1", *words], capsys)
    assert code == 2
    assert f"ascend-vllm: error: {message}" in printed


def test_unknown_datasets_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "serve", "--dataset-name", "random-mm"])
    assert caught.value.code == 2
    assert "argument --dataset-name: invalid choice: 'random-mm'" in capsys.readouterr().err


# ---- datasets ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tiny_dir: str) -> Tokenizer:
    return Tokenizer.from_directory(tiny_dir)


def sample(tokenizer: Tokenizer | None, *words: str) -> list[datasets.SampleRequest]:
    args = options(*words)
    return datasets.sample_requests(args, tokenizer, args.seed)


def test_random_lengths(tokenizer: Tokenizer) -> None:
    words = ["--num-prompts", "40", "--random-input-len", "20", "--random-output-len", "10"]
    made = sample(tokenizer, *words, "--random-range-ratio", "0.5", "--random-prefix-len", "8")
    assert {request.output_len for request in made} >= {5, 15} and len({r.prompt for r in made}) == 40
    assert all(18 <= request.prompt_len <= 38 + 4 for request in made)
    assert datasets.count_tokens(tokenizer, [str(r.prompt) for r in made]) == [r.prompt_len for r in made]
    assert sample(tokenizer, *words) == sample(tokenizer, *words) != sample(tokenizer, *words, "--seed", "1")
    ids = sample(None, *words, "--random-prefix-len", "8", "--skip-tokenizer-init")
    assert len({tuple(request.prompt[:8]) for request in ids}) == 1
    for wrong in ("1", "x", '{"input": 0.5}'):
        with pytest.raises(ConfigError, match="--random-range-ratio"):
            sample(tokenizer, "--random-range-ratio", wrong)


def test_prefix_repetition() -> None:
    words = ["--dataset-name", "prefix_repetition", "--num-prompts", "10", "--prefix-repetition-num-prefixes", "3"]
    words += ["--prefix-repetition-prefix-len", "6", "--prefix-repetition-suffix-len", "4", "--skip-tokenizer-init"]
    made = sample(None, *words, "--prefix-repetition-output-len", "7")
    # ten prompts are three for each of three beginnings
    assert [(request.prompt_len, request.output_len) for request in made] == [(10, 7)] * 9
    beginnings = [tuple(request.prompt[:6]) for request in made]
    assert sorted(beginnings.count(one) for one in set(beginnings)) == [3, 3, 3]
    with pytest.raises(ConfigError, match="must be at least --prefix-repetition-num-prefixes"):
        sample(None, *words, "--num-prompts", "2")


def test_sonnet(tokenizer: Tokenizer, tmp_path: pathlib.Path) -> None:
    lines = datasets._VERSES.read_text().splitlines()
    assert len(set(lines)) == len(lines) > 40
    words = ["--dataset-name", "sonnet", "--num-prompts", "5", "--sonnet-prefix-len", "250"]
    made = sample(tokenizer, *words, "--input-len", "400", "--output-len", "12")
    texts = [str(request.prompt) for request in made]
    assert len(set(texts)) == 5 and {request.output_len for request in made} == {12}
    shared = texts[0][: next(i for i in range(len(texts[0])) if len({text[: i + 1] for text in texts}) > 1)]
    assert 180 <= datasets.count_tokens(tokenizer, [shared])[0] <= 275
    assert all(340 <= request.prompt_len <= 400 for request in made)
    own = tmp_path / "lines.txt"
    own.write_text("sun\nhill\n")
    assert "sun\n" in str(sample(tokenizer, *words, "--input-len", "400", "--dataset-path", str(own))[0].prompt)
    with pytest.raises(ConfigError, match=r"--sonnet-input-len \(240\) must be at least --sonnet-prefix-len"):
        sample(tokenizer, *words, "--sonnet-input-len", "240")


def test_sharegpt(tokenizer: Tokenizer, tmp_path: pathlib.Path) -> None:
    question, answer = "What does the server say today?", "Hello! I am fine, thank you."
    turns = [
        [{"from": "human", "value": question}, {"from": "gpt", "value": answer}, {"value": "more"}],
        [{"value": "a single turn"}],
        [{"value": "x"}, {"value": answer}],
        [{"value": question * 300}, {"value": answer}],
    ]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([{"conversations": turn} for turn in turns]))
    words = ["--dataset-name", "sharegpt", "--dataset-path", str(path), "--num-prompts", "3"]
    lengths = datasets.count_tokens(tokenizer, [question, answer])
    # the one usable conversation is taken again
    assert sample(tokenizer, *words) == [datasets.SampleRequest(question, *lengths)] * 3
    assert sample(tokenizer, *words, "--no-oversample", "--sharegpt-output-len", "9")[0].output_len == 9
    with pytest.raises(ConfigError, match="holds no usable prompt"):
        path.write_text("[]")
        sample(tokenizer, *words)
    with pytest.raises(ConfigError, match="needs a file: give its path with --dataset-path"):
        sample(tokenizer, "--dataset-name", "sharegpt")
    with pytest.raises(ConfigError, match="sharegpt needs a tokenizer"):
        sample(None, *words)


def test_custom(tokenizer: Tokenizer, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one", "output_tokens": 3}\n\n{"prompt": "two", "output_tokens": 4}\n')
    words = ["--dataset-name", "custom", "--dataset-path", str(path), "--num-prompts", "2", "--disable-shuffle"]
    made = sample(tokenizer, *words)
    assert [request.output_len for request in made] == [256, 256]
    assert made[0].prompt == "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    plain = sample(tokenizer, *words, "--custom-output-len", "-1", "--skip-chat-template")
    assert [(request.prompt, request.output_len) for request in plain] == [("one", 3), ("two", 4)]
    # a chat server has its own template
    assert sample(tokenizer, *words, "--backend", "openai-chat")[0].prompt == "one"
    for content, message in (
        ("{", "line 1 is not JSON"),
        ('{"text": "one"}', "line 1 must be an object with the text 'prompt'"),
        ('{"prompt": "one"}', "line 1 needs 'output_tokens'"),
    ):
        path.write_text(content)
        with pytest.raises(ConfigError, match=message):
            sample(tokenizer, *words, "--custom-output-len", "-1")


# ---- without a server ----------------------------------------------------------------------------------------


def test_throughput(tiny_dir: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["throughput", "--model", tiny_dir, "--dtype", "float32", "--kv-cache-memory-bytes", "8M"]
    words += ["--input-len", "12", "--output-len", "4", "--num-prompts", "5", "--n", "2", "--disable-tqdm"]
    code, printed = bench([*words, "--num-warmups", "1", "--output-json", str(tmp_path / "t.json")], capsys)
    assert code == 0
    result = json.loads((tmp_path / "t.json").read_text())
    assert list(result) == [
        "model_id",
        "elapsed_time",
        "num_requests",
        "total_num_tokens",
        "requests_per_second",
        "tokens_per_second",
    ]
    assert result["model_id"] == tiny_dir and result["num_requests"] == 5
    assert result["requests_per_second"] == pytest.approx(5 / result["elapsed_time"])
    assert result["tokens_per_second"] == pytest.approx(result["total_num_tokens"] / result["elapsed_time"])
    assert "Total num output tokens:  40\n" in printed
    assert 5 * 12 + 40 <= result["total_num_tokens"] <= 5 * 15 + 40


def test_throughput_of_chats(tiny_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["throughput", "--model", tiny_dir, "--dtype", "float32", "--kv-cache-memory-bytes", "8M"]
    words += ["--num-prompts", "2", "--input-len", "9", "--output-len", "4", "--backend", "vllm-chat"]
    code, printed = bench([*words, "--disable-tqdm"], capsys)
    assert code == 0 and "Total num output tokens:  8\n" in printed


def test_latency(tiny_dir: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["latency", "--model", tiny_dir, "--dtype", "float32", "--kv-cache-memory-bytes", "8M"]
    words += ["--input-len", "8", "--output-len", "3", "--batch-size", "2", "--num-iters-warmup", "1"]
    code, printed = bench([*words, "--num-iters", "3", "--output-json", str(tmp_path / "l.json")], capsys)
    assert code == 0
    result = json.loads((tmp_path / "l.json").read_text())
    assert list(result) == ["avg_latency", "latencies", "percentiles"]
    assert result["avg_latency"] == pytest.approx(math.fsum(result["latencies"]) / 3)
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert result["percentiles"]["50"] == pytest.approx(sorted(result["latencies"])[1])
    assert f"Avg latency: {result['avg_latency']} seconds\n10% percentile latency: " in printed
    beams = [*words, "--num-iters", "1", "--num-iters-warmup", "0", "--use-beam-search", "--n", "2"]
    assert bench(beams, capsys)[0] == 0
    code, printed = bench([*words, "--batch-size", "0"], capsys)
    assert code == 2 and "--batch-size must be at least 1, got 0." in printed


def test_the_command() -> None:
    """The console command knows all three; engine flags stand beside the options of those that make an engine."""
    done = subprocess.run(
        [sys.executable, "-m", "ascend_vllm.entrypoints.cli", "bench", "latency", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert "--num-iters-warmup" in done.stdout and "--enable-prefix-caching" in done.stdout
