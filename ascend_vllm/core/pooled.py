"""The row kind of pooling requests."""

from __future__ import annotations

from ascend_vllm.core.request import Request, RowKind
from ascend_vllm.pooling_params import PoolingParams
from ascend_vllm.types.messages import EngineCoreOutput, PooledData
from ascend_vllm.types.step import PooledOutput


class Pooled(RowKind):
    """Nothing is sampled: what the workers make of the prompt ends the request.

    Args:
        params: of the pooling.
    """

    def __init__(self, params: PoolingParams) -> None:
        self.reads_prefix_cache = not params.skip_reading_prefix_cache


def pooled_output(request: Request, pooled: PooledOutput) -> EngineCoreOutput:
    """The one output of a pooling request, which has ended."""
    return EngineCoreOutput(
        request.request_id,
        [],
        finish_reason=request.finish_reason,
        first_scheduled_time=request.first_scheduled_time,
        num_cached_tokens=request.num_cached_tokens,
        pooled=PooledData(pooled.data.shape, pooled.data.tobytes()),
    )
