"""The output side of a pooling request: one result, at its end."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ascend_vllm.engine.request_stats import FinishedSequence
from ascend_vllm.errors import RequestError
from ascend_vllm.outputs import CompletionOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
from ascend_vllm.sampling_params import RequestOutputKind
from ascend_vllm.types.messages import EngineCoreOutput, FinishReason


class PoolingState:
    """Waits for what the pooler makes of a prompt; the counterpart of a `SequenceState`.

    Attributes:
        data: float32, [D] of the prompt or [P, D] of each of its tokens; None before the end, and after an abort.
        finish_reason: None while it runs.
        last_token_time: seconds of time.monotonic() at its end.
        num_tokens: always 0: nothing is generated.
    """

    __slots__ = ("data", "finish_reason", "last_token_time")

    num_tokens = 0

    def __init__(self) -> None:
        self.data: npt.NDArray[np.float32] | None = None
        self.finish_reason: FinishReason | None = None
        self.last_token_time: float | None = None

    def update(self, output: EngineCoreOutput) -> bool:
        """Takes the result.

        Returns:
            False: nothing here ends a request of which the core does not know.
        """
        if output.pooled is not None:
            self.data = np.frombuffer(output.pooled.data, np.float32).reshape(output.pooled.shape)
        self.finish_reason = output.finish_reason
        return False

    def end(self, reason: FinishReason) -> None:
        """Ends it from outside, without a result."""
        self.finish_reason = reason

    def make_outputs(self, _kind: RequestOutputKind) -> list[CompletionOutput]:
        """No sequences."""
        return []

    def summaries(self) -> list[FinishedSequence]:
        """What the metrics count of it at its end."""
        return [FinishedSequence(str(self.finish_reason), 0)]


def pooling_output(output: RequestOutput) -> PoolingRequestOutput[PoolingOutput]:
    """The result of a pooling request, of its one output.

    Raises:
        RequestError: there is none: the request was aborted.
    """
    if output.pooled is None:
        raise RequestError("The request was aborted before its prompt was pooled.")
    return PoolingRequestOutput(
        output.request_id,
        PoolingOutput(output.pooled),
        output.prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens,
    )
