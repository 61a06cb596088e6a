"""How values are written: both spellings, switches, JSON, counts, YAML files, and the messages of what is wrong."""

from __future__ import annotations

import argparse
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.args.fields import flags_of
from ascend_vllm.args.parser import (
    FlexibleArgumentParser,
    LoRAModule,
    add_flags,
    expand_config_file,
    length,
)
from ascend_vllm.args.tables.server import FrontendArgs
from ascend_vllm.errors import ConfigError, UnsupportedFlagError

ALL_FLAGS = [*flags_of(FrontendArgs), *flags_of(EngineArgs)]


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    made = FlexibleArgumentParser(prog="server")
    add_flags(made, FrontendArgs)
    return EngineArgs.add_cli_args(made)


def error_of(parser: argparse.ArgumentParser, words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(words)
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--max-model-len", "100"],
        ["--max_model_len", "100"],
        ["--max_model-len=100"],
        ["--max-model-len=100"],
        ["--max-model", "100"],
    ],
)
def test_spellings(parser: FlexibleArgumentParser, words: list[str]) -> None:
    assert parser.parse_args(words).max_model_len == 100


def test_underscores_of_values_stay(parser: FlexibleArgumentParser) -> None:
    assert parser.parse_args(["--served_model_name=my_model"]).served_model_name == ["my_model"]
    assert parser.parse_args(["--model", "/a_b/c_d"]).model == "/a_b/c_d"


def test_short_forms(parser: FlexibleArgumentParser) -> None:
    parsed = parser.parse_args(["-tp", "2", "-pp=4", "-q", "awq", "-spec-draft-tp", "3"])
    assert (parsed.tensor_parallel_size, parsed.pipeline_parallel_size, parsed.quantization) == (2, 4, "awq")
    assert parsed.speculative_draft_tensor_parallel_size == 3


@pytest.mark.parametrize("flag", ["--tokenizer", "--host", "--quantization", "--chat-template"])
@pytest.mark.parametrize("text", ["", "None"])
def test_nullable_text(parser: FlexibleArgumentParser, flag: str, text: str) -> None:
    assert getattr(parser.parse_args([flag, text]), flag[2:].replace("-", "_")) is None


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ([], None),
        (["--enable-chunked-prefill"], True),
        (["--enable-chunked-prefill=true"], True),
        (["--enable-chunked-prefill=True"], True),
        (["--enable-chunked-prefill", "True"], True),
        (["--enable_chunked_prefill=false"], False),
        (["--enable-chunked-prefill=False"], False),
        (["--no-enable-chunked-prefill"], False),
        (["--enable-chunked-prefill", "--no-enable-chunked-prefill"], False),
    ],
)
def test_switch_with_value(parser: FlexibleArgumentParser, words: list[str], value: bool | None) -> None:
    assert parser.parse_args(words).enable_chunked_prefill is value


@pytest.mark.parametrize(
    "name", ["--enable-chunked-prefill", "--multi-step-stream-outputs", "--disable-logprobs-during-spec-decoding"]
)
def test_wrong_boolean(parser: FlexibleArgumentParser, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = error_of(parser, [f"{name}=yes"], capsys)
    assert f"argument {name}: Invalid boolean value: yes. Expected 'true' or 'false'." in message


def test_plain_switch_takes_no_value(parser: FlexibleArgumentParser, capsys: pytest.CaptureFixture[str]) -> None:
    assert parser.parse_args(["--trust-remote-code"]).trust_remote_code is True
    assert parser.parse_args(["--trust-remote-code", "--no-trust-remote-code"]).trust_remote_code is False
    assert "--trust-remote-code" in error_of(parser, ["--trust-remote-code=true"], capsys)
    assert "takes no value" in error_of(parser, ["--no-enable-chunked-prefill=true"], capsys)


@pytest.mark.parametrize(
    ("words", "logged"),
    [
        ([], False),
        (["--disable-log-requests"], False),
        (["--no-disable-log-requests"], True),
        (["--no-enable-log-requests"], False),
        (["--enable-log-requests"], True),
        (["--disable-log-requests", "--enable-log-requests"], True),
        (["--enable-log-requests", "--disable-log-requests"], False),
    ],
)
def test_opposite_switches_stay_in_step(parser: FlexibleArgumentParser, words: list[str], logged: bool) -> None:
    parsed = parser.parse_args(words)
    args = EngineArgs.from_cli_args(parsed)
    assert parsed.enable_log_requests is args.enable_log_requests is logged
    assert parsed.disable_log_requests is args.disable_log_requests is not logged


@pytest.mark.parametrize(
    ("words", "overlapped"),
    [
        ([], True),
        (["--disable-async-output-proc"], False),
        (["--no-async-scheduling"], False),
        (["--async-scheduling"], True),
        (["--disable-async-output-proc", "--async-scheduling"], True),
    ],
)
def test_both_names_of_overlap(parser: FlexibleArgumentParser, words: list[str], overlapped: bool) -> None:
    args = EngineArgs.from_cli_args(parser.parse_args(words))
    assert args.async_scheduling is not args.disable_async_output_proc
    assert args.async_scheduling is overlapped


def test_opposite_switches_of_python_callers() -> None:
    assert EngineArgs(disable_log_requests=False).enable_log_requests is True
    assert EngineArgs(enable_log_requests=True).disable_log_requests is False
    assert EngineArgs().enable_log_requests is False
    assert EngineArgs(disable_async_output_proc=True).async_scheduling is False
    assert EngineArgs(async_scheduling=False).disable_async_output_proc is True


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("1k", 1000),
        ("1K", 1024),
        ("25.6k", 25600),
        ("2m", 2_000_000),
        ("2M", 2 * 2**20),
        ("1G", 2**30),
        ("auto", -1),
        ("-1", -1),
    ],
)
def test_length(text: str, value: int) -> None:
    assert length(text) == value


