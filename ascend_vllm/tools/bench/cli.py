"""The subcommands of `ascend-vllm bench`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from ascend_vllm.args.parser import FlexibleArgumentParser
from ascend_vllm.tools.bench import offline, serve

# name → help, what adds the options, and what measures and returns the figures
_COMMANDS: dict[
    str, tuple[str, Callable[[FlexibleArgumentParser], None], Callable[[argparse.Namespace], dict[str, Any]]]
] = {
    "serve": ("load a running server", serve.add_arguments, serve.measure),
    "throughput": (
        "tokens per second without a server",
        offline.add_throughput_arguments,
        offline.measure_throughput,
    ),
    "latency": ("the time of one batch without a server", offline.add_latency_arguments, offline.measure_latency),
}


def add_arguments(parser: FlexibleArgumentParser) -> None:
    parser.description = "Measures a running server, or the engine without one."
    subparsers = parser.add_subparsers(dest="bench_type", metavar="BENCHMARK", required=True)
    for name, (text, add, _) in _COMMANDS.items():
        add(subparsers.add_parser(name, help=text))


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand; returns the exit code: 1 if no request was answered."""
    return 1 if _COMMANDS[args.bench_type][2](args).get("completed") == 0 else 0
