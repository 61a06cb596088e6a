"""Compares two clients: `ascend-vllm bench serve` and `vllm bench serve` load the same server alternately.

    python benchmarks/compare_clients.py --model /tmp/qwen2-0.5b --peer-program VLLM/bin/vllm --json result.json

Both send random prompts of the same lengths at the same concurrency. If the ratios are near 1, the figures of a
comparison of servers do not depend on the client.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

from comparison import machine, report, servers
from comparison.client import Client, LoadError

from ascend_vllm.engine.tokenization import Tokenizer

FIGURES = ("output_throughput", "median_ttft_ms", "median_tpot_ms", "median_e2el_ms")
# options for both clients
SIZES = ("num_prompts", "concurrency", "input_len", "output_len")


def _peer_figures(args: argparse.Namespace, url: str, seed: int) -> dict[str, float]:
    """One run of the peer's client.

    Raises:
        LoadError: it exited with an error, or a request failed.
    """
    with tempfile.TemporaryDirectory() as directory:
        words = [args.peer_program, "bench", "serve", "--base-url", url, "--model", args.served_model_name]
        words += ["--tokenizer", args.model, "--ignore-eos", "--temperature", "0", "--disable-tqdm"]
        words += ["--seed", str(seed), "--num-prompts", str(args.num_prompts)]
        words += ["--max-concurrency", str(args.concurrency), "--dataset-name", "random"]
        words += ["--random-input-len", str(args.input_len), "--random-output-len", str(args.output_len)]
        words += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,99"]
        words += ["--save-result", "--result-dir", directory, "--result-filename", "result.json"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        path = pathlib.Path(directory) / "result.json"
        if done.returncode or not path.is_file():
            raise LoadError(
                f"{args.peer_program} bench serve ended with code {done.returncode}:\n{done.stderr[-2000:]}"
            )
        result: dict[str, float] = json.loads(path.read_text())
    if result["failed"]:
        raise LoadError(f"{result['failed']} requests of {args.peer_program} bench serve failed.")
    return result


def compare(args: argparse.Namespace, url: str) -> dict[str, Any]:
    """Loads one server with both clients alternately.

    Returns:
        for each of FIGURES both readings, their medians and the ratio of those, ours over the peer's.

    Raises:
        LoadError: a client or a request failed.
    """
    readings: dict[str, dict[str, list[float]]] = {name: {"ours": [], "peer": []} for name in FIGURES}
    client = Client(url, Tokenizer.from_directory(args.model), args.served_model_name)
    load = {name: getattr(args, name) for name in SIZES}
    client.load(seed=1000, **load)
    for number in range(args.rounds):
        ours = client.load(seed=number, **load)
        peer = _peer_figures(args, url, number + 500)
        for name in FIGURES:
            readings[name]["ours"].append(ours[name])
            readings[name]["peer"].append(peer[name])
    found: dict[str, Any] = {}
    for name, sides in readings.items():
        mine, theirs = (statistics.median(sides[side]) for side in ("ours", "peer"))
        # answers in one event have no time per token
        ratio = mine / theirs if theirs else None
        found[name] = {"ours": mine, "peer": theirs, "ratio": ratio, "readings": sides}
    return found


@contextlib.contextmanager
def _server(args: argparse.Namespace) -> Iterator[str]:
    """The server's address: --base-url, or of a server started here."""
    if args.base_url is not None:
        yield args.base_url
        return
    flags = ["--dtype", "bfloat16", "--kv-cache-memory-bytes", str(args.kv_cache_bytes)]
    with servers.Server(servers.ours(), args.model, flags) as server:
        server.wait_ready(args.start_timeout)
        yield server.url


def _parse_args() -> argparse.Namespace:
    parser = report.parser_of(__doc__, "at the end")
    add = parser.add_argument
    add("--model", required=True, help="directory of the model")
    add("--peer-program", default="vllm", help="path of vLLM's command; default: the one that the shell finds")
    add("--base-url", help="a server that runs already; default: ours is started")
    add("--served-model-name", default=servers.MODEL_NAME, help="of that server (default: %(default)s)")
    add("--rounds", type=int, default=3, help="runs of each client (default: %(default)s)")
    add("--num-prompts", type=int, default=32, help="requests of a run (default: %(default)s)")
    add("--concurrency", type=int, default=8, help="requests under way at once (default: %(default)s)")
    add("--input-len", type=int, default=128, help="tokens of a prompt (default: %(default)s)")
    add("--output-len", type=int, default=64, help="tokens to generate (default: %(default)s)")
    add("--kv-cache-bytes", type=int, default=2**30, help="of the server (default: %(default)s)")
    add("--start-timeout", type=float, default=300, help="seconds that the server may take (default: %(default)s)")
    args = parser.parse_args()
    found = shutil.which(args.peer_program)
    if found is None:
        parser.error(f"--peer-program: there is no program {args.peer_program!r}")
    args.peer_program = found
    return args


def _peer_version(args: argparse.Namespace) -> str:
    """What the peer's program says of itself.

    Raises:
        LoadError: nothing.
    """
    done = subprocess.run([args.peer_program, "--version"], capture_output=True, text=True, check=False)
    if done.returncode or not done.stdout.split():
        raise LoadError(f"{args.peer_program} --version ended with code {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout.split()[-1]


def _content(args: argparse.Namespace, peer_version: str, found: dict[str, Any]) -> dict[str, Any]:
    """The result as it is kept."""
    return {
        **report.heading("clients", "compare_clients.py", args, machine.describe()),
        "rounds": args.rounds,
        "sizes": {name: getattr(args, name) for name in SIZES},
        "peer_version": peer_version,
        "figures": found,
    }


def main() -> None:
    """Measures, prints a line for each figure, writes the file."""
    args = _parse_args()
    try:
        # before the measurement, so that a failure does not lose it
        peer_version = _peer_version(args)
        with _server(args) as url:
            found = compare(args, url)
    except (LoadError, servers.ServerError) as error:
        raise SystemExit(str(error)) from error
    for name, row in found.items():
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
        print(f"{name:20} ours {row['ours']:10.4g}  peer {row['peer']:10.4g}  ratio {ratio}")
    report.save(args.json, _content(args, peer_version, found))


if __name__ == "__main__":
    report.run(main)
