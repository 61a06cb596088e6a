"""Configurations and core messages made by hand, for tests without a model."""

from __future__ import annotations

import os
import signal
from typing import Any

import msgspec
import zmq

from ascend_vllm.config.cache import CacheConfig
from ascend_vllm.config.engine import DeviceConfig, EngineConfig, ObservabilityConfig, ParallelConfig
from ascend_vllm.config.model import LoadConfig, ModelConfig
from ascend_vllm.config.scheduler import SchedulerConfig
from ascend_vllm.engine.core_client import CoreClient
from ascend_vllm.engine.input_processor import InputProcessor
from ascend_vllm.engine.metrics import StepStats
from ascend_vllm.engine.output_processor import OutputProcessor, OutputQueue
from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.outputs import RequestOutput
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.messages import EngineCoreOutput, EngineCoreOutputs, EngineReady
from tests.plain_arch import make_arch


def make_config(
    *,
    max_model_len: int = 64,
    generation_config: dict[str, Any] | None = None,
    max_num_queued_reqs: int | None = None,
    policy: str = "fcfs",
    log_stats: bool = True,
    **arch: Any,
) -> EngineConfig:
    """A configuration of a model that does not exist; further settings are ArchConfig's."""
    return EngineConfig(
        model=ModelConfig(
            model="/absent",
            served_model_names=("tiny", "tiny2"),
            tokenizer="/absent",
            architecture="Qwen2ForCausalLM",
            arch=make_arch(**arch),
            generation_config=generation_config or {},
            dtype="float32",
            max_model_len=max_model_len,
        ),
        load=LoadConfig(),
        cache=CacheConfig(block_size=16),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=max_model_len,
            max_num_seqs=4,
            max_model_len=max_model_len,
            max_num_queued_reqs=max_num_queued_reqs,
            policy=policy,
        ),
        parallel=ParallelConfig(),
        device=DeviceConfig(),
        observability=ObservabilityConfig(log_stats=log_stats),
    )


def stop_and_play_ready(client: CoreClient, outbound: zmq.Socket[bytes], inbound: zmq.Socket[bytes]) -> None:
    """Stops an engine core's process before it imports torch, and sends in its place that it is ready.

    Args:
        client: has just started its only core.
        outbound: PUSH, connected to where the process would send its messages.
        inbound: PULL, connected here to where the process would get messages; nobody reads them.
    """
    (core,) = client._cores
    assert core.process.pid is not None
    os.kill(core.process.pid, signal.SIGSTOP)
    inbound.set_hwm(0)
    inbound.connect(core.process.inbound)
    assert core._sender.poll(30_000, zmq.POLLOUT)
    ready = EngineReady(num_gpu_blocks=32, block_size=16, max_model_len=128, load_time_s=0.1)
    outbound.send(msgspec.msgpack.encode(ready))


class FakeEngine:
    """Input and output processor joined; the test plays the core.

    Args:
        tokenizer: of the "model".
        stream_each_token: see `OutputProcessor`.
        stream_interval: likewise.
        config: see `make_config`.
    """

    def __init__(
        self, tokenizer: Tokenizer, stream_each_token: bool = False, stream_interval: int = 1, **config: Any
    ) -> None:
        self.input = InputProcessor(make_config(**config), tokenizer)
        self.output = OutputProcessor(tokenizer, stream_each_token, stream_interval)
        self.stats = StepStats()
        # request id → ids of its core requests
        self.core_ids: dict[str, list[str]] = {}
        self.stopped: list[str] = []

    def add(
        self,
        params: SamplingParams,
        request_id: str = "r",
        prompt: Any = "The quick",
        queue: OutputQueue[Any] | None = None,
        arrival_time: float = 10.0,
    ) -> None:
        """Checks and registers a request."""
        request = self.input.process(request_id, prompt, params, arrival_time=arrival_time)
        self.output.add(request, queue)
        self.core_ids[request_id] = [core.request_id for core in request.core_requests]

    def step(self, *outputs: EngineCoreOutput, now: float | None = None) -> list[RequestOutput]:
        """One step of the core."""
        processed = self.output.process(EngineCoreOutputs(list(outputs)), self.stats, now)
        self.stopped += processed.stopped_ids
        processed.publish()
        return processed.request_outputs

    def give(
        self, token_ids: list[int], request_id: str = "r", index: int = 0, now: float | None = None, **fields: Any
    ) -> list[RequestOutput]:
        """A step in which one sequence gets tokens."""
        return self.step(EngineCoreOutput(self.core_ids[request_id][index], token_ids, **fields), now=now)
