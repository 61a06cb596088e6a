"""Compares this project's server with vLLM's on one machine, alternately, with the same client.

    python scripts/make_random_model.py /tmp/qwen2-0.5b
    python scripts/make_random_model.py /tmp/tiny-5m --preset tiny-5m
    python scripts/make_random_model.py /tmp/moe --preset qwen2-moe-1.5g
    python scripts/make_random_model.py /tmp/mla --preset deepseek-v2-1.5g
    python benchmarks/compare_servers.py --model /tmp/qwen2-0.5b --tiny-model /tmp/tiny-5m --moe-model /tmp/moe \\
        --mla-model /tmp/mla --peer-program /path/to/vllm/bin/vllm --json result.json
    python benchmarks/compare_servers.py --model /tmp/qwen2-0.5b --rows c1 c8 --rounds 1 --peer none
    python benchmarks/compare_servers.py --tiny-model /tmp/tiny-5m --peer null

    python scripts/make_random_model.py /tmp/qwen2-0.5b-w8a8 --weights w8a8
    python scripts/make_random_model.py /tmp/qwen2-0.5b-w4 --weights w4a16
    python benchmarks/compare_servers.py --w8a8-model /tmp/qwen2-0.5b-w8a8 --w4-model /tmp/qwen2-0.5b-w4 \\
        --peer-program /path/to/vllm/bin/vllm --json quantized.json

    python scripts/make_random_model.py /tmp/qwen2-7b --preset qwen2-7b
    python benchmarks/compare_servers.py --model /tmp/qwen2-7b --rows load c1 --peer none --rounds 1

Both servers get the same flags (bfloat16, KV cache of the same size), and only one computes at a time; in each round
a row is measured on ours, then on the peer's, with the same prompts, new in each round. vLLM is bound to all cores,
with tcmalloc if installed. Prefix caching and chunked prefill have each server's defaults, but are on for both in
the rows "prefix", "mixed", "long8k" and "long8k-mixed". In the rows "open-ttft" and "open-gap" requests of mixed
lengths arrive as a Poisson process for five minutes (--open-s), at the same rate for both: --open-rate, or 80% of
what the peer answers in a closed loop. The rows "start" and "memory" start the servers each time, after a warm-up
start, so that files and compiled graphs are cached (--warm-starts). The machine's limits are measured before and
after each reading, when all servers are idle. The row "load" starts them with weights that are not in the file cache,
and its limit is the time to read them from the disk; it is measured only where --rows names it. Without --rows, those
of models that are not given are left out.

With AMX vLLM rounds the inputs of W4A16 to 8 bits in groups, in bfloat16: compare it with `--ours-args
--cpu-int8-activations`, or keep it from that with `--peer-variables VLLM_CPU_INT4_W4A8=0`. With `--peer null` the
peer is this server with a device that answers every step at once: what the engine and the front end can do at most.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import shlex
from collections.abc import Iterator
from typing import Any

from comparison import machine, report, servers
from comparison.client import Client, LoadError
from comparison.limits import ModelFacts, file_read_s, forget_files
from comparison.peaks import Peaks, Reading, median_reading
from comparison.rows import OTHER_MODELS, ROWS, SETUPS, Row, Sizes, Subject, saturation

from ascend_vllm.engine.tokenization import Tokenizer

# difference between the seeds of rounds, above the number of seeds in a row
_SEEDS_PER_ROUND = 1000
_SATURATION_SEED = 800_000
_SEEDS = {row.name: index for index, row in enumerate(ROWS)}
# of the peer's saturation, at which requests of the open loop arrive
_OPEN_SHARE = 0.8
# vLLM's defaults, which are flags here
_SHARED_FLAGS = ("--enable-prefix-caching", "--enable-chunked-prefill")
# setups whose servers are started anew for each reading
_FRESH = ("fresh", "cold")
_SETUP_FLAGS = {"shared": _SHARED_FLAGS, "long8k": _SHARED_FLAGS}


class Comparison:
    """Measures both programs.

    Args:
        args: the command line.
        programs: "ours" and, if there is one, "peer".
        sizes: numbers and lengths of the requests.
        peaks: measures the machine's limits.
    """

    def __init__(
        self, args: argparse.Namespace, programs: dict[str, servers.Program], sizes: Sizes, peaks: Peaks
    ) -> None:
        self._args = args
        self._sizes = sizes
        self._peaks = peaks
        self._programs = programs
        self._machine = machine.describe()
        self._commands: dict[str, dict[str, str]] = {side: {} for side in self._programs}
        self._versions: dict[str, str] = {}
        self.results: list[report.RowResult] = []

    @property
    def peer(self) -> str | None:
        """The peer's name; None without one."""
        return self._programs["peer"].name if "peer" in self._programs else None

    def run(self, rows: list[Row]) -> None:
        """Measures the rows, grouped by setup."""
        for setup in SETUPS:
            if chosen := [row for row in rows if row.setup == setup]:
                measured = [(row, report.RowResult(row)) for row in chosen]
                self.results += [result for _, result in measured]
                (self._run_fresh if setup in _FRESH else self._run_resident)(setup, measured)

    def _flags(self, setup: str) -> list[str]:
        args = self._args
        size = args.memory_kv_cache_bytes if setup in _FRESH else args.kv_cache_bytes
        # an answer to a long prompt has at most four tokens, in the warm-up
        longest = max(args.max_model_len, self._sizes.long8k_len + 4) if setup == "long8k" else args.max_model_len
        flags = ["--dtype", "bfloat16", "--max-model-len", str(longest)]
        flags += ["--kv-cache-memory-bytes", str(size)]
        return [*flags, *_SETUP_FLAGS.get(setup, ())]

    def _model(self, setup: str) -> str:
        return str(getattr(self._args, f"{setup}_model") if setup in OTHER_MODELS else self._args.model)

    @contextlib.contextmanager
    def _server(self, side: str, setup: str) -> Iterator[servers.Server]:
        program, model, flags = self._programs[side], self._model(setup), self._flags(setup)
        self._commands[side][setup] = program.shown(model, flags)
        with servers.Server(program, model, flags) as server:
            server.wait_ready(self._args.start_timeout)
            self._versions[side] = server.version()
            yield server

    def _run_fresh(self, setup: str, measured: list[tuple[Row, report.RowResult]]) -> None:
        model = self._model(setup)
        facts, tokenizer = ModelFacts.of(model), Tokenizer.from_directory(model)
        is_cold = setup == "cold"
        for side in list(self._programs) * (0 if is_cold else self._args.warm_starts):
            with self._server(side, setup) as server:
                self._print(f"{self._programs[side].name} was ready in {server.start_s:.1f} s (warm-up)")
        for number in range(self._args.rounds):
            self._note_read(model, is_cold, measured)
            for side in self._programs:
                if is_cold:
                    forget_files(model)
                with self._server(side, setup) as server:
                    client = Client(server.url, tokenizer)
                    for row, result in measured:
                        subject = Subject(server, client, facts, self._sizes, self._seed(number, row))
                        self._take(side, row, result, subject)
            if is_cold:
                # a disk may be faster the second time, or with others at work
                self._note_read(model, is_cold, measured)
            report.save(self._args.json, self.content())

    @staticmethod
    def _note_read(model: str, is_cold: bool, measured: list[tuple[Row, report.RowResult]]) -> None:
        """Measures how long the weights' files take to read, the limit of some rows."""
        read_s = file_read_s(model, is_cold)
        for row, result in measured:
            if row.limit_text:
                result.allowed.append(read_s)

    def _run_resident(self, setup: str, measured: list[tuple[Row, report.RowResult]]) -> None:
        model = self._model(setup)
        facts, tokenizer = ModelFacts.of(model), Tokenizer.from_directory(model)
        with contextlib.ExitStack() as stack:
            running = {side: stack.enter_context(self._server(side, setup)) for side in self._programs}
            clients = {side: Client(server.url, tokenizer) for side, server in running.items()}
            rate = 0.0
            if setup == "open":
                rate = self._open_rate({side: (server, clients[side]) for side, server in running.items()}, facts)
            for number in range(self._args.rounds):
                for row, result in measured:
                    along = next((other for line, other in measured if line.name == row.along), None)
                    limits = [self._limits(running)]
                    for side, server in running.items():
                        seed = self._seed(number, row)
                        subject = Subject(server, clients[side], facts, self._sizes, seed, rate)
                        if number == 0 and row.warm_up is not None and along is None:
                            row.warm_up(subject)
                        self._take(side, row, result, subject, along)
                        limits.append(self._limits(running))
                    self._note_limits(row, result, facts, limits)
                    report.save(self._args.json, self.content())

    def _limits(self, running: dict[str, servers.Server]) -> Reading:
        """Measures the machine's limits while no server computes."""
        for side, server in running.items():
            if not server.wait_idle():
                self._print(f"{self._programs[side].name} is busy without requests, which disturbs the readings")
        return self._peaks.read()

    def _seed(self, number: int, row: Row) -> int:
        return number * _SEEDS_PER_ROUND + _SEEDS[row.name]

    def _open_rate(self, running: dict[str, tuple[servers.Server, Client]], facts: ModelFacts) -> float:
        """Requests per second of the open loop."""
        if self._args.open_rate is not None:
            return float(self._args.open_rate)
        side = "peer" if "peer" in running else "ours"
        server, client = running[side]
        # the first one is a warm-up
        subjects = [Subject(server, client, facts, self._sizes, _SATURATION_SEED + number) for number in (0, 1)]
        found = [saturation(subject) for subject in subjects][-1]
        self._print(f"{self._programs[side].name} answers {found:.3g} requests/s of mixed lengths at most")
        return _OPEN_SHARE * found

    def _take(
        self,
        side: str,
        row: Row,
        result: report.RowResult,
        subject: Subject,
        along: report.RowResult | None = None,
    ) -> None:
        if along is not None and row.read is not None:
            figures = along.figures[side][-1]
            value = row.read(figures)
        else:
            value, figures = row.measure(subject)
        result.add(side, value, figures)
        self._print(f"{row.name:9} {self._programs[side].name:12} {value:10.4g} {row.unit}")

    def _note_limits(self, row: Row, result: report.RowResult, facts: ModelFacts, limits: list[Reading]) -> None:
        result.limits += limits
        if row.limit is not None:
            result.allowed.append(row.limit(facts, self._sizes, median_reading(limits)))

    @staticmethod
    def _print(text: str) -> None:
        print(text, flush=True)

    def content(self) -> dict[str, Any]:
        """The result for JSON."""
        return {
            **report.heading("servers", "compare_servers.py", self._args, self._machine),
            "rounds": self._args.rounds,
            "sizes": dataclasses.asdict(self._sizes),
            "programs": {
                side: {"name": program.name, "version": self._versions.get(side), "commands": self._commands[side]}
                for side, program in self._programs.items()
            },
            "rows": [result.as_dict() for result in self.results if result.readings],
        }


