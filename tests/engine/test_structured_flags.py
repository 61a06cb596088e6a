"""--guided-decoding-backend and --structured-outputs-config."""

from __future__ import annotations

from typing import Any

import pytest

from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.args.structured import structured_outputs_config
from ascend_vllm.config.structured import StructuredOutputsConfig
from ascend_vllm.errors import ConfigError
from ascend_vllm.structured_outputs import StructuredOutputsParams
from tests.tiny_models import tiny_model


@pytest.mark.parametrize(
    ("backend", "settings", "expected"),
    [
        ("outlines", None, {"backend": "outlines"}),
        ("auto", {}, {}),
        ("guidance:disable-any-whitespace", None, {"backend": "guidance", "disable_any_whitespace": True}),
        (
            "xgrammar:no-fallback,no-additional-properties",
            None,
            {"backend": "xgrammar", "disable_fallback": True, "disable_additional_properties": True},
        ),
        (
            "outlines",
            {"backend": "xgrammar", "disable_fallback": True},
            {"backend": "xgrammar", "disable_fallback": True},
        ),
        ("auto", {"reasoning_parser": "qwen3", "disable_any_whitespace": True}, {"disable_any_whitespace": True}),
    ],
)
def test_both_spellings(backend: str, settings: dict[str, Any] | None, expected: dict[str, Any]) -> None:
    assert structured_outputs_config(backend, settings) == StructuredOutputsConfig(**expected)


@pytest.mark.parametrize(
    ("backend", "settings", "message"),
    [
        (
            "X",
            None,
            r"Invalid guided_decoding_backend 'X,must be one of \['auto', 'xgrammar', 'guidance', ",
        ),
        ("xgrammar:fast", None, "Invalid option 'fast' of guided_decoding_backend 'xgrammar'"),
        ("auto", {"colour": 1}, r"--structured-outputs-config has unknown key\(s\) colour; there are backend, "),
        ("auto", {"disable_fallback": 1}, "--structured-outputs-config: Expected `bool`, got `int`"),
        ("auto", {"backend": "X"}, "--structured-outputs-config: unknown backend 'X'"),
    ],
)
def test_what_is_wrong(backend: str, settings: dict[str, Any] | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        structured_outputs_config(backend, settings)


def test_they_reach_the_configuration() -> None:
    args = EngineArgs(
        model=tiny_model("qwen2"),
        guided_decoding_backend="guidance",
        structured_outputs_config={"disable_any_whitespace": True, "reasoning_parser": "qwen3"},
    )
    config = args.create_engine_config()
    assert config.structured == StructuredOutputsConfig("guidance", disable_any_whitespace=True)
    assert args.reasoning_parser == "qwen3"
    assert EngineArgs(model=tiny_model("qwen2")).create_engine_config().structured.backend == "outlines"


def test_requests_name_a_library_that_there_is() -> None:
    assert StructuredOutputsParams(regex="a", backend="lm-format-enforcer").backend == "lm-format-enforcer"
    with pytest.raises(ValueError, match=r"Unknown guided decoding backend 'zzz'\. Must be one of 'auto', "):
        StructuredOutputsParams(regex="a", backend="zzz")
    with pytest.raises(ValueError, match="begin_after cannot be an empty string"):
        StructuredOutputsParams(regex="a", begin_after="")


def test_what_cannot_be_sent_is_refused() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"items": deep}
    try:
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"regex": "\ud800"}, "regex is not valid Unicode text"),
            ({"json": {"enum": ["\udfff"]}}, "json is not valid Unicode text"),
            ({"choice": ["a", "\ud800"]}, "choice is not valid Unicode text"),
            ({"json": {"maximum": 10**40}}, "json cannot be written as JSON"),
            ({"json": {"enum": [object()]}}, "json cannot be written as JSON"),
            ({"json": deep}, "json is nested too deeply"),
        ]
        for fields, message in wrong:
            with pytest.raises(ValueError, match=message):
                StructuredOutputsParams(**fields)
    finally:
        # level by level: freeing it at once would be as deep
        while deep:
            deep = deep.pop("items")
