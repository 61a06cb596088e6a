"""Tool parsers: what each format's texts mean, and that the way they are cut makes no difference."""

from __future__ import annotations

import json
import pathlib
import re
import time
from collections.abc import Sequence
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from ascend_vllm.entrypoints.parsers import tools
from ascend_vllm.entrypoints.parsers.tools import (
    TOOL_PARSERS,
    ToolParser,
    find_tool_parser,
    load_tool_parser_plugin,
    partial_marker_length,
)
from ascend_vllm.entrypoints.parsers.tools_forced import (
    NamedToolParser,
    RequiredToolParser,
    arguments_schema,
    calls_schema,
)
from ascend_vllm.entrypoints.parsers.tools_json import BracketScanner
from ascend_vllm.errors import ConfigError

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "where": {"type": "object"},
                },
            },
        },
    }
]
Calls = list[tuple[str, str]]


def make_parser(name: str) -> ToolParser:
    """A parser of a format; those of demanded calls are no formats of a model."""
    if name == "required":
        return RequiredToolParser(TOOLS)
    return NamedToolParser(TOOLS, "find") if name == "named" else find_tool_parser(name)(TOOLS)


def read(name: str, pieces: Sequence[str]) -> tuple[str, Calls]:
    """Content and calls; checks the order of deltas, with name and id only in a call's first one."""
    parser = make_parser(name)
    content, ids = "", set()
    calls: list[list[str]] = []
    for delta in [*map(parser.feed, pieces), parser.finish()]:
        content += delta.content
        for call in delta.calls:
            if call.name is not None:
                assert call.index == len(calls)
                assert call.id
                ids.add(call.id)
                calls.append([call.name, call.arguments])
            else:
                assert call.id is None
                assert call.arguments
                assert call.index == len(calls) - 1
                calls[-1][1] += call.arguments
    assert len(ids) == len(calls) == parser.num_calls
    return content, [(name, arguments) for name, arguments in calls]


ARGUMENTS = r'{"text": "a \"{\\\" é", "count": [1, {}]}'
CALL = f'{{"name": "find", "arguments": {ARGUMENTS}}}'
SECOND = '{"name": "go", "parameters": {}}'
TWO: Calls = [("find", ARGUMENTS), ("go", "{}")]
XML = (
    "<tool_call>\n<function=find>\n<parameter=text>\na <b> \nc\n</parameter>\n<parameter=count>\n12\n</parameter>\n"
    '<parameter=exact>True</parameter><parameter=where>{"x":[1]}</parameter>\n</function>\n</tool_call>'
)
XML_ARGUMENTS = '{"text": "a <b> \\nc", "count": 12, "exact": true, "where": {"x": [1]}}'

