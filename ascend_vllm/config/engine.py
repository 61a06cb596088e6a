"""The configuration of an engine: frozen, plain data, sent to the engine core unchanged."""

from __future__ import annotations

import msgspec

from ascend_vllm.config.cache import CacheConfig
from ascend_vllm.config.graphs import GraphConfig
from ascend_vllm.config.lora import LoRAConfig
from ascend_vllm.config.model import LoadConfig, ModelConfig
from ascend_vllm.config.scheduler import SchedulerConfig
from ascend_vllm.config.speculation import SpeculativeConfig
from ascend_vllm.config.structured import StructuredOutputsConfig

# of packages with executors of their own: name of --distributed-executor-backend = "module:Class"
EXECUTOR_ENTRY_POINTS = "ascend_vllm.executors"


class ParallelConfig(msgspec.Struct, frozen=True):
    """How many workers there are and how they are started.

    Attributes:
        tensor_parallel_size: workers that share each layer.
        distributed_executor_backend: "uni": the worker runs in the engine core's process; "mp": each in a process of
            its own; "ray": each in a Ray actor, on any machine of the cluster; or the name of a package's executor.
        data_parallel_size: engine cores, each with workers of its own, that share the requests.
        data_parallel_rank: number of the engine core with this configuration; 0 in the API server's.
        pipeline_parallel_size: number of pipeline stages.
        stage_layers: layers of each stage; empty: distributed evenly.
        enable_expert_parallel: workers of a stage have some whole experts each, not a part of every one.
        nnodes: machines that the workers run on, an equal share on each, in the order of their ranks.
        node_rank: number of the machine with this configuration; the engine core runs on 0.
        master_addr: name or address of machine 0, as the others reach it.
        master_port: port on which machine 0 listens for the others.
        node_secret_file: path of the secret that the machines share; None: read from the environment, or generated.
            The secret itself is not part of the configuration, which is logged.
    """

    tensor_parallel_size: int = 1
    distributed_executor_backend: str = "uni"
    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    pipeline_parallel_size: int = 1
    stage_layers: tuple[int, ...] = ()
    enable_expert_parallel: bool = False
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 29501
    node_secret_file: str | None = None

    @property
    def world_size(self) -> int:
        """Number of workers of one engine core."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def local_world_size(self) -> int:
        """Number of workers of one engine core on each machine."""
        return self.world_size // self.nnodes

    @property
    def output_rank(self) -> int:
        """Rank of the worker that returns the outputs of steps: the first of the last stage."""
        return self.world_size - self.tensor_parallel_size


class DeviceConfig(msgspec.Struct, frozen=True):
    """Which platform the workers run on.

    Attributes:
        device: "cpu" or "npu".
        cpu_kernel_probe: whether the CPU's kernels are chosen by measurement.
    """

    device: str = "cpu"
    cpu_kernel_probe: bool = True


class ObservabilityConfig(msgspec.Struct, frozen=True):
    """What is measured and logged.

    Attributes:
        log_stats: whether there are metrics and the periodic log line.
        otlp_traces_endpoint: receiver of OpenTelemetry traces of requests; None: none are sent.
        log_requests: whether arriving and aborted requests are logged.
    """

    log_stats: bool = True
    otlp_traces_endpoint: str | None = None
    log_requests: bool = False


class EngineConfig(msgspec.Struct, frozen=True):
    """All sections. `EngineArgs.create_engine_config` makes it and checks it across sections."""

    model: ModelConfig
    load: LoadConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    parallel: ParallelConfig
    device: DeviceConfig
    observability: ObservabilityConfig
    structured: StructuredOutputsConfig = StructuredOutputsConfig()
    graphs: GraphConfig = GraphConfig()
    # None: without adapters
    lora: LoRAConfig | None = None
    # None: without drafts
    speculation: SpeculativeConfig | None = None
