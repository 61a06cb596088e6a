"""Decides how many workers share the model and how they are started, from flags and config.json."""

from __future__ import annotations

import importlib.util

from ascend_vllm import envs
from ascend_vllm.args.tables.engine import EngineFlags
from ascend_vllm.config.arch import ArchConfig
from ascend_vllm.config.engine import ParallelConfig
from ascend_vllm.config.node_secret import read_secret, require_secret
from ascend_vllm.distributed.parallel_context import layers_of_stages
from ascend_vllm.errors import ConfigError
from ascend_vllm.logger import init_logger
from ascend_vllm.platforms.facts import probe_npus, too_few_npus

logger = init_logger(__name__)


def parallel_config(args: EngineFlags, arch: ArchConfig, device: str) -> ParallelConfig:
    """The configuration's section for workers. A single worker runs in the engine's process unless Ray is requested.

    Raises:
        ConfigError: there are too few devices; KV heads or layers cannot be divided; there are no experts to spread;
            one process would have several workers; the workers cannot be divided among the machines; or Ray is not
            installed.
    """
    backend = _backend(args)
    if args.enable_expert_parallel and arch.num_experts < 1:
        raise ConfigError("Number of experts in the model must be greater than 0 when expert parallelism is enabled.")
    _check_data_parallel(args, backend)
    _check_nodes(args, backend)
    tp_size, pp_size, engines = args.tensor_parallel_size, args.pipeline_parallel_size, args.data_parallel_size
    config = ParallelConfig(
        tensor_parallel_size=tp_size,
        distributed_executor_backend=backend,
        data_parallel_size=engines,
        pipeline_parallel_size=pp_size,
        stage_layers=_stage_layers(len(arch.layers), pp_size),
        enable_expert_parallel=args.enable_expert_parallel,
        nnodes=args.nnodes,
        node_rank=args.node_rank,
        master_addr=args.master_addr,
        master_port=args.master_port,
        node_secret_file=args.node_secret_file,
    )
    num_workers = config.local_world_size * engines
    if backend != "ray" and device == "npu" and num_workers > 1 and (count := probe_npus().count) < num_workers:
        raise ConfigError(too_few_npus(num_workers, count, _flags_of_workers(config)))
    if config.world_size == 1 and backend in ("mp", "uni"):
        return ParallelConfig(data_parallel_size=engines)
    if backend == "uni":
        sizes = f"--tensor-parallel-size is {tp_size}"
        if pp_size > 1:
            product = config.world_size
            sizes = f"--tensor-parallel-size {tp_size} with --pipeline-parallel-size {pp_size} needs {product}"
        raise ConfigError(f"--distributed-executor-backend uni runs one worker, and {sizes}: use mp.")
    num_kv_heads = arch.num_kv_heads
    if num_kv_heads % tp_size and tp_size % num_kv_heads:
        raise ConfigError(
            f"--tensor-parallel-size {tp_size} and the model's {num_kv_heads} KV heads: one must divide the other."
        )
    if pp_size > 1 and args.num_scheduler_steps > 1:
        logger.info(
            "--num-scheduler-steps %d: with --pipeline-parallel-size %d steps are made one at a time, and the stages "
            "work on different ones",
            args.num_scheduler_steps,
            pp_size,
        )
    return config


def _check_data_parallel(args: EngineFlags, backend: str) -> None:
    size, local = args.data_parallel_size, args.data_parallel_size_local
    if local is not None and local > size:
        raise ConfigError(f"data_parallel_size_local ({local}) must be <= data_parallel_size ({size})")
    if local not in (None, size):
        raise ConfigError(
            f"--data-parallel-size-local {local} leaves engines of --data-parallel-size {size} to other machines, "
            "which is not supported in this version: leave it out."
        )
    if size > 1 and backend == "ray":
        raise ConfigError(
            f"--data-parallel-size {size} is not supported with --distributed-executor-backend ray: use mp."
        )


