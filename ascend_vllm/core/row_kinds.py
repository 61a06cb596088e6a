"""Row kinds by the field of a request that asks for them. A constrained one gets its kind later, with its grammar."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ascend_vllm.core.beam.row_kind import Beam
from ascend_vllm.core.request import Request, RowKind
from ascend_vllm.pooling_params import PoolingParams
from ascend_vllm.types.messages import EngineCoreOutput, PooledData
from ascend_vllm.types.step import RowResult


class Pooled(RowKind):
    """Nothing is sampled: the pooler's output for the prompt ends the request.

    Args:
        params: whether the prefix cache may be read.
    """

    may_draft = False

    def __init__(self, params: PoolingParams) -> None:
        self.reads_prefix_cache = not params.skip_reading_prefix_cache

    def output_of(self, row: Request, result: RowResult) -> EngineCoreOutput:
        """See `RowKind`."""
        output = super().output_of(row, result)
        output.pooled = PooledData(result.data.shape, result.data.tobytes())
        return output


# field of EngineCoreRequest → makes the kind of a request in which it is set, of the request, the field's value and
# the most tokens whose KV a sequence may hold
ROW_KINDS: dict[str, Callable[[Request, Any, int], RowKind]] = {
    "beam_search": Beam,
    "pooling_params": lambda _request, params, _max_model_len: Pooled(params),
}
