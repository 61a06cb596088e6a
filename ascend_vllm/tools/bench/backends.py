"""The endpoints that can be measured: how to make their requests and parse their answers.

Answers are parsed after the run, so that the client takes little CPU time while it measures.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ascend_vllm.tools.bench.datasets import SampleRequest, count_tokens
from ascend_vllm.tools.bench.metrics import Outcome

Chunks = Sequence[tuple[float, bytes]]

_SAMPLING = (
    "top_p",
    "top_k",
    "min_p",
    "temperature",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)


def sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling fields that the command line sets for all requests."""
    fields = {name: getattr(args, name) for name in _SAMPLING if getattr(args, name) is not None}
    if args.use_beam_search:
        fields["use_beam_search"] = True
    return fields | (args.extra_body or {})


def _completion_body(args: argparse.Namespace, model: str, request: SampleRequest) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": request.prompt,
        "repetition_penalty": 1.0,
        "max_tokens": request.output_len,
        "logprobs": args.logprobs,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _chat_body(args: argparse.Namespace, model: str, request: SampleRequest) -> dict[str, Any]:  # noqa: ARG001
    return {
        "model": model,
        "messages": [{"role": "user", "content": [{"type": "text", "text": request.prompt}]}],
        "max_completion_tokens": request.output_len,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _generate_body(args: argparse.Namespace, model: str, request: SampleRequest) -> dict[str, Any]:  # noqa: ARG001
    return {"prompt": request.prompt, "max_tokens": request.output_len, "stream": True}


def _completion_text(choice: dict[str, Any]) -> str:
    return choice.get("text") or ""


def _chat_text(choice: dict[str, Any]) -> str:
    return choice.get("delta", {}).get("content") or ""


def _events(chunks: Chunks, separator: bytes) -> Iterator[tuple[float, bytes]]:
    """The events of an answer, each with the arrival of its last byte."""
    pending = b""
    for moment, data in chunks:
        *whole, pending = (pending + data).split(separator)
        for event in whole:
            yield moment, event
    if pending.strip():
        yield chunks[-1][0], pending


@dataclasses.dataclass(frozen=True)
class Backend:
    """A type of endpoint.

    Attributes:
        path: its default path.
        make_body: makes the JSON of a request.
        text_of: returns the text in a choice of an event; None: answers have the format of /generate.
        takes_ids: whether prompts may be token ids.
    """

    path: str
    make_body: Callable[[argparse.Namespace, str, SampleRequest], dict[str, Any]]
    text_of: Callable[[dict[str, Any]], str] | None
    takes_ids: bool

    def body(self, args: argparse.Namespace, model: str, request: SampleRequest) -> bytes:
        fields = self.make_body(args, model, request)
        if args.ignore_eos:
            fields["ignore_eos"] = True
        return json.dumps(fields | sampling_fields(args)).encode()

    def read(
        self, chunks: Chunks, outcome: Outcome, request: SampleRequest, tokenizer: Any, ignore_eos: bool
    ) -> None:
        """Parses an answer into `outcome`.

        Args:
            chunks: the answer's chunks as received.
            outcome: of the request; its start is set.
            request: that was sent.
            tokenizer: counts tokens if the answer has no usage; None: events are counted instead.
            ignore_eos: whether every answer has the requested length.
        """
        if self.text_of is None:
            self._read_frames(chunks, outcome, request)
            known = request.output_len if ignore_eos and outcome.moments else 0
        else:
            known = self._read_sse(chunks, outcome, self.text_of)
        if not outcome.moments and not outcome.error:
            outcome.error = "The server sent no token."
        if outcome.error:
            outcome.output_len = 0
        elif known or tokenizer is None:
            outcome.output_len = known or len(outcome.moments)
        else:
            outcome.output_len = count_tokens(tokenizer, [outcome.text])[0]

    def _read_sse(self, chunks: Chunks, outcome: Outcome, text_of: Callable[[dict[str, Any]], str]) -> int:
        """Parses server-sent events; returns the number of tokens in `usage`, or 0."""
        texts, num_tokens = [], 0
        for moment, event in _events(chunks, b"\n\n"):
            # comments keep a connection alive
            if not event.startswith(b"data: ") or event == b"data: [DONE]":
                continue
            data = json.loads(event[len(b"data: ") :])
            if "error" in data:
                outcome.error = str(data["error"].get("message") or data["error"])
            if data.get("choices"):
                outcome.moments.append(moment)
                texts.append(text_of(data["choices"][0]))
            if usage := data.get("usage"):
                num_tokens = usage.get("completion_tokens") or 0
                outcome.prompt_len = usage.get("prompt_tokens") or outcome.prompt_len
        outcome.text = "".join(texts)
        outcome.event_chars = list(map(len, texts))
        return num_tokens

    @staticmethod
    def _read_frames(chunks: Chunks, outcome: Outcome, request: SampleRequest) -> None:
        """Parses the frames of /generate: the prompt with all text so far, or, in MindIE's format, the new text."""
        frames = list(_events(chunks, b"\0"))
        if not frames:
            return
        last = json.loads(frames[-1][1])
        if "error" in last:
            outcome.error = str(last["error"])
            return
        outcome.moments = [moment for moment, _ in frames]
        prompt = request.prompt if isinstance(request.prompt, str) else ""
        if last["text"][0].startswith(prompt):
            outcome.text = last["text"][0][len(prompt) :]
            # parsing each frame, all of them with the whole text, would take long: their sizes grow with the text
            first = len(json.loads(frames[0][1])["text"][0]) - len(prompt)
            sizes = [len(frame) for _, frame in frames]
            outcome.event_chars = [first, *(max(0, b - a) for a, b in itertools.pairwise(sizes))]
        else:
            texts = [json.loads(frame)["text"][0] for _, frame in frames]
            outcome.text = "".join(texts)
            outcome.event_chars = list(map(len, texts))


_COMPLETIONS = Backend("/v1/completions", _completion_body, _completion_text, takes_ids=True)
BACKENDS = {
    "openai": _COMPLETIONS,
    "vllm": _COMPLETIONS,
    "openai-chat": Backend("/v1/chat/completions", _chat_body, _chat_text, takes_ids=False),
    "generate": Backend("/generate", _generate_body, None, takes_ids=False),
}
