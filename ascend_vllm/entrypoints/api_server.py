"""The plain server: ``python -m ascend_vllm.entrypoints.api_server`` with POST /generate and GET /health.

The body of /generate is `prompt`, `stream` and the fields of `SamplingParams`. The answer is
``{"text": [prompt + output, …]}``; a stream sends such objects, each with all the text so far and ended by a zero
byte::

    curl -X POST http://localhost:8000/generate -d '{"prompt": "hello", "max_tokens": 16, "temperature": 0}'
"""

from __future__ import annotations

import sys

from ascend_vllm.entrypoints.interrupts import ending_at_once

with ending_at_once():
    import argparse
    from collections.abc import Callable
    from typing import TYPE_CHECKING

    from ascend_vllm.args.engine_args import EngineArgs
    from ascend_vllm.args.parser import FlexibleArgumentParser, add_flags, fields_from_namespace
    from ascend_vllm.args.tables.server import GenerateServerArgs
    from ascend_vllm.entrypoints.http import launcher

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ascend_vllm.engine.async_llm import AsyncLLM


_DEMO_EXAMPLE = """curl {url}/generate -d '{"prompt": "hello", "max_tokens": 32, "temperature": 0}'"""


def make_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The command line: the server's flags and the engine's."""
    parser = FlexibleArgumentParser(prog=prog, description="Plain /generate server of ascend-vllm.")
    add_flags(parser, GenerateServerArgs)
    EngineArgs.add_cli_args(parser)
    # None: no model is named, which EngineArgs.from_cli_args says
    parser.set_defaults(model=None)
    return parser


def _run_server(args: argparse.Namespace) -> int:
    """Serves until a signal stops the process or the engine dies; returns the exit code."""
    server_args = GenerateServerArgs(**fields_from_namespace(GenerateServerArgs, args))
    engine_args = EngineArgs.from_cli_args(args)

    def load_app() -> Callable[[AsyncLLM], FastAPI]:
        from ascend_vllm.entrypoints.generate.app import build_app

        return lambda engine: build_app(engine, server_args)

    return launcher.serve(
        launcher.Program(
            name="ascend-vllm /generate server",
            flags=args,
            http_args=server_args,
            engine_args=engine_args,
            load_app=load_app,
            log_level=server_args.log_level,
            access_log=True,
            demo_example=_DEMO_EXAMPLE,
            api_path="/generate",
        )
    )


def main() -> None:
    with ending_at_once():
        args = make_parser().parse_args()
    sys.exit(launcher.exit_code_of(lambda: _run_server(args)))


if __name__ == "__main__":
    main()
