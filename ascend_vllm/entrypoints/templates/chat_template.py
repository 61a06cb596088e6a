"""Conversations as prompts: which template is used, what messages look like to it, and what its errors become."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import jinja2
from jinja2 import nodes

from ascend_vllm.errors import ConfigError, RequestError

ContentFormat = Literal["auto", "string", "openai"]

# kind of a part → the key of its text
_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_MEDIA_PARTS = frozenset(
    {"image_url", "input_image", "image", "audio_url", "input_audio", "audio", "video_url", "video"}
)
# what a template gets from other fields; `self`, `conversation` and `tokenize` are arguments of the rendering itself
_RESERVED_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "messages",
        "self",
        "tokenize",
        "tools",
    }
)


class Renderer(Protocol):
    """What renders templates: a `Tokenizer`, or the process for the templates of requests."""

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """The model's own template, or several by name; None: it has none."""

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> str:
        """The prompt's text; see `Tokenizer.apply_chat_template`."""


def load_chat_template(value: str | None) -> str | None:
    """The template that --chat-template means: a file's contents, or the value itself with its escapes resolved.

    Raises:
        ConfigError: it looks like the path of a file that does not exist.

    Example::

        load_chat_template("{% for m in messages %}{{ m.content }}\\\\n{% endfor %}")
    """
    if value is None:
        return None
    try:
        path = pathlib.Path(value)
        if path.is_file():
            return path.read_text(encoding="utf-8")
    except OSError as error:
        # A template is too long for a path; anything else is a file that cannot be read.
        if not set("{}\n") & set(value):
            raise ConfigError(f"The chat template {value} cannot be read: {error}") from error
    if not set("{}\n") & set(value):
        raise ConfigError(f"The supplied chat template string ({value}) appears path-like, but doesn't exist!")
    # Characters beyond Latin-1 become escapes first, so that resolving escapes brings them back.
    return value.encode("latin-1", "backslashreplace").decode("unicode_escape")


def parse_messages(
    messages: Sequence[Mapping[str, Any]], content_format: Literal["string", "openai"], model_name: str
) -> list[dict[str, Any]]:
    """Messages in the form templates expect.

    Args:
        messages: with a role; content is a string, a list of text parts, or nothing. Other keys are kept.
        content_format: "string" joins parts with newlines, "openai" makes a list of parts of every content.
        model_name: for the text of errors.

    Raises:
        RequestError: there is no message, or one is not understood.
    """
    if not messages:
        raise RequestError(
            "Cannot apply chat template to an empty conversation. Provide at least one message.", "messages"
        )
    return [_parse_message(message, content_format, model_name) for message in messages]


