"""Chooses the row kind of a request."""

from __future__ import annotations

from ascend_vllm.core.beam.row_kind import Beam
from ascend_vllm.core.pooled import Pooled
from ascend_vllm.core.request import PLAIN, Request, RowKind
from ascend_vllm.types.messages import EngineCoreRequest


def row_kind_of(request: Request, message: EngineCoreRequest, max_model_len: int) -> RowKind:
    """The row kind of a new request. A constrained one gets its kind later, with its grammar (`core.structured`).

    Args:
        request: made from the message.
        message: as the API server sent it.
        max_model_len: most tokens whose KV a sequence may hold.
    """
    if message.beam_search is not None and request.num_tokens:
        return Beam(request, message.beam_search, max_model_len)
    if message.pooling_params is not None:
        return Pooled(message.pooling_params)
    return PLAIN
