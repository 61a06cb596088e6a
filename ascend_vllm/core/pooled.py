"""What becomes of a prompt that the workers have pooled."""

from __future__ import annotations

from ascend_vllm.core.request import Request
from ascend_vllm.types.messages import EngineCoreOutput, PooledData
from ascend_vllm.types.step import PooledOutput


def pooled_output(request: Request, pooled: PooledOutput) -> EngineCoreOutput:
    """The one output of its request, which has ended."""
    return EngineCoreOutput(
        request.request_id,
        [],
        finish_reason=request.finish_reason,
        first_scheduled_time=request.first_scheduled_time,
        num_cached_tokens=request.num_cached_tokens,
        pooled=PooledData(pooled.data.shape, pooled.data.tobytes()),
    )
