"""What LoRA adapters cost: servers with and without them, and vLLM's, alternately on one machine.

    python scripts/make_random_model.py /tmp/qwen2-0.5b
    python benchmarks/compare_adapters.py --model /tmp/qwen2-0.5b --peer-program /path/to/vllm/bin/vllm \\
        --json adapters.json
    python benchmarks/compare_adapters.py --model /tmp/qwen2-0.5b --rows one eight --peer none

Eight adapters of all linear layers of attention and MLP are written for the model. In each round the rows are
measured one after another, with the same number of prompts, new in each round: on this project's server with
--enable-lora ("ours"), and on the server beside it. That is this project's without --enable-lora, asked for the model
as it is, in the rows "unused", "one" and "eight", and vLLM's with the same adapters in "vllm-one" and "vllm-eight".
The row "loading" streams answers of the model, loads adapters meanwhile and asks each for a token: its reading is by
how much that lengthens a gap between tokens of a stream. Gaps while adapters are loaded are compared with the usual
one, those of their first tokens with the longest one while the model itself is asked for a token, which takes a step.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import pathlib
import shlex
import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

from comparison import machine, report, servers
from comparison.adapters import write_adapters
from comparison.client import Client, LoadError

from ascend_vllm.engine.tokenization import Tokenizer

_NUM_ADAPTERS = 8
_RUNTIME_LOADING = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
_SEEDS_PER_ROUND, _WARM_UP_SEED = 100, 900_000
# name of ours without adapters, of ours with them, and of vLLM's
_PLAIN, _OURS, _VLLM = "plain", "ours", "vllm"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(report.Line):
    """One line of the table.

    Attributes:
        beside: the server that ours is compared with.
        adapters: of how many adapters the requests ask for one, on servers that have them; None: the row "loading".
    """

    beside: str
    adapters: int | None


def _rate(name: str, title: str, beside: str, adapters: int, target: float) -> Row:
    return Row(
        name=name, title=f"output tokens, concurrency 8, {title}", unit="tok/s", higher_is_better=True,
        target_ratio=target, beside=beside, adapters=adapters,
    )  # fmt: skip


ROWS = (
    _rate("unused", "no request has an adapter, and a server without adapters", _PLAIN, 0, 0.95),
    _rate("one", "all with one adapter, and a server without adapters", _PLAIN, 1, 0.85),
    _rate("eight", "each with another adapter, and a server without adapters", _PLAIN, 8, 0.75),
    _rate("vllm-one", "all with one adapter, and vLLM", _VLLM, 1, 1.5),
    _rate("vllm-eight", "each with another adapter, and vLLM", _VLLM, 8, 1.5),
    Row(
        name="loading",
        title="by how much loading adapters lengthens gaps between tokens of 8 streams, at most, and vLLM",
        unit="s",
        higher_is_better=False,
        target_ratio=1.0,
        most=0.05,
        beside=_VLLM,
        adapters=None,
    ),
)


class Comparison:
    """Measures the servers.

    Args:
        args: the command line.
        adapters: directories of the adapters by name.
    """

    def __init__(self, args: argparse.Namespace, adapters: dict[str, str]) -> None:
        self._args = args
        self._adapters = adapters
        self._machine = machine.describe()
        self._tokenizer = Tokenizer.from_directory(args.model)
        self._clients: dict[str, Client] = {}
        self._versions: dict[str, str] = {}
        self._commands: dict[str, str] = {}
        self._running: dict[str, servers.Server] = {}
        self.results: list[report.RowResult] = []

    def run(self, rows: Sequence[Row]) -> None:
        """Starts the servers, and measures the rows in turns."""
        sides = dict.fromkeys([_OURS, *(row.beside for row in rows)])
        if self._args.peer == "none":
            sides.pop(_VLLM, None)
        self.results = [report.RowResult(row) for row in rows]
        with contextlib.ExitStack() as stack:
            for side in sides:
                self._start(side, stack)
            for side in sides:
                self._warm_up(side)
            for number in range(self._args.rounds):
                for row, result in zip(rows, self.results, strict=True):
                    for side in report.in_turns((_OURS, row.beside), number):
                        if side in sides:
                            self._take(number, row, result, side)
                report.save(self._args.json, self.content())

    def _start(self, side: str, stack: contextlib.ExitStack) -> None:
        args = self._args
        flags = ["--dtype", "bfloat16", "--max-model-len", str(args.max_model_len)]
        flags += ["--kv-cache-memory-bytes", str(args.kv_cache_bytes)]
        shown = flags
        if side != _PLAIN:
            flags = [*flags, "--enable-lora", "--max-loras", str(_NUM_ADAPTERS), "--max-lora-rank", str(args.rank)]
            flags += ["--max-cpu-loras", str(2 * _NUM_ADAPTERS), "--lora-modules"]
            # without the directory, which is temporary
            shown = flags + [f"{name}=…" for name in self._adapters]
            flags += [f"{name}={path}" for name, path in self._adapters.items()]
        program = (
            servers.vllm(args.peer_program, shlex.split(args.peer_args), args.tcmalloc)
            if side == _VLLM
            else servers.ours(shlex.split(args.ours_args))
        )
        program = dataclasses.replace(program, environment=dict(program.environment) | _RUNTIME_LOADING)
        self._commands[side] = program.shown(args.model, shown)
        server = stack.enter_context(servers.Server(program, args.model, flags))
        server.wait_ready(args.start_timeout)
        self._running[side] = server
        self._versions[side] = server.version()
        self._clients[side] = Client(server.url, self._tokenizer)

    def _warm_up(self, side: str) -> None:
        """Short answers, of each adapter and of all in one batch."""
        count, names = self._args.concurrency, [] if side == _PLAIN else list(self._adapters)
        for chosen in ([], names[:1], names):
            self._clients[side].load(
                seed=_WARM_UP_SEED, num_prompts=count, concurrency=count, input_len=16, output_len=4, adapters=chosen
            )

    def _take(self, number: int, row: Row, result: report.RowResult, side: str) -> None:
        for other in self._running.values():
            other.wait_idle()
        args, seed = self._args, number * _SEEDS_PER_ROUND + ROWS.index(row)
        lengths = {"input_len": args.input_len, "output_len": args.output_len}
        if row.adapters is None:
            value, figures = self._pause(side, seed, number)
        else:
            names = [] if side == _PLAIN else list(self._adapters)[: row.adapters]
            load = {"num_prompts": args.concurrency * args.waves, "concurrency": args.concurrency}
            figures = self._clients[side].load(seed=seed, adapters=names, **load, **lengths)
            value = figures["output_throughput"]
        result.add("ours" if side == _OURS else "peer", value, figures)
        print(f"{row.name:10} {side:6} {value:10.4g} {row.unit}", flush=True)

    def _pause(self, side: str, seed: int, number: int) -> tuple[float, dict[str, Any]]:
        args = self._args
        named = list(self._adapters.values())[: args.loads]
        gaps = self._clients[side].loading(
            seed=seed,
            streams=args.concurrency,
            input_len=args.input_len,
            output_len=args.stream_len,
            adapters={f"loaded-{number}-{index}": path for index, path in enumerate(named)},
            apart_s=args.apart_s,
        )
        figures = {
            f"{kind}_gap_s": {"count": len(found), "median": statistics.median(found), "longest": max(found)}
            for kind, found in dataclasses.asdict(gaps).items()
        }
        return gaps.pause_s(), figures

    def content(self) -> dict[str, Any]:
        """The result for JSON."""
        args = self._args
        names = ("concurrency", "input_len", "output_len", "stream_len", "waves", "loads", "rank")
        return {
            **report.heading("adapters", "compare_adapters.py", args, self._machine),
            "rounds": args.rounds,
            "sizes": {name: getattr(args, name) for name in names},
            "programs": {
                side: {"version": self._versions[side], "command": command}
                for side, command in self._commands.items()
            },
            "rows": [result.as_dict() for result in self.results if result.readings],
        }


def _parse_args() -> argparse.Namespace:
    parser = report.parser_of(__doc__, "after every round")
    add = parser.add_argument
    add("--model", required=True, help="directory of the model")
    add("--rows", nargs="+", choices=[row.name for row in ROWS], help="default: all that the peer allows")
    add("--rounds", type=int, default=3, help="readings of each row and server (default: %(default)s)")
    add("--peer", choices=("vllm", "none"), default="vllm", help="(default: %(default)s)")
    add("--peer-program", help="path of vLLM's command; default: the one that the shell finds")
    add("--peer-args", default="", help="further flags of the peer, in one word")
    add("--ours-args", default="", help="further flags of ours, in one word")
    add("--tcmalloc", help="path of libtcmalloc for the peer; default: where systems have it")
    add("--rank", type=int, default=16, help="of the adapters (default: %(default)s)")
    add("--concurrency", type=int, default=8, help="requests running at a time (default: %(default)s)")
    add("--waves", type=int, default=3, help="prompts, as a multiple of the concurrency (default: %(default)s)")
    add("--input-len", type=int, default=128, help="tokens of a prompt (default: %(default)s)")
    add("--output-len", type=int, default=64, help="tokens of an answer (default: %(default)s)")
    add("--stream-len", type=int, default=192, help="the same while adapters are loaded (default: %(default)s)")
    add("--loads", type=int, default=4, help="adapters that are loaded then, at most 8 (default: %(default)s)")
    add("--apart-s", type=float, default=0.7, help="seconds between them (default: %(default)s)")
    add("--max-model-len", type=int, default=2048, help="(default: %(default)s)")
    add("--kv-cache-bytes", type=int, default=2**29, help="of each server (default: %(default)s)")
    add("--start-timeout", type=float, default=900, help="seconds that a server may take (default: %(default)s)")
    args = parser.parse_args()
    if not 1 <= args.loads <= _NUM_ADAPTERS:
        parser.error(f"--loads must be 1 to {_NUM_ADAPTERS}, got {args.loads}")
    return args


def main() -> None:
    """Measures, prints the table, writes the file."""
    args = _parse_args()
    rows = [row for row in ROWS if row.name in args.rows] if args.rows else list(ROWS)
    if args.peer == "none":
        rows = [row for row in rows if row.beside != _VLLM or row.adapters is None]
    print(machine.one_line(machine.describe()))
    with tempfile.TemporaryDirectory(prefix="adapters-") as directory:
        adapters = write_adapters(pathlib.Path(directory), args.model, _NUM_ADAPTERS, args.rank)
        try:
            comparison = Comparison(args, adapters)
            comparison.run(rows)
        except (servers.ServerError, LoadError) as error:
            raise SystemExit(str(error)) from error
    print("\n".join(report.lines(comparison.results, "beside")))


if __name__ == "__main__":
    report.run(main)
