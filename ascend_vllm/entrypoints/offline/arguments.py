"""Arguments of vLLM 0.32's `LLM` whose features do not exist here: refused by name, not as unknown.

A program that writes out a default of vLLM's asks for nothing, and runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ascend_vllm.errors import RequestError, UnsupportedFlagError
from ascend_vllm.refusals import Refusal, first_refused

# what is missing or to be done instead → keyword of the constructor → its default
REFUSED: Mapping[str, Mapping[str, Any]] = {
    "speculative decoding is not available in this version; leave it out, the answers are the same": {
        "spec_method": None,
        "spec_model": None,
        "spec_tokens": None,
        "per_request_spec_decode_metrics": "none",
    },
    "weights and KV cache stay in the memory of the device; swap_space is what preempted sequences may take of the "
    "CPU's": {
        "offload_backend": "auto",
        "offload_group_size": 0,
        "offload_num_in_group": 1,
        "offload_prefetch_step": 1,
        "offload_params": None,
        "cpu_offload_params": None,
        "kv_offloading_size": None,
        "kv_offloading_backend": "native",
    },
    "weights keep the number format of dtype; quantised ones are not available in this version": {
        "quantization_config": None,
        "allow_deprecated_quantization": False,
        "kv_cache_dtype_skip_layers": None,
    },
    "models with experts are not available in this version": {
        "enable_return_routed_experts": False,
        "aux_output_config": None,
        "moe_backend": "auto",
        "enable_ep_weight_filter": False,
        "all2all_backend": "allgather_reducescatter",
        "enable_elastic_ep": False,
        "elastic_ep_max_dp_size": None,
        "enable_eplb": False,
        "eplb_config": None,
        "expert_placement_strategy": "linear",
    },
    "which tokens sampling has left is not reported in this version": {"return_sampling_mask": False},
    # True is the stored token, which the hub's client uses without being told
    "the client of the hub reads the environment variable HF_TOKEN, or what `hf auth login` has stored": {
        "hf_token": True
    },
    "the environment variable VLLM_TORCH_PROFILER_DIR asks for traces": {
        "profiler_config": None,
        "enable_layerwise_nvtx_tracing": False,
    },
    "functions for single requests are given to SamplingParams(logits_processors=[...])": {"logits_processors": None},
    "the device decides on its kernels and graphs": {
        "attention_config": None,
        "attention_backend": None,
        "linear_backend": "auto",
        "sparse_indexer_topk_backend": "auto",
        "kernel_config": None,
        "ir_op_priority": None,
        "enable_flashinfer_autotune": None,
        "disable_cascade_attn": None,
        "use_fp64_gumbel": False,
        "cudagraph_capture_sizes": None,
        "max_cudagraph_capture_size": None,
        "cudagraph_metrics": False,
        "optimization_level": 2,
        "performance_mode": "balanced",
        "jit_monitor_mode": "warn",
        "jit_monitor_verbose": False,
        "kv_sharing_fast_prefill": False,
        "swa_bounded_replay": True,
        "pt_load_map_location": "cpu",
    },
    "models with a recurrent state are not available in this version": {
        "mamba_config": None,
        "mamba_cache_dtype": "auto",
        "mamba_ssm_cache_dtype": "auto",
        "mamba_block_size": None,
        "mamba_cache_mode": "none",
        "mamba_backend": "triton",
        "mamba_ssu_algorithm": None,
        "mamba_cache_philox_rounds": 0,
        "enable_mamba_shared_prefix_checkpoint": False,
        "enable_mamba_cache_stochastic_rounding": False,
        "replayssm_buffer_len": 16,
        "use_replayssm": False,
        "gdn_prefill_backend": None,
        "kda_prefill_backend": None,
        "kda_decode_backend": None,
        "engram_config": None,
        "diffusion_config": None,
    },
    "the model runs on one device in this version": {
        "distributed_timeout_seconds": None,
        "cpu_distributed_timeout_seconds": None,
        "numa_bind": False,
        "numa_bind_nodes": None,
        "numa_bind_cpus": None,
        "device_ids": None,
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "dcp_comm_backend": None,
        "dcp_q_replicate": None,
        "dcp_kv_cache_interleave_size": 1,
        "cp_kv_cache_interleave_size": None,
        "enable_hc_sp": False,
        "enable_batch_sharded_sampling": None,
        "enable_dbo": False,
        "ubatch_size": 0,
        "dbo_decode_token_threshold": 32,
        "dbo_prefill_token_threshold": 512,
        "dp_sync_interval": 16,
        "disable_nccl_for_dp_synchronization": None,
        "enable_nccl_comm_suspend": False,
        "enable_fault_tolerance": False,
        "fault_tolerance_config": None,
        "kv_transfer_config": None,
        "kv_events_config": None,
        "ec_transfer_config": None,
        "ec_manager_config": None,
    },
    "prompts are text only in this version": {
        "language_model_only": False,
        "enable_mm_embeds": False,
        "interleave_mm_strings": False,
        "media_io_kwargs": None,
        "mm_processor_cache_gb": 4,
        "mm_processor_cache_type": "lru",
        "mm_hasher_algorithm": "blake3",
        "mm_shm_cache_max_object_size_mb": 128,
        "mm_encoder_only": False,
        "mm_encoder_tp_mode": "weights",
        "mm_encoder_attn_backend": None,
        "mm_encoder_attn_dtype": None,
        "mm_encoder_fp8_scale_path": None,
        "mm_encoder_fp8_scale_save_path": None,
        "mm_encoder_fp8_scale_save_margin": 1.5,
        "io_processor_plugin": None,
        "skip_mm_profiling": False,
        "video_pruning_rate": None,
        "video_pruning_method": "evs",
        "mm_tensor_ipc": "direct_rpc",
        "mm_processor_device": "auto",
        "mm_ipc_gpu_memory_gb": 0,
        "mm_device_do_normalize": True,
        "disable_chunked_mm_input": False,
        "enable_mm_processor_stats": False,
    },
    "LoRA adapters are not available in this version; merge the adapter into the model's weights": {
        "default_mm_loras": None,
        "lora_target_modules": None,
        "enable_tower_connector_lora": False,
        "specialize_active_lora": False,
        "enable_mixed_moe_lora_format": False,
        "enable_moe_shared_loras": False,
        "max_lora_cls_labels": None,
    },
    "the scheduler has max_num_seqs, max_num_batched_tokens, long_prefill_token_threshold and scheduling_policy": {
        "scheduler_cls": None,
        "max_num_scheduled_tokens": None,
        "max_num_active_seqs": None,
        "long_prefill_token_threshold_adaptive": False,
        "scheduler_reserve_full_isl": True,
        "prefill_schedule_interval": 1,
        "watermark": 0.0,
    },
    "the KV cache has block_size and enable_prefix_caching": {
        "prefix_caching_hash_algo": "sha256",
        "prefix_cache_retention_interval": 0,
        "prefix_match_unit": None,
        "disable_hybrid_kv_cache_manager": None,
    },
    "the model is the directory, or the repository of the hub, that `model` names": {
        "model_weights": "",
        "hf_config_path": None,
        "model_class_overrides": None,
        "weight_transfer_config": None,
    },
    "load_format says how weights are read": {
        "safetensors_load_strategy": None,
        "safetensors_prefetch_num_threads": 8,
        "safetensors_prefetch_block_size": 16777216,
    },
    "metrics are those that get_metrics() returns": {
        "show_hidden_metrics_for_version": None,
        "kv_cache_metrics": False,
        "kv_cache_metrics_sample": 0.01,
        "custom_histogram_buckets": None,
        "enable_mfu_metrics": False,
    },
    "the environment variable VLLM_LOGGING_LEVEL and Python's logging decide on log messages": {
        "log_level": None,
        "log_config_file": None,
        "logging_config": None,
        "aggregate_engine_logging": False,
        "enable_logging_iteration_details": False,
        "enable_trace_replay": False,
    },
    "reasoning_parser names the format of the model's thoughts": {
        "reasoning_parser_plugin": None,
        "reasoning_config": None,
    },
    "outputs carry no watermarks in this version": {"watermark_config": None},
    "enable_sleep_mode is the one switch of sleeping": {
        "sleep_mode_offload_cudagraph": False,
        "sleep_preserve_parameter_names": None,
        "enable_cumem_allocator": False,
    },
    "the engine runs in the caller's process, with a worker of its own": {
        "worker_cls": "auto",
        "worker_extension_cls": "",
        "enable_shm_tensor_arena": False,
        "renderer_num_workers": 1,
        "tokens_only": False,
        "shutdown_timeout": 0,
        "fail_on_environ_validation": False,
    },
}

# what asks for nothing whatever the default is; numbers and False may ask for something
_EMPTY: tuple[Any, ...] = (None, "", [], {}, (), set())
_REFUSALS = {
    name: Refusal(reason, (*_EMPTY, default)) for reason, names in REFUSED.items() for name, default in names.items()
}

_NO_TRANSFER = "weights are read from the model's files, and not sent to a running engine"
# methods of 0.32 whose features do not exist → why
REFUSED_METHODS: Mapping[str, str] = {
    "finish_weight_update": _NO_TRANSFER,
    "get_weight_version": _NO_TRANSFER,
    "init_weight_transfer_engine": _NO_TRANSFER,
    "release_kv_cache_memory": "sleep(level=1) gives the memory of the KV cache back, and wake_up() takes it again",
    "shutdown_weight_transfer_engine": _NO_TRANSFER,
    "start_draft_weight_update": _NO_TRANSFER,
    "start_weight_update": _NO_TRANSFER,
    "update_weight_version": _NO_TRANSFER,
    "update_weights": _NO_TRANSFER,
}


def without_defaults(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Further keywords of the constructor, without those that ask for nothing.

    Raises:
        UnsupportedFlagError: one asks for a feature that does not exist; the text names it.
    """
    refusals = {name: _REFUSALS[name] for name in arguments if name in _REFUSALS}
    if (found := first_refused(refusals, arguments)) is not None:
        raise UnsupportedFlagError(found.name, found.reason)
    return {name: value for name, value in arguments.items() if name not in refusals}


def refuse(**arguments: Any) -> None:
    """Refuses arguments of a call whose features do not exist, given by their names.

    Raises:
        RequestError: one of them asks for something.
    """
    refusals = {name: Refusal(f"{name} is not supported in this version.", (*_EMPTY, False)) for name in arguments}
    if (found := first_refused(refusals, arguments)) is not None:
        raise RequestError(found.reason, found.name)


def refuse_lora(lora_request: Any, num_prompts: int) -> None:
    """Refuses adapters: one for all prompts, or a list with one, or none, for each.

    Raises:
        RequestError: the list is of another length, or an adapter is in it.
    """
    if isinstance(lora_request, Sequence):
        if len(lora_request) != num_prompts:
            raise RequestError("The lengths of prompts and lora_request must be the same.", "lora_request")
        lora_request = next((one for one in lora_request if one is not None), None)
    refuse(lora_request=lora_request)