@pytest.mark.parametrize("text", ["", "k", "1.5K", "1.5", "-2", "1e3", "1kk", "12q", "0.0001k"])
def test_wrong_length(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        length(text)


@given(st.integers(0, 10**12), st.sampled_from(["", "k", "K", "m", "M", "g", "G"]))
def test_length_is_the_product(number: int, unit: str) -> None:
    scale = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}[unit]
    assert length(f"{number}{unit}") == number * scale


def test_json(parser: FlexibleArgumentParser, capsys: pytest.CaptureFixture[str]) -> None:
    parsed = parser.parse_args(["--rope-scaling", '{"type":"dynamic","factor":2.0}', "--allowed-origins", '["a"]'])
    assert parsed.rope_scaling == {"type": "dynamic", "factor": 2.0}
    assert parsed.allowed_origins == ["a"]
    assert "is not JSON" in error_of(parser, ["--rope-scaling", "{type}"], capsys)
    assert "is not a JSON object" in error_of(parser, ["--rope-scaling", "[1]"], capsys)
    assert "is not a JSON list" in error_of(parser, ["--allowed-origins", "{}"], capsys)
    assert "is not a JSON list" in error_of(parser, ["--allowed-origins", "null"], capsys)


@pytest.mark.parametrize(
    ("text", "value"),
    [("image=16,video=2", {"image": 16, "video": 2}), ('{"image": 4}', {"image": 4}), ("", None)],
)
def test_counts_by_name(parser: FlexibleArgumentParser, text: str, value: dict[str, int] | None) -> None:
    assert parser.parse_args(["--limit-mm-per-prompt", text]).limit_mm_per_prompt == value


