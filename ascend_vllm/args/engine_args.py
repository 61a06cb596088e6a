"""The engine's arguments under vLLM's names, and the configuration that is made from them."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from typing import Any

import msgspec

from ascend_vllm.args import checks, hf_checks, hf_files, limits, pooling
from ascend_vllm.args.fields import Flag, flags_of, refuse_unsupported
from ascend_vllm.args.graphs import resolve_graph_config
from ascend_vllm.args.kv_cache import check_kv_cache, has_int8_scales, read_layer_scales
from ascend_vllm.args.parallel import parallel_config
from ascend_vllm.args.parser import (
    AUTO_LENGTH,
    FlexibleArgumentParser,
    add_flags,
    fields_from_namespace,
    length,
)
from ascend_vllm.args.quantization_files import check_quantization
from ascend_vllm.args.speculation import speculative_config
from ascend_vllm.args.structured import structured_outputs_config
from ascend_vllm.args.tables.engine import EngineFlags
from ascend_vllm.args.tables.server import FrontendArgs, GenerateServerArgs
from ascend_vllm.config.arch import ArchConfig
from ascend_vllm.config.cache import CacheConfig, kv_cache_specs
from ascend_vllm.config.engine import DeviceConfig, EngineConfig, ObservabilityConfig, ParallelConfig
from ascend_vllm.config.lora import LoRAConfig
from ascend_vllm.config.model import LoadConfig, ModelConfig
from ascend_vllm.config.scheduler import SchedulerConfig
from ascend_vllm.errors import ConfigError, UnsupportedFlagError
from ascend_vllm.logger import init_logger
from ascend_vllm.platforms import resolve_device
from ascend_vllm.platforms.facts import DeviceFacts, device_facts, npu_unusable_reason

logger = init_logger(__name__)

# share of the KV-cache memory available now; the rest is a reserve for changes until the engine allocates it
_AUTO_LENGTH_SHARE = 0.9


@dataclasses.dataclass
class EngineArgs(EngineFlags):
    """All settings of an engine, one field per flag; keyword arguments of `LLM` have the same names.

    Example::

        config = EngineArgs(model="/models/Qwen2.5-0.5B-Instruct", max_model_len=4096).create_engine_config()
    """

    # `--model` as typed, where `model` is the directory of a prepared one: no field, for `LLM(**asdict(args))`
    _typed_model = ""

    def __post_init__(self) -> None:
        """Synchronises pairs of arguments with the same meaning, of which Python callers set one."""
        if self.enable_log_requests:
            self.disable_log_requests = False
        elif not self.disable_log_requests:
            self.enable_log_requests = True
        if self.disable_async_output_proc:
            self.async_scheduling = False
        elif not self.async_scheduling:
            self.disable_async_output_proc = True
        if self.reasoning_parser is None and isinstance(self.structured_outputs_config, dict):
            self.reasoning_parser = self.structured_outputs_config.get("reasoning_parser") or None

    @classmethod
    def add_cli_args(cls, parser: FlexibleArgumentParser) -> FlexibleArgumentParser:
        """Adds the engine's flags to a parser, and returns it."""
        add_flags(parser, cls)
        return parser

    @classmethod
    def from_cli_args(cls, namespace: argparse.Namespace) -> EngineArgs:
        """The arguments in a namespace of such a parser; absent ones have their defaults.

        A server's parser has None for --model if none is named: then a warning says which one is taken.
        """
        fields = fields_from_namespace(cls, namespace)
        if fields.get("model", cls.model) is None:
            del fields["model"]
            logger.warning(
                "No model is named, so --model's default %s is taken: name one as `ascend-vllm serve MODEL`, or the "
                "built-in `demo`.",
                cls.model,
            )
        return cls(**fields)

    def with_model_directory(self, directory: str) -> EngineArgs:
        """The same arguments with the model's directory; the model is still served under its original name.

        Example::

            args = EngineArgs(model="demo").with_model_directory(ensure_demo_model())
        """
        args = dataclasses.replace(self, model=directory, served_model_name=list(self._served_names()))
        args._typed_model = self.model
        # a draft model of the same name is the same model
        if self.speculative_model == self.model:
            args.speculative_model = directory
        if self.speculative_config is not None and self.speculative_config.get("model") == self.model:
            args.speculative_config = {**self.speculative_config, "model": directory}
        return args

    def create_engine_config(self) -> EngineConfig:
        """Makes the configuration, with all defaults that depend on the model's files and the device.

        Raises:
            ConfigError: a flag or a combination of flags is wrong.
            UnsupportedFlagError: a flag requires a feature that is not supported.
            ModelLoadError: the model's config.json or generation_config.json is missing or broken.
        """
        checks.check_flags(self)
        refuse_unsupported(EngineArgs, vars(self))
        device = resolve_device(self.device)
        if device == "npu" and (reason := npu_unusable_reason()):
            raise ConfigError(reason)
        facts = device_facts(device)
        if facts.refusal is not None:
            if self.dtype != "auto":
                # an invalid one is reported first
                limits.resolve_dtype(self.dtype, None, facts)
            raise ConfigError(facts.refusal)
        block_size = checks.check_block_size(self.block_size, facts)
        checks.check_num_seqs(self.max_num_seqs, facts)
        max_model_len = _length(self.max_model_len, "max_model_len", auto_allowed=True)

        directory = hf_files.find_model_directory(self.model, self.revision, self.download_dir, self.load_format)
        # the raw file is used only for checks and for the heads of pooling models; all else comes from `arch`
        hf_config = hf_files.read_hf_config(
            directory,
            trust_remote_code=self.trust_remote_code,
            overrides=self.hf_overrides,
            rope_scaling=self.rope_scaling,
            rope_theta=self.rope_theta,
        )
        check_quantization(self.quantization, hf_config["quantization_config"])
        arch = ArchConfig.from_hf(hf_config, self.quantization)
        is_auto = max_model_len == AUTO_LENGTH
        longest = limits.resolve_max_model_len(
            None if is_auto else max_model_len, arch, disable_sliding_window=self.disable_sliding_window
        )
        if self.disable_sliding_window:
            arch = arch.without_sliding_window()
        dtype = limits.resolve_dtype(self.dtype, arch.dtype, facts, hf_config.get("model_type"))
        model = self._model_config(directory, hf_config, arch, dtype, longest)
        check_kv_cache(self, facts, arch)
        speculation = speculative_config(self, model, facts)
        draft = None if speculation is None else speculation.draft
        cache = self._cache_config(block_size, facts.kv_scale_dtype, arch, hf_config.get("model_type"))
        if draft is not None and draft.arch.common_window != arch.common_window:
            # blocks are freed where neither model reads them
            cache = msgspec.structs.replace(cache, sliding_window=None)
        parallel = parallel_config(self, arch, facts.name)
        if is_auto:
            longest = _fitting_length(model, cache, parallel, facts.name, draft)
            model = msgspec.structs.replace(model, max_model_len=longest)
        lora = self._lora_config(arch, dtype, facts)
        if lora is not None:
            model = msgspec.structs.replace(model, num_added_tokens=lora.max_added_tokens)
        config = EngineConfig(
            model=model,
            load=self._load_config(),
            cache=cache,
            scheduler=self._scheduler_config(arch, longest, block_size, facts),
            parallel=parallel,
            device=DeviceConfig(device=facts.name, cpu_kernel_probe=self.cpu_kernel_probe),
            observability=ObservabilityConfig(
                not self.disable_log_stats, self.otlp_traces_endpoint or None, self.enable_log_requests
            ),
            structured=structured_outputs_config(self.guided_decoding_backend, self.structured_outputs_config),
            lora=lora,
            speculation=None if speculation is None else speculation.up_to(longest),
        )
        checks.check_tracing(self.collect_detailed_traces, self.otlp_traces_endpoint)
        hf_checks.check_size(config, hf_config, hf_files.weight_bytes(directory))
        checks.check_config(config)
        hf_checks.check_head_size(hf_config)
        longest = self.max_seq_len_to_capture
        if self.max_context_len_to_capture is not None:
            longest = self.max_context_len_to_capture
        return msgspec.structs.replace(config, graphs=resolve_graph_config(config, longest))

    def _lora_config(self, arch: ArchConfig, dtype: str, facts: DeviceFacts) -> LoRAConfig | None:
        if not self.enable_lora:
            return None
        if facts.name != "cpu" and self.lora_dtype not in ("auto", dtype):
            raise UnsupportedFlagError(
                f"--lora-dtype {self.lora_dtype}", f"NPUs multiply adapters in the model's {dtype}, use auto"
            )
        if arch.latent is not None and facts.name != "cpu":
            raise UnsupportedFlagError(
                "--enable-lora", f"adapters for latent attention are not available on --device {facts.name}"
            )
        # drafts would have to know tokens of adapters, and a cap would lift -inf of tokens that a row must not have
        is_drafted = self.speculative_model is not None or self.speculative_config is not None
        adds_tokens = facts.name == "cpu" and not is_drafted and arch.logit_cap is None
        return LoRAConfig(
            max_loras=self.max_loras,
            max_rank=self.max_lora_rank,
            max_cpu_loras=self.max_cpu_loras or self.max_loras,
            dtype=dtype if self.lora_dtype == "auto" else self.lora_dtype,
            fully_sharded=self.fully_sharded_loras,
            max_added_tokens=self.lora_extra_vocab_size if adds_tokens else 0,
        )

    def _served_names(self) -> tuple[str, ...]:
        names = self.served_model_name
        if isinstance(names, str):
            return (names,)
        return tuple(names) if names else (self.model,)

    def _model_config(
        self, directory: str, hf_config: dict[str, Any], arch: ArchConfig, dtype: str, longest: int
    ) -> ModelConfig:
        tokenizer = directory
        if self.tokenizer is not None and self.tokenizer != self.model:
            tokenizer = hf_files.find_tokenizer_directory(self.tokenizer, self.tokenizer_revision, self.download_dir)
        elif self.tokenizer_revision not in (None, self.revision):
            raise ConfigError("--tokenizer-revision needs --tokenizer with the name of a tokenizer on the hub.")
        return ModelConfig(
            model=directory,
            served_model_names=self._served_names(),
            tokenizer=tokenizer,
            architecture=hf_config["architectures"][0],
            arch=arch,
            generation_config=hf_files.read_generation_config(
                self.generation_config, directory, self.override_generation_config
            ),
            dtype=dtype,
            max_model_len=longest,
            tokenizer_mode=self.tokenizer_mode,
            tokenizer_extension_path=self.tokenizer_extension_path,
            skip_tokenizer_init=self.skip_tokenizer_init,
            trust_remote_code=self.trust_remote_code,
            seed=self.seed,
            max_logprobs=self.max_logprobs,
            logprobs_mode=self.logprobs_mode,
            enforce_eager=self.enforce_eager,
            pooler=pooling.resolve_pooler(self, hf_config, directory),
            enable_sleep_mode=self.enable_sleep_mode,
            source=self._typed_model or self.model,
        )

    def _load_config(self) -> LoadConfig:
        patterns = self.ignore_patterns or LoadConfig().ignore_patterns
        listed = (patterns,) if isinstance(patterns, str) else tuple(patterns)
        return LoadConfig(
            load_format=self.load_format,
            ignore_patterns=listed,
            use_tqdm=self.use_tqdm_on_load,
            quantize_lm_head=self.quantize_lm_head,
            cpu_int8_activations=self.cpu_int8_activations,
        )

    def _cache_config(
        self, block_size: int, scale_dtype: str, arch: ArchConfig, model_type: str | None
    ) -> CacheConfig:
        layer_scales = None
        if (path := self.quantization_param_path) is not None:
            layer_scales = read_layer_scales(path, len(arch.layers), self.tensor_parallel_size, model_type)
        return CacheConfig(
            block_size=block_size,
            gpu_memory_utilization=self.gpu_memory_utilization,
            kv_cache_memory_bytes=_length(self.kv_cache_memory_bytes, "kv_cache_memory_bytes"),
            num_gpu_blocks_override=self.num_gpu_blocks_override,
            swap_space_gib=float(self.swap_space),
            cache_dtype=self.kv_cache_dtype,
            scale_dtype=scale_dtype,
            layer_scales=layer_scales,
            has_checkpoint_scales=has_int8_scales(arch),
            enable_prefix_caching=self.enable_prefix_caching,
            sliding_window=arch.common_window,
        )

    def _scheduler_config(
        self, arch: ArchConfig, longest: int, block_size: int, facts: DeviceFacts
    ) -> SchedulerConfig:
        chunked = limits.resolve_chunked_prefill(self.enable_chunked_prefill, longest, arch)
        # =false asks for vLLM's order, and several passes are of steps in which all rows decode
        is_plain = self.enable_chunked_prefill is None and self.num_scheduler_steps == 1
        mixed = facts.mixes_steps and is_plain and not chunked
        requested = _length(self.max_num_batched_tokens, "max_num_batched_tokens")
        budget = limits.resolve_max_num_batched_tokens(
            requested,
            chunked_prefill=chunked,
            max_model_len=longest,
            max_num_seqs=self.max_num_seqs,
            multi_step=self.num_scheduler_steps > 1,
            # chunks of cached prompts end at block boundaries
            multiple_of=block_size if chunked and self.enable_prefix_caching else 1,
        )
        return SchedulerConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=self.max_num_seqs,
            max_model_len=longest,
            enable_chunked_prefill=chunked,
            max_num_queued_reqs=self.max_num_queued_reqs,
            max_num_queued_tokens=_length(self.max_num_queued_tokens, "max_num_queued_tokens"),
            num_scheduler_steps=self.num_scheduler_steps,
            multi_step_stream_outputs=self.multi_step_stream_outputs,
            stream_interval=self.stream_interval,
            policy=self.scheduling_policy,
            preemption_mode=self.preemption_mode,
            delay_factor=float(self.scheduler_delay_factor),
            max_num_partial_prefills=self.max_num_partial_prefills,
            max_long_partial_prefills=self.max_long_partial_prefills,
            long_prefill_token_threshold=limits.resolve_long_prefill_threshold(
                self.long_prefill_token_threshold, self.max_num_partial_prefills, longest
            ),
            async_scheduling=self.async_scheduling,
            max_decode_pause_s=limits.resolve_max_decode_pause_s(
                self.max_decode_pause_ms,
                chunked_prefill=chunked,
                mixed_steps=mixed,
                has_default=requested is None and self.num_scheduler_steps == 1,
            ),
            max_scored_tokens=limits.max_scored_tokens(arch.vocab_size),
            mixed_steps=mixed,
            queue_timeout_s=None if self.queue_timeout_s is None else float(self.queue_timeout_s),
        )


