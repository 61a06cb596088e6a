"""Tools and thoughts in chat: which parsers read an answer, and the deltas they make of it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ascend_vllm.entrypoints.openai.tool_metrics import CountedToolParser, ToolCallCounts
from ascend_vllm.entrypoints.parsers.reasoning import (
    THOUGHTS_END,
    ReasoningParser,
    begins_with_thoughts,
    check_reasoning_parser,
    make_reasoning_parser,
)
from ascend_vllm.entrypoints.parsers.tools import (
    ToolCallDelta,
    ToolDelta,
    ToolParser,
    find_tool_parser,
    load_tool_parser_plugin,
)
from ascend_vllm.entrypoints.parsers.tools_forced import NamedToolParser, RequiredToolParser
from ascend_vllm.errors import RequestError

if TYPE_CHECKING:
    from ascend_vllm.args.tables.server import FrontendArgs
    from ascend_vllm.entrypoints.openai.protocol_chat import ChatCompletionRequest


@dataclasses.dataclass(frozen=True)
class ChatParsers:
    """The server's flags about tools and thoughts.

    Attributes:
        tool_parser: reads tool calls; None: there is none.
        auto_tool_choice: the model may decide to call a tool.
        exclude_unused_tools: tools that must not be called stay out of the prompt.
        reasoning: name of the reasoning parser; None: thoughts stay in the text.
        counts: of texts in which calls were looked for.
    """

    tool_parser: type[ToolParser] | None = None
    auto_tool_choice: bool = False
    exclude_unused_tools: bool = False
    reasoning: str | None = None
    counts: ToolCallCounts = dataclasses.field(default_factory=ToolCallCounts)

    @classmethod
    def from_flags(cls, args: FrontendArgs, reasoning_parser: str | None) -> ChatParsers:
        """The parsers that the flags name; runs the plug-in file.

        Raises:
            ConfigError: there is no such parser, or the plug-in fails.
        """
        if args.tool_parser_plugin:
            load_tool_parser_plugin(args.tool_parser_plugin)
        if reasoning_parser:
            check_reasoning_parser(reasoning_parser)
        return cls(
            find_tool_parser(args.tool_call_parser) if args.tool_call_parser else None,
            args.enable_auto_tool_choice,
            args.exclude_tools_when_tool_choice_none,
            reasoning_parser or None,
        )

    def prepare(self, request: ChatCompletionRequest) -> None:
        """Check a request's tools against the flags, and keep the special tokens that calls are written with.

        Raises:
            RequestError: this server cannot do what `tool_choice` asks for.
        """
        choice = request.effective_tool_choice
        if choice == "none":
            return
        if choice == "auto":
            if self.tool_parser is None or not self.auto_tool_choice:
                raise RequestError(
                    '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
                    "tool_choice",
                )
            if self.tool_parser.KEEPS_SPECIAL_TOKENS:
                request.skip_special_tokens = False
            return
        named = f'tool_choice="{choice}"' if isinstance(choice, str) else f'tool_choice=function "{_name(choice)}"'
        if self.tool_parser is None:
            raise RequestError(f"{named} requires --tool-call-parser to be set", "tool_choice")

    def end_of_thoughts(self, prompt: str) -> str | None:
        """What ends the thoughts that come before the text, and that a constraint on it leaves free; None: none do.

        What a model writes that may think, and never ends to, is thoughts, as in vLLM.

        Args:
            prompt: what the output follows.
        """
        if self.reasoning is None or begins_with_thoughts(self.reasoning, prompt) is False:
            return None
        return THOUGHTS_END

    def tools_in_prompt(self, request: ChatCompletionRequest) -> list[dict[str, Any]] | None:
        """The tools that the chat template is told of."""
        if self.exclude_unused_tools and request.effective_tool_choice == "none":
            return None
        return request.tools or None

    def make(
        self, request: ChatCompletionRequest, prompt: str, request_type: str = "chat_completions"
    ) -> ChoiceParser | None:
        """A parser of one choice's text; None: the text is the content.

        Args:
            request: which has the tools.
            prompt: what the text follows.
            request_type: label of the metric, see `ToolCallCounts`.
        """
        tools = self._make_tool_parser(request, request_type)
        reasoning = self._make_reasoning_parser(request, prompt)
        if tools is None and reasoning is None:
            return None
        return ChoiceParser(
            reasoning,
            tools,
            include_reasoning=request.include_reasoning is not False,
            parallel_calls=request.parallel_tool_calls is not False,
            demanded=request.demanded_tools is not None,
            called_reason="stop" if isinstance(request.effective_tool_choice, dict) else "tool_calls",
        )

    def _make_reasoning_parser(self, request: ChatCompletionRequest, prompt: str) -> ReasoningParser | None:
        if self.reasoning is None:
            return None
        if request.has_free_thoughts:
            # all that no constraint holds for is thoughts, whether they are opened or not
            return ReasoningParser(thinking=True)
        return make_reasoning_parser(self.reasoning, prompt)

    def _make_tool_parser(self, request: ChatCompletionRequest, request_type: str) -> ToolParser | None:
        choice, tools = request.effective_tool_choice, request.tools or ()
        if self.tool_parser is None or choice == "none":
            return None
        parser: ToolParser
        if isinstance(choice, dict):
            parser = NamedToolParser(tools, _name(choice))
        else:
            parser = RequiredToolParser(tools) if choice == "required" else self.tool_parser(tools)
        return CountedToolParser(parser, self.counts, bool(request.stream), request_type)


def _name(choice: dict[str, Any]) -> Any:
    return choice["function"]["name"]


@dataclasses.dataclass
class _Call:
    """A call that was found.

    Attributes:
        arguments: pieces of its arguments' JSON.
    """

    id: str | None
    name: str
    arguments: list[str]


class ChoiceParser:
    """Reads the text of one choice: thoughts first, then content and calls.

    Args:
        reasoning: separates the thoughts; None: there are none.
        tools: finds the calls; None: none is wanted.
        include_reasoning: tell the thoughts.
        parallel_calls: tell more calls than the first.
        demanded: the model cannot but call a tool.
        called_reason: finish reason of a message whose calls were written to their end.

    """

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        include_reasoning: bool,
        parallel_calls: bool,
        demanded: bool = False,
        called_reason: str = "tool_calls",
    ) -> None:
        self._reasoning_parser = reasoning
        self._tool_parser = tools
        self._parallel_calls = parallel_calls
        self._demanded = demanded
        self._called_reason = called_reason
        self._tells_reasoning = reasoning is not None and include_reasoning
        # pieces of what was found so far
        self._content: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[_Call] = []

    @property
    def content(self) -> str:
        """The content so far."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str | None:
        """The thoughts so far; None: they are not told."""
        return "".join(self._thoughts) if self._tells_reasoning else None

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls so far, as a whole message has them."""
        return [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": "".join(call.arguments)}}
            for call in self._calls
        ]

    @property
    def has_called(self) -> bool:
        """Whether there are any."""
        return bool(self._calls)

    def feed(self, text: str, final: bool) -> list[dict[str, Any]]:
        """Read the next piece of the text.

        Args:
            text: the piece.
            final: it is the last one.

        Returns:
            The deltas of a stream, in order; none while what the text is cannot be known.
        """
        deltas: list[dict[str, Any]] = []
        thoughts, text = self._split(text, final)
        if thoughts and self._tells_reasoning:
            self._thoughts.append(thoughts)
            deltas.append({"reasoning": thoughts})
        for found in self._find_calls(text, final):
            if found.content:
                self._content.append(found.content)
                deltas.append({"content": found.content})
            calls = [call for call in found.calls if self._parallel_calls or call.index == 0]
            deltas.extend({"tool_calls": [self._add_call(call)]} for call in calls)
        return deltas

    def finish_reason(self, reason: str | None) -> str | None:
        """The message's finish reason: calls that were written to their end are one of their own."""
        return self._called_reason if self._calls and reason == "stop" else reason

    @property
    def message_content(self) -> str | None:
        """`content` as a whole message has it: none beside what the model chose to say instead."""
        return self.content or (None if not self._demanded and (self._calls or self._thoughts) else "")

    def _split(self, text: str, final: bool) -> tuple[str, str]:
        """Thoughts and what follows them."""
        if self._reasoning_parser is None:
            return "", text
        thoughts, rest = self._reasoning_parser.feed(text)
        if final:
            last_thoughts, last_rest = self._reasoning_parser.finish()
            thoughts, rest = thoughts + last_thoughts, rest + last_rest
        return thoughts, rest

    def _find_calls(self, text: str, final: bool) -> list[ToolDelta]:
        if self._tool_parser is None:
            return [ToolDelta(text)]
        found = [self._tool_parser.feed(text)]
        return [*found, self._tool_parser.finish()] if final else found

    def _add_call(self, call: ToolCallDelta) -> dict[str, Any]:
        """Take note of a call's news; its delta."""
        if call.name is None:
            self._calls[call.index].arguments.append(call.arguments)
            return {"index": call.index, "function": {"arguments": call.arguments}}
        self._calls.append(_Call(call.id, call.name, [call.arguments]))
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": call.index, "id": call.id, "type": "function", "function": function}
