"""Says whether the working tree is slower than a commit: kernels, the engine's host time, and two servers.

    make bench-gate                     against the commit at which this branch left main
    make bench-gate BASE=HEAD~1
    python benchmarks/bench_gate.py --rows core tiny --rounds 5

The commit is checked out in a temporary git worktree, and its kernels are built there; both sides use the same
virtual environment, and the benchmark programs of the working tree. A row is measured on both in turns, first and
last on the commit. Its ratio is the median of the working tree's readings, each divided by the mean of the commit's
two beside it; its noise is how much any two readings of the commit differ at most. A row whose ratio is below 1 by
more than its noise has fallen, and the program exits with 1.

It takes some minutes on two cores, and more the first time, when kernels are compiled and the model of the
row c8, 1 GB of random weights, is written to build/bench_gate.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence

from comparison import servers
from comparison.client import Client, LoadError

from ascend_vllm.engine.tokenization import Tokenizer

BENCHMARKS = pathlib.Path(__file__).resolve().parent
ROOT = BENCHMARKS.parent
MODELS = ROOT / "build" / "bench_gate"
# no row is more precise than this, whatever its few readings of the commit say
_LEAST_NOISE = 0.02
_START_S = 300.0

_OPS = ("packed_linear", "paged_attention", "fused_add_rms_norm", "silu_and_mul", "sample_tokens")
# of the cases of these ops, those that take milliseconds at most
_CASES = ("1 rows, 896->9728", "8 rows, 896->9728", "32 rows, 4864->896", "256 rows, 896->896")
_CASES += ("1 decode at 1024", "8 decodes at 512", "256 after", "32x896", "32x4864", "1 rows, top_p 0.9")


class GateError(Exception):
    """The comparison cannot be made; the text says why."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """One figure of one side.

    Attributes:
        value: in `unit`.
        unit: for the table.
        higher_is_better: False for times.
    """

    value: float
    unit: str
    higher_is_better: bool


# name → figure
Readings = dict[str, Reading]
# measures a side, given by its number
Measure = Callable[[int], Readings]


@dataclasses.dataclass
class Result:
    """The readings of one figure.

    Attributes:
        name: of the figure.
        base: of the commit, one before each of the working tree's and one after the last.
        tree: of the working tree.
    """

    name: str
    base: list[Reading]
    tree: list[Reading]

    @property
    def ratio(self) -> float:
        """Speed of the working tree by that of the commit; above 1: it is faster."""
        beside = itertools.pairwise(map(_speed, self.base))
        ratios = [2 * _speed(new) / sum(pair) for new, pair in zip(self.tree, beside, strict=True)]
        return statistics.median(ratios)

    @property
    def noise(self) -> float:
        """How much two readings of the commit differ at most, as a share of the faster one."""
        speeds = [_speed(reading) for reading in self.base]
        return max(_LEAST_NOISE, 1 - min(speeds) / max(speeds))

    @property
    def has_fallen(self) -> bool:
        """Whether the working tree is slower by more than the noise."""
        return self.ratio < 1 - self.noise

    def line(self) -> str:
        """The row of the table."""
        base, tree = (statistics.median(one.value for one in readings) for readings in (self.base, self.tree))
        mark = "  FELL" if self.has_fallen else ""
        figures = f"{base:10.4g} {tree:10.4g} {self.base[0].unit:6}"
        return f"{self.name:44} {figures} {self.ratio:6.3f} {self.noise:6.1%}{mark}"


HEADER = f"{'row':44} {'commit':>10} {'tree':>10} {'':6} {'ratio':>6} {'noise':>6}"


def _speed(reading: Reading) -> float:
    return reading.value if reading.higher_is_better else 1 / reading.value


# ---- the two sides -------------------------------------------------------------------------------------------


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    if done.returncode:
        raise GateError(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


def find_base(name: str | None) -> str:
    """The commit to compare with: the one of this name; None: where HEAD left main, or HEAD without a main.

    Raises:
        GateError: there is no such commit.
    """
    if name is not None:
        return _git("rev-parse", "--verify", f"{name}^{{commit}}")
    try:
        return _git("merge-base", "main", "HEAD")
    except GateError:
        return _git("rev-parse", "HEAD")


@contextlib.contextmanager
def checked_out(commit: str, build: bool) -> Iterator[pathlib.Path]:
    """A tree of a commit, which is removed afterwards.

    Args:
        commit: to check out.
        build: compile its kernels; what has not changed comes from the working tree.

    Raises:
        GateError: its kernels cannot be built.
    """
    with tempfile.TemporaryDirectory(prefix="bench_gate-") as directory:
        tree = pathlib.Path(directory) / "base"
        try:
            _git("worktree", "add", "--detach", str(tree), commit)
            if build:
                _build(tree, commit)
            yield tree
        finally:
            shutil.rmtree(tree, ignore_errors=True)
            # forgets what has no directory any more
            _git("worktree", "prune")


def _build(tree: pathlib.Path, commit: str) -> None:
    library = pathlib.Path("ascend_vllm", "_C.so")
    changed = _git("diff", "--name-only", commit, "--", "csrc_ascend")
    if not changed and not _git("ls-files", "--others", "--exclude-standard", "--", "csrc_ascend"):
        shutil.copy2(ROOT / library, tree / library)
        return
    (ROOT / "build").mkdir(exist_ok=True)
    (tree / "build").symlink_to(ROOT / "build")
    print("building the commit's kernels", flush=True)
    done = subprocess.run([sys.executable, str(tree / "csrc_ascend" / "build.py")], capture_output=True, text=True)
    if done.returncode:
        raise GateError(f"the commit's kernels cannot be built:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def _environment(tree: pathlib.Path) -> dict[str, str]:
    return {"PYTHONPATH": str(tree)}


# ---- what is measured ----------------------------------------------------------------------------------------


class Gate:
    """Measures rows on both sides.

    Args:
        trees: of the commit and of the working tree.
        args: the command line.
    """

    def __init__(self, trees: Sequence[pathlib.Path], args: argparse.Namespace) -> None:
        self._trees = trees
        self._args = args

    def run(self) -> Iterator[Result]:
        """Measures the rows of the command line; yields their figures."""
        for name in self._args.rows:
            with ROWS[name](self) as measure:
                yield from self._rounds(measure)

    def _rounds(self, measure: Measure) -> Iterator[Result]:
        base, tree = [measure(0)], []
        for _ in range(self._args.rounds):
            tree.append(measure(1))
            base.append(measure(0))
        for name in base[0]:
            # one that the working tree does not have, because an op is gone, is not compared
            if name in tree[0]:
                yield Result(name, [readings[name] for readings in base], [readings[name] for readings in tree])

    def _program(self, side: int, *words: str) -> list[dict[str, float | str | int]]:
        """Runs a benchmark program of the working tree on one side's package; returns what it writes as JSON."""
        with tempfile.NamedTemporaryFile(suffix=".json") as target:
            command = [sys.executable, str(BENCHMARKS / words[0]), *words[1:], "--json", target.name]
            environment = os.environ | _environment(self._trees[side])
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                which = "the commit" if side == 0 else "the working tree"
                raise GateError(f"{words[0]} fails on {which}:\n{done.stderr[-2000:]}")
            found = json.loads(pathlib.Path(target.name).read_text())
        rows: list[dict[str, float | str | int]] = found["results"] if isinstance(found, dict) else found
        return rows

    @contextlib.contextmanager
    def kernels(self) -> Iterator[Measure]:
        """Some ops at the sizes of a 0.5B model, in µs."""

        def measure(side: int) -> Readings:
            words = ["--op", *_OPS, "--case", *_CASES, "--budget", str(self._args.kernel_budget_s)]
            rows = self._program(side, "bench_ops.py", *words)
            return {f"{row['op']}: {row['case']}": Reading(float(row["kernel_us"]), "µs", False) for row in rows}

        yield measure

    @contextlib.contextmanager
    def core(self) -> Iterator[Measure]:
        """Host time of a scheduler call with an executor that computes nothing, in µs."""

        def measure(side: int) -> Readings:
            words = ["--rows", *map(str, self._args.core_rows), "--calls", str(self._args.core_calls), "--encode"]
            rows = self._program(side, "bench_core.py", *words)
            return {f"core: {row['rows']} rows": Reading(float(row["median_us"]), "µs", False) for row in rows}

        yield measure

    @contextlib.contextmanager
    def tiny(self) -> Iterator[Measure]:
        """A model of 5 million parameters over HTTP, where the host's work is most of the time."""
        with self._served("tiny, 32 clients", "tiny-5m", num_prompts=96, concurrency=32, input_len=32) as measure:
            yield measure

    @contextlib.contextmanager
    def c8(self) -> Iterator[Measure]:
        """A model of 0.5B parameters over HTTP, which eight clients ask."""
        with self._served("0.5B, 8 clients", "qwen2-0.5b", num_prompts=8, concurrency=8, input_len=128) as measure:
            yield measure

    @contextlib.contextmanager
    def _served(self, name: str, preset: str, **load: int) -> Iterator[Measure]:
        """Output tokens per second of a server of each side; both stay, and one of them computes at a time."""
        model = str(_model(preset))
        tokenizer = Tokenizer.from_directory(model)
        # `python -m` would look into the current directory first
        environments = [_environment(tree) | {"PYTHONSAFEPATH": "1"} for tree in self._trees]
        flags = ["--dtype", "bfloat16", "--max-model-len", "512", "--kv-cache-memory-bytes", "256M"]
        with contextlib.ExitStack() as stack:
            running = []
            for side, environment in zip(("the commit", "the working tree"), environments, strict=True):
                program = dataclasses.replace(servers.ours(), name=f"the server of {side}", environment=environment)
                server = stack.enter_context(servers.Server(program, model, flags))
                server.wait_ready(_START_S)
                running.append(server)
            seeds = itertools.count()

            def measure(side: int) -> Readings:
                client = Client(running[side].url, tokenizer)
                found = client.load(seed=next(seeds), output_len=self._args.output_len, **load)
                running[side].wait_idle()
                return {name: Reading(found["output_throughput"], "tok/s", True)}

            for side in (0, 1):
                measure(side)
            yield measure


