"""A worker: runs one model, or one rank's part of it, on one device.

The composition root of everything below the executor: here the platform, the model and the attention backend are
chosen and handed to each other; `worker.runner_choice` makes the runner.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from ascend_vllm import envs
from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.config.graphs import GraphMode
from ascend_vllm.distributed.group import join_groups
from ascend_vllm.distributed.parallel_context import ParallelContext
from ascend_vllm.distributed.rendezvous import Rendezvous
from ascend_vllm.distributed.stage_link import StageLink
from ascend_vllm.errors import ConfigError, RequestError
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.layers.step_state import StepState
from ascend_vllm.logger import init_logger
from ascend_vllm.models.blocks import CausalLM
from ascend_vllm.models.loader import load_model
from ascend_vllm.ops import native
from ascend_vllm.ops.kernel_choice import choose_cpu_kernels
from ascend_vllm.ops.native import import_op_modules, load_native_library
from ascend_vllm.ops.registry import OPS, ops_on_reference
from ascend_vllm.platforms import get_platform
from ascend_vllm.platforms.weight_reserve import WeightReserve
from ascend_vllm.pooling_params import PoolingParams
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.step import ADAPTER_SLOT, KVCacheSize, NewRow, SchedulerOutput, StepOutput
from ascend_vllm.worker.adapters import WorkerAdapters
from ascend_vllm.worker.kv_memory import GIB, KVMemory, first_line
from ascend_vllm.worker.kv_pages import PagesAhead
from ascend_vllm.worker.largest_step import make_largest_step, num_blocks_of
from ascend_vllm.worker.model_runner import ModelRunner
from ascend_vllm.worker.plugins import select_attention_backend
from ascend_vllm.worker.profiler import WorkerProfiler
from ascend_vllm.worker.runner_choice import LoadedModel, Runner, RunnerFactory, layers_with_cache
from ascend_vllm.worker.speculation.methods import METHODS
from ascend_vllm.worker.speculation.proposer import ProposerFactory

logger = init_logger(__name__)

_WARM_UP_TOKENS = 16
# with more drafts steps are recorded when they come
_MOST_WARM_UP_DRAFTS = 8

# tags of `wake_up`
WEIGHTS = "weights"
KV_CACHE = "kv_cache"


class Worker:
    """Holds the model and runs steps.

    Args:
        config: the engine's configuration.
        rank: number of the worker in the engine; workers of a pipeline stage have consecutive numbers.
        rendezvous: where the workers connect with each other; None for a single worker.
        reserve: memory for the weights that are loaded first.

    Raises:
        ConfigError: the device cannot be used, or not with this dtype.

    Example::

        worker = Worker(config)
        worker.load_model()
        worker.initialize_cache(worker.determine_num_blocks(), worker.determine_num_cpu_blocks())
        output = worker.execute_model(step)
    """

    def __init__(
        self,
        config: EngineConfig,
        rank: int = 0,
        rendezvous: Rendezvous | None = None,
        reserve: WeightReserve | None = None,
    ) -> None:
        self._config = config
        self._reserve = reserve
        self._platform = get_platform(config.device.device)
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        if config.cache.format is None and config.cache.cache_dtype not in ("auto", config.model.dtype):
            raise ConfigError(
                f"--kv-cache-dtype {config.cache.cache_dtype} differs from the model's {config.model.dtype}: "
                "16 and 32 bits are possible in the model's dtype only, use auto."
            )
        tp_size = config.parallel.tensor_parallel_size
        self._parallel = ParallelContext(
            tp_rank=rank % tp_size,
            tp_size=tp_size,
            pp_rank=rank // tp_size,
            pp_size=config.parallel.pipeline_parallel_size,
            stage_layers=config.parallel.stage_layers,
            expert_parallel=config.parallel.enable_expert_parallel,
        )
        meeting = rendezvous or Rendezvous(port=0)
        place = meeting.place(rank, self._parallel.world_size)
        self._device = self._platform.initialize(
            place.local_rank, place.num_workers, meeting.address, config.parallel.data_parallel_size
        )
        if self._dtype not in self._platform.dtypes:
            possible = ", ".join(str(dtype).removeprefix("torch.") for dtype in self._platform.dtypes)
            raise ConfigError(
                f"--dtype {config.model.dtype} is not available on --device {self._platform.name}; possible here: "
                f"{possible}."
            )
        self._collectives, stages = join_groups(self._platform, self._parallel, rendezvous)
        self._link: StageLink | None = None
        if stages is not None:
            stage, width = self._parallel.pp_rank, config.model.hidden_size
            self._link = StageLink(stages, stage, width, self._dtype, self._device)
        self._loaded: LoadedModel | None = None
        self._runner: Runner | None = None
        self._adapters: WorkerAdapters | None = None
        self._cache_size: KVCacheSize | None = None
        self._pages: PagesAhead | None = None
        traces = envs.torch_profiler_dir()
        self._profiler = None if traces is None else WorkerProfiler(traces, rank)

    def load_model(self) -> None:
        """Reads the weights and chooses the attention backend.

        Raises:
            ModelLoadError: the model directory cannot be loaded.
            ConfigError: no attention backend supports this model with this block size and dtype.
        """
        config = self._config
        load_native_library()
        if self._platform.op_modules is not None:
            import_op_modules(self._platform.op_modules)
        if self._platform.device_type == "cpu":
            choose_cpu_kernels(self._dtype, probe=config.device.cpu_kernel_probe)
        start = time.monotonic()
        step_state = self._make_step_state()
        context = BuildContext(
            dtype=self._dtype,
            device=self._device,
            parallel=self._parallel,
            collectives=self._collectives,
            step_state=step_state,
            lora=config.lora,
            kv_cache=config.cache.format,
            kv_layer_scales=scales[self._parallel.tp_rank] if (scales := config.cache.layer_scales) else None,
        )
        try:
            # the progress bars of all ranks would overwrite each other
            load = msgspec.structs.replace(config.load, use_tqdm=config.load.use_tqdm and self._parallel.rank == 0)
            reserve, self._reserve = self._reserve, None
            model = load_model(config.model, load, context, reserve)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"the weights do not fit in the memory of the device: {first_line(error)}; use a smaller or a "
                "quantised model, or free memory that other processes hold."
            ) from error
        if self._platform.device_type == "cpu":
            kinds = {kind for layer in model.layers() for kind in layer.product_kinds}
            for kind in sorted(kinds):
                choose_cpu_kernels(self._dtype, probe=config.device.cpu_kernel_probe, product=kind)
        proposers: ProposerFactory | None = None
        if config.speculation is not None and self._parallel.rank == self.output_rank:
            proposers = METHODS[config.speculation.method](config, model, context)
        backend_class = select_attention_backend(
            self._platform.device_type, layers_with_cache(model, proposers), self._dtype, config.cache.block_size
        )
        backend = backend_class(config.cache.block_size)
        for sentence in backend.advice(config):
            logger.warning("%s", sentence)
        self._loaded = LoadedModel(model, backend, step_state, proposers)
        if self._adapters is not None:
            self._adapters.use(model)
        elif config.lora is not None:
            self._adapters = WorkerAdapters(model, config.lora, config.model.arch)
        logger.info(
            "Model loaded in %.2f s: %s, %s, attention backend %s",
            time.monotonic() - start,
            config.model.architecture,
            config.model.dtype,
            backend_class.name,
        )
        self._log_ops()

    def _make_step_state(self) -> StepState:
        """Memory for the step state that layers declare, with room for any step or padded batch of a graph."""
        scheduler, graphs = self._config.scheduler, self._config.graphs
        # padding tokens of a step with prompts are a row of their own
        num_rows = max(scheduler.max_num_seqs + bool(graphs.piece_sizes), *graphs.capture_sizes, 0)
        num_tokens = max(scheduler.max_num_batched_tokens, num_rows * max(graphs.query_lens))
        return StepState(num_tokens, num_rows, self._device)

    def determine_num_blocks(self) -> int:
        """Number of KV blocks that this device has memory for; 1 or more. --num-gpu-blocks-override decides if given.

        Raises:
            ConfigError: there is no memory for one block, or for the configured size.
        """
        override = self._config.cache.num_gpu_blocks_override
        if override is not None:
            return override
        other_bytes = self._peak_bytes() + self._graph_bytes()
        return self._kv_memory().num_blocks(other_bytes)

    def determine_num_cpu_blocks(self) -> int:
        """Number of blocks that --swap-space has room for in CPU memory; 0 if rows are never swapped."""
        if self._config.scheduler.preemption_mode == "recompute":
            return 0
        return self._kv_memory().num_cpu_blocks()

    def initialize_cache(self, num_blocks: int, num_cpu_blocks: int = 0) -> None:
        """Allocates the KV cache, and runs the model once to warm it up.

        Args:
            num_blocks: of the KV cache on the device.
            num_cpu_blocks: of the pool that preempted rows are swapped to. Its pages are allocated when written.

        Raises:
            ConfigError: the memory is not there.
        """
        memory = self._kv_memory()
        self._cache_size = KVCacheSize(num_blocks, num_cpu_blocks)
        kv_caches = memory.allocate(
            num_blocks, "KV cache", f"--num-gpu-blocks-override, {self._platform.cache_size_flags}"
        )
        cpu_caches = memory.allocate_swap_pool(num_cpu_blocks)
        runners = self._runners()
        self._runner = runners.make_runner(kv_caches, cpu_caches)
        logger.info(
            "KV cache: %d blocks of %d tokens, %d bytes per token in %d layers, %.2f GiB; %d blocks to swap to, "
            "%.2f GiB",
            num_blocks,
            self._config.cache.block_size,
            memory.block_bytes // self._config.cache.block_size,
            len(self._model_in_use.attention_layers),
            num_blocks * memory.block_bytes / GIB,
            num_cpu_blocks,
            num_cpu_blocks * memory.block_bytes / GIB,
        )
        runners.capture_graphs(self._runner, kv_caches)
        self._warm_up(self._runner, num_blocks)
        backend = self._model_in_use.backend
        if planes := [plane for cache in kv_caches for plane in backend.host_planes(cache)]:
            self._pages = PagesAhead(planes)

    @property
    def output_rank(self) -> int:
        """Number of the worker that returns the results of steps."""
        return self._config.parallel.output_rank

    def execute_model(self, step: SchedulerOutput) -> StepOutput:
        """Runs one step; see `ModelRunner.execute`."""
        runner = self.get_runner()
        self._platform.begin_step(sum(step.num_scheduled_tokens), self.get_model().num_weights)
        if self._pages is not None and (block := _last_block(step)) >= self._pages.next_block:
            self._pages.extend(block)
        if self._adapters is None:
            return runner.execute(step)
        with self._adapters.computing():
            return runner.execute(step)

    def get_model(self) -> CausalLM:
        """The model.

        Raises:
            RuntimeError: the weights are not loaded.
        """
        return self._model_in_use.model

    @property
    def device(self) -> torch.device:
        """Of the model."""
        return self._device

    def get_runner(self) -> Runner:
        """What runs the steps.

        Raises:
            RuntimeError: there is no KV cache.
        """
        if self._runner is None:
            raise RuntimeError("the worker has no KV cache: call initialize_cache first")
        return self._runner

    def apply_model(self, function: Callable[[CausalLM], Any]) -> Any:
        """Calls a function with the model, and returns its result."""
        return function(self.get_model())

    def load_adapter(self, number: int, path: str) -> None:
        """See `WorkerAdapters.load`."""
        self._adapters_in_use.load(number, path)

    def adapter_state(self, number: int) -> str | None:
        """See `WorkerAdapters.state`."""
        return self._adapters_in_use.state(number)

    def place_adapter(self, slot: int, number: int) -> None:
        """See `WorkerAdapters.place`."""
        self._adapters_in_use.place(slot, number)

    def drop_adapter(self, number: int) -> None:
        """See `WorkerAdapters.drop`."""
        self._adapters_in_use.drop(number)

    def profile(self, is_start: bool = True) -> None:
        """Begins or ends a trace of the steps, see `WorkerProfiler`.

        Raises:
            RequestError: VLLM_TORCH_PROFILER_DIR is not set.
        """
        if self._profiler is None:
            raise RequestError("Profiler is not enabled. Set VLLM_TORCH_PROFILER_DIR to a directory for its traces.")
        if isinstance(self._runner, ModelRunner):
            self._runner.replays_steps = not is_start
        if is_start:
            self._profiler.start()
        else:
            self._profiler.stop()

    def sleep(self, level: int = 1) -> None:
        """Frees memory until `wake_up`. No slot may be in use; the contents of the KV cache are lost.

        Args:
            level: 1: the KV cache and the swap pool; 2: the weights, too.
        """
        before = self._platform.free_bytes()
        if level >= 2:
            self._loaded = None
        self._free_caches()
        self._platform.release_memory()
        native.release_memory()
        logger.info("Asleep at level %d: %.2f GiB given back", level, (self._platform.free_bytes() - before) / GIB)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocates memory again: loads the weights if they were freed, and allocates the KV cache.

        Args:
            tags: "weights", "kv_cache" or both; None: both. The weights come first.

        Raises:
            RuntimeError: the KV cache is to be allocated without weights.
            ConfigError: the memory is not there.
            ModelLoadError: the weights can no longer be read.
        """
        wanted = (WEIGHTS, KV_CACHE) if tags is None else tags
        if WEIGHTS in wanted and self._loaded is None:
            self.load_model()
        if KV_CACHE in wanted and self._runner is None:
            if self._cache_size is None:
                raise RuntimeError("the worker has never been awake")
            self.initialize_cache(self._cache_size.num_blocks, self._cache_size.num_cpu_blocks)

    def shutdown(self) -> None:
        """Frees the model and the cache."""
        self._close_pages()
        self._runner = None
        self._loaded = None
        if self._adapters is not None:
            self._adapters.shutdown()

    @property
    def _adapters_in_use(self) -> WorkerAdapters:
        if self._adapters is None:
            raise RuntimeError("the worker was built without LoRA adapters")
        return self._adapters

    @property
    def _model_in_use(self) -> LoadedModel:
        if self._loaded is None:
            raise RuntimeError("the worker has no model: call load_model first")
        return self._loaded

    def _runners(self) -> RunnerFactory:
        return RunnerFactory(
            self._config,
            self._platform,
            self._device,
            self._parallel,
            self._collectives,
            self._link,
            self._model_in_use,
        )

    def _kv_memory(self) -> KVMemory:
        loaded = self._model_in_use
        return KVMemory(self._config, self._platform, self._device, loaded.attention_layers, loaded.backend)

    def _warm_up(self, runner: Runner, num_blocks: int) -> None:
        """Runs a prompt and one decoding step in slot 0, with random sampling, and frees the slot."""
        config = self._config
        start = time.monotonic()
        room = min(num_blocks * config.cache.block_size, config.scheduler.max_model_len)
        length = min(_WARM_UP_TOKENS, config.scheduler.max_num_batched_tokens, room - 1)
        if length < 1:
            return
        blocks = list(range(math.ceil((length + 1) / config.cache.block_size)))
        row = NewRow(0, "warm-up", [0] * length, length, 0, blocks, SamplingParams(), seed=0, stop_token_ids=[])
        if config.model.pooler is not None:
            row.pooling_params = PoolingParams()
        runner.execute(SchedulerOutput(-1, [], [row], [0], [length], []))
        if config.model.pooler is None:
            # stages that do not sample continue with an arbitrary token
            runner.execute(SchedulerOutput(-1, [], [], [0], [1], [], sampled=[(0, 0)]))
        runner.execute(SchedulerOutput(-1, [0], [], [], [], []))
        if config.speculation is not None and config.graphs.mode == GraphMode.RECORDED:
            self._warm_up_drafts(runner, config.speculation.num_speculative_tokens, room)
        logger.debug("Warmed up in %.2f s", time.monotonic() - start)

    def _warm_up_drafts(self, runner: Runner, max_drafts: int, room: int) -> None:
        """Records the steps that a row alone has with up to so many drafts: what that takes would count against them.

        Args:
            runner: no slot is in use.
            max_drafts: of a row.
            room: tokens that the row can have.
        """
        max_drafts = min(max_drafts, _MOST_WARM_UP_DRAFTS)
        # of the prompt, and with each number of drafts, all of which may be right
        most_tokens = 2 + sum(range(2, max_drafts + 2))
        if most_tokens > room:
            return
        blocks = list(range(math.ceil(most_tokens / self._config.cache.block_size)))

        def row(length: int, temperature: float) -> NewRow:
            params = SamplingParams(temperature=temperature)
            return NewRow(0, "warm-up", [0] * length, length, 0, blocks, params, seed=0, stop_token_ids=[])

        # a head reads so many tokens after right drafts: here of a prompt, behind its first token
        for count in range(1, max_drafts + 2):
            runner.execute(SchedulerOutput(-1, [], [row(1 + count, 0.0)], [0], [1], [], max_drafts=1))
            wanted = min(count, max_drafts)
            runner.execute(SchedulerOutput(-1, [], [], [0], [count], [], max_drafts=wanted))
            runner.execute(SchedulerOutput(-1, [0], [], [], [], []))
        runner.execute(SchedulerOutput(-1, [], [row(1, 1.0)], [0], [1], []))
        for count in range(1, max_drafts + 1):
            step = SchedulerOutput(-1, [], [], [0], [1 + count], [], drafts=[(0, [0] * count)], max_drafts=count)
            runner.execute(step)
        runner.execute(SchedulerOutput(-1, [0], [], [], [], []))

    def _peak_bytes(self) -> int:
        """Memory that steps need beside the weights and the KV cache; 0 if the platform does not measure it.

        Raises:
            ConfigError: the largest step does not fit in the memory of the device.
        """
        config = self._config
        step = make_largest_step(
            config.scheduler,
            config.cache.block_size,
            pools=config.model.pooler is not None,
            state={} if config.lora is None else {ADAPTER_SLOT: 0},
        )
        cache_bytes = self._kv_memory().cache_bytes(num_blocks_of(step))
        return max(0, self._platform.peak_bytes(lambda: self._run_largest_step(step)) - cache_bytes)

    def _run_largest_step(self, step: SchedulerOutput) -> None:
        """Computes a step of `make_largest_step` with a temporary KV cache."""
        flags = "--max-num-batched-tokens or --max-num-seqs"
        kv_caches = self._kv_memory().allocate(num_blocks_of(step), "KV cache for the largest step", flags)
        try:
            self._runners().make_runner(kv_caches, []).compute_largest(step)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"a step of {sum(step.num_scheduled_tokens)} tokens and {len(step.new_rows)} sequences does not fit "
                f"in the memory of the device beside the weights: {first_line(error)}; lower {flags}."
            ) from error
        finally:
            del kv_caches
            self._free_caches()

    def _graph_bytes(self) -> int:
        """Memory of the graphs: that of the largest of each kind, which all share, and the outputs of the others.

        Raises:
            ConfigError: there is not enough memory.
        """
        if self._config.graphs.mode in (GraphMode.EAGER, GraphMode.RECORDED):
            return 0
        kv_caches = self._kv_memory().allocate(1, "KV cache to capture a graph", "--max-num-seqs")
        runners = self._runners()
        runner = runners.make_runner(kv_caches, [])
        # compiled graphs launch the same operators
        graphs = runners.make_captured_graphs(runner)
        if not graphs:
            return 0
        self._platform.release_memory()
        before = self._platform.free_bytes()
        try:
            for each in graphs:
                each.capture(only_largest=True)
            self._platform.release_memory()
            return before - self._platform.free_bytes() + sum(each.output_bytes() for each in graphs)
        finally:
            del each, graphs, runner, runners, kv_caches
            self._free_caches()
            self._platform.release_memory()

    def _free_caches(self) -> None:
        """Frees the KV cache and the objects that refer to it."""
        self._close_pages()
        self._runner = None
        if self._loaded is not None:
            # a backend may refer to the caches that were bound to it
            backend = type(self._loaded.backend)(self._config.cache.block_size)
            self._loaded = dataclasses.replace(self._loaded, backend=backend)
        # a runner is part of a cycle of references
        gc.collect()

    def _close_pages(self) -> None:
        if self._pages is not None:
            self._pages.close()
            self._pages = None

    def _log_ops(self) -> None:
        device_type = self._platform.device_type
        on_reference = ops_on_reference(device_type)
        logger.log(
            logging.INFO if on_reference else logging.DEBUG,
            "%d of %d ops run on their reference on %s%s",
            len(on_reference),
            sum(device_type in spec.devices for spec in OPS.values()),
            device_type,
            f": {', '.join(on_reference)}" if on_reference else "",
        )


def _last_block(step: SchedulerOutput) -> int:
    """The last of the blocks that rows get in a step, in the order of the pool; -1: they get none."""
    of_rows = [row.block_ids for row in step.new_rows]
    return max(itertools.chain(*of_rows, *(block_ids for _, block_ids in step.new_blocks)), default=-1)
