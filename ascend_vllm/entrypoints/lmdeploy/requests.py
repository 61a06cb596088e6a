"""One synchronous engine for several callers: a caller that waits for an output runs the steps for all."""

from __future__ import annotations

import collections
import threading
from collections.abc import Generator, Mapping

from ascend_vllm.engine.input_processor import TokensPrompt
from ascend_vllm.engine.llm_engine import LLMEngine
from ascend_vllm.lora.request import LoRARequest
from ascend_vllm.outputs import RequestOutput
from ascend_vllm.sampling_params import SamplingParams


class SharedRequests:
    """Requests of several callers on one engine."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        # request id → where its outputs go
        self._inboxes: dict[str, collections.deque[RequestOutput]] = {}

    def run(
        self, requests: Mapping[str, tuple[TokensPrompt, SamplingParams]], lora: LoRARequest | None = None
    ) -> Generator[RequestOutput, None, None]:
        """The outputs of new requests, by id, until all have finished; closing the generator aborts the others.

        Args:
            requests: prompt and parameters by id.
            lora: the adapter of all; None: the model as it is.

        Raises:
            RequestError: a request is wrong.
            RuntimeError: the engine was shut down.
        """
        inbox: collections.deque[RequestOutput] = collections.deque()
        open_ids: set[str] = set()
        try:
            for request_id, (prompt, params) in requests.items():
                with self._lock:
                    self._engine.add_request(request_id, prompt, params, lora_request=lora)
                    self._inboxes[request_id] = inbox
                    open_ids.add(request_id)
            while open_ids:
                with self._lock:
                    if not inbox:
                        self._step()
                    arrived = list(inbox)
                    inbox.clear()
                    finished = {output.request_id for output in arrived if output.finished}
                    open_ids -= finished
                    self._forget(finished)
                yield from arrived
        finally:
            with self._lock:
                self._forget(open_ids)
                # empty after a successful call; a closed pipeline has no engine to abort them in
                if open_ids and self._engine.has_unfinished_requests():
                    self._engine.abort_request(list(open_ids))

    def _step(self) -> None:
        """Runs a step and distributes the outputs; the lock must be held."""
        if not self._engine.has_unfinished_requests():
            raise RuntimeError("the pipeline was closed")
        for output in self._engine.step():
            inbox = self._inboxes.get(output.request_id)
            if inbox is not None:
                inbox.append(output)

    def _forget(self, request_ids: set[str]) -> None:
        for request_id in request_ids:
            self._inboxes.pop(request_id, None)
