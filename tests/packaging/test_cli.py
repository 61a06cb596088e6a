"""The console command, up to the point where the server would start."""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys

import pytest

import ascend_vllm
from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.entrypoints import cli

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    """The namespaces that `serve` hands to the server, which does not start."""
    from ascend_vllm.entrypoints.openai import api_server

    namespaces: list[argparse.Namespace] = []

    def record(namespace: argparse.Namespace) -> int:
        namespaces.append(namespace)
        return 0

    monkeypatch.setattr(api_server, "run_server", record)
    return namespaces


def test_serve(served: list[argparse.Namespace]) -> None:
    assert cli.main(["serve", "/models/m", "--port", "81", "--max_model_len=1k"]) == 0
    (namespace,) = served
    assert (namespace.model, namespace.port, namespace.max_model_len) == ("/models/m", 81, 1000)


def test_serve_hands_over_what_the_server_itself_would_parse(served: list[argparse.Namespace]) -> None:
    from ascend_vllm.entrypoints.openai.api_server import make_parser

    cli.main(["serve", "m"])
    own = make_parser().parse_args(["--model", "m"])
    handed = {name: value for name, value in vars(served[0]).items() if name != "command"}
    assert handed == vars(own)


def test_a_model_behind_the_keys_is_no_key(served: list[argparse.Namespace], tmp_path: pathlib.Path) -> None:
    model = str(tmp_path)
    for words, expected in (
        (["--api-key", "k", model], (model, ["k"])),
        (["--api-key", "k", "org/model"], ("org/model", ["k"])),
        (["--port", "1", "--api-key", "k1", "k2", "demo"], ("demo", ["k1", "k2"])),
        ([model, "--api-key", "k1", "k2"], (model, ["k1", "k2"])),
        ([model, "--api-key", "k1", "--api-key", "k2"], (model, ["k1", "k2"])),
        (["--model", model, "--api-key", "k1", model], (model, ["k1", model])),
        # what is no model's name stays a secret
        (["--api-key", "k1", "k2"], (None, ["k1", "k2"])),
        (["--api-key", model], (None, [model])),
    ):
        assert cli.main(["serve", *words]) == 0
        assert (served[-1].model, served[-1].api_key) == expected, words


def test_serve_with_config_file(served: list[argparse.Namespace], tmp_path: pathlib.Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("model: /from/file\nport: 1\nserved-model-name: [a, b]\n")
    assert cli.main(["serve", "--config", str(path)]) == 0
    assert cli.main(["serve", "/typed", "--config", str(path), "--port", "2"]) == 0
    first, second = served
    assert (first.model, first.port, first.served_model_name) == ("/from/file", 1, ["a", "b"])
    assert (second.model, second.port, second.served_model_name) == ("/typed", 2, ["a", "b"])


def test_two_models_are_an_error(
    served: list[argparse.Namespace], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["A", "--model", "B"], ["--model=B", "A"], ["--port", "1", "A", "--model", "B"]):
        assert cli.main(["serve", *words]) == 2
        error = capsys.readouterr().err
        assert error == "ascend-vllm: error: Two models are named, A and --model B: leave one of them out.\n"
    path = tmp_path / "serve.yaml"
    path.write_text("model: B\n")
    # the same twice is no contradiction, and the command line wins over a file
    for words in (["A", "--model", "A"], ["A", "--config", str(path)], ["--port", "1", "A", "--config", str(path)]):
        assert cli.main(["serve", *words]) == 0
        assert served[-1].model == "A"


def test_no_model_is_said(served: list[argparse.Namespace], package_log: pytest.LogCaptureFixture) -> None:
    assert cli.main(["serve"]) == cli.main(["serve", "facebook/opt-125m"]) == 0
    nothing, named = served
    assert EngineArgs.from_cli_args(named).model == "facebook/opt-125m"
    assert package_log.text == ""
    assert EngineArgs.from_cli_args(nothing).model == "facebook/opt-125m"
    assert "No model is named, so --model's default facebook/opt-125m is taken" in package_log.text


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["serve", "--hlep"], "ascend-vllm serve: error: unrecognized arguments: --hlep. Did you mean --help?"),
        (
            ["serve", "m", "--max_modle_len=4k"],
            "unrecognized arguments: --max-modle-len=4k. Did you mean --max-model-len?",
        ),
        (["serve", "--prot", "80", "m"], "unrecognized arguments: --prot m. Did you mean --port?"),
        (
            ["bench", "serve", "--num-promps", "4"],
            "ascend-vllm bench serve: error: unrecognized arguments: --num-promps",
        ),
        (["chat", "--zzzz"], "ascend-vllm chat: error: unrecognized arguments: --zzzz\n"),
    ],
)
def test_the_nearest_flag_is_named(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert error in shown
    assert f"See ascend-vllm {words[0]}" in shown


@pytest.mark.parametrize(
    ("word", "shown", "hidden"),
    [
        ("max-model-len", ["--max-model-len", "Model and tokenizer:"], ["--port", "KV cache:"]),
        ("MAX_NUM", ["--max-num-seqs", "--max-num-queued-reqs"], ["--port"]),
        ("kv-cache", ["KV cache:", "--block-size", "--kv-cache-memory-bytes"], ["--port", "--max-num-seqs"]),
        ("kv cache", ["KV cache:", "--block-size", "--kv-cache-memory-bytes"], ["--port"]),
        ("parallelism", ["Devices and parallelism:", "--tensor-parallel-size"], ["--port"]),
        ("opentelemetry", ["--otlp-traces-endpoint"], ["--port"]),
        ("all", ["--port", "--max-num-seqs", "--help=WORD"], []),
        ("page", ["--port", "--max-num-seqs"], []),
        ("listgroup", ["OpenAI server\n", "KV cache\n"], ["--port"]),
        ("group", ["OpenAI server\n", "KV cache\n"], ["--port"]),
        ("prot", ["No group or flag has 'prot' in its name or help. The nearest flag is --port."], ["Default"]),
    ],
)
def test_help_on_some_flags(
    word: str, shown: list[str], hidden: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["serve", "m", f"--help={word}"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(part in text for part in shown), text
    assert not any(part in text for part in hidden), text


def test_help_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help=x"], ["bench", "--help=x"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(words)
        assert caught.value.code == 0
        assert "serve" in capsys.readouterr().out


def test_wrong_config_file_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "m", "--config", "flags.json"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("ascend-vllm: error: Config file must be of a yaml/yml type.")
    assert message.count("\n") == 1


def test_unsupported_flag_ends_with_exit_code_2_and_its_name(tmp_path: pathlib.Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "ascend_vllm.entrypoints.cli",
            "serve",
            str(tmp_path),
            "--enable-prompt-embeds",
            "--port",
            "0",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "--enable-prompt-embeds is not supported: prompts are text or token ids" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [[], ["nonsense"], ["serve", "m", "--nonsense"]])
def test_wrong_command_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_version_and_help_come_without_torch() -> None:
    program = (
        "import sys\n"
        "from ascend_vllm.entrypoints import cli\n"
        "try:\n"
        "    cli.main(sys.argv[1:])\n"
        "except SystemExit as end:\n"
        "    assert not end.code\n"
        "heavy = {'torch', 'transformers', 'fastapi'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    for words in (["--version"], ["serve", "--help"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
        )
        assert ascend_vllm.__version__ in done.stdout or "--block-size" in done.stdout


def test_demo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "ensure_demo_model", lambda: "/where/it/is")
    assert cli.main(["demo"]) == 0
    assert capsys.readouterr().out == "/where/it/is\n"
