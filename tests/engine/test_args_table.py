"""The flag table against the command line of vLLM 0.6.3, and the refusals it promises."""

from __future__ import annotations

import json
import logging
import pathlib
from typing import Any

import pytest

from ascend_vllm.args.engine_args import EngineArgs, all_flags
from ascend_vllm.args.fields import Flag, flags_of, refuse_unsupported
from ascend_vllm.args.parser import FlexibleArgumentParser, add_flags, fields_from_namespace
from ascend_vllm.args.tables.server import FrontendArgs, GenerateServerArgs
from ascend_vllm.errors import UnsupportedFlagError

GOLDEN: dict[str, dict[str, Any]] = json.loads((pathlib.Path(__file__).parent / "flags_0_6_3.json").read_text())
FLAGS = {item.name: item for item in all_flags()}
OWNERS = (FrontendArgs, GenerateServerArgs, EngineArgs)

# where this project deliberately differs from 0.6.3: the device decides on the block size, and prompts are private
DEFAULTS_THAT_DIFFER = {"--block-size": None, "--disable-log-requests": True}
# 0.6.3 lists 8, 16 and 32; here the device says at start which sizes it has. Options may follow a guided backend.
CHOICES_THAT_DIFFER = {"--block-size", "--guided-decoding-backend"}
KINDS = {
    "flag": {"flag"},
    "bool": {"bool"},
    "int": {"int", "length"},
    "float": {"float"},
    "str": {"str"},
    "nullable_str": {"nullable_str", "lora_module"},
    "json": {"json_object", "json_list"},
    "kvs": {"kvs"},
}
# every kind's values that are not the default of any flag of that kind
SAMPLES: dict[str, tuple[str, ...]] = {
    "bool": ("true", "false"),
    "str": ("something",),
    "nullable_str": ("something",),
    "int": ("3",),
    "float": ("0.5",),
    "length": ("3k",),
    "json_object": ('{"a": 1}',),
    "json_list": ('["a"]',),
    "kvs": ("image=3",),
    "lora_module": ("name=path",),
}


def server_parser() -> FlexibleArgumentParser:
    parser = FlexibleArgumentParser(prog="server")
    add_flags(parser, FrontendArgs)
    return EngineArgs.add_cli_args(parser)


def test_golden_table_is_whole() -> None:
    assert len(GOLDEN) == 113


@pytest.mark.parametrize("name", GOLDEN)
def test_flag_of_0_6_3(name: str) -> None:
    golden, item = GOLDEN[name], FLAGS[name]
    assert item.default == DEFAULTS_THAT_DIFFER.get(name, golden["default"])
    assert item.kind in KINDS[golden["kind"]]
    assert set(golden.get("short", ())) <= set(item.short)
    # 0.6.3 takes one key; several are today's
    assert item.many == golden.get("many", name == "--api-key")
    assert item.repeat == golden.get("repeat", name == "--api-key")
    if "choices" in golden and name not in CHOICES_THAT_DIFFER:
        assert set(golden["choices"]) <= set(item.choices or ())


def test_every_flag_of_0_6_3_is_a_flag_of_the_openai_server() -> None:
    parsed = vars(server_parser().parse_args([]))
    for name in GOLDEN:
        assert name.removeprefix("--").replace("-", "_") in parsed


@pytest.mark.parametrize("name", FLAGS)
def test_texts_are_sentences(name: str) -> None:
    item = FLAGS[name]
    assert item.help[0].isupper() and item.help.endswith(".")
    assert 20 < len(item.help) < 320
    assert item.unsupported is None or item.no_effect is None
    for reason in (item.unsupported, item.no_effect):
        assert reason is None or not reason.endswith(".")


@pytest.mark.parametrize("name", [name for name, item in FLAGS.items() if item.example is not None])
def test_examples_parse_and_are_not_refused(name: str) -> None:
    import shlex

    example = FLAGS[name].example or ""
    assert name in example or name.replace("--", "--no-", 1) in example
    owner = next(owner for owner in OWNERS if name in {item.name for item in flags_of(owner)})
    parser = FlexibleArgumentParser(prog="server")
    add_flags(parser, owner)
    values = fields_from_namespace(owner, parser.parse_args(shlex.split(example)))
    refuse_unsupported(owner, values)
    assert values[FLAGS[name].field] != FLAGS[name].default or name == "--response-role"


def refused_words() -> list[tuple[type, str, list[str]]]:
    """Every flag that is not fully supported, with each kind of value that must be refused."""
    cases: list[tuple[type, str, list[str]]] = []
    for owner in OWNERS:
        for item in flags_of(owner):
            if item.unsupported is None:
                continue
            cases += [(owner, item.name, words) for words in _refused_by(item)]
    return cases


def _refused_by(item: Flag) -> list[list[str]]:
    if item.kind == "flag":
        return [["--no-" + item.name[2:]] if item.default else [item.name]]
    if item.choices is not None:
        kept = {str(item.default), *map(str, item.allowed), "None"}
        return [[item.name, choice] for choice in item.choices if choice not in kept]
    return [[item.name, sample] for sample in SAMPLES[item.kind] if sample not in item.allowed]


@pytest.mark.parametrize(("owner", "name", "words"), refused_words())
def test_unsupported_values_are_refused_by_name(owner: type, name: str, words: list[str]) -> None:
    parser = FlexibleArgumentParser(prog="server")
    add_flags(parser, owner)
    values = fields_from_namespace(owner, parser.parse_args(words))
    with pytest.raises(UnsupportedFlagError) as caught:
        refuse_unsupported(owner, values)
    assert str(caught.value).startswith(name)
    assert FLAGS[name].unsupported in str(caught.value)


def test_refusals_of_each_kind_are_found() -> None:
    some = {
        "--prompt-adapters",  # of the server's own table
        "--load-format",
        "--enable-prompt-embeds",
        "--cpu-offload-gb",
        "--data-parallel-rank",
        "--additional-config",
        "--limit-mm-per-prompt",
    }
    assert some <= {name for _, name, _ in refused_words()}


@pytest.mark.parametrize("owner", OWNERS)
def test_defaults_and_allowed_values_are_not_refused(owner: type) -> None:
    defaults = {item.field: item.default for item in flags_of(owner)}
    refuse_unsupported(owner, defaults)
    for item in flags_of(owner):
        for value in item.allowed:
            refuse_unsupported(owner, defaults | {item.field: value})


def test_flags_without_effect_are_announced(caplog: pytest.LogCaptureFixture) -> None:
    values = vars(EngineArgs(disable_custom_all_reduce=True))
    logger = logging.getLogger("ascend_vllm")
    logger.addHandler(caplog.handler)
    try:
        refuse_unsupported(EngineArgs, values)
    finally:
        logger.removeHandler(caplog.handler)
    assert "--disable-custom-all-reduce has no effect: results are always added in the standard way" in caplog.text
    assert "--tokenizer-pool-size" not in caplog.text
