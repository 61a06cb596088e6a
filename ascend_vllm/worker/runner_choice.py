"""The choice of a worker's runner, and of the graphs or tapes by which it decodes.

Models generate or pool, on the last pipeline stage or an earlier one; `GraphConfig.mode` says whether decoding steps
are launched by operators, tapes, captured graphs or compiled graphs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TypeAlias

import torch

from ascend_vllm import envs
from ascend_vllm.attention.backend import AttentionBackend, LayerCache
from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.config.graphs import GraphMode
from ascend_vllm.distributed.collectives import Collectives
from ascend_vllm.distributed.parallel_context import ParallelContext
from ascend_vllm.distributed.stage_link import StageLink
from ascend_vllm.errors import ConfigError
from ascend_vllm.layers.attention import Attention
from ascend_vllm.layers.step_state import StepState
from ascend_vllm.logger import init_logger
from ascend_vllm.models.blocks import CausalLM
from ascend_vllm.ops.native import load_native_library
from ascend_vllm.platforms.interface import GraphRecorder, Platform
from ascend_vllm.worker.block_mover import BlockMover
from ascend_vllm.worker.compiled_runner import CompiledRunner
from ascend_vllm.worker.graph_cache import GraphCache, fingerprint
from ascend_vllm.worker.graph_runner import GraphRunner
from ascend_vllm.worker.input_batch import InputBatch
from ascend_vllm.worker.model_runner import ModelForward, ModelRunner, StepGraphs
from ascend_vllm.worker.piecewise_runner import PiecewiseRunner
from ascend_vllm.worker.pooling import PoolingRunner, make_gatherer
from ascend_vllm.worker.sampling.acceptance import TypicalAcceptance
from ascend_vllm.worker.speculation.proposer import ProposerFactory
from ascend_vllm.worker.stage_runner import StageRunner
from ascend_vllm.worker.tape_runner import TapeRunner

logger = init_logger(__name__)

Runner: TypeAlias = ModelRunner | PoolingRunner | StageRunner


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model on the device and what belongs to it.

    Attributes:
        model: with its weights.
        backend: computes attention in all layers.
        step_state: declared by the model's layers.
        proposers: makes what drafts tokens; None: this worker does not.
    """

    model: CausalLM
    backend: AttentionBackend
    step_state: StepState
    proposers: ProposerFactory | None = None

    @property
    def attention_layers(self) -> list[Attention]:
        """See `layers_with_cache`."""
        return layers_with_cache(self.model, self.proposers)


def layers_with_cache(model: CausalLM, proposers: ProposerFactory | None) -> list[Attention]:
    """Attention layers that have KV caches: the model's, then those of the proposer."""
    return [*model.attention_layers, *(() if proposers is None else proposers.attention_layers)]


