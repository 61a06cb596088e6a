"""Chat templates of a pipeline: LMDeploy's built-in ones by name, or the model's own."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.entrypoints.templates.chat_template import parse_messages, render_chat
from ascend_vllm.errors import ConfigError, RequestError
from ascend_vllm.logger import init_logger

logger = init_logger(__name__)

Messages = Sequence[Mapping[str, Any]]

# fields with the texts around messages; a configuration without any of them defines no template
_FORM = ("system", "eosys", "user", "eoh", "assistant", "eoa", "separator")
_CAPABILITIES = (None, "chat", "completion")


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A template that writes fixed texts around each message.

    Attributes:
        system, eosys: before and after a system message.
        meta_instruction: the system message of conversations without one; None: they have none.
        user, eoh: before and after a user's message.
        assistant, eoa: before and after an answer.
        separator: after the end of an answer, before the next message.
        stop_words: tokens that end an answer.
        is_completion: a plain string is the prompt as it is.

    Example::

        template = ChatTemplate(user="USER: ", eoh="\\n", assistant="ASSISTANT: ", eoa="</s>")
        template.messages2prompt("hi")      # "USER: hi\\nASSISTANT: "
    """

    system: str = ""
    meta_instruction: str | None = ""
    eosys: str = ""
    user: str = ""
    eoh: str = ""
    assistant: str = ""
    eoa: str = ""
    separator: str = ""
    stop_words: tuple[str, ...] = ()
    is_completion: bool = False

    @property
    def adds_special_tokens(self) -> bool:
        """Whether the tokenizer adds what the model expects around a text: the template writes none of it."""
        return True

    def messages2prompt(self, messages: str | Messages) -> str:
        """The prompt's text.

        Args:
            messages: of a conversation; a string is the first message of a user.

        Raises:
            RequestError: a message is wrong.
        """
        if isinstance(messages, str):
            if self.is_completion:
                return messages
            messages = [{"role": "user", "content": messages}]
        parsed = parse_messages(messages, "string", "this model")
        if self.meta_instruction is not None and parsed[0]["role"] != "system":
            parsed.insert(0, {"role": "system", "content": self.meta_instruction})
        forms = {
            "system": (self.system, self.eosys),
            "user": (self.user, self.eoh),
            "assistant": (self.assistant, self.eoa + self.separator),
        }
        pieces = []
        for message in parsed:
            if message["role"] not in forms:
                raise RequestError(f"role must be one of {', '.join(forms)}, got {message['role']!r}.", "messages")
            before, after = forms[message["role"]]
            pieces.append(before + message["content"] + after)
        return "".join(pieces) + self.assistant


