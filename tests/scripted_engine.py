"""The real OpenAI application on an engine whose model writes what a test says.

A tiny model calls no tools and thinks no thoughts: what it would write is written by hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import httpx

from ascend_vllm.args.tables.server import FrontendArgs
from ascend_vllm.engine.adapter_tokenizers import AdapterTokenizers
from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.entrypoints.openai.app import build_app
from ascend_vllm.entrypoints.openai.chat_tools import ChatParsers
from ascend_vllm.outputs import CompletionOutput, Logprob, RequestOutput
from ascend_vllm.sampling_params import RequestOutputKind, SamplingParams
from tests.engine.engine_for_tests import make_config
from tests.tiny_models import tiny_model

# a call of the function `find` in the format of the parser "hermes"
ARGUMENTS = '{"text": "a \\"b\\"", "count": 3}'
CALL = f'<tool_call>\n{{"name": "find", "arguments": {ARGUMENTS}}}\n</tool_call>'
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)


class ScriptedEngine:
    """An engine's front whose model writes a given text, cut into given pieces, for every choice."""

    # the only API server
    group = None

    def __init__(self, pieces: Sequence[str], finish_reason: str = "stop") -> None:
        self.config = make_config(max_model_len=512)
        self.max_model_len = 512
        self.tokenizer = Tokenizer.from_directory(tiny_model("qwen2"))
        self.tokenizers = AdapterTokenizers(self.config, self.tokenizer)
        self.params: list[SamplingParams] = []
        self.prompts: list[str] = []
        self._pieces = pieces
        self._finish_reason = finish_reason

    def default_sampling_params(self) -> dict[str, Any]:
        return {}

    async def generate(
        self, prompt: dict[str, Any], params: SamplingParams, request_id: str, **_: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        self.params.append(params)
        self.prompts.append(self.tokenizer.decode(prompt["prompt_token_ids"]))
        pieces = self._pieces if params.output_kind is RequestOutputKind.DELTA else ["".join(self._pieces)]
        for position, text in enumerate(pieces):
            reason = self._finish_reason if position == len(pieces) - 1 else None
            outputs = [
                CompletionOutput(index, text, [40], None, [{40: Logprob(-1.0, 1, "x")}], reason)
                for index in range(params.n)
            ]
            yield RequestOutput(request_id, None, prompt["prompt_token_ids"], None, outputs, reason is not None)

    async def generate_shaped(
        self,
        prompt: dict[str, Any],
        params: SamplingParams,
        request_id: str,
        shape: Callable[[RequestOutput], Any],
        **_: Any,
    ) -> AsyncGenerator[Any, None]:
        async for output in self.generate(prompt, params, request_id):
            yield shape(output)


class PatientEngine(ScriptedEngine):
    """An engine that writes its text and waits for `may_end` before the last piece of it."""

    def __init__(self, pieces: Sequence[str]) -> None:
        super().__init__(pieces)
        self.may_end = asyncio.Event()
        self.reached_end = asyncio.Semaphore(0)

    async def generate(
        self, prompt: dict[str, Any], params: SamplingParams, request_id: str, **_: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        async for output in super().generate(prompt, params, request_id):
            if output.finished:
                self.reached_end.release()
                await self.may_end.wait()
            yield output


def client_of(engine: ScriptedEngine, **flags: Any) -> httpx.AsyncClient:
    """A client of the real application on a scripted engine."""
    flags = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", **flags}
    reasoning = flags.pop("reasoning_parser", None)
    args = FrontendArgs(**flags)
    app = build_app(engine, args, parsers=ChatParsers.from_flags(args, reasoning))  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
