"""Conversations as prompts."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.entrypoints.templates.chat_template import (
    detect_content_format,
    load_chat_template,
    parse_messages,
    render_chat,
)
from ascend_vllm.errors import ConfigError, RequestError
from tests.tiny_models import tiny_model

USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(tiny_model("qwen2-tied"))


def render(tokenizer: Tokenizer, messages: Any = (USER,), **options: Any) -> str:
    return render_chat(tokenizer, messages, model_name="tiny", **options)


def test_a_template_from_a_file_or_the_command_line(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{{ 'ä\\n' }}")
    assert load_chat_template(None) is None
    assert load_chat_template(str(path)) == "{{ 'ä\\n' }}"
    assert load_chat_template(r"{{ x }}\n\tä日") == "{{ x }}\n\tä日"
    assert load_chat_template("{{ x }}" * 5000) == "{{ x }}" * 5000  # too long for a path
    with pytest.raises(ConfigError) as error:
        load_chat_template("absent.jinja")
    assert str(error.value) == (
        "The supplied chat template string (absent.jinja) appears path-like, but doesn't exist!"
    )


def test_contents_become_strings() -> None:
    messages = [
        {"role": "system", "content": None},
        {"role": "user", "content": ["a", {"type": "text", "text": "b"}, {"text": "c"}], "name": "me"},
        {"role": "zzz"},
    ]
    assert parse_messages(messages, "string", "tiny") == [
        {"role": "system", "content": ""},
        {"role": "user", "content": "a\nb\nc", "name": "me"},
        {"role": "zzz", "content": ""},
    ]
    assert parse_messages([USER], "openai", "tiny")[0]["content"] == [{"type": "text", "text": "hi"}]


def test_arguments_of_past_tool_calls_become_objects() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    (parsed,) = parse_messages([message], "string", "tiny")
    assert parsed["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert call["function"]["arguments"] == '{"x": 1}'
    call["function"]["arguments"] = "{"
    with pytest.raises(RequestError, match="arguments of a tool call are not JSON"):
        parse_messages([message], "string", "tiny")


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "Cannot apply chat template to an empty conversation. Provide at least one message."),
        (["hi"], "A message must be an object, but is of type str"),
        ([{"content": "hi"}], "A message has no role"),
        ([{"role": "user", "content": 5}], "must be a string or a list of parts, but is int"),
        ([{"role": "user", "content": [{"type": "zzz"}]}], "Unknown part type: zzz"),
        ([{"role": "user", "content": [{"type": ["text"]}]}], "Unknown part type: ['text']"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "tiny is not a multimodal model"),
        ([{"role": "user", "content": [{"type": "text"}]}], "A content part of type text has no text"),
        ([{"role": "user", "content": [5]}], "A content part must be an object, but is int"),
    ],
)
def test_wrong_messages(tokenizer: Tokenizer, messages: Any, words: str) -> None:
    with pytest.raises(RequestError) as error:
        render(tokenizer, messages)
    assert words in str(error.value)
    assert error.value.param == "messages"


def test_generation_prompt_and_continuation(tokenizer: Tokenizer) -> None:
    assert render(tokenizer) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render(tokenizer, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"
    continued = [USER, {"role": "assistant", "content": "So"}]
    text = render(tokenizer, continued, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nSo")
    with pytest.raises(RequestError, match="Cannot set both `continue_final_message` and `add_generation_prompt`"):
        render(tokenizer, continued, continue_final_message=True)


def test_own_template_tools_and_variables(tokenizer: Tokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    template = "{{ tools[0].function.name }} {{ flavour }} {{ messages[0].content }}"
    text = render(tokenizer, chat_template=template, tools=tools, template_kwargs={"flavour": "sweet"})
    assert text == "f sweet hi"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content }}", "no element 7"),
        ("{% for %}", "Expected an expression"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    ],
)
def test_what_a_template_raises_is_the_requests_fault(tokenizer: Tokenizer, template: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        render(tokenizer, chat_template=template)


def test_without_any_template(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer.hf, "chat_template", None)
    with pytest.raises(RequestError, match="has no chat template, so one must be given"):
        render(tokenizer)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "string"),
        ("{% for m in messages %}{% for p in m['content'] %}{{ p.text }}{% endfor %}{% endfor %}", "openai"),
        ("{% for p in messages[0].content %}{{ p.text }}{% endfor %}", "openai"),
        ("{% set c = messages[0].content %}{% for p in c | list %}{{ p.text }}{% endfor %}", "openai"),
        (
            "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% break %}{% endif %}{% endfor %}",
            "string",
        ),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "string"),
    ],
)
def test_what_templates_expect_of_contents(tokenizer: Tokenizer, template: str, expected: str) -> None:
    assert detect_content_format(template) == expected
    assert render(tokenizer, chat_template=template) == "hi"
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render(tokenizer, parts, chat_template=template) == ("ab" if expected == "openai" else "a\nb")
