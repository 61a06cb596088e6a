"""Requests for the tests of the KV cache."""

from __future__ import annotations

from ascend_vllm.core.request import Request
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.messages import EngineCoreRequest

Keys = list[tuple[int, str]]


def make_request(request_id: str, prompt: list[int] | int, keys: Keys | None = None) -> Request:
    """A request; an integer prompt is a length, and gives equal tokens for all requests."""
    token_ids = list(range(prompt)) if isinstance(prompt, int) else prompt
    return Request(
        EngineCoreRequest(request_id, token_ids, SamplingParams(), None, 0.0, content_keys=keys or []), 64, 0
    )


def append(request: Request, token_id: int) -> None:
    """Appends a sampled token, as a step does."""
    request.token_ids.append(token_id)
    request.num_tokens += 1
