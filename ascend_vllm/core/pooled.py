"""The row kind of pooling requests."""

from __future__ import annotations

from ascend_vllm.core.request import Request, RowKind
from ascend_vllm.pooling_params import PoolingParams
from ascend_vllm.types.messages import EngineCoreOutput, PooledData
from ascend_vllm.types.step import RowResult


class Pooled(RowKind):
    """Nothing is sampled: the pooler's output for the prompt ends the request.

    Args:
        params: whether the prefix cache may be read.
    """

    def __init__(self, params: PoolingParams) -> None:
        self.reads_prefix_cache = not params.skip_reading_prefix_cache

    def output_of(self, row: Request, result: RowResult) -> EngineCoreOutput:
        """See `RowKind`."""
        output = super().output_of(row, result)
        output.pooled = PooledData(result.data.shape, result.data.tobytes())
        return output
