"""Log-probabilities of a step, as arrays, on their way to the requests, as records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ascend_vllm.core.request import Request
from ascend_vllm.types.messages import EngineCoreOutput, TokenLogprobs
from ascend_vllm.types.step import PromptLogprobs, StepLogprobs


def row_logprobs(logprobs: StepLogprobs, index: int, count: int, num_logprobs: int) -> list[TokenLogprobs]:
    """One row's log-probabilities of `count` tokens: each token's, and those of the `num_logprobs` most likely."""
    width = 1 + num_logprobs
    token_ids = logprobs.token_ids[index, :count, :width].tolist()
    values = logprobs.logprobs[index, :count, :width].tolist()
    ranks = logprobs.ranks[index, :count].tolist()
    return [TokenLogprobs(*entry) for entry in zip(token_ids, values, ranks, strict=True)]


def take_prompt_logprobs(rows: Mapping[int, Request], parts: Sequence[PromptLogprobs]) -> list[EngineCoreOutput]:
    """Gives requests the log-probabilities of the part of their prompt that a step computed.

    Those that have been preempted since then take them too: what was computed is good. They are emitted part by part,
    the last one with the first token: all of a long prompt's at once would keep the API server from others' outputs.

    Args:
        rows: slot → the request that was in it when the step was made.
        parts: of the prompts.

    Returns:
        Outputs of requests whose prompts go on.
    """
    outputs = []
    for part in parts:
        request = rows[part.slot]
        if request.prompt_logprobs is None:
            continue
        width = 1 + (request.sampling_params.prompt_logprobs or 0)
        columns = part.token_ids[:, :width].tolist(), part.logprobs[:, :width].tolist(), part.ranks.tolist()
        request.append_prompt_logprobs(part.start, [TokenLogprobs(*entry) for entry in zip(*columns, strict=True)])
        if request.prompt_logprobs and request.is_scored and not request.is_finished:
            outputs.append(EngineCoreOutput(request.request_id, [], prompt_logprobs=request.prompt_logprobs))
            request.prompt_logprobs = []
    return outputs
