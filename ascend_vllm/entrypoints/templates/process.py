"""Renders the chat templates of requests, in limited processes (see `sandbox.child`).

A request's template is a client's program. Jinja's sandbox denies it files, the network and the interpreter, but does
not stop endless loops or huge texts. So it runs in a process with limited memory and CPU time, which `pool` can kill
at any moment. The process gets the data of one request at a time, keeps no state between requests, and imports
neither torch nor transformers.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.sandbox
import msgspec
from jinja2 import ext, nodes, parser

from ascend_vllm.entrypoints.templates.chat_template import render_chat
from ascend_vllm.errors import RequestError

# a template may raise a text of any length; answers contain no more of it
_MAX_ERROR_CHARACTERS = 20_000
# arguments of transformers' apply_chat_template: a template does not see them
_NOT_VARIABLES = frozenset(
    {
        "max_length",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenizer_kwargs",
        "truncation",
    }
)
_NEEDS_TOKENS = ("return_assistant_tokens_mask", "sanitize_control_tokens")
# keys of a message's reasoning; templates read the first that is there
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
# stands at the end of the message that is continued
_MARK = "END_OF_THE_CONTINUED_MESSAGE "


class Answer(msgspec.Struct):
    """The result of a job: either `text` or `error` is set.

    Attributes:
        text: the prompt.
        error: what is wrong with the request, what its template says about it, or that the text is too long.
        param: the field at fault, if `error` is set.
    """

    text: str | None = None
    error: str | None = None
    param: str | None = None


def exceeded(what: str) -> RequestError:
    """The error of a rendering that did more than it may; `what` is the verb and its object."""
    return RequestError(
        f"The rendering of the request's `chat_template` {what}, which is more than a request's own template may.",
        "chat_template",
    )


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    """Imports and reads what would otherwise delay the first job; see `sandbox.child`.

    Args:
        setup: the most characters of a text, in decimal digits.
    """
    max_characters = int(setup)
    warm = TemplateRenderer({}, datetime.datetime.now(), 100)
    render_chat(warm, [{"role": "user", "content": ""}], model_name="", chat_template="{{ messages|tojson }}")
    return lambda job: msgspec.json.encode(answer_job(job, max_characters))


def answer_job(job: bytes, max_characters: int) -> Answer:
    """Renders a job, JSON with ``special_tokens``, ``now`` (ISO 8601) and ``options`` of `render_chat`.

    Raises:
        MemoryError: the rendering needs more memory than there is; all other failures become answers.
    """
    try:
        fields = json.loads(job)
        now = datetime.datetime.fromisoformat(fields["now"])
        renderer = TemplateRenderer(fields["special_tokens"], now, max_characters)
        return Answer(text=render_chat(renderer, **fields["options"]))
    except MemoryError:
        raise
    except Exception as error:
        # `render_chat` attributes any exception of the renderer to the template
        cause = error.__cause__ if isinstance(error.__cause__, MemoryError | RequestError) else error
        if isinstance(cause, MemoryError):
            raise cause from None
        # other exceptions come from the parser, before anything is rendered
        param = cause.param if isinstance(cause, RequestError) else "chat_template"
        return Answer(error=(str(cause) or type(cause).__name__)[:_MAX_ERROR_CHARACTERS], param=param)


class TemplateRenderer:
    """Renders templates with the conventions of transformers' tokenizers.

    Args:
        special_tokens: variables that every template gets.
        now: time of ``strftime_now``.
        max_characters: of a rendered text.
    """

    # a request brings its own
    chat_template: str | None = None

    def __init__(self, special_tokens: Mapping[str, str], now: datetime.datetime, max_characters: int) -> None:
        self._special_tokens = special_tokens
        self._now = now
        self._max_characters = max_characters

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        chat_template: str = "",
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        documents: list[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt's text for a conversation, whose messages are in the template's format.

        Raises:
            RequestError: the text is too long.
            Exception: whatever the template raises, or a MemoryError.
        """
        for name in _NEEDS_TOKENS:
            if variables.get(name):
                raise ValueError(f"`{name}` is about token ids, but a conversation is rendered as text here.")
        for document in documents or ():
            if not isinstance(document, dict):
                raise TypeError("Documents should be a list of dicts with 'title' and 'text' keys!")
        messages = [_as_templates_see_it(message) for message in conversation]
        continued = _mark_last(messages, chat_template) if continue_final_message else None
        # a new environment each time, so that no state is shared between requests
        template = _make_environment(self._now).from_string(chat_template)
        variables = {key: value for key, value in variables.items() if key not in _NOT_VARIABLES}
        parts, size = [], 0
        for part in template.generate(
            messages=messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            **{**self._special_tokens, **variables},
        ):
            size += len(part)
            if size > self._max_characters:
                raise exceeded(f"made more than {self._max_characters} characters")
            parts.append(part)
        text = "".join(parts)
        text = text if continued is None else _cut_at_mark(text, continued)
        text.encode()  # a lone surrogate is no text
        return text