def _check_nodes(args: EngineFlags, backend: str) -> None:
    """Checks --nnodes and related flags, with vLLM's texts if it has any."""
    nnodes, world_size = args.nnodes, args.tensor_parallel_size * args.pipeline_parallel_size
    if not 0 <= args.node_rank < nnodes:
        raise ConfigError(
            f"`--node-rank` must be between 0 and {nnodes - 1}; got `--node-rank {args.node_rank}`. Set it to this "
            "node's zero-based index, and --nnodes to the number of nodes."
        )
    if nnodes == 1:
        return
    if backend not in ("mp", "uni"):
        raise ConfigError(
            f"--nnodes {nnodes}: nnodes > 1 can only be set when distributed executor backend is mp or uni, got "
            f"{backend}; the machines of --distributed-executor-backend ray are those of its cluster."
        )
    if args.data_parallel_size > 1:
        raise ConfigError(
            f"--data-parallel-size {args.data_parallel_size} is not supported with --nnodes {nnodes}: the engines of "
            "one server are on one machine. Start a server for each engine."
        )
    if world_size % nnodes:
        raise ConfigError(
            f"`--nnodes {nnodes}` must evenly divide the total world size ({world_size}). Adjust `--nnodes`, "
            "`--pipeline-parallel-size` or `--tensor-parallel-size`."
        )
    if not 0 < args.master_port < 65536:
        raise ConfigError(f"--master-port must be between 1 and 65535, got {args.master_port}.")
    if args.node_rank:
        require_secret(args.node_secret_file, args.node_rank)
    else:
        # on node 0 the secret may be created later
        read_secret(args.node_secret_file)


def _backend(args: EngineFlags) -> str:
    """How workers are started; for a single one "mp" and "uni" mean the same.

    Raises:
        ConfigError: the flags contradict each other, or Ray is requested and not installed.
    """
    backend = args.distributed_executor_backend
    if args.worker_use_ray:
        if backend not in (None, "ray"):
            raise ConfigError(f"worker-use-ray can't be used with distributed executor backend '{backend}'.")
        backend = "ray"
    if backend == "ray" and importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "--distributed-executor-backend ray: Ray is not installed. Please install Ray with `pip install ray`, or "
            "with this server: `pip install 'ascend-vllm[ray]'`."
        )
    return backend or "mp"


def _flags_of_workers(config: ParallelConfig) -> str:
    """The flags that determine the number of workers, for messages."""
    flags = "--tensor-parallel-size"
    if config.nnodes > 1:
        flags = f"--nnodes {config.nnodes} with --tensor-parallel-size {config.tensor_parallel_size}"
        if config.pipeline_parallel_size > 1:
            flags += f" and --pipeline-parallel-size {config.pipeline_parallel_size}"
        return flags
    if config.pipeline_parallel_size > 1:
        flags = f"--pipeline-parallel-size {config.pipeline_parallel_size} with {flags} {config.tensor_parallel_size}"
    if config.data_parallel_size == 1:
        return flags
    flags = flags if config.pipeline_parallel_size > 1 else f"{flags} {config.tensor_parallel_size}"
    return f"--data-parallel-size {config.data_parallel_size} with {flags}"


def _stage_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Number of layers of each stage: VLLM_PP_LAYER_PARTITION, or divided as evenly as possible; () for one stage.

    Raises:
        ConfigError: they do not match the model; with vLLM's texts if it has any.
    """
    if num_stages == 1:
        return ()
    wanted = envs.pp_layer_partition()
    if wanted is None:
        if num_stages > num_layers:
            raise ConfigError(
                f"--pipeline-parallel-size {num_stages} is more than the model has layers ({num_layers}): each stage "
                "needs one at least."
            )
        return layers_of_stages(num_layers, num_stages)
    try:
        counts = tuple(int(count) for count in wanted.split(","))
    except ValueError as error:
        raise ConfigError(f"Invalid partition string: {wanted} (VLLM_PP_LAYER_PARTITION)") from error
    if len(counts) != num_stages:
        raise ConfigError(
            f"VLLM_PP_LAYER_PARTITION: len(partitions)={len(counts)} does not match pp_size={num_stages}."
        )
    if sum(counts) != num_layers:
        raise ConfigError(
            f"VLLM_PP_LAYER_PARTITION: sum(partitions)={sum(counts)} does not match num_hidden_layers={num_layers}."
        )
    if min(counts) < 1:
        raise ConfigError(f"VLLM_PP_LAYER_PARTITION={wanted}: each stage needs one layer at least.")
    return counts
