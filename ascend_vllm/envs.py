"""The environment variables that ascend-vllm reads; no other module reads the environment.

Each is a function, so that a value is read when it is needed and tests can change it.
"""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Callable

from ascend_vllm.errors import ConfigError


def _number(name: str, default: float, words: str, is_right: Callable[[float], bool] = math.isfinite) -> float:
    """A variable that is a number; `words` say which numbers are right."""
    value = os.environ.get(name) or str(default)
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not is_right(number):
        raise ConfigError(f"{name} must be {words}, got {value!r}.")
    return number


def cpu_kvcache_space_gib() -> float | None:
    """`VLLM_CPU_KVCACHE_SPACE`: size of the KV cache on CPU in GiB; None or 0: a share of the free memory."""
    size = _number("VLLM_CPU_KVCACHE_SPACE", 0, "a number of GiB")
    return size if size > 0 else None


def logging_level() -> str:
    """`VLLM_LOGGING_LEVEL`: level of this package's log, INFO by default."""
    return os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper()


def configure_logging() -> bool:
    """`VLLM_CONFIGURE_LOGGING`: 0 leaves logging to the embedding program."""
    return os.environ.get("VLLM_CONFIGURE_LOGGING", "1") != "0"


def logging_config_path() -> pathlib.Path | None:
    """`VLLM_LOGGING_CONFIG_PATH`: a JSON file for Python's logging.config that sets the log up instead."""
    value = os.environ.get("VLLM_LOGGING_CONFIG_PATH")
    return pathlib.Path(value).expanduser() if value else None


def use_modelscope() -> bool:
    """`VLLM_USE_MODELSCOPE`: true would load models from ModelScope, which is not possible."""
    return os.environ.get("VLLM_USE_MODELSCOPE", "False").lower() in ("1", "true")


def plugins() -> tuple[str, ...] | None:
    """`VLLM_PLUGINS`: names of the installed plug-ins that may be used, separated by commas; None: all of them."""
    value = os.environ.get("VLLM_PLUGINS")
    return None if value is None else tuple(name.strip() for name in value.split(",") if name.strip())


def api_key() -> str | None:
    """`VLLM_API_KEY`: a key that requests must carry; wins over --api-key."""
    return os.environ.get("VLLM_API_KEY") or None


def openai_api_key() -> str | None:
    """`OPENAI_API_KEY`: the key that `ascend-vllm bench serve` shows to the server."""
    return os.environ.get("OPENAI_API_KEY") or None


def allow_long_max_model_len() -> bool:
    """`VLLM_ALLOW_LONG_MAX_MODEL_LEN`: 1 lets --max-model-len exceed what the model's config says."""
    return os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0") == "1"


def pp_layer_partition() -> str | None:
    """`VLLM_PP_LAYER_PARTITION`: layers of each stage of --pipeline-parallel-size, separated by commas."""
    return os.environ.get("VLLM_PP_LAYER_PARTITION") or None


def cache_root() -> pathlib.Path:
    """`VLLM_CACHE_ROOT`: where the demo model and measurements of kernels are kept; default ~/.cache/ascend_vllm."""
    value = os.environ.get("VLLM_CACHE_ROOT")
    if value:
        return pathlib.Path(value).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(base) if base else pathlib.Path.home() / ".cache") / "ascend_vllm"


def cpu_isa() -> str | None:
    """`ASCEND_VLLM_CPU_ISA`: forces the kernels' instruction set (amx_bf16, avx512_bf16, avx512_vnni, avx512, avx2,
    scalar; on Arm neon_bf16, neon_dotprod, neon, scalar)."""
    return os.environ.get("ASCEND_VLLM_CPU_ISA") or None


def _switch(name: str, default: bool) -> bool:
    """A variable that is 0 or 1."""
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{name} must be 0 or 1, got {value!r}.")
    return value == "1" if value else default


def use_pfa_high_precision_mode() -> bool:
    """`USE_PFA_HIGH_PRECISION_MODE`: 1, the default, computes prompts' attention on NPUs in high precision.

    Qwen2-7B and Qwen2-57B need it. For other models 0 makes the first token come 5 to 10 percent sooner.
    """
    return _switch("USE_PFA_HIGH_PRECISION_MODE", default=True)