class RunnerFactory:
    """Makes the runner of a worker, and its graphs.

    Args:
        config: of the engine.
        platform: of the device, initialised.
        device: of the model.
        parallel: ranks of the worker.
        collectives: of its tensor-parallel group.
        link: to the other pipeline stages; None: there are none.
        loaded: the model to run.
    """

    def __init__(
        self,
        config: EngineConfig,
        platform: Platform,
        device: torch.device,
        parallel: ParallelContext,
        collectives: Collectives,
        link: StageLink | None,
        loaded: LoadedModel,
    ) -> None:
        self._config = config
        self._platform = platform
        self._device = device
        self._parallel = parallel
        self._collectives = collectives
        self._link = link
        self._loaded = loaded

    def make_runner(self, kv_caches: list[LayerCache], cpu_caches: list[LayerCache]) -> Runner:
        """Makes the runner, without graphs.

        Args:
            kv_caches: one for each of `LoadedModel.attention_layers`, on the device.
            cpu_caches: one per layer, in CPU memory; empty if there is no swapping.
        """
        config, model, backend = self._config, self._loaded.model, self._loaded.backend
        mover = BlockMover(backend, kv_caches, cpu_caches, self._device)
        batch = InputBatch(
            num_slots=config.scheduler.max_num_seqs,
            max_model_len=config.scheduler.max_model_len,
            block_size=config.cache.block_size,
            vocab_size=config.model.vocab_size,
            step_state=self._loaded.step_state,
            max_drafts=0 if config.speculation is None else config.speculation.num_speculative_tokens,
        )
        num_layers = len(model.attention_layers)
        forward = ModelForward(model, backend, kv_caches[:num_layers], self._link)
        if self._link is not None and not self._parallel.is_last_stage:
            return StageRunner(forward, self._link, mover, batch, self._device)
        if config.model.pooler is None:
            runner = ModelRunner(
                model,
                forward,
                mover,
                batch,
                config.model.logprobs_mode,
                self._device,
                host_memory=self._platform.shares_host_memory,
                acceptance=TypicalAcceptance.of(config.speculation),
                needs_hidden=config.speculation is not None and config.speculation.needs_hidden,
            )
            if self._loaded.proposers is not None:
                caches = kv_caches[num_layers:]
                runner.use_proposer(self._loaded.proposers.make(batch, runner.sampler, caches, backend))
            return runner
        gatherer = make_gatherer(
            config.model.pooler, config.scheduler.max_num_seqs, config.model.hidden_size, self._device
        )
        return PoolingRunner(model, forward, mover, batch, gatherer, self._device)

    def capture_graphs(self, runner: Runner, kv_caches: list[LayerCache]) -> None:
        """Captures or compiles the configured graphs, and lets the runner decode by them.

        Raises:
            ConfigError: graphs cannot be captured or compiled.
        """
        if not isinstance(runner, ModelRunner):
            return
        graphs: Sequence[StepGraphs]
        match self._config.graphs.mode:
            case GraphMode.RECORDED:
                graphs = self._make_tapes(runner)
            case GraphMode.COMPILED:
                pieces = self._make_pieces(runner, self._platform.make_graph_recorder())
                graphs = [self._make_compiled_graphs(kv_caches), *pieces]
            case _:
                graphs = self.make_captured_graphs(runner)
        for each in graphs:
            each.capture()
            runner.use_graphs(each)

    def make_captured_graphs(self, runner: Runner) -> list[GraphRunner | PiecewiseRunner]:
        """Makes the captured graphs of a runner: of decoding steps, then of steps with prompts, if they have some.

        They are not captured yet. They share memory, unless those of decoding steps stand for compiled ones, which
        have memory of their own.
        """
        graphs, loaded = self._config.graphs, self._loaded
        if graphs.mode == GraphMode.EAGER or not isinstance(runner, ModelRunner):
            return []
        recorder = self._platform.make_graph_recorder()
        if recorder is None or loaded.backend.replay_arguments([1]) is None:
            missing = "the device has none" if recorder is None else "the attention operators cannot be replayed"
            logger.warning("Decoding runs without graphs: %s", missing)
            return []
        block_size = self._config.cache.block_size
        decoding = GraphRunner(
            graphs, block_size, self._device, loaded.step_state, loaded.backend, runner.forward, recorder
        )
        if graphs.mode == GraphMode.COMPILED:
            recorder = self._platform.make_graph_recorder()
        return [decoding, *self._make_pieces(runner, recorder)]

    def _make_pieces(self, runner: ModelRunner, recorder: GraphRecorder | None) -> list[PiecewiseRunner]:
        """The graphs of steps with prompts; none if attention of some layer cannot be left out of graphs."""
        loaded, config = self._loaded, self._config
        caches = [layer.kv_cache_spec(config.cache.block_size) for layer in loaded.model.attention_layers]
        dtype = getattr(torch, config.model.dtype)
        can_split = all(loaded.backend.can_split(cache, dtype) for cache in caches)
        if recorder is None or not can_split or not config.graphs.piece_sizes:
            return []
        pieces = PiecewiseRunner(
            config.graphs.piece_sizes,
            config.scheduler.max_num_seqs,
            self._device,
            loaded.step_state,
            loaded.backend,
            runner.forward,
            recorder,
            self._collectives,
        )
        return [pieces]

    def _make_compiled_graphs(self, kv_caches: list[LayerCache]) -> CompiledRunner:
        config, loaded = self._config, self._loaded
        compiler = self._platform.make_graph_compiler()
        if compiler is None or loaded.backend.replay_arguments([1]) is None:
            missing = "nothing compiles for the device" if compiler is None else "the attention operators are too old"
            raise ConfigError(f"INFER_MODE=PTA: {missing}; unset INFER_MODE.")
        made_for = fingerprint(config, loaded.backend, compiler.versions())
        # a subdirectory, since users may keep other files in TORCHAIR_CACHE_HOME
        parallel = config.parallel
        rank = parallel.data_parallel_rank * parallel.world_size + self._parallel.rank
        directory = envs.torchair_cache_home() / "ascend_vllm" / f"rank{rank}"
        cache = GraphCache(directory.absolute(), made_for)
        return CompiledRunner(
            config.graphs,
            config.cache.block_size,
            self._device,
            loaded.step_state,
            loaded.model,
            loaded.backend,
            kv_caches,
            compiler,
            cache,
        )

    def _make_tapes(self, runner: ModelRunner) -> list[TapeRunner]:
        if not load_native_library():
            return []
        config = self._config
        # drafts and step state differ from row to row, and other stages send what this one computes with
        if config.speculation is None and self._link is None and not self._loaded.step_state.specs:
            runner.use_tapes_of_steps()
        blocks_per_row = math.ceil(config.scheduler.max_model_len / config.cache.block_size)
        tapes = TapeRunner(
            runner.forward,
            config.scheduler.max_num_seqs,
            blocks_per_row,
            self._loaded.step_state,
            config.graphs.query_lens,
            runner.decode_inputs,
        )
        return [tapes]
