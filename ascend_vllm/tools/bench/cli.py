"""The subcommands of `ascend-vllm bench`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from ascend_vllm.args.parser import FlexibleArgumentParser
from ascend_vllm.tools.bench import offline, serve

_COMMANDS: dict[str, tuple[str, Callable[[FlexibleArgumentParser], None], Callable[[argparse.Namespace], int]]] = {
    "serve": ("load a running server", serve.add_arguments, serve.serve),
    "throughput": ("tokens per second without a server", offline.add_throughput_arguments, offline.throughput),
    "latency": ("the time of one batch without a server", offline.add_latency_arguments, offline.latency),
}


def add_arguments(parser: FlexibleArgumentParser) -> None:
    """Adds the subcommands."""
    parser.description = "Measures a running server, or the engine without one."
    subparsers = parser.add_subparsers(dest="bench_type", metavar="BENCHMARK", required=True)
    for name, (text, add, _) in _COMMANDS.items():
        add(subparsers.add_parser(name, help=text))


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand; returns the exit code."""
    return _COMMANDS[args.bench_type][2](args)
