"""The engine's arguments under vLLM's names, and the configuration that is made from them."""

from __future__ import annotations

import dataclasses

from ascend_vllm.engine.arg_fields import Flag, flags_of
from ascend_vllm.engine.args_features import AdapterArgs, InputOutputArgs, SpeculativeArgs
from ascend_vllm.engine.args_model import LoadArgs, ModelArgs
from ascend_vllm.engine.args_runtime import CacheArgs, ObservabilityArgs, ParallelArgs, SchedulerArgs
from ascend_vllm.engine.args_server import FrontendArgs, GenerateServerArgs


# base classes are collected from the last to the first: the flags keep the order of this list read upwards
@dataclasses.dataclass
class EngineArgs(
    InputOutputArgs,
    SpeculativeArgs,
    AdapterArgs,
    ObservabilityArgs,
    ParallelArgs,
    SchedulerArgs,
    CacheArgs,
    LoadArgs,
    ModelArgs,
):
    """Everything an engine can be told, one field per flag; keyword arguments of `LLM` have the same names."""


def all_flags() -> tuple[Flag, ...]:
    """Every flag of every server once: HTTP, OpenAI server, /generate server, engine."""
    found = {item.name: item for owner in (FrontendArgs, GenerateServerArgs, EngineArgs) for item in flags_of(owner)}
    return tuple(found.values())
