"""The OpenAI-compatible server: ``python -m ascend_vllm.entrypoints.openai.api_server`` or ``ascend-vllm serve``."""

from __future__ import annotations

import sys

from ascend_vllm.entrypoints.interrupts import ending_at_once

with ending_at_once():
    import argparse
    from collections.abc import Callable
    from typing import TYPE_CHECKING

    from ascend_vllm.args.adapters import check_adapters
    from ascend_vllm.args.engine_args import EngineArgs
    from ascend_vllm.args.parser import FlexibleArgumentParser, add_flags, fields_from_namespace
    from ascend_vllm.args.tables.server import FrontendArgs
    from ascend_vllm.entrypoints.http import launcher
    from ascend_vllm.entrypoints.openai.chat_tools import ChatParsers
    from ascend_vllm.errors import ConfigError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ascend_vllm.engine.async_llm import AsyncLLM


_DEMO_EXAMPLE = (
    "curl {url}/v1/chat/completions -H 'Content-Type: application/json' "
    """-d '{"model": "{model}", "messages": [{"role": "user", "content": "What does --block-size do?"}], """
    """"max_tokens": 100, "temperature": 0}'"""
)


def make_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The command line: the server's flags and the engine's."""
    parser = FlexibleArgumentParser(prog=prog, description="OpenAI-compatible server of ascend-vllm.")
    add_flags(parser, FrontendArgs)
    EngineArgs.add_cli_args(parser)
    # None: no model is named, which EngineArgs.from_cli_args says
    parser.set_defaults(model=None)
    return parser


def run_server(args: argparse.Namespace) -> int:
    """Serves until SIGINT, SIGTERM or the engine's death.

    Returns:
        The process's exit code: 0 after SIGINT or SIGTERM, 2 for a wrong flag, 1 for anything else.
    """
    return launcher.exit_code_of(lambda: _run_server(args))


def _run_server(args: argparse.Namespace) -> int:
    frontend_args = FrontendArgs(**fields_from_namespace(FrontendArgs, args))
    if frontend_args.chat_template is not None:
        from ascend_vllm.entrypoints.templates.chat_template import load_chat_template

        frontend_args.chat_template = load_chat_template(frontend_args.chat_template)
    engine_args = EngineArgs.from_cli_args(args)
    count = frontend_args.api_server_count
    if (frontend_args.headless or count < 1) and engine_args.node_rank == 0:
        given = "--headless" if frontend_args.headless else f"--api-server-count {count}"
        raise ConfigError(
            f"{given} starts no API server, and the one of --nnodes is on this machine, as --node-rank is 0: leave "
            f"{given} out, or give --nnodes and a --node-rank above 0."
        )
    check_adapters(frontend_args.lora_modules or (), engine_args)
    log_requests = engine_args.enable_log_requests
    if frontend_args.enable_log_outputs and not log_requests:
        raise ConfigError("--enable-log-outputs requires --enable-log-requests.")
    parsers = ChatParsers.from_flags(frontend_args, engine_args.reasoning_parser)

    def load_app() -> Callable[[AsyncLLM], FastAPI]:
        # FastAPI imports it with the first route, that is, when the engine is ready
        import pydantic.v1  # noqa: F401

        from ascend_vllm.entrypoints.openai.app import build_app

        return lambda engine: build_app(engine, frontend_args, log_requests=log_requests, parsers=parsers)

    return launcher.serve(
        launcher.Program(
            name="ascend-vllm API server",
            flags=args,
            http_args=frontend_args,
            engine_args=engine_args,
            load_app=load_app,
            log_level=frontend_args.uvicorn_log_level,
            access_log=not frontend_args.disable_uvicorn_access_log,
            demo_example=_DEMO_EXAMPLE.replace("{model}", (engine_args.served_model_name or ["demo"])[0]),
            api_path="/v1",
            api_server_count=count,
        )
    )


def main() -> None:
    with ending_at_once():
        args = make_parser().parse_args()
    sys.exit(run_server(args))


if __name__ == "__main__":
    main()
