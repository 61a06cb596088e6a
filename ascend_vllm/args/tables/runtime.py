"""Flags of the KV cache, the scheduler, the devices and what is measured."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from ascend_vllm.args.fields import flag
from ascend_vllm.config.engine import EXECUTOR_ENTRY_POINTS
from ascend_vllm.types.kv_cache import KV_CACHE_FORMATS

# auto, and the dtypes that it can stand for
_MODEL_DTYPES = ("auto", "float16", "bfloat16", "float32")
# other formats of today's vLLM
_OTHER_KV_CACHES = (
    *("fp8_inc", "fp8_ds_mla", "int4_per_token_head", "nvfp4", "nvfp4_4over6", "nvfp4_ds_mla", "ultraquant_4bit"),
    *("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"),
)
_KV_CACHE_DTYPES = (*_MODEL_DTYPES, *KV_CACHE_FORMATS, *_OTHER_KV_CACHES)
_ONE_MACHINE = "all engines of --data-parallel-size run on this machine in this version; leave it out"
_OTHER_BALANCER = "requests are shared by the server itself; leave it out, or start several servers"


@dataclasses.dataclass
class CacheArgs:
    """Size and layout of the KV cache."""

    SECTION: ClassVar[str] = "KV cache"

    block_size: int | None = flag(
        None,
        "The number of tokens that one block of the KV cache holds. Without it the fastest size of the device is "
        "taken; the CPU allows 16, 32, 64 and 128, an NPU allows 64 and 128.",
        example="--block-size 32",
    )
    gpu_memory_utilization: float = flag(
        0.9,
        "The share of an NPU's memory, between 0 and 1, that weights, activations and KV cache may fill together. "
        "On CPU use --kv-cache-memory-bytes instead.",
        example="--gpu-memory-utilization 0.8",
    )
    kv_cache_memory_bytes: int | None = flag(
        None,
        "The size of the KV cache in bytes; 2G means 2 GiB. Without it the CPU takes "
        "what VLLM_CPU_KVCACHE_SPACE says, or else a quarter of the free memory, at most 4 GiB.",
        kind="length",
        example="--kv-cache-memory-bytes 2G",
    )
    num_gpu_blocks_override: int | None = flag(
        None,
        "The exact number of blocks in the KV cache, whatever the memory says. It is meant for tests of preemption.",
        example="--num-gpu-blocks-override 100",
    )
    swap_space: float = flag(
        4,
        "The CPU memory in GiB, per device, to which the KV cache of preempted requests may be swapped; 0 turns "
        "swapping off.",
        example="--swap-space 8",
    )
    cpu_offload_gb: float = flag(
        0,
        "The part of the weights, in GiB, that is kept in CPU memory to make room on the device.",
        unsupported="weights stay on the device in this version",
    )
    kv_cache_dtype: str = flag(
        "auto",
        "The number format of the KV cache; auto is the format of the model. With 8 bits per number the same memory "
        "holds almost twice the tokens; int8 needs no scales from elsewhere, since every token has its own.",
        choices=_KV_CACHE_DTYPES,
        unsupported="the KV cache has 8 bits per number, as int8 and fp8, or the format of the model",
        allowed=(*_MODEL_DTYPES, *KV_CACHE_FORMATS),
        example="--kv-cache-dtype int8",
    )
    enable_prefix_caching: bool = flag(
        False,
        "Keeps the KV cache of earlier requests and reuses it for requests that begin with the same text. Answers "
        "stay the same and begin sooner.",
        example="--enable-prefix-caching",
    )
    use_v2_block_manager: bool = flag(
        True,
        "Chooses the newer of two block managers. There is only one here, so the flag changes nothing.",
        no_effect="there is only one block manager",
    )
    enable_sleep_mode: bool = flag(
        False,
        "Lets the server give its memory back while it is not needed.",
        example="--enable-sleep-mode",
    )


@dataclasses.dataclass
class SchedulerArgs:
    """How requests share the steps of the engine."""

    SECTION: ClassVar[str] = "Scheduling"

    max_num_seqs: int = flag(
        256,
        "The largest number of sequences that are worked on at the same time. Further requests wait in a queue.",
        example="--max-num-seqs 64",
    )
    max_num_batched_tokens: int | None = flag(
        None,
        "The largest number of tokens that one step of the engine works on. It must not be smaller than "
        "--max-model-len unless chunked prefill is on.",
        kind="length",
        example="--max-num-batched-tokens 8192",
    )
    enable_chunked_prefill: bool | None = flag(
        None,
        "Cuts long prompts into chunks, so that running answers keep flowing while a prompt is read. It is off "
        "unless you ask for it or --max-model-len is above 32768.",
        example="--enable-chunked-prefill --max-num-batched-tokens 512",
    )
    max_decode_pause_ms: float | None = flag(
        None,
        "How long in milliseconds running answers may pause under chunked prefill while a chunk of a prompt is read: "
        "chunks are as small as that needs. With 0 they are as large as --max-num-batched-tokens allows, as they are "
        "if you give that flag without this one; otherwise the pause is 250.",
        example="--enable-chunked-prefill --max-decode-pause-ms 100",
    )
    max_num_partial_prefills: int = flag(
        1,
        "The largest number of prompts that may be partly read at the same time under chunked prefill.",
        example="--enable-chunked-prefill --max-num-partial-prefills 4",
    )
    max_long_partial_prefills: int = flag(
        1,
        "How many of the prompts that are partly read at the same time may be long ones.",
        example="--enable-chunked-prefill --max-num-partial-prefills 4 --max-long-partial-prefills 2",
    )
    long_prefill_token_threshold: int = flag(
        0,
        "The number of tokens above which a prompt counts as long; one step reads at most so many tokens of it. With "
        "0 no prompt is long, unless --max-num-partial-prefills is above 1: then 4 percent of --max-model-len count.",
        example="--enable-chunked-prefill --long-prefill-token-threshold 1024",
    )
    max_num_queued_reqs: int | None = flag(
        None,
        "The largest number of requests that may wait. Beyond it new requests are refused with HTTP status 503; "
        "without it the queue has no limit.",
        example="--max-num-queued-reqs 100",
    )
    max_num_queued_tokens: int | None = flag(
        None,
        "The largest number of prompt tokens of requests whose answers have not begun. Beyond it new requests are "
        "refused with HTTP status 503; without it there is no limit.",
        kind="length",
        example="--max-num-queued-tokens 100k",
    )
    queue_timeout_s: float | None = flag(
        None,
        "The longest time in seconds that a request may wait for its first step. Requests that wait longer are "
        "answered with HTTP status 503; without it they wait as long as it takes.",
        example="--queue-timeout-s 30",
    )
    scheduling_policy: str = flag(
        "fcfs",
        "The order in which waiting requests are served: fcfs is first come, first served; priority takes the "
        "request with the lowest priority number first.",
        choices=("fcfs", "priority"),
        example="--scheduling-policy priority",
    )
    preemption_mode: str | None = flag(
        None,
        "What happens to a running request when the KV cache is full: recompute drops its cache and computes it "
        "again later, swap moves it to CPU memory and back. Without it requests of several sequences are swapped and "
        "others recomputed.",
        kind="str",
        choices=("recompute", "swap"),
        example="--preemption-mode recompute",
    )
    scheduler_delay_factor: float = flag(
        0.0,
        "Holds new prompts back for this many times the duration of the last prompt step, to collect larger batches.",
        example="--scheduler-delay-factor 0.5",
    )
    num_scheduler_steps: int = flag(
        1,
        "The number of tokens that are computed for each request before the scheduler runs again. A larger number "
        "makes tokens cheaper, and new requests wait a little longer.",
        example="--num-scheduler-steps 8",
    )
    multi_step_stream_outputs: bool = flag(
        True,
        "Whether streaming sends every token of a group of steps on its own; false sends the group at once. It "
        "matters only when --num-scheduler-steps is above 1.",
        kind="bool",
        example="--num-scheduler-steps 8 --multi-step-stream-outputs=false",
    )
    num_lookahead_slots: int = flag(
        0,
        "KV cache slots that are reserved ahead for tokens that are not yet certain.",
        unsupported="speculative decoding reserves the slots that it needs by itself",
    )
    disable_async_output_proc: bool = flag(
        False,
        "Makes the engine finish all work on one step before it starts the next one.",
        opposite="async_scheduling",
        example="--disable-async-output-proc",
    )
    async_scheduling: bool = flag(
        True,
        "Plans the next step of the engine while the current one is still running. This is on unless "
        "--disable-async-output-proc is given.",
        opposite="disable_async_output_proc",
        example="--no-async-scheduling",
    )
    stream_interval: int = flag(
        1,
        "The number of tokens that are gathered before a streaming answer is sent on. The first token never waits; "
        "a larger number costs less work per token.",
        example="--stream-interval 8",
    )


@dataclasses.dataclass
class ParallelArgs:
    """On which devices, and on how many, the model runs."""

    SECTION: ClassVar[str] = "Devices and parallelism"

    device: str = flag(
        "auto",
        "The kind of device the model runs on: cpu, or npu for Huawei Ascend. With auto an NPU is used if there is "
        "one, else the CPU.",
        choices=("auto", "cpu", "npu", "cuda", "neuron", "openvino", "tpu", "xpu"),
        unsupported="this server runs on cpu and npu",
        allowed=("cpu", "npu"),
        example="--device cpu",
    )
    cpu_kernel_probe: bool = flag(
        True,
        "Measures at the first start on a machine which instruction set of the CPU multiplies fastest, and keeps the "
        "result in the cache directory; it takes less than 50 ms. Without it a table of known processors decides.",
        kind="bool",
        example="--no-cpu-kernel-probe",
    )
    tensor_parallel_size: int = flag(
        1,
        "The number of devices that share every layer of the model.",
        short=("-tp",),
        example="--tensor-parallel-size 2",
    )
    pipeline_parallel_size: int = flag(
        1,
        "The number of stages, one after another, into which the layers of the model are cut, with as many devices "
        "each as --tensor-parallel-size says.",
        short=("-pp",),
        example="--pipeline-parallel-size 2",
    )
    data_parallel_size: int = flag(
        1,
        "The number of engines, each with the whole model on devices of its own, that share the requests of one "
        "server.",
        short=("-dp",),
        example="--data-parallel-size 2",
    )
    data_parallel_size_local: int | None = flag(
        None,
        "The number of engines that run on this machine; all of --data-parallel-size do.",
        short=("-dpl",),
    )
    data_parallel_backend: str = flag(
        "mp",
        "How the engines of --data-parallel-size are started: mp, a process for each.",
        choices=("mp", "ray"),
        short=("-dpb",),
        unsupported=_ONE_MACHINE,
    )
    data_parallel_rank: int | None = flag(
        None,
        "The number of this engine among those of several servers.",
        short=("-dpn",),
        unsupported=_OTHER_BALANCER,
    )
    data_parallel_start_rank: int | None = flag(
        None,
        "The number of the first engine of this machine among those of several machines.",
        short=("-dpr",),
        unsupported=_ONE_MACHINE,
    )
    data_parallel_address: str | None = flag(
        None,
        "The address of the machine with the API server, for engines on other machines.",
        kind="str",
        short=("-dpa",),
        unsupported=_ONE_MACHINE,
    )
    data_parallel_rpc_port: int | None = flag(
        None,
        "The port of the machine with the API server, for engines on other machines.",
        short=("-dpp",),
        unsupported=_ONE_MACHINE,
    )
    data_parallel_hybrid_lb: bool = flag(
        False,
        "Shares requests out among the engines of each machine, and leaves machines to another load balancer.",
        short=("-dph",),
        unsupported=_OTHER_BALANCER,
    )
    data_parallel_external_lb: bool = flag(
        False,
        "Leaves sharing requests out among the engines to another load balancer.",
        short=("-dpe",),
        unsupported=_OTHER_BALANCER,
    )
    data_parallel_multi_port_external_lb: bool = flag(
        False,
        "Starts an API server with a port of its own for each engine.",
        short=("-dpm",),
        unsupported=_OTHER_BALANCER,
    )
    enable_expert_parallel: bool = flag(
        False,
        "Gives each of --tensor-parallel-size workers some whole experts of a mixture-of-experts model, instead of a "
        "part of every expert. With --data-parallel-size each engine has all experts.",
    )
    nnodes: int = flag(
        1,
        "The number of machines, called nodes, that share the workers evenly. Run the same command on each, with its "
        "own --node-rank.",
        short=("-n",),
        example="--tensor-parallel-size 2 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1",
    )
    node_rank: int = flag(
        0,
        "The number of this machine among those of --nnodes. Number 0 has the API server, the others run workers.",
        short=("-r",),
        example="--tensor-parallel-size 2 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1",
    )
    master_addr: str = flag(
        "127.0.0.1",
        "The address of the machine with --node-rank 0, at which the other machines reach it.",
        example="--master-addr 10.0.0.1",
    )
    master_port: int = flag(
        29501,
        "The port on which the machine with --node-rank 0 listens to the other machines of --nnodes.",
        example="--master-port 29600",
    )
    node_secret_file: str | None = flag(
        None,
        "A file with the secret that the machines of --nnodes prove to each other, the same on all of them; only its "
        "owner may have rights to it. Without it ASCEND_VLLM_NODE_SECRET is taken; the machine with --node-rank 0 "
        "makes a secret and prints it if there is neither.",
        kind="str",
        example="--node-secret-file /etc/ascend-vllm/node-secret",
    )
    distributed_executor_backend: str | None = flag(
        None,
        "How workers on several devices are started: mp, a process for each on this machine or those of --nnodes, or "
        "ray, an actor of Ray for each on the machines of a cluster. With one device the worker lives in the engine "
        "process, unless it is ray.",
        kind="str",
        choices=("ray", "mp", "uni"),
        entry_points=EXECUTOR_ENTRY_POINTS,
        example="--distributed-executor-backend mp",
    )
    worker_use_ray: bool = flag(False, "The older spelling of --distributed-executor-backend ray.")
    engine_use_ray: bool = flag(
        False,
        "Runs the engine itself inside Ray.",
        unsupported="the engine always runs in a process of its own on this machine",
    )
    ray_workers_use_nsight: bool = flag(
        False,
        "Profiles workers under Ray with Nsight.",
        unsupported="Nsight profiles NVIDIA's devices; VLLM_TORCH_PROFILER_DIR has workers trace their steps",
    )
    max_parallel_loading_workers: int | None = flag(
        None,
        "Loads the weights of several workers in groups, to use less memory at start.",
        no_effect="each worker reads its own part of the weights alone, so that all together need no more",
    )
    disable_custom_all_reduce: bool = flag(
        False,
        "Uses the standard way to add results of several devices instead of a special one.",
        no_effect="results are always added in the standard way",
    )
    max_context_len_to_capture: int | None = flag(None, "The older name of --max-seq-len-to-capture.")
    max_seq_len_to_capture: int = flag(
        8192,
        "The longest sequence that is decoded in captured graphs, on NPUs; longer ones run operator by operator.",
    )
    compilation_config: str | None = flag(
        None,
        "Settings of graph compilation, as a level or as JSON.",
        short=("-O",),
        unsupported="models are not compiled in this version; leave it out",
        allowed=("0",),
    )
    additional_config: dict[str, Any] | None = flag(
        None,
        "Further settings of the device, as a JSON object.",
        unsupported="no device has further settings in this version",
    )
    override_neuron_config: dict[str, Any] | None = flag(
        None,
        "Settings for AWS Neuron devices, as a JSON object.",
        unsupported="this server runs on cpu and npu",
    )


@dataclasses.dataclass
class ObservabilityArgs:
    """What is measured, traced and logged."""

    SECTION: ClassVar[str] = "Logging and metrics"

    disable_log_stats: bool = flag(
        False,
        "Turns off the metrics of the engine at /metrics and the line about throughput that is logged every few "
        "seconds.",
    )
    disable_log_requests: bool = flag(
        True,
        "Writes no requests to the log. This is on unless --enable-log-requests is given.",
        opposite="enable_log_requests",
    )
    enable_log_requests: bool = flag(
        False,
        "Writes a line for every request to the log, with its prompt and its parameters. --max-log-len truncates the "
        "prompt.",
        opposite="disable_log_requests",
        example="--enable-log-requests",
    )
    otlp_traces_endpoint: str | None = flag(
        None,
        "The address to which an OpenTelemetry trace of every request is sent.",
        kind="str",
        example="--otlp-traces-endpoint http://localhost:4317",
    )
    collect_detailed_traces: str | None = flag(
        None,
        "The parts of the engine whose times a trace tells: model, worker or all, separated by commas. It needs "
        "--otlp-traces-endpoint.",
        kind="str",
        no_effect="every trace tells the times of waiting, of the prompt and of decoding",
    )