def _parse_args() -> argparse.Namespace:
    parser = report.parser_of(__doc__, "after every reading")
    add = parser.add_argument
    add("--model", help="directory of the model of the rows that have none of their own")
    for setup, what in OTHER_MODELS.items():
        add(f"--{setup}-model", help=f"directory of the model of the rows {setup}: {what}")
    add("--rows", nargs="+", choices=[row.name for row in ROWS], help="default: those whose models are given")
    add("--rounds", type=int, default=3, help="readings of each row and server (default: %(default)s)")
    add("--peer", choices=("vllm", "null", "none"), default="vllm", help="(default: %(default)s)")
    add("--peer-program", help="path of the peer's command; default: the one that the shell finds")
    add("--peer-args", default="", help="further flags of the peer, in one word")
    add("--peer-variables", default="", help="further variables of vLLM's environment, NAME=VALUE …, in one word")
    add("--ours-args", default="", help="further flags of ours, in one word")
    add("--open-rate", type=float, help="requests/s of the rows open; default: 80%% of the peer's saturation")
    add("--tcmalloc", help="path of libtcmalloc for the peer; default: where systems have it")
    add("--max-model-len", type=int, default=2048, help="(default: %(default)s)")
    add("--kv-cache-bytes", type=int, default=2**30, help="of both servers (default: %(default)s)")
    add("--memory-kv-cache-bytes", type=int, default=2**27, help="in rows start and memory (default: %(default)s)")
    add("--warm-starts", type=int, default=1, help="starts of each before those that count (default: %(default)s)")
    add("--start-timeout", type=float, default=900, help="seconds that a server may take (default: %(default)s)")
    add("--gib", type=float, default=1.0, help="read in a measurement of the bandwidth, in GiB")
    for field in dataclasses.fields(Sizes):
        name = "--" + field.name.replace("_", "-")
        add(name, type=int, default=field.default, help="(default: %(default)s)")
    args = parser.parse_args()
    _check(parser, args)
    return args


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    missing = {setup for setup in OTHER_MODELS if getattr(args, f"{setup}_model") is None}
    args.rows = args.rows or [row.name for row in ROWS if _is_default(row, args, missing)]
    without_null = [row.name for row in ROWS if row.name in args.rows and row.null_ratio is None]
    if args.peer == "null" and without_null:
        parser.error(f"--peer null is not compared in the rows {' '.join(without_null)}")
    if wrong := [word for word in shlex.split(args.peer_variables) if not word.partition("=")[1]]:
        parser.error(f"--peer-variables: each is NAME=VALUE, got {' '.join(wrong)}")
    chosen = {row.setup for row in ROWS if row.name in args.rows}
    if args.model is None and (not chosen or chosen - set(OTHER_MODELS)):
        parser.error("--model: name the directory of a model, such as scripts/make_random_model.py writes")
    for setup in chosen & missing:
        parser.error(f"--{setup}-model: name the directory of {OTHER_MODELS[setup]}, or leave its rows out")
    if args.open_rate is not None and not 0 < args.open_rate < math.inf:
        parser.error(f"--open-rate must be above 0, got {args.open_rate}")
    for name in ("rounds", *(field.name for field in dataclasses.fields(Sizes))):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")


