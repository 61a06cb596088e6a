"""Which program takes which flags: vLLM's other programs, and the flags that its users have added since 0.6.3."""

from __future__ import annotations

import argparse
import json
import pathlib

import pytest

from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.args.fields import flags_of
from ascend_vllm.args.parser import FlexibleArgumentParser
from ascend_vllm.entrypoints import api_server, cli
from ascend_vllm.entrypoints.openai import run_batch
from ascend_vllm.entrypoints.openai.app import add_named_middleware
from ascend_vllm.errors import ConfigError

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "engine" / "flags_0_6_3.json").read_text())
NAMES = list(GOLDEN)
# of 0.6.3's server, from --model on, without the last ones that belong to the OpenAI server
ENGINE_NAMES = [
    name for name in NAMES[NAMES.index("--model") :] if name not in ("--max-log-len", "--disable-fastapi-docs")
]

GENERATE_SERVER = {
    "host": None,
    "port": 8000,
    "ssl_keyfile": None,
    "ssl_certfile": None,
    "ssl_ca_certs": None,
    "ssl_cert_reqs": 0,
    "root_path": None,
    "log_level": "debug",
}
# today's, as its users type them
SERVER_TODAY = """
--api-key --enable-log-requests --disable-uvicorn-access-log --disable-access-log-for-endpoints
--enable-request-id-headers --enable-prompt-tokens-details --enable-force-include-usage --enable-server-load-tracking
--enable-tokenizer-info-endpoint --chat-template-content-format --trust-request-chat-template
--default-chat-template-kwargs --exclude-tools-when-tool-choice-none --reasoning-parser --tool-server --uds
--ssl-ciphers --enable-ssl-refresh --h11-max-incomplete-event-size --h11-max-header-count --api-server-count
--headless --log-config-file --enable-log-outputs --sse-keep-alive-interval
"""
ENGINE_TODAY = """
--runner --convert --task --generation-config --override-generation-config --hf-overrides --async-scheduling
--enable-prefix-caching --enable-chunked-prefill --enable-sleep-mode --enable-prompt-embeds --logprobs-mode
--max-num-seqs --kv-cache-memory-bytes --data-parallel-size --enable-expert-parallel --speculative-config
--compilation-config --structured-outputs-config --guided-decoding-backend --limit-mm-per-prompt
--mm-processor-kwargs --allowed-local-media-path --allowed-media-domains --model-impl --stream-interval
--max-num-queued-reqs --max-num-queued-tokens --additional-config
"""


def option_strings(parser: argparse.ArgumentParser) -> set[str]:
    return {name for action in parser._actions for name in action.option_strings}


def command_parser(name: str) -> argparse.ArgumentParser:
    parser = FlexibleArgumentParser()
    cli.COMMANDS[name].add_arguments(parser)
    return parser


def test_flags_of_the_generate_server() -> None:
    parser = api_server.make_parser()
    parsed = vars(parser.parse_args([]))
    assert {name: parsed[name] for name in GENERATE_SERVER} == GENERATE_SERVER
    assert set(ENGINE_NAMES) <= option_strings(parser)
    assert "--api-key" not in option_strings(parser) and "--disable-fastapi-docs" not in option_strings(parser)


def test_flags_of_run_batch() -> None:
    parser = FlexibleArgumentParser()
    run_batch.add_arguments(parser)
    parsed = parser.parse_args(["-i", "in", "-o", "out", "--model", "m"])
    assert (str(parsed.input_file), str(parsed.output_file), parsed.response_role) == ("in", "out", "assistant")
    assert (parsed.enable_metrics, parsed.url, parsed.port) == (False, "0.0.0.0", 8000)
    assert set(ENGINE_NAMES) <= option_strings(parser)
    assert {"--input-file", "--output-file"} <= option_strings(parser)


def test_flags_of_the_clients() -> None:
    for name in ("complete", "chat"):
        parsed = vars(command_parser(name).parse_args([]))
        assert parsed["url"] == "http://localhost:8000/v1"
        assert parsed["model_name"] is None and parsed["api_key"] is None
        assert ("system_prompt" in parsed) == (name == "chat")


def test_the_model_of_serve() -> None:
    parser = command_parser("serve")
    assert parser.parse_args(["m", "--port", "1"]).model_tag == "m"
    assert set(NAMES) <= option_strings(parser)
    assert set(cli.COMMANDS) >= {"serve", "complete", "chat", "bench", "run-batch", "collect-env"}


@pytest.mark.parametrize("name", SERVER_TODAY.split())
def test_todays_flags_of_the_server(name: str) -> None:
    assert name in option_strings(command_parser("serve"))


@pytest.mark.parametrize("name", ENGINE_TODAY.split())
def test_todays_flags_of_the_engine(name: str) -> None:
    assert name in {item.name for item in flags_of(EngineArgs)}


class NeitherNor:
    """An instance of it is no middleware."""


IS_NO_MIDDLEWARE = NeitherNor()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            f"{__name__}.IS_NO_MIDDLEWARE",
            f"Invalid middleware {__name__}.IS_NO_MIDDLEWARE. Must be a function or a class.",
        ),
        ("no.such.module.thing", "--middleware no.such.module.thing"),
    ],
)
def test_wrong_middleware(name: str, message: str) -> None:
    from fastapi import FastAPI

    with pytest.raises(ConfigError) as caught:
        add_named_middleware(FastAPI(), name)
    assert message in str(caught.value)