# format, text, content, calls
CASES: list[tuple[str, str, str, Calls]] = [
    # calls that had to be made; what is cut short before a name is no content
    ("named", ARGUMENTS, "", TWO[:1]),
    ("named", "", "", []),
    ("required", f"[{CALL}]", "", TWO[:1]),
    ("required", f" [ {CALL} ,\n {SECOND} ] ", "", TWO),
    ("required", f"[{SECOND}, {CALL.replace('arguments', 'parameters')}]", "", TWO[::-1]),
    ("required", f"[{CALL[:-9]}", "", [("find", ARGUMENTS[:-8])]),
    ("required", '[{"name": "fi', "", []),
    ("required", "[\n\n", "", []),
    ("hermes", "Hello {x} <tool> you", "Hello {x} <tool> you", []),
    ("hermes", " \n", " \n", []),
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", TWO[:1]),
    ("hermes", f"I look.\n<tool_call>{CALL}</tool_call>\n<tool_call>{SECOND}</tool_call>\n", "I look.\n", TWO),
    ("hermes", f"\n\n<tool_call>{CALL}</tool_call> Done.", " Done.", TWO[:1]),
    ("hermes", f'<tool_call>{{"arguments": {ARGUMENTS}, "name": "find"}}</tool_call>', "", [("find", "")]),
    ("hermes", '<tool_call>{"name": "go"}</tool_call>', "", [("go", "{}")]),
    ("hermes", '<tool_call>{"name": "go", "arguments": "{\\"a\\": 1}"}', "", [("go", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "go", "arguments": null}', "", [("go", "{}")]),
    ("hermes", '<tool_call>{"name": "go", "arguments": {"a": 1}, "id": "}"}</tool_call>', "", [("go", '{"a": 1}')]),
    # the object's last bracket forgotten
    ("hermes", '<tool_call>{"name": "go", "arguments": {}\n</tool_call>x', "x", [("go", "{}")]),
    ("hermes", '<tool_call>{"name": "g\\u00f6", "arguments": {"a": "', "", [("gö", '{"a": "')]),
    ("hermes", '<tool_call>{"name": "go", "arg', '<tool_call>{"name": "go", "arg', []),
    ("hermes", "<tool_call>none</tool_call>", "<tool_call>none</tool_call>", []),
    ("hermes", '<tool_call>{"nam": 1}</tool_call>', '<tool_call>{"nam": 1}</tool_call>', []),
    ("hermes", '<tool_call>{"name": 1, "id": {}} x', '<tool_call>{"name": 1, "id": {}} x', []),
    ("hermes", f"<tool_call> or <tool_call>{SECOND}", "<tool_call> or ", TWO[1:]),
    ("hermes", "see <tool_c", "see <tool_c", []),
    ("internlm", f"Well <|action_start|><|plugin|>\n{CALL}<|action_end|>\n", "Well ", TWO[:1]),
    ("internlm", f"<|action_start|> <|plugin|>{SECOND}<|action_end|>", "", TWO[1:]),
    ("internlm", "<|action_start|><|interpreter|>1", "<|action_start|><|interpreter|>1", []),
    ("llama3_json", f"{CALL}; {SECOND}", "", TWO),
    ("llama3_json", f" <|python_tag|>{CALL};{SECOND}", "", TWO),
    ("llama3_json", f'{{"type": "function", {CALL[1:]}', "", TWO[:1]),
    ("llama3_json", '{"city": "Rome", "x": {"name": 1}}', '{"city": "Rome", "x": {"name": 1}}', []),
    ("llama3_json", '{"name": "Ann", "type": 3}', '{"name": "Ann", "type": 3}', []),
    ("llama3_json", f"So: {CALL}", f"So: {CALL}", []),
    ("llama3_json", "{", "{", []),
    ("mistral", f"[TOOL_CALLS] [{CALL}, {SECOND}]", "", TWO),
    ("mistral", f"Now.[TOOL_CALLS]find{ARGUMENTS}[TOOL_CALLS]go[ARGS]{{}}", "Now.", TWO),
    ("mistral", f"[TOOL_CALLS]find[CALL_ID]123456789[ARGS]{ARGUMENTS}", "", TWO[:1]),
    ("mistral", "[TOOL_CALLS] or not", "[TOOL_CALLS] or not", []),
    ("mistral", "[TOOL_CALLS]find", "[TOOL_CALLS]find", []),
    ("mistral", "[1, 2] and [TOOL", "[1, 2] and [TOOL", []),
    ("qwen3_xml", f"Sure.\n{XML}\n{XML}", "Sure.\n", [("find", XML_ARGUMENTS)] * 2),
    ("qwen3_coder", "<tool_call><function=go></function></tool_call>!", "!", [("go", "{}")]),
    ("qwen3_xml", "<tool_call><function=go> text", " text", [("go", "{}")]),
    (
        "qwen3_xml",
        "<tool_call><function=find><parameter=count>few</parameter><parameter=other>1</parameter><parameter=text>x",
        "",
        [("find", '{"count": "few", "other": "1"')],
    ),
    ("qwen3_xml", "<tool_call>{}", "<tool_call>{}", []),
    ("qwen3_xml", "<tool_call><function=<", "<tool_call><function=<", []),
    ("qwen", f"<tool_call>{CALL}</tool_call>", "", TWO[:1]),
]


def expected(case: tuple[str, str, str, Calls]) -> tuple[str, Calls]:
    content, calls = case[2:]
    if calls == [("find", "")]:  # not in the model's spelling: read and written again
        calls = [("find", json.dumps(json.loads(ARGUMENTS), ensure_ascii=False))]
    return content, calls


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_every_split_point(case: tuple[str, str, str, Calls]) -> None:
    name, text = case[:2]
    want = expected(case)
    assert read(name, [text]) == want
    assert read(name, list(text)) == want
    for at in range(1, len(text)):
        assert read(name, [text[:at], text[at:]]) == want, (text[:at], text[at:])


@hypothesis.given(st.data())
def test_random_cuts_of_random_mixtures(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(TOOL_PARSERS)))
    own = [case[1] for case in CASES if case[0] == name]
    scraps = [*own, "<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "{", "}", '"', ";", ",", "\\", " ", "\n", CALL]
    text = "".join(data.draw(st.lists(st.sampled_from(scraps), max_size=6)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    content, calls = read(name, pieces)
    assert (content, calls) == read(name, [text])
    if not calls:
        assert content == text


@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(st.data())
def test_long_texts_that_are_read_again(monkeypatch: pytest.MonkeyPatch, data: st.DataObject) -> None:
    """As above, where an opener whose call turns out to be none is followed by more than is read at a time."""
    name = data.draw(st.sampled_from(sorted(TOOL_PARSERS)))
    own = [case[1] for case in CASES if case[0] == name]
    text = "".join(
        data.draw(st.lists(st.sampled_from([*own, '{"id": ', "<tool_call>{", "[TOOL_CALLS]{", " "]), max_size=6))
    )
    monkeypatch.undo()
    want = read(name, [text])
    monkeypatch.setattr(tools, "_CHUNK_SIZE", data.draw(st.integers(1, 40)))
    monkeypatch.setattr(tools, "_MAX_FALSE_STARTS", 1000)
    size = data.draw(st.integers(1, 100))
    assert read(name, [text[start : start + size] for start in range(0, len(text), size)]) == want


# what is held back while more of it comes: format, what it begins with, what comes again and again
HELD_BACK = [
    ("hermes", "", " \n"),
    ("hermes", "<tool_call>", " \n"),
    ("hermes", "<tool_call>", "{<tool_call>"),
    ("hermes", '<tool_call>{"name": "', "{a"),
    ("hermes", '<tool_call>{"name": "', '\\"'),
    ("hermes", '<tool_call>{"name": "f", "x": [', "{},"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}', " "),
    ("llama3_json", '{"id": "', "{a"),
    ("mistral", "[TOOL_CALLS]", "ab"),
    ("mistral", "[TOOL_CALLS][", " "),
    ("qwen3_xml", "<tool_call><function=", "ab"),
    ("qwen3_xml", "<tool_call><function=f>", " "),
    ("qwen3_xml", "<tool_call><function=f><parameter=", "ab"),
    ("qwen3_xml", "<tool_call><function=f><parameter=a>", "</"),
    ("required", '[{"name": "', "{a"),
]


def test_the_work_is_in_proportion_to_the_text() -> None:
    """Text is not scanned again with every new token: 100,000 tokens once took minutes and blocked all streams."""
    start = time.process_time()
    for name, opening, again in HELD_BACK:
        parser = make_parser(name)
        parser.feed(opening)
        for _ in range(20_000):
            parser.feed(again)
        parser.finish()
    assert time.process_time() - start < 60, "some 5 s; each of many took more before"


def test_false_starts_are_counted() -> None:
    """Each opener without an end is looked at up to the end of the text, so that only so many are."""
    opener = '<tool_call>{"id": "' + "x" * 5000
    text = opener * 16 + f"<tool_call>{SECOND}</tool_call>"
    assert read("hermes", [text]) == read("hermes", list(text)) == (opener * 16, TWO[1:])
    text = opener * 17 + f"<tool_call>{SECOND}</tool_call>"
    assert read("hermes", [text]) == read("hermes", list(text)) == (text, [])


@pytest.mark.parametrize("name", ["hermes", "qwen3_xml"])
def test_values_that_are_too_deep(name: str) -> None:
    """A model's output must not cause a RecursionError."""
    deep = "[" * 100_000 + "]" * 100_000
    if name == "hermes":
        text = f'<tool_call>{{"id": {deep}, "name": "f"}}'
        assert read(name, [text]) == (text, [])
    else:
        text = f"<tool_call><function=find><parameter=count>{deep}</parameter></function>"
        assert read(name, [text]) == ("", [("find", json.dumps({"count": deep}))])


def test_arguments_are_told_while_they_are_written() -> None:
    parser = find_tool_parser("hermes")()
    assert parser.feed('Ok<tool_call>{"name": "f", "argum').calls == []
    (first,) = parser.feed('ents": {"a": "').calls[:1]
    assert first.name == "f"
    (piece,) = parser.feed("long").calls
    assert (piece.index, piece.arguments, piece.name, piece.id) == (0, "long", None, None)


def test_text_is_told_at_once() -> None:
    parser = find_tool_parser("hermes")()
    assert [parser.feed(piece).content for piece in ("a", " b <", "tool", "s> c")] == ["a", " b ", "", "<tools> c"]
    plain = find_tool_parser("llama3_json")()
    assert [plain.feed(piece).content for piece in ('{"', 'city"', ": 1")] == ["", '{"city"', ": 1"]


def test_ids() -> None:
    (call,) = find_tool_parser("hermes")().feed(f"<tool_call>{SECOND}").calls[:1]
    assert re.fullmatch(r"chatcmpl-tool-[0-9a-f]{32}", call.id or "")
    (call,) = find_tool_parser("mistral")().feed("[TOOL_CALLS]f{}").calls[:1]
    assert re.fullmatch(r"[0-9A-Za-z]{9}", call.id or "")


@hypothesis.given(
    st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)), st.text()
)
def test_the_end_of_an_object(value: Any, rest: str) -> None:
    text = json.dumps({"x": value})
    assert BracketScanner().find_end(text + rest) == len(text)
    scanner = BracketScanner()
    assert [scanner.find_end(character) for character in text] == [-1] * (len(text) - 1) + [1]


def test_partial_marker_length() -> None:
    assert partial_marker_length("so <thi", ("<think>",)) == 4
    assert partial_marker_length("<think>", ("<think>",)) == 0
    assert partial_marker_length("ab", ("b", "abc")) == 2
    assert partial_marker_length("", ("x",)) == partial_marker_length("x", ()) == 0


def test_unknown_names() -> None:
    with pytest.raises(
        ConfigError, match=r"invalid tool call parser: nope \(chose from \{ hermes, internlm, llama3_json"
    ):
        find_tool_parser("nope")


def test_plugin_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "plugin.py"
    path.write_text(
        "from ascend_vllm.entrypoints.parsers.tools import register_tool_parser\n"
        "from ascend_vllm.entrypoints.parsers.tools_json import JsonToolParser\n"
        '@register_tool_parser("arrows")\n'
        "class Arrows(JsonToolParser):\n"
        '    OPENERS = ("==>",)\n'
    )
    load_tool_parser_plugin(str(path))
    assert read("arrows", [f"so ==> {SECOND}"]) == ("so ", TWO[1:])
    with pytest.raises(ConfigError, match="arrows"):
        find_tool_parser("nope")
    path.write_text("1 / 0")
    with pytest.raises(ConfigError, match=r"--tool-parser-plugin: cannot load .*plugin.py: ZeroDivisionError"):
        load_tool_parser_plugin(str(path))
    with pytest.raises(ConfigError, match="FileNotFoundError"):
        load_tool_parser_plugin(str(tmp_path / "absent.py"))


def test_schemas_of_demanded_calls() -> None:
    kinds = {"Kind": {"enum": ["cat"]}}
    find = {"type": "object", "properties": {"kind": {"$ref": "#/$defs/Kind"}}, "$defs": kinds}
    tools = [{"function": {"name": "find", "parameters": find}}, {"function": {"name": "go"}}]
    assert [arguments_schema(tool) for tool in tools] == [find, {"type": "object"}]
    schema = calls_schema(tools, parallel=True)
    # where the references look for them
    assert schema["$defs"] == kinds
    assert (schema["minItems"], "maxItems" in schema) == (1, False)
    assert calls_schema(tools, parallel=False)["maxItems"] == 1
    first, second = schema["items"]["anyOf"]
    assert first["properties"]["parameters"] == {"type": "object", "properties": find["properties"]}
    assert [variant["properties"]["name"]["enum"] for variant in (first, second)] == [["find"], ["go"]]
    assert find["$defs"] is kinds, "the request's own schema is as it was"
    other = {"function": {"name": "other", "parameters": {"$defs": {"Kind": {"enum": ["dog"]}}}}}
    with pytest.raises(ValueError, match="Two of `tools` define 'Kind' in their `\\$defs` differently"):
        calls_schema([*tools, other], parallel=True)