# vLLM's name for the arguments of asynchronous engines
AsyncEngineArgs = EngineArgs


def _length(value: int | str | None, field: str, *, auto_allowed: bool = False) -> int | None:
    """The value of a flag of kind "length", which Python callers may write as "4k", too.

    Raises:
        ConfigError: it is neither positive nor "auto", if that is allowed.
    """
    if isinstance(value, str):
        try:
            value = length(value)
        except argparse.ArgumentTypeError as err:
            raise ConfigError(str(err)) from err
    if value is not None and value < 1 and not (auto_allowed and value == AUTO_LENGTH):
        raise ConfigError(f"--{field.replace('_', '-')} must be at least 1, got {value}.")
    return value


def _fitting_length(
    model: ModelConfig, cache: CacheConfig, parallel: ParallelConfig, device: str, draft: ModelConfig | None
) -> int:
    """--max-model-len auto: the longest sequence whose KV cache fits in memory, within the model's limit.

    Args:
        model: the target.
        cache: its KV cache.
        parallel: how it is divided.
        device: in the platforms' names.
        draft: the draft model, which one worker has whole, with KV in the same blocks; None: there is none.

    Raises:
        ConfigError: not even one block fits.
    """
    blocks = cache.num_gpu_blocks_override
    if blocks is None:
        # imported here because it needs torch to measure memory, which no other part of the configuration does
        from ascend_vllm.platforms import get_platform

        num_workers = parallel.local_world_size
        # each machine loads an equal part
        weight_bytes = hf_files.weight_bytes(model.model) // parallel.nnodes
        if draft is not None:
            # the worker that has it decides for all how many blocks there are
            weight_bytes += hf_files.weight_bytes(draft.model) * num_workers
        available = get_platform(device).expected_kv_cache_bytes(
            cache, weight_bytes, num_workers, parallel.data_parallel_size
        )
        specs = kv_cache_specs(model, cache, parallel.tensor_parallel_size)
        # the stage with the largest KV cache per token has memory for the fewest blocks
        of_stages, stages = iter(specs), parallel.stage_layers or (len(specs),)
        block_bytes = max(sum(spec.block_bytes for spec in itertools.islice(of_stages, size)) for size in stages)
        if draft is not None:
            block_bytes += sum(spec.block_bytes for spec in kv_cache_specs(draft, cache))
        blocks = int(available * _AUTO_LENGTH_SHARE) // block_bytes
    if blocks < 1:
        raise ConfigError("--max-model-len auto: there is no memory for a KV cache of even one block.")
    return min(model.max_model_len, blocks * cache.block_size)


def all_flags() -> tuple[Flag, ...]:
    """All flags of all servers, without duplicates: HTTP, OpenAI server, /generate server, engine."""
    found = {item.name: item for owner in (FrontendArgs, GenerateServerArgs, EngineArgs) for item in flags_of(owner)}
    return tuple(found.values())
