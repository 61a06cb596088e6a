"""All flags of the engine, one theme after the other."""

from __future__ import annotations

import dataclasses

from ascend_vllm.args.tables.features import (
    AdapterArgs,
    InputOutputArgs,
    MultimodalArgs,
    PromptAdapterArgs,
    SpeculativeArgs,
)
from ascend_vllm.args.tables.model import LoadArgs, ModelArgs
from ascend_vllm.args.tables.runtime import CacheArgs, ObservabilityArgs, ParallelArgs, SchedulerArgs


# base classes are collected from the last to the first: the flags keep the order of this list read upwards
@dataclasses.dataclass
class EngineFlags(
    InputOutputArgs,
    MultimodalArgs,
    SpeculativeArgs,
    PromptAdapterArgs,
    AdapterArgs,
    ObservabilityArgs,
    ParallelArgs,
    SchedulerArgs,
    CacheArgs,
    LoadArgs,
    ModelArgs,
):
    """The values of the flags, one field each; `EngineArgs` makes the configuration of them."""
