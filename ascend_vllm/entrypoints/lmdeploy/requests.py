"""One synchronous engine for several callers: a caller that waits for an output runs the steps for all."""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Iterator

from ascend_vllm.engine.input_processor import TokensPrompt
from ascend_vllm.engine.llm_engine import LLMEngine
from ascend_vllm.outputs import RequestOutput
from ascend_vllm.sampling_params import SamplingParams


class SharedRequests:
    """Requests of several callers on one engine.

    Attributes:
        numbers: of the prompts.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.lock = threading.Lock()
        # request id → where its outputs go
        self.inboxes: dict[str, collections.deque[RequestOutput]] = {}
        self.numbers = itertools.count()

    def step(self) -> None:
        """Runs a step and distributes the outputs; the lock must be held."""
        for output in self.engine.step():
            inbox = self.inboxes.get(output.request_id)
            if inbox is not None:
                inbox.append(output)


class Inbox:
    """The requests of one call; a context manager that aborts unfinished ones at its end."""

    def __init__(self, requests: SharedRequests) -> None:
        self._requests = requests
        self._outputs: collections.deque[RequestOutput] = collections.deque()
        self._open_ids: set[str] = set()

    def __enter__(self) -> Inbox:
        return self

    def __exit__(self, *_: object) -> None:
        with self._requests.lock:
            for request_id in self._open_ids:
                self._requests.inboxes.pop(request_id, None)
            # empty after a successful call; a closed pipeline has no engine to abort them in
            if self._open_ids and self._requests.engine.has_unfinished_requests():
                self._requests.engine.abort_request(list(self._open_ids))

    def add(self, request_id: str, prompt: TokensPrompt, params: SamplingParams) -> None:
        """Queues a request under a new id.

        Raises:
            RequestError: the request is wrong.
        """
        with self._requests.lock:
            self._requests.engine.add_request(request_id, prompt, params)
            self._requests.inboxes[request_id] = self._outputs
            self._open_ids.add(request_id)

    def outputs(self) -> Iterator[RequestOutput]:
        """Outputs of these requests until all have finished.

        Raises:
            RuntimeError: the engine was shut down.
        """
        while self._open_ids:
            with self._requests.lock:
                if not self._outputs:
                    if not self._requests.engine.has_unfinished_requests():
                        raise RuntimeError("the pipeline was closed")
                    self._requests.step()
                arrived = list(self._outputs)
                self._outputs.clear()
                for output in arrived:
                    if output.finished:
                        self._open_ids.discard(output.request_id)
                        self._requests.inboxes.pop(output.request_id, None)
            yield from arrived