class OwnChatTemplate:
    """The template that comes with the model's tokenizer.

    Args:
        tokenizer: brings the template.
        meta_instruction: the system message of conversations without one; None: what the template makes of them.
        is_completion: a plain string is the prompt as it is.
    """

    stop_words: tuple[str, ...] = ()
    # the template writes them
    adds_special_tokens = False

    def __init__(
        self, tokenizer: Tokenizer, meta_instruction: str | None = None, *, is_completion: bool = False
    ) -> None:
        self.is_completion = is_completion
        self._tokenizer = tokenizer
        self._meta_instruction = meta_instruction

    def messages2prompt(self, messages: str | Messages) -> str:
        """The prompt's text; see `ChatTemplate`."""
        if self.is_completion and isinstance(messages, str):
            return messages
        conversation: list[Any] = (
            [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        )
        if conversation and self._meta_instruction is not None:
            first = conversation[0]
            if not isinstance(first, Mapping) or first.get("role") != "system":
                conversation.insert(0, {"role": "system", "content": self._meta_instruction})
        return render_chat(self._tokenizer, conversation, model_name="this model")


PromptTemplate = ChatTemplate | OwnChatTemplate


def _read_built_in() -> tuple[dict[str, ChatTemplate], list[tuple[str, list[str]]]]:
    """Templates by name; and names with the words that a model's path must all hold, of which the first fits."""
    data = tomllib.loads(pathlib.Path(__file__).with_name("templates.toml").read_text(encoding="utf-8"))
    templates: dict[str, ChatTemplate] = {}
    for texts in data["templates"]:
        names, stop_words = texts.pop("names"), tuple(texts.pop("stop_words", ()))
        template = ChatTemplate(**{"meta_instruction": None, **texts}, stop_words=stop_words)
        templates |= dict.fromkeys(names, template)
    return templates, [(entry["name"], entry["words"]) for entry in data["by_path"]]


BUILT_IN, _BY_PATH = _read_built_in()


@dataclasses.dataclass
class ChatTemplateConfig:
    """Which chat template a pipeline uses, and what differs from it.

    Args:
        model_name: name of a built-in template (`BUILT_IN`), or a new name. A new name with texts around the messages
            is a template of its own; without them it means the model's own template.
        system, meta_instruction, eosys, user, eoh, assistant, eoa: see `ChatTemplate`; None: as in the built-in one.
        capability: "chat", or "completion", which takes plain strings as they are.
        separator, stop_words: see `ChatTemplate`.

    Raises:
        ConfigError: capability is none of these.

    Example::

        ChatTemplateConfig("internlm2-chat", meta_instruction="Answer in one word.")
    """

    model_name: str
    system: str | None = None
    meta_instruction: str | None = None
    eosys: str | None = None
    user: str | None = None
    eoh: str | None = None
    assistant: str | None = None
    eoa: str | None = None
    capability: str | None = None
    separator: str | None = None
    stop_words: list[str] | None = None

    def __post_init__(self) -> None:
        if self.capability not in _CAPABILITIES:
            raise ConfigError(f"capability must be 'chat' or 'completion' in this version, got {self.capability!r}.")

    @classmethod
    def from_json(cls, file_or_string: str) -> ChatTemplateConfig:
        """Reads a configuration from a file, or from a text of JSON.

        Raises:
            ConfigError: it is not JSON, or not an object of these fields.
        """
        text = file_or_string
        if not text.lstrip().startswith("{"):
            try:
                text = pathlib.Path(file_or_string).read_text(encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"the chat template {file_or_string} cannot be read: {error}") from error
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"the chat template is not JSON: {error}") from error
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(values, dict) or not isinstance(values.get("model_name"), str):
            raise ConfigError("the chat template must be a JSON object with a model_name")
        if unknown := sorted(set(values) - names):
            raise ConfigError(f"unknown key(s) in the chat template: {', '.join(unknown)}")
        return cls(**values)

    @property
    def chat_template(self) -> ChatTemplate:
        """The template of built-in or given texts.

        Raises:
            ConfigError: the name is not built in, and no texts are given.
        """
        template = BUILT_IN.get(self.model_name)
        if template is None:
            if not self.has_form:
                raise ConfigError(
                    f"{self.model_name!r} is not a chat template; the built-in ones are {', '.join(BUILT_IN)}. "
                    f"A new one needs some of {', '.join(_FORM)}."
                )
            template = ChatTemplate()
        given = {
            name: getattr(self, name) for name in (*_FORM, "meta_instruction") if getattr(self, name) is not None
        }
        if self.stop_words is not None:
            given["stop_words"] = tuple(self.stop_words)
        if self.capability is not None:
            given["is_completion"] = self.capability == "completion"
        return dataclasses.replace(template, **given)

    @property
    def has_form(self) -> bool:
        """Whether it defines texts around messages."""
        return any(getattr(self, name) is not None for name in _FORM)


def choose_template(
    config: ChatTemplateConfig | None, model_name: str | None, model_path: str, tokenizer: Tokenizer
) -> PromptTemplate:
    """The template of a pipeline.

    A configuration decides, or else a name. Without both, and for a name that is not built in, it is the model's own
    template, or else the built-in one that fits the model's path. A model that none fits gets prompts as they are.

    Args:
        config: of the caller.
        model_name: of the caller; None or "": none.
        model_path: as the caller wrote it.
        tokenizer: may bring the model's own template.

    Raises:
        ConfigError: a name is not built in, and the model has no template of its own.
    """
    if config is None and model_name:
        config = ChatTemplateConfig(model_name)
    if config is None:
        if tokenizer.chat_template is not None:
            return OwnChatTemplate(tokenizer)
        path = model_path.lower()
        name = next((name for name, words in _BY_PATH if all(word in path for word in words)), None)
        if name is None:
            logger.warning("No chat template is known for %s: prompts are taken as they are.", model_path)
        return BUILT_IN[name or "base"]
    if config.model_name in BUILT_IN or config.has_form or tokenizer.chat_template is None:
        return config.chat_template
    return OwnChatTemplate(tokenizer, config.meta_instruction, is_completion=config.capability == "completion")