def _is_default(row: Row, args: argparse.Namespace, missing: set[str]) -> bool:
    """Whether a row is measured without --rows: if there are its model and its target, and it is not the disk's."""
    is_given = row.setup not in missing if row.setup in OTHER_MODELS else args.model is not None
    return is_given and row.setup != "cold" and (args.peer != "null" or row.null_ratio is not None)


def main() -> None:
    """Measures, prints the table, writes the file."""
    args = _parse_args()
    sizes = Sizes(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Sizes)})
    print(machine.one_line(machine.describe()))
    try:
        programs = _programs(args)
        with Peaks(args.gib) as peaks:
            limits = peaks.read()
            print(f"{limits.bandwidth_gb_s:.1f} GB/s read, {limits.peak_gflop_s:.0f} GFLOP/s of {limits.peak_name}")
            comparison = Comparison(args, programs, sizes, peaks)
            comparison.run(_rows(args))
    except (servers.ServerError, LoadError) as error:
        raise SystemExit(str(error)) from error
    print("\n".join(report.lines(comparison.results, comparison.peer)))


def _rows(args: argparse.Namespace) -> list[Row]:
    """The chosen rows, with their targets against the peer."""
    chosen = [row for row in ROWS if row.name in args.rows]
    if args.peer != "null":
        return chosen
    return [dataclasses.replace(row, target_ratio=row.null_ratio or 0.0) for row in chosen]


def _programs(args: argparse.Namespace) -> dict[str, servers.Program]:
    programs = {"ours": servers.ours(shlex.split(args.ours_args))}
    if args.peer == "vllm":
        variables = dict(word.split("=", 1) for word in shlex.split(args.peer_variables))
        programs["peer"] = servers.vllm(args.peer_program, shlex.split(args.peer_args), args.tcmalloc, variables)
    elif args.peer == "null":
        programs["peer"] = servers.null_device(shlex.split(args.ours_args))
    return programs


if __name__ == "__main__":
    report.run(main)
