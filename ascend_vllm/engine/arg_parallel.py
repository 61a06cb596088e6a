"""How many workers share the model and how they are run, from the flags and the model's config.json."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ascend_vllm.config.engine import ParallelConfig
from ascend_vllm.errors import ConfigError
from ascend_vllm.platforms.facts import probe_npus, too_few_npus

if TYPE_CHECKING:
    from ascend_vllm.engine.args import EngineArgs


def parallel_config(args: EngineArgs, hf_config: Mapping[str, Any], device: str) -> ParallelConfig:
    """The section of the configuration. A worker alone lives in the engine's process, unless Ray is to run it.

    Raises:
        ConfigError: there are fewer devices; the model's KV heads cannot be shared so; or one process is to hold
            several workers; or Ray is to run them and is not installed.
    """
    backend = _backend(args)
    _check_data_parallel(args, backend)
    size, engines = args.tensor_parallel_size, args.data_parallel_size
    if backend != "ray" and device == "npu" and size * engines > 1 and (count := probe_npus().count) < size * engines:
        flags = "--tensor-parallel-size"
        if engines > 1:
            flags = f"--data-parallel-size {engines} with --tensor-parallel-size {size}"
        raise ConfigError(too_few_npus(size * engines, count, flags))
    if size == 1 and backend != "ray":
        return ParallelConfig(data_parallel_size=engines)
    if backend == "uni":
        raise ConfigError(
            f"--distributed-executor-backend uni runs one worker, and --tensor-parallel-size is {size}: use mp."
        )
    num_kv_heads = hf_config.get("num_key_value_heads")
    if isinstance(num_kv_heads, int) and num_kv_heads % size and size % num_kv_heads:
        raise ConfigError(
            f"--tensor-parallel-size {size} and the model's {num_kv_heads} KV heads: one must divide the other."
        )
    return ParallelConfig(tensor_parallel_size=size, distributed_executor_backend=backend, data_parallel_size=engines)


def _check_data_parallel(args: EngineArgs, backend: str) -> None:
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


def _backend(args: EngineArgs) -> str:
    """How workers are started; with one of them "mp" and "uni" mean the same.

    Raises:
        ConfigError: the flags contradict each other, or Ray is wanted and not installed.
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