def use_ifa_high_precision_mode() -> bool:
    """`USE_IFA_HIGH_PRECISION_MODE`: 1 computes decoding attention on NPUs in high precision; default 0.

    Qwen2-7B, Qwen2-57B and Qwen2-72B need it for long sequences. It costs other models 5 to 10 percent per token.
    """
    return _switch("USE_IFA_HIGH_PRECISION_MODE", default=False)


def use_prefix_high_precision_mode() -> bool:
    """`USE_PREFIX_HIGH_PRECISION_MODE`: 1 computes attention over cached prefixes on NPUs in high precision.

    Default 0. Qwen2-7B and Qwen2-72B need it with --enable-prefix-caching.
    """
    return _switch("USE_PREFIX_HIGH_PRECISION_MODE", default=False)


def ascend_attention_ops() -> str:
    """`ASCEND_VLLM_ATTENTION_OPS`: attention operators on NPUs: fused (the default), or flash, the older pair."""
    value = os.environ.get("ASCEND_VLLM_ATTENTION_OPS") or "fused"
    if value not in ("fused", "flash"):
        raise ConfigError(f"ASCEND_VLLM_ATTENTION_OPS must be fused or flash, got {value!r}.")
    return value


def ascend_custom_ops() -> tuple[str, ...]:
    """`ASCEND_VLLM_CUSTOM_OPS`: custom operators that NPUs use: names separated by commas, or all; default none.

    They must have been built with CANN first, see ascend_kernels.md.
    """
    names = os.environ.get("ASCEND_VLLM_CUSTOM_OPS", "").split(",")
    return tuple(name.strip() for name in names if name.strip())


def ascend_enable_nz() -> int:
    """`VLLM_ASCEND_ENABLE_NZ`: which weights NPUs keep in their own format: 0 none, 1 quantised ones, 2 all.

    The default is 1. Weights in float32 never are.
    """
    value = os.environ.get("VLLM_ASCEND_ENABLE_NZ") or "1"
    if value not in ("0", "1", "2"):
        raise ConfigError(f"VLLM_ASCEND_ENABLE_NZ must be 0, 1 or 2, got {value!r}.")
    return int(value)


def infer_mode() -> str | None:
    """`INFER_MODE`: PTA makes decoding on NPUs replay graphs that torchair compiles; unset, the default, does not."""
    value = os.environ.get("INFER_MODE") or None
    if value not in (None, "PTA"):
        raise ConfigError(f"INFER_MODE must be PTA or unset, got {value!r}.")
    return value


def torchair_decode_gear_enable() -> bool:
    """`PTA_TORCHAIR_DECODE_GEAR_ENABLE`: 1 takes the numbers of sequences that graphs are made for from a list.

    The default, 0, takes powers of two. It needs INFER_MODE=PTA.
    """
    return _switch("PTA_TORCHAIR_DECODE_GEAR_ENABLE", default=False)


def torchair_decode_gear_list() -> str | None:
    """`PTA_TORCHAIR_DECODE_GEAR_LIST`: the numbers of sequences that graphs are made for, such as 2,4,8,16.

    1 and numbers above --max-num-seqs are left out, and --max-num-seqs is added.
    """
    return os.environ.get("PTA_TORCHAIR_DECODE_GEAR_LIST") or None


def torchair_cache_home() -> pathlib.Path:
    """`TORCHAIR_CACHE_HOME`: where compiled graphs are kept; default .torchair_cache in the current directory."""
    return pathlib.Path(os.environ.get("TORCHAIR_CACHE_HOME") or ".torchair_cache").expanduser()


def omp_num_threads() -> int | None:
    """`OMP_NUM_THREADS`: number of compute threads; None: one for each core this process may use."""
    value = os.environ.get("OMP_NUM_THREADS", "")
    return int(value) if value.isdecimal() and int(value) > 0 else None


def max_n_sequences() -> int | None:
    """`VLLM_MAX_N_SEQUENCES`: the largest `n` of a request, and `--max-sequences-per-request` without that flag."""
    return int(_number("VLLM_MAX_N_SEQUENCES", 0, "a whole number", lambda n: n >= 0 and n.is_integer())) or None


