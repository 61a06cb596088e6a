"""Tool calls and reasoning in chat: chooses the parsers of an answer, and makes deltas of what they emit."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ascend_vllm.entrypoints.openai.tool_metrics import CountedToolParser, ToolCallCounts
from ascend_vllm.entrypoints.parsers.reasoning import ReasoningParser, check_reasoning_parser, make_reasoning_parser
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
    """The server's flags about tools and reasoning.

    Attributes:
        tool_parser: class of the parser of tool calls; None: they are not parsed.
        auto_tool_choice: allow `tool_choice` "auto".
        exclude_unused_tools: leave the tools out of the prompt if `tool_choice` is "none".
        reasoning: name of the reasoning parser; None: reasoning stays in the text.
        counts: how often texts were parsed, and calls found.
    """

    tool_parser: type[ToolParser] | None = None
    auto_tool_choice: bool = False
    exclude_unused_tools: bool = False
    reasoning: str | None = None
    counts: ToolCallCounts = dataclasses.field(default_factory=ToolCallCounts)

    @classmethod
    def from_flags(cls, args: FrontendArgs, reasoning_parser: str | None) -> ChatParsers:
        """The parsers named by the flags; runs the plug-in file first.

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

    def prepare(self, request: ChatCompletionRequest) -> list[dict[str, Any]] | None:
        """Check a request's tools against the flags, and keep special tokens in the text if calls contain them.

        Returns:
            The tools for the chat template.

        Raises:
            RequestError: this server cannot do what `tool_choice` asks for.
        """
        choice = request.effective_tool_choice
        if choice == "none":
            return None if self.exclude_unused_tools else request.tools
        if choice == "auto":
            if self.tool_parser is None or not self.auto_tool_choice:
                raise RequestError(
                    '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
                    "tool_choice",
                )
            if self.tool_parser.KEEPS_SPECIAL_TOKENS:
                request.skip_special_tokens = False
        elif choice == "required" and self.tool_parser is None:
            raise RequestError('tool_choice="required" requires --tool-call-parser to be set', "tool_choice")
        return request.tools

    def make(
        self, request: ChatCompletionRequest, prompt: str, request_type: str = "chat_completions"
    ) -> ChoiceParser | None:
        """A parser for one choice's text; None: the whole text is the content.

        Args:
            request: with its tools.
            prompt: the rendered prompt.
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
        if request.has_exempt_reasoning:
            # all text before the constraint applies is reasoning, with or without an opening tag
            return ReasoningParser(thinking=True)
        return make_reasoning_parser(self.reasoning, prompt, request.continue_final_message)

    def _make_tool_parser(self, request: ChatCompletionRequest, request_type: str) -> ToolParser | None:
        choice, tools = request.effective_tool_choice, request.tools or ()
        parser: ToolParser
        if isinstance(choice, dict):
            parser = NamedToolParser(tools, choice["function"]["name"])
        elif self.tool_parser is None or choice == "none":
            return None
        else:
            parser = RequiredToolParser(tools) if choice == "required" else self.tool_parser(tools)
        return CountedToolParser(parser, self.counts, bool(request.stream), request_type)


@dataclasses.dataclass
class _Call:
    """A tool call, as far as it is parsed.

    Attributes:
        arguments: chunks of its arguments' JSON.
    """

    id: str | None
    name: str
    arguments: list[str]


class ChoiceParser:
    """Parses the text of one choice: reasoning first, then content and calls.

    Args:
        reasoning: separates the reasoning; None: there is none.
        tools: finds the calls; None: they are not parsed.
        include_reasoning: emit the reasoning.
        parallel_calls: emit more calls than the first.
        demanded: `tool_choice` forces a call.
        called_reason: finish reason of a message with complete calls.
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
        self._shows_reasoning = reasoning is not None and include_reasoning
        # what was parsed so far
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_Call] = []

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str | None:
        """The reasoning so far; None: it is not emitted."""
        return "".join(self._reasoning) if self._shows_reasoning else None

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls so far, as in an unstreamed message."""
        return [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": "".join(call.arguments)}}
            for call in self._calls
        ]

    @property
    def has_called(self) -> bool:
        return bool(self._calls)

    def feed(self, text: str, final: bool) -> list[dict[str, Any]]:
        """Parse the next chunk of the text.

        Args:
            text: the chunk.
            final: whether it is the last one.

        Returns:
            The deltas of a stream, in order; none while the text is ambiguous.
        """
        deltas: list[dict[str, Any]] = []
        reasoning, text = self._split(text, final)
        if reasoning and self._shows_reasoning:
            self._reasoning.append(reasoning)
            deltas.append({"reasoning": reasoning})
        for found in self._find_calls(text, final):
            if found.content:
                self._content.append(found.content)
                deltas.append({"content": found.content})
            calls = [call for call in found.calls if self._parallel_calls or call.index == 0]
            deltas.extend({"tool_calls": [self._add_call(call)]} for call in calls)
        return deltas

    def finish_reason(self, reason: str | None) -> str | None:
        """The message's finish reason: `called_reason` if it has calls and was not cut off."""
        return self._called_reason if self._calls and reason == "stop" else reason

    @property
    def message_content(self) -> str | None:
        """`content` of an unstreamed message: null if empty beside reasoning or calls, or where a call is forced."""
        return self.content or (None if self._demanded or self._calls or self._reasoning else "")

    def _split(self, text: str, final: bool) -> tuple[str, str]:
        """Splits a chunk into reasoning and the text behind it."""
        if self._reasoning_parser is None:
            return "", text
        reasoning, rest = self._reasoning_parser.feed(text)
        if final:
            last_reasoning, last_rest = self._reasoning_parser.finish()
            reasoning, rest = reasoning + last_reasoning, rest + last_rest
        return reasoning, rest

    def _find_calls(self, text: str, final: bool) -> list[ToolDelta]:
        if self._tool_parser is None:
            return [ToolDelta(text)]
        found = [self._tool_parser.feed(text)]
        return [*found, self._tool_parser.finish()] if final else found

    def _add_call(self, call: ToolCallDelta) -> dict[str, Any]:
        """Record an update of a call; returns its delta."""
        if call.name is None:
            self._calls[call.index].arguments.append(call.arguments)
            return {"index": call.index, "function": {"arguments": call.arguments}}
        self._calls.append(_Call(call.id, call.name, [call.arguments]))
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": call.index, "id": call.id, "type": "function", "function": function}