@pytest.mark.parametrize("text", ["image", "image=x", "image=1,image=2"])
def test_wrong_counts_by_name(parser: FlexibleArgumentParser, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--limit-mm-per-prompt" in error_of(parser, ["--limit-mm-per-prompt", text], capsys)


def test_lora_modules(parser: FlexibleArgumentParser, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--lora-modules", "one=/p1", '{"name": "two", "path": "/p2", "base_model_name": "base"}']
    assert parser.parse_args(words).lora_modules == [LoRAModule("one", "/p1"), LoRAModule("two", "/p2", "base")]
    assert "Invalid JSON format for --lora-modules: {name" in error_of(parser, ["--lora-modules", "{name"], capsys)
    fields = error_of(parser, ["--lora-modules", '{"nom": "x"}'], capsys)
    assert 'Invalid fields for --lora-modules: {"nom": "x"} - ' in fields


def test_lists(parser: FlexibleArgumentParser) -> None:
    parsed = parser.parse_args(["--served-model-name", "a", "b", "--middleware", "x.y", "--middleware", "z.w"])
    assert parsed.served_model_name == ["a", "b"]
    assert parsed.middleware == ["x.y", "z.w"]
    assert parser.parse_args(["--api-key", "k1", "--api-key", "k2"]).api_key == ["k1", "k2"]
    assert parser.parse_args(["--api-key", "k1", "k2", "--port", "1", "--api_key=k3"]).api_key == ["k1", "k2", "k3"]
    # what one command line gathers must not show up in the next
    assert parser.parse_args([]).middleware == []


def test_errors_are_short(parser: FlexibleArgumentParser, capsys: pytest.CaptureFixture[str]) -> None:
    message = error_of(parser, ["--port", "many"], capsys)
    assert message.startswith("server: error: argument --port") and message.count("\n") == 2
    assert "--nonsense" in error_of(parser, ["--nonsense"], capsys)
    assert "--dtype" in error_of(parser, ["--dtype", "int3"], capsys)


# ---- YAML ----------------------------------------------------------------------------------------------------


def write(tmp_path: pathlib.Path, text: str, name: str = "serve.yaml") -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


CONFIG = """\
port: 9000
max_model_len: 4k
enable-chunked-prefill: true
trust-remote-code: true
disable-log-stats: false
served-model-name: [a, b]
middleware: [x.y, z.w]
allowed-origins: ["http://one"]
rope-scaling: {rope_type: linear, factor: 2.0}
tokenizer:
host: ""
"""


@pytest.mark.parametrize("position", ["before", "after", "equals"])
def test_config_file(parser: FlexibleArgumentParser, tmp_path: pathlib.Path, position: str) -> None:
    path = write(tmp_path, CONFIG)
    words = {
        "before": ["--config", path, "--port", "9001"],
        "after": ["--port", "9001", "--config", path],
        "equals": ["--port", "9001", f"--config={path}"],
    }[position]
    parsed = parser.parse_args(expand_config_file(words, ALL_FLAGS))
    assert parsed.port == 9001  # the command line wins wherever it stands
    assert parsed.max_model_len == 4000
    assert parsed.enable_chunked_prefill is True and parsed.trust_remote_code is True
    assert parsed.disable_log_stats is False
    assert parsed.served_model_name == ["a", "b"]
    assert parsed.middleware == ["x.y", "z.w"]
    assert parsed.allowed_origins == ["http://one"]
    assert parsed.rope_scaling == {"rope_type": "linear", "factor": 2.0}
    assert parsed.tokenizer is None and parsed.host is None


def test_config_file_does_not_swallow_the_model(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, "served-model-name: [a, b]\n")
    words = expand_config_file(["/models/m", "--config", path], ALL_FLAGS)
    assert words == ["/models/m", "--served-model-name", "a", "b"]


def test_without_config_file() -> None:
    assert expand_config_file(["m", "--port", "1"], ALL_FLAGS) == ["m", "--port", "1"]


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("port: 1", "serve.json", "Config file must be of a yaml/yml type."),
        ("port: [", "serve.yaml", "is not YAML"),
        ("- port", "serve.yaml", "one flag per line"),
        ("prot: 1", "serve.yml", "there is no flag --prot"),
    ],
)
def test_wrong_config_file(tmp_path: pathlib.Path, text: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        expand_config_file(["--config", write(tmp_path, text, name)], ALL_FLAGS)


def test_config_flag_is_used_once_and_with_a_file(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        expand_config_file(["--config", str(tmp_path / "none.yaml")], ALL_FLAGS)
    with pytest.raises(ConfigError, match="--config needs the path"):
        expand_config_file(["--config"], ALL_FLAGS)
    path = write(tmp_path, "port: 1")
    with pytest.raises(ConfigError, match="No more than one --config"):
        expand_config_file(["--config", path, f"--config={path}"], ALL_FLAGS)
    assert expand_config_file(["--config", write(tmp_path, "")], ALL_FLAGS) == []


# ---- flags of the servers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"enable_auto_tool_choice": True}, "Error: --enable-auto-tool-choice requires --tool-call-parser"),
        ({"port": 70000}, "--port must be between 0 and 65535, got 70000."),
        ({"ssl_keyfile": "k"}, "--ssl-keyfile needs --ssl-certfile."),
        ({"ssl_ca_certs": "ca"}, "--ssl-ca-certs needs --ssl-certfile."),
        ({"ssl_ca_certs": "ca", "ssl_cert_reqs": 2}, "--ssl-ca-certs needs --ssl-certfile."),
        ({"ssl_cert_reqs": 3}, "--ssl-cert-reqs must be 0, 1 or 2, got 3."),
        ({"ssl_cert_reqs": 2}, "--ssl-cert-reqs needs --ssl-ca-certs: whose certificates may clients show?"),
        ({"max_log_len": -1}, "--max-log-len must not be negative, got -1."),
    ],
)
def test_server_checks(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FrontendArgs(**values).check()  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_server_check_refuses_unsupported_flags() -> None:
    FrontendArgs().check()
    FrontendArgs(enable_auto_tool_choice=True, tool_call_parser="hermes").check()
    with pytest.raises(UnsupportedFlagError, match="--tool-server demo is not supported"):
        FrontendArgs(tool_server="demo").check()