def _as_templates_see_it(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without nulls, and with its reasoning under the names that templates know."""
    seen = {key: value for key, value in message.items() if value is not None}
    reasoning = next((seen[name] for name in _REASONING_KEYS if name in seen), None)
    # the order matters to templates that print whole messages
    return seen if reasoning is None else {"thinking": reasoning} | seen | {"reasoning_content": reasoning}


def _mark_last(messages: Sequence[dict[str, Any]], chat_template: str) -> str:
    """Marks the end of the last message's text, and returns the text."""
    content = messages[-1].get("content")
    if "content" not in chat_template:
        raise ValueError("`continue_final_message` needs a chat template that reads the content of messages.")
    if isinstance(content, str):
        messages[-1]["content"] = content + _MARK
        return content
    for part in reversed(content or ()):
        text = part.get("text")
        if isinstance(text, str):
            part["text"] = text + _MARK
            return text
    raise ValueError("`continue_final_message` is set, but the last message has no text.")


def _cut_at_mark(text: str, continued: str) -> str:
    """The text up to the mark; where the template has cut white space off, so is it before the mark."""
    if continued.strip() not in text or _MARK.strip() not in text:
        raise ValueError(
            "`continue_final_message` is set, but the last message is not in what the chat template makes of the "
            f"conversation. The message: {continued.strip()}\nWhat the template made:\n{text}"
        )
    end = text.rindex(_MARK.strip())
    return text[:end] if text.startswith(_MARK, end) else text[:end].rstrip()


class _GenerationTag(ext.Extension):
    """``{% generation %}…{% endgeneration %}`` is for those who train models; here it stands for its contents."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: parser.Parser) -> nodes.Node:
        """The tag's contents, in a scope of their own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_contents"), [], [], body).set_lineno(line)

    def _contents(self, caller: Any) -> str:
        return str(caller())


class _Dict:
    """``dict`` of templates: makes dictionaries, and is no type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(jinja2.utils.Namespace):
    """``namespace`` of templates, without names that mean something to Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that a variable may be called self
        fields = dict(*args[1:], **kwargs)
        for name in fields:
            _check_attribute(name)
        jinja2.utils.Namespace.__init__(args[0], fields)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"A namespace of a chat template takes no name like {name!r}.")


def _make_environment(now: datetime.datetime) -> jinja2.Environment:
    """The environment that chat templates are written for."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, ext.loopcontrols]
    )

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        # jinja2's own filter writes for HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: Any) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def strftime_now(format: str) -> str:
        return now.strftime(format)

    environment.filters["tojson"] = to_json
    environment.globals.update(
        {
            "dict": _Dict(),
            "namespace": _Namespace,
            "raise_exception": raise_exception,
            "strftime_now": strftime_now,
        }
    )
    return environment