def http_timeout_keep_alive_s() -> int:
    """`VLLM_HTTP_TIMEOUT_KEEP_ALIVE`: seconds an HTTP connection may be idle between requests; default 5.

    It is closed a second later than that.
    """
    value = os.environ.get("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "5")
    if not value.isdecimal():
        raise ConfigError(f"VLLM_HTTP_TIMEOUT_KEEP_ALIVE must be a whole number of seconds, got {value!r}.")
    return int(value)


def keep_alive_on_engine_death() -> bool:
    """`VLLM_KEEP_ALIVE_ON_ENGINE_DEATH`: 1 lets the HTTP server stay, answering errors, when the engine has died."""
    return os.environ.get("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "0") == "1"


def engine_iteration_timeout_s(default: float) -> float | None:
    """`VLLM_ENGINE_ITERATION_TIMEOUT_S`: the seconds that one step of the engine may take, 600 by default on CPU.

    After that the engine counts as dead and the server ends. 0 means no limit, and the default on NPUs is 60.
    """
    # docstrings here are answers of the demo model, so it is said here: raises ConfigError if it is no number
    seconds = _number("VLLM_ENGINE_ITERATION_TIMEOUT_S", default, "a number of seconds", lambda s: 0 <= s < math.inf)
    return seconds or None


def _seconds(name: str, default: float) -> float:
    """A variable that is a number of seconds above 0."""
    return _number(name, default, "a number of seconds above 0", lambda s: 0 < s < math.inf)


def node_wait_s() -> float:
    """`ASCEND_VLLM_NODE_WAIT_S`: the seconds that the machines of --nnodes wait for each other; default 600."""
    return _seconds("ASCEND_VLLM_NODE_WAIT_S", 600.0)


def node_timeout_s() -> float:
    """`ASCEND_VLLM_NODE_TIMEOUT_S`: the seconds of silence after which a machine of --nnodes is gone; default 10."""
    return _seconds("ASCEND_VLLM_NODE_TIMEOUT_S", 10.0)


def node_secret() -> str:
    """`ASCEND_VLLM_NODE_SECRET`: the secret that all machines of --nnodes share; --node-secret-file wins over it."""
    return os.environ.get("ASCEND_VLLM_NODE_SECRET", "")


def server_dev_mode() -> bool:
    """`VLLM_SERVER_DEV_MODE`: 1 adds routes for development to the server, such as POST /reset_prefix_cache."""
    return os.environ.get("VLLM_SERVER_DEV_MODE", "0") == "1"


def enable_responses_api_store() -> bool:
    """`VLLM_ENABLE_RESPONSES_API_STORE`: 0 keeps no answers of /v1/responses, so that none can be asked for later."""
    return os.environ.get("VLLM_ENABLE_RESPONSES_API_STORE", "1") != "0"


def allow_runtime_lora_updating() -> bool:
    """`VLLM_ALLOW_RUNTIME_LORA_UPDATING`: 1 or true adds the routes that load and unload LoRA adapters."""
    return os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "0").strip().lower() in ("1", "true")


def lora_resolver_cache_dir() -> str:
    """`VLLM_LORA_RESOLVER_CACHE_DIR`: directory whose subdirectories are LoRA adapters for requests that name them.

    With `VLLM_ALLOW_RUNTIME_LORA_UPDATING` only. `adapter_config.json` must name the served model.
    """
    return os.environ.get("VLLM_LORA_RESOLVER_CACHE_DIR", "")


def eagle_use_safe_ai_lab_style() -> bool:
    """`EAGLE_USE_SAFE_AI_LAB_STYLE`: EAGLE heads are computed as SafeAILab trains them. The default is 1.

    0 changes nothing but a warning in the log.
    """
    return _switch("EAGLE_USE_SAFE_AI_LAB_STYLE", default=True)


def enable_spec_metric() -> bool:
    """`ENABLE_SPEC_METRIC`: 0 leaves the metrics of speculative decoding out of /metrics and the log; default 1."""
    return _switch("ENABLE_SPEC_METRIC", default=True)


def otlp_traces_protocol() -> str:
    """`OTEL_EXPORTER_OTLP_TRACES_PROTOCOL`: how traces are sent, grpc (the default) or http/protobuf."""
    value = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    if value not in ("grpc", "http/protobuf"):
        raise ConfigError(f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL must be grpc or http/protobuf, got {value!r}.")
    return value


def torch_profiler_dir() -> str | None:
    """`VLLM_TORCH_PROFILER_DIR`: directory for traces of the workers; adds routes that begin and end them."""
    value = os.environ.get("VLLM_TORCH_PROFILER_DIR")
    return str(pathlib.Path(value).expanduser()) if value else None


def export(values: dict[str, str], paths: dict[str, pathlib.Path]) -> None:
    """Sets variables for the program this process becomes: values, and directories in front of search paths."""
    os.environ.update(values)
    for name, path in paths.items():
        os.environ[name] = os.pathsep.join(filter(None, (str(path), os.environ.get(name))))


# variables that decide what a worker does: their beginnings, and whole names
_WORKERS_PREFIXES = ("ASCEND_", "HCCL_", "VLLM_", "OMP_", "PTA_", "USE_PFA_", "USE_IFA_", "USE_PREFIX_")
_WORKERS_NAMES = {"PYTORCH_NPU_ALLOC_CONF", "CPU_AFFINITY_CONF", "INFER_MODE", "TORCHAIR_CACHE_HOME"}
# of one machine only, or a secret
_NOT_FOR_WORKERS = {"ASCEND_RT_VISIBLE_DEVICES", "VLLM_HOST_IP", "VLLM_API_KEY", "ASCEND_VLLM_NODE_SECRET"}


def for_workers() -> dict[str, str]:
    """The variables that workers on other machines are to have as this process has them."""
    return {
        name: value
        for name, value in os.environ.items()
        if (name.startswith(_WORKERS_PREFIXES) or name in _WORKERS_NAMES) and name not in _NOT_FOR_WORKERS
    }


def forget(name: str) -> None:
    """Unsets a variable that somebody else has set for this process."""
    os.environ.pop(name, None)


def keep_tokenizers_in_their_thread() -> None:
    """Lets the `tokenizers` library work in the thread that calls it, not in one for each processor, unless told."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def prepare_ray() -> None:
    """Lets Ray send no usage statistics and not run workers behind all other processes, unless it is told to."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # read by a cluster that is started here; Ray's own choice is 15
    os.environ.setdefault("RAY_worker_niceness", "0")


def ray_address() -> str | None:
    """`RAY_ADDRESS`: the Ray cluster of --distributed-executor-backend ray, such as 10.0.0.1:6379.

    If it is not set, the cluster that `ray start` started on this machine, else one that is started for the server.
    """
    return os.environ.get("RAY_ADDRESS") or None


def everything() -> dict[str, str]:
    """A copy of the whole environment, for who examines it."""
    return dict(os.environ)


def keep_device_backends_out() -> None:
    """Lets `import torch` not import torch_npu by itself, which fails where it is installed without CANN."""
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


def ascend_rt_visible_devices() -> str | None:
    """`ASCEND_RT_VISIBLE_DEVICES`: which NPUs of the container may be used, counted from 0, such as 0,1; else all."""
    return os.environ.get("ASCEND_RT_VISIBLE_DEVICES") or None


def pytorch_npu_alloc_conf() -> str:
    """`PYTORCH_NPU_ALLOC_CONF`: settings of torch_npu's memory allocator; default expandable_segments:True."""
    # it is for torch_npu, which reads it when it first allocates memory
    return os.environ.setdefault("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True")


def cpu_affinity_conf() -> str:
    """`CPU_AFFINITY_CONF`: how torch_npu binds a worker's threads to CPU cores; 0 leaves them unbound.

    It is 1 if it is not set: the cores are shared out evenly among the NPUs.
    """
    # read by torch_npu when a device is first used
    return os.environ.setdefault("CPU_AFFINITY_CONF", "1")


def ascend_home_path() -> pathlib.Path | None:
    """`ASCEND_HOME_PATH`: where CANN is installed; set by its set_env.sh."""
    value = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
    return pathlib.Path(value) if value else None


def hccl_op_expansion_mode() -> str | None:
    """`HCCL_OP_EXPANSION_MODE`: where HCCL expands collective operations: AIV, AI_CPU, HOST or HOST_TS."""
    return os.environ.get("HCCL_OP_EXPANSION_MODE") or None