def _model(preset: str) -> pathlib.Path:
    """The directory of a model with random weights, which is written if it is missing."""
    directory = MODELS / preset
    if not (directory / "config.json").exists():
        print(f"writing {directory}", flush=True)
        MODELS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=MODELS) as unfinished:
            target = pathlib.Path(unfinished) / preset
            script = str(ROOT / "scripts" / "make_random_model.py")
            subprocess.run([sys.executable, script, str(target), "--preset", preset], check=True)
            target.rename(directory)
    return directory


# by name, in the order of the table
ROWS: dict[str, Callable[[Gate], contextlib.AbstractContextManager[Measure]]] = {
    "kernels": Gate.kernels,
    "core": Gate.core,
    "tiny": Gate.tiny,
    "c8": Gate.c8,
}


def _parse_args(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--base", help="commit to compare with; default: where HEAD left main")
    add("--rows", nargs="+", choices=tuple(ROWS), default=list(ROWS), help="default: all")
    add("--rounds", type=int, default=3, help="readings of the working tree in each row (default: %(default)s)")
    add("--kernel-budget-s", type=float, default=0.1, help="seconds per kernel and reading (default: %(default)s)")
    add("--core-rows", type=int, nargs="+", default=[1, 64], help="running requests (default: %(default)s)")
    add("--core-calls", type=int, default=300, help="scheduler calls of a reading (default: %(default)s)")
    add("--output-len", type=int, default=64, help="tokens of an answer of the servers (default: %(default)s)")
    args = parser.parse_args(words)
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")
    return args


def main(words: Sequence[str] | None = None) -> int:
    """Measures and prints the table; returns the exit code."""
    args = _parse_args(words)
    try:
        commit = find_base(args.base)
        print(f"the working tree against {_git('log', '-1', '--format=%h %s', commit)}", flush=True)
        with checked_out(commit, build=args.rows != ["core"]) as base:
            print(HEADER, flush=True)
            fallen = []
            for result in Gate((base, ROOT), args).run():
                print(result.line(), flush=True)
                fallen += [result.name] * result.has_fallen
    except (GateError, servers.ServerError, LoadError) as error:
        raise SystemExit(str(error)) from error
    print(f"slower than the commit: {', '.join(fallen)}" if fallen else "nothing fell by more than its noise")
    return int(bool(fallen))


if __name__ == "__main__":
    # so that the temporary worktree is removed and the servers are ended
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
