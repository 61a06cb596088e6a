"""The console command `ascend-vllm`.

Subcommands stand in a table; each imports what it needs when it runs, so that help and version come at once.
"""

from __future__ import annotations

import sys

from ascend_vllm.entrypoints.interrupts import ending_at_once, report_interrupt

with ending_at_once():
    import argparse
    import dataclasses
    import importlib
    import pathlib
    import re
    from collections.abc import Callable, Sequence
    from typing import Any

    import ascend_vllm
    from ascend_vllm.args.engine_args import EngineArgs
    from ascend_vllm.args.fields import flags_of
    from ascend_vllm.args.parser import FlexibleArgumentParser, add_flags, expand_config_file
    from ascend_vllm.args.tables.server import FrontendArgs
    from ascend_vllm.entrypoints import cli_client
    from ascend_vllm.entrypoints.demo_model import DEMO_MODEL_NAME, ensure_demo_model
    from ascend_vllm.errors import AscendVllmError, ConfigError

EXIT_FAILURE = 1
EXIT_USAGE = 2


@dataclasses.dataclass(frozen=True)
class Command:
    """A subcommand.

    Attributes:
        help: one line for the list of subcommands.
        add_arguments: adds its arguments to a parser.
        run: does the work and returns the process's exit code.
        expand: changes its words before they are parsed.
    """

    help: str
    add_arguments: Callable[[FlexibleArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    expand: Callable[[Sequence[str]], list[str]] = list


def _add_serve_arguments(parser: FlexibleArgumentParser) -> None:
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the model to serve; the same as --model")
    parser.usage = "%(prog)s MODEL [flags]"
    # for --help only: the file's flags have replaced it before anything is parsed
    parser.add_argument("--config", metavar="FILE", help="a YAML file with flags; the command line wins over it")
    add_flags(parser, FrontendArgs)
    EngineArgs.add_cli_args(parser)
    # None: no model is named, which EngineArgs.from_cli_args says
    parser.set_defaults(model=None)


def _expand_serve(words: Sequence[str]) -> list[str]:
    return expand_config_file(words, [*flags_of(FrontendArgs), *flags_of(EngineArgs)])


def _model_behind_keys(keys: list[str] | None) -> str | None:
    """The model of `serve --api-key KEY MODEL`, which the flag took for one more key; it is taken away from them."""
    if keys is None or len(keys) < 2:
        return None
    last = keys[-1] or ""
    if last == DEMO_MODEL_NAME or pathlib.Path(last).is_dir() or re.fullmatch(r"[\w.-]+/[\w.-]+", last):
        return keys.pop()
    return None


def _is_model_flag(word: str) -> bool:
    return word.partition("=")[0] == "--model"


def _serve(namespace: argparse.Namespace) -> int:
    from ascend_vllm.entrypoints.openai.api_server import run_server

    tag = namespace.model_tag
    if tag is None and namespace.model is None:
        tag = _model_behind_keys(namespace.api_key)
    if tag is not None:
        # a model in --config is not typed: the command line wins over it
        if namespace.model not in (None, tag) and any(_is_model_flag(word) for word in namespace.typed):
            raise ConfigError(f"Two models are named, {tag} and --model {namespace.model}: leave one of them out.")
        namespace.model = tag
    del namespace.model_tag, namespace.config, namespace.typed
    return run_server(namespace)


def _add_demo_arguments(parser: FlexibleArgumentParser) -> None:
    parser.description = (
        "Makes the small chat model behind --model demo, unless it is there already, and prints its directory."
    )


def _demo(namespace: argparse.Namespace) -> int:  # noqa: ARG001 - every command gets its namespace
    print(ensure_demo_model())
    return 0


def _program(description: str, module: str) -> Command:
    """A program whose module has `add_arguments(parser)` and `run(namespace)`."""

    def load() -> Any:
        return importlib.import_module(f"ascend_vllm.{module}")

    return Command(description, lambda parser: load().add_arguments(parser), lambda words: int(load().run(words)))


COMMANDS: dict[str, Command] = {
    "serve": Command("start the OpenAI-compatible server", _add_serve_arguments, _serve, _expand_serve),
    "complete": Command(
        "continue lines with a running server", cli_client.add_complete_arguments, cli_client.complete
    ),
    "chat": Command("talk to a running server", cli_client.add_chat_arguments, cli_client.chat),
    "bench": _program("measure a server or the engine", "tools.bench.cli"),
    "run-batch": _program("answer a file of requests", "entrypoints.openai.run_batch"),
    "collect-env": _program("describe this machine for a report", "tools.collect_env"),
    "doctor": _program("check what a model on an Ascend NPU needs", "tools.doctor.cli"),
    "train-eagle": _program("train an EAGLE head for speculative decoding", "tools.train_eagle.cli"),
    "sim-run": _program("run a command on simulated Ascend devices", "tools.sim_run"),
    "demo": Command("make the built-in demo model", _add_demo_arguments, _demo),
}


def make_parser(chosen: str | None = None) -> FlexibleArgumentParser:
    """The parser of the whole command.

    Args:
        chosen: the only subcommand whose arguments are needed; None: all are.
    """
    parser = FlexibleArgumentParser(
        prog="ascend-vllm",
        description="LLM inference server with vLLM's interfaces for Huawei Ascend NPUs and any CPU",
    )
    parser.add_argument("-v", "--version", action="version", version=ascend_vllm.__version__)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.help)
        if chosen in (None, name):
            command.add_arguments(subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand.

    Args:
        argv: the words after the program's name; None: those of this process.

    Returns:
        The exit code: 0, 1 after a failure, 2 after a wrong command line, 130 after Ctrl-C.

    Example::

        main(["serve", "demo", "--port", "8080"])
    """
    try:
        with ending_at_once():
            typed = list(sys.argv[1:] if argv is None else argv)
            chosen = typed[0] if typed and typed[0] in COMMANDS else None
            parser = make_parser(chosen)
            words = typed if chosen is None else [chosen, *COMMANDS[chosen].expand(typed[1:])]
            namespace = parser.parse_args(words, argparse.Namespace(typed=typed))
        return COMMANDS[namespace.command].run(namespace)
    except ConfigError as err:
        print(f"ascend-vllm: error: {err}", file=sys.stderr)
        return EXIT_USAGE
    except AscendVllmError as err:
        print(f"ascend-vllm: error: {err}", file=sys.stderr)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return report_interrupt()


if __name__ == "__main__":
    sys.exit(main())