def render_chat(
    tokenizer: Renderer,
    messages: Sequence[Mapping[str, Any]],
    *,
    model_name: str,
    chat_template: str | None = None,
    content_format: ContentFormat = "auto",
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The prompt's text for a conversation; it holds its special tokens, so tokenise it without adding any.

    Args:
        tokenizer: brings the model's own template.
        messages: see `parse_messages`.
        model_name: for the text of errors.
        chat_template: used instead of the model's own.
        content_format: what the template expects of a content; "auto" looks into the template.
        add_generation_prompt: end with the beginning of an answer.
        continue_final_message: leave the last message open, so that the output continues it.
        tools: functions the model may call.
        template_kwargs: further variables of the template.

    Raises:
        RequestError: the messages are wrong, there is no template, the template refuses them, or one of the further
            variables has a field of its own.
    """
    if reserved := sorted(_RESERVED_KWARGS.intersection(template_kwargs or ())):
        raise RequestError(f"chat_template_kwargs must not contain {', '.join(reserved)}", "chat_template_kwargs")
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.", "continue_final_message"
        )
    template = chat_template or tokenizer.chat_template
    if template is None:
        raise RequestError(
            "The model's tokenizer has no chat template, so one must be given (--chat-template).", "messages"
        )
    if content_format == "auto":
        content_format = detect_content_format(template) if isinstance(template, str) else "string"
    if not isinstance(template, str) or "developer" not in template:
        messages = _without_developer(messages)
    conversation = parse_messages(messages, content_format, model_name)
    try:
        return tokenizer.apply_chat_template(
            conversation,
            chat_template=chat_template,
            tools=None if tools is None else [dict(tool) for tool in tools],
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **(template_kwargs or {}),
        )
    except Exception as error:
        # A template is a program of the model's author, run in a sandbox: what it raises is about its input.
        raise RequestError(str(error) or type(error).__name__, "messages") from error


def described_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool of a request as templates print it: with its description and parameters, null if it has none."""
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return dict(tool)
    usual = {"name": function.get("name"), "description": None, "parameters": None}
    return {**tool, "function": {**usual, **function}}


def _without_developer(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages for a template that does not know the developer's role: what it says belongs to the system's."""
    said = [message for message in messages if isinstance(message, Mapping) and message.get("role") == "developer"]
    if not said:
        return list(messages)
    rest = [message for message in messages if not isinstance(message, Mapping) or message.get("role") != "developer"]
    if rest and isinstance(rest[0], Mapping) and rest[0].get("role") == "system":
        said.insert(0, rest.pop(0))
    texts = ["\n".join(_parse_content(message.get("content"), "this model")) for message in said]
    return [{"role": "system", "content": "\n\n".join(texts)}, *rest]


@functools.lru_cache(maxsize=16)
def detect_content_format(template: str) -> Literal["string", "openai"]:
    """What a template expects of a message's content: "openai" if it loops over the parts of contents."""
    try:
        tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except jinja2.TemplateSyntaxError:  # extensions of transformers; rendering will tell if it is really wrong
        return "string"
    # variables that hold a content, like x in {% set x = message['content'] %}
    names = {
        node.target.name
        for node in tree.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and _is_content(node.node, set())
    }
    loops = tree.find_all(nodes.For)
    return "openai" if any(_is_content(loop.iter, names) for loop in loops) else "string"


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    """Whether an expression is a message's content, filters aside."""
    while isinstance(node, nodes.Filter):
        node = node.node
    match node:
        case nodes.Getattr(attr="content"):
            return True
        case nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Name(name=name):
            return name in names
        case _:
            return False


def _parse_message(
    message: Mapping[str, Any], content_format: Literal["string", "openai"], model_name: str
) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"A message must be an object, but is of type {type(message).__name__}", "messages")
    if not isinstance(message.get("role"), str):
        raise RequestError("A message has no role", "messages")
    texts = _parse_content(message.get("content"), model_name)
    parsed = dict(message)
    parsed["content"] = (
        "\n".join(texts) if content_format == "string" else [{"type": "text", "text": text} for text in texts]
    )
    calls = message.get("tool_calls")
    if isinstance(calls, Sequence) and not isinstance(calls, str):
        parsed["tool_calls"] = [_parse_tool_call(call) for call in calls]
    return parsed


def _parse_content(content: Any, model_name: str) -> list[str]:
    if content is None:
        return [""]
    if isinstance(content, str):
        return [content]
    if not isinstance(content, Sequence):
        raise RequestError(
            f"The content of a message must be a string or a list of parts, but is {type(content).__name__}",
            "messages",
        )
    return [_parse_part(part, model_name) for part in content]


def _parse_part(part: Any, model_name: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise RequestError(f"A content part must be an object, but is {type(part).__name__}", "messages")
    kind = part.get("type", "text" if "text" in part else None)
    # before it is looked up: a list, say, cannot be
    if not isinstance(kind, str):
        raise RequestError(f"Unknown part type: {kind}", "messages")
    if kind in _MEDIA_PARTS:
        raise RequestError(f"{model_name} is not a multimodal model", "messages")
    if kind not in _TEXT_PARTS:
        raise RequestError(f"Unknown part type: {kind}", "messages")
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise RequestError(f"A content part of type {kind} has no text", "messages")
    return text


def _parse_tool_call(call: Any) -> Any:
    """A past tool call; its arguments, a string of JSON on the wire, become the object that templates print."""
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(arguments, str):
        return call
    try:
        value = json.loads(arguments) if arguments else {}
    except RecursionError as error:
        raise RequestError("The arguments of a tool call are nested too deeply.", "messages") from error
    except ValueError as error:
        raise RequestError(f"The arguments of a tool call are not JSON: {error}", "messages") from error
    return {**call, "function": {**function, "arguments": value}}
