"""Renders conversations as prompts: choice of the template, normalised messages, errors."""

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

# type of a content part → key of its text
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
# set by other fields of a request; `self`, `conversation` and `tokenize` are arguments of `apply_chat_template`
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
    """Renders templates: a `Tokenizer`, or the process that renders templates from requests."""

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """The model's template, or several by name; None: it has none."""

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> str:
        """The prompt's text; see `Tokenizer.apply_chat_template`."""


def load_chat_template(value: str | None) -> str | None:
    """The template given by --chat-template: a file's contents, or the value itself with its escapes resolved.

    Raises:
        ConfigError: the value looks like a path, but the file does not exist.

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
        # a template may be too long for a path; other values are files that cannot be read
        if not set("{}\n") & set(value):
            raise ConfigError(f"The chat template {value} cannot be read: {error}") from error
    if not set("{}\n") & set(value):
        raise ConfigError(f"The supplied chat template string ({value}) appears path-like, but doesn't exist!")
    # characters beyond Latin-1 are escaped first and restored with the other escapes
    return value.encode("latin-1", "backslashreplace").decode("unicode_escape")


def parse_messages(
    messages: Sequence[Mapping[str, Any]], content_format: Literal["string", "openai"], model_name: str
) -> list[dict[str, Any]]:
    """Messages in the form that templates expect.

    Args:
        messages: with a role; the content is a string, a list of text parts, or None. Other keys are kept.
        content_format: "string" joins parts with newlines; "openai" makes every content a list of parts.
        model_name: for error messages.

    Raises:
        RequestError: there are no messages, or one is invalid.
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
    """Renders a conversation as a prompt, with its special tokens: tokenise it without adding any.

    Args:
        tokenizer: with the model's template.
        messages: see `parse_messages`.
        model_name: for error messages.
        chat_template: used instead of the model's.
        content_format: form of the contents; "auto" detects what the template expects.
        add_generation_prompt: append the start of an assistant message.
        continue_final_message: leave the last message open, so that the output continues it.
        tools: functions that the model may call.
        template_kwargs: further variables of the template.

    Raises:
        RequestError: the messages or variables are invalid, there is no template, or the template raises an error.
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
        # templates run in a sandbox and raise exceptions to reject their input
        raise RequestError(str(error) or type(error).__name__, "messages") from error


def described_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool with `description` and `parameters`, null if the request has none, since templates print them."""
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return dict(tool)
    defaults = {"name": function.get("name"), "description": None, "parameters": None}
    return {**tool, "function": {**defaults, **function}}


def _without_developer(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Merges developer messages into the system message, for templates without the developer role."""
    system = [message for message in messages if isinstance(message, Mapping) and message.get("role") == "developer"]
    if not system:
        return list(messages)
    rest = [message for message in messages if not isinstance(message, Mapping) or message.get("role") != "developer"]
    if rest and isinstance(rest[0], Mapping) and rest[0].get("role") == "system":
        system.insert(0, rest.pop(0))
    texts = ["\n".join(_parse_content(message.get("content"), "this model")) for message in system]
    return [{"role": "system", "content": "\n\n".join(texts)}, *rest]


@functools.lru_cache(maxsize=16)
def detect_content_format(template: str) -> Literal["string", "openai"]:
    """Form of the contents that a template expects: "openai" if it loops over the parts of a content."""
    try:
        tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except jinja2.TemplateSyntaxError:  # may use extensions of transformers; rendering reports real errors
        return "string"
    # variables with a content, like x in {% set x = message['content'] %}
    names = {
        node.target.name
        for node in tree.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and _is_content(node.node, set())
    }
    loops = tree.find_all(nodes.For)
    return "openai" if any(_is_content(loop.iter, names) for loop in loops) else "string"


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    """Whether an expression is a message's content, possibly filtered."""
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
    # unhashable values cannot be looked up below
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
    """Decodes the arguments of a past tool call, a JSON string in requests, into the object that templates print."""
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
