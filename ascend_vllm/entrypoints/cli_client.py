"""Clients in the terminal for a running server: `ascend-vllm complete` and `ascend-vllm chat`."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from ascend_vllm import envs
from ascend_vllm.args.parser import FlexibleArgumentParser
from ascend_vllm.errors import AscendVllmError

_TIMEOUT_S = 600


class ClientError(AscendVllmError):
    """The server cannot be reached, or refused a request; the text says what to do."""


class Client:
    """Requests to one OpenAI-compatible server.

    Args:
        url: with its path, for example ``http://localhost:8000/v1``.
        api_key: sent as a bearer token; None: none.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def first_model(self) -> str:
        """The name under which the server's model is served.

        Raises:
            ClientError: the server cannot be reached or refuses.
        """
        with self._open("/models", None) as answer:
            return str(json.load(answer)["data"][0]["id"])

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The choices of a streamed answer's events.

        Raises:
            ClientError: the server cannot be reached or refuses, or the stream carries an error.
        """
        with self._open(path, {**body, "stream": True}) as answer:
            for line in answer:
                data = line.decode().strip().removeprefix("data: ")
                if not data or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise ClientError(str(event["error"].get("message", event["error"])))
                yield from event.get("choices", [])

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        try:
            return urllib.request.urlopen(request, timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            raise ClientError(f"{self._url} answers {error.code}: {_message(error.read())}") from error
        except (OSError, ValueError) as error:
            raise ClientError(
                f"{self._url} cannot be reached ({error}). Is a server running there? --url names another."
            ) from error


def _message(body: bytes) -> str:
    try:
        content = json.loads(body)
        return str(content["error"]["message"] if isinstance(content.get("error"), dict) else content)
    except (ValueError, KeyError, AttributeError):
        return body.decode(errors="replace")[:500]


def add_complete_arguments(parser: FlexibleArgumentParser) -> None:
    parser.description = "Continues each line that you type, with a running server."
    _add_arguments(parser)


def add_chat_arguments(parser: FlexibleArgumentParser) -> None:
    parser.description = "A conversation with the model of a running server; the end of the input ends it."
    _add_arguments(parser)
    parser.add_argument("--system-prompt", help="what the model is told before the conversation")


def _add_arguments(parser: FlexibleArgumentParser) -> None:
    parser.add_argument("--url", default="http://localhost:8000/v1", help="the server (default: %(default)s)")
    parser.add_argument("--model-name", help="the model to ask; without it the first that the server has")
    parser.add_argument("--api-key", help="the key that the server wants; without it VLLM_API_KEY")
    parser.add_argument("-q", "--quick", metavar="MESSAGE", help="send only this, print the answer and end")


def complete(args: argparse.Namespace) -> int:
    """Completes lines of the standard input until it ends, or one from --quick. Returns the exit code."""
    client, model = _connect(args)
    for prompt in _messages(args, "Please enter prompt to complete:"):
        body = {"model": model, "prompt": prompt}
        _print(choice.get("text") or "" for choice in client.stream("/completions", body))
    return 0


def chat(args: argparse.Namespace) -> int:
    """Answers lines of the standard input as one conversation until it ends, or --quick. Returns the exit code."""
    client, model = _connect(args)
    messages: list[dict[str, str]] = []
    if args.system_prompt:
        messages.append({"role": "system", "content": args.system_prompt})
    for line in _messages(args, "Please enter a message for the chat model:"):
        messages.append({"role": "user", "content": line})
        events = client.stream("/chat/completions", {"model": model, "messages": messages})
        text = _print(choice.get("delta", {}).get("content") or "" for choice in events)
        messages.append({"role": "assistant", "content": text})
    return 0


def _connect(args: argparse.Namespace) -> tuple[Client, str]:
    client = Client(args.url, args.api_key or envs.api_key())
    model = args.model_name or client.first_model()
    print(f"Using model: {model}")
    return client, model


def _messages(args: argparse.Namespace, invitation: str) -> Iterable[str]:
    """The message of --quick, or lines of the standard input."""
    return _typed_lines(invitation, sys.stdin, sys.stdout) if args.quick is None else [args.quick]


def _typed_lines(invitation: str, source: TextIO, terminal: TextIO) -> Iterator[str]:
    """Prompts for lines, and yields those that are not empty; in a terminal they can be edited and recalled."""
    if source.isatty() and terminal.isatty():
        # `input` takes its keys; a Python without the module has those of the terminal
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")
    print(invitation)
    while True:
        try:
            line = input("> ")
        except EOFError:
            print(file=terminal)
            return
        if line.strip():
            yield line


def _print(deltas: Iterator[str]) -> str:
    """Prints deltas as they come; returns the whole text."""
    text = ""
    for delta in deltas:
        print(delta, end="", flush=True)
        text += delta
    print()
    return text
