"""Runs one step on the device: applies the diff, builds the batch, computes logits, samples.

Letters: T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from ascend_vllm.attention.backend import AttentionBackend, ForwardBatch, LayerCache
from ascend_vllm.distributed.stage_link import StageLink
from ascend_vllm.models.blocks import CausalLM
from ascend_vllm.ops.decode_inputs import DecodeInputs
from ascend_vllm.types.step import PromptLogprobs, SchedulerOutput, StepOutput
from ascend_vllm.worker.block_mover import BlockMover
from ascend_vllm.worker.input_batch import InputBatch, Int32Array, upload
from ascend_vllm.worker.multi_step import MultiStepDecoder
from ascend_vllm.worker.plain_decoding import PlainDecoder
from ascend_vllm.worker.sampling.acceptance import TypicalAcceptance
from ascend_vllm.worker.sampling.columns import MASKS, Int64Array
from ascend_vllm.worker.sampling.logprobs import by_place, collect
from ascend_vllm.worker.sampling.prompt_logprobs import PromptScorer
from ascend_vllm.worker.sampling.sampler import PROCESSED_LOGITS, PROCESSED_LOGPROBS, RAW_LOGITS, Sampler
from ascend_vllm.worker.speculation.proposer import ComputedStep, Proposer


class StepGraphs(Protocol):
    """Computes some steps faster than operator by operator."""

    @property
    def query_lens(self) -> Sequence[int]:
        """Numbers of tokens that the row with most of them may have in such a step."""

    def capture(self) -> None:
        """Called once before the first step, to capture or compile graphs."""

    def run(self, batch: ForwardBatch) -> torch.Tensor | None:
        """[T, H] of a batch's tokens, valid until the next call; None if there is no graph for the batch."""


class ModelForward:
    """The forward pass through this worker's layers, operator by operator.

    Args:
        model: on the device; all layers, or those of a pipeline stage.
        backend: computes attention in all its layers.
        kv_caches: one per layer, made by the backend.
        link: to the other pipeline stages; None: there are none.
    """

    def __init__(
        self, model: CausalLM, backend: AttentionBackend, kv_caches: list[LayerCache], link: StageLink | None = None
    ) -> None:
        self._model = model
        self._backend = backend
        self._kv_caches = kv_caches
        self._link = link

    def __call__(self, batch: ForwardBatch, metadata: Any = None) -> torch.Tensor:
        """[T, H] of a batch's tokens, or [S, H] of its `output_indices`.

        Args:
            batch: of the step.
            metadata: of the step, for the backend; None: what it prepares.
        """
        if metadata is None:
            metadata = self._backend.prepare(batch)
        hidden = None if self._link is None else self._link.receive(len(batch.input_ids))
        return self._model.forward(batch, self._kv_caches, self._backend, metadata, hidden)


class ModelRunner:
    """Runs the steps of a model that generates; owns the batch slots.

    Args:
        model: on `device`.
        forward: the pass through its layers.
        mover: copies KV blocks.
        batch: empty slots.
        logprobs_mode: see `Sampler`.
        device: of the model.
        host_memory: tensors on the device are in host memory, see `Platform.shares_host_memory`.
        acceptance: the rule for drafts; None: the exact one.
        needs_hidden: a proposer of this rank, or of another one that shares the layers, reads `ComputedStep.hidden`.

    Attributes:
        forward: as given.
        sampler: of all its steps.
        replays_steps: replay whole steps where that is possible; False while a profiler runs, which does not see the
            operators of a replay.
    """

    def __init__(
        self,
        model: CausalLM,
        forward: ModelForward,
        mover: BlockMover,
        batch: InputBatch,
        logprobs_mode: str,
        device: torch.device,
        *,
        host_memory: bool,
        acceptance: TypicalAcceptance | None = None,
        needs_hidden: bool = False,
    ) -> None:
        self._model = model
        self.forward = forward
        self._mover = mover
        self._batch = batch
        self.sampler = Sampler(batch, logprobs_mode, device, host_memory=host_memory, acceptance=acceptance)
        self._scorer = PromptScorer(
            batch,
            self._logits_of,
            device,
            reports_logits=logprobs_mode in (RAW_LOGITS, PROCESSED_LOGITS),
            processed=logprobs_mode in (PROCESSED_LOGPROBS, PROCESSED_LOGITS),
        )
        self._device = device
        self._multi_step = MultiStepDecoder(batch, self.sampler, self._logits, device, host_memory=host_memory)
        self._graphs: list[StepGraphs] = []
        self._plain: PlainDecoder | None = None
        self.replays_steps = True
        self._proposer: Proposer | None = None
        self._needs_hidden = needs_hidden

    @property
    def decode_inputs(self) -> DecodeInputs | None:
        """Where the inputs of steps without prompts are gathered; None: the library is missing."""
        return self._batch.decode_inputs

    def use_graphs(self, graphs: StepGraphs) -> None:
        """Computes steps by these graphs of the forward pass where possible, and by earlier ones where those can."""
        self._graphs.append(graphs)

    def use_tapes_of_steps(self) -> None:
        """Replays whole steps where it can: see `PlainDecoder`, and what it needs."""
        self._plain = PlainDecoder(self._batch, self.forward, self._model.compute_logits)

    def use_proposer(self, proposer: Proposer) -> None:
        """Lets this propose drafts after each step."""
        self._proposer = proposer
        self._needs_hidden = self._needs_hidden or proposer.needs_hidden

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> StepOutput:
        """Applies the step's diff, computes its tokens and samples.

        Raises:
            ValueError: the step does not fit its rows.
        """
        if step.block_moves:
            self._mover.move(step.block_moves)
        self._batch.apply(step)
        if self._proposer is not None:
            self._proposer.apply(step)
        if self._scorer.requests or any(row.sampling_params.prompt_logprobs is not None for row in step.new_rows):
            self._scorer.apply(step)
        if not step.slots:
            return _nothing_sampled(step.step_id)
        slots = np.array(step.slots, np.int64)
        if step.num_steps == 1:
            # a token of each row
            is_decoding = sum(step.num_scheduled_tokens) == len(slots)
            may_replay = self.replays_steps and is_decoding and not self._scorer.requests
            if self._plain is not None and may_replay:
                output = self._plain.run(step, slots)
                if output is not None:
                    return output
            return self._forward_and_sample(step, slots, np.array(step.num_scheduled_tokens, np.int64))
        sampled, logprobs = self._multi_step.run(slots, step.num_steps)
        return StepOutput(
            step_id=step.step_id,
            slots=slots.astype(np.int32),
            sampled_token_ids=sampled,
            logprobs=logprobs,
        )

    @torch.inference_mode()
    def compute_largest(self, step: SchedulerOutput) -> None:
        """Computes a step in which all rows sample, though only some of them compute tokens, and frees the rows.

        It needs as much memory as the largest possible step, except for the KV cache of the rows.

        Args:
            step: of `make_largest_step`.
        """
        self._batch.apply(step)
        slots = np.array(step.slots, np.int64)
        host_batch = self._batch.build(slots, np.array(step.num_scheduled_tokens, np.int64))
        hidden = self._hidden(host_batch.to_device(self._device))
        rows = np.array([row.slot for row in step.new_rows], np.int64)[: len(hidden)]
        num_tokens = upload(self._batch.num_tokens[rows], self._device)
        self.sampler.sample(self._model.compute_logits(hidden[: len(rows)]), self.sampler.plan(rows), num_tokens)
        self._batch.apply(SchedulerOutput(step.step_id, [row.slot for row in step.new_rows], [], [], [], []))

    def _forward_and_sample(self, step: SchedulerOutput, slots: Int64Array, num_scheduled: Int64Array) -> StepOutput:
        """Computes the rows' next tokens, and samples for rows whose known tokens are all computed."""
        host_batch = self._batch.build(slots, num_scheduled)
        # ranks that share the layers must compute the same tokens of the last one
        may_draft = self._batch.may_any_draft(slots)
        needs_hidden = self._needs_hidden and may_draft
        only_outputs = not (self._scorer.requests or needs_hidden)
        batch = host_batch.to_device(self._device, only_outputs=only_outputs)
        of_all = hidden = self._hidden(batch)
        prompts = self._scorer.score(host_batch, slots, hidden) if self._scorer.requests else []
        self._batch.advance(slots, num_scheduled)
        sampling_slots = host_batch.sampling_slots
        computed: ComputedStep | None = None
        if self._proposer is not None and may_draft:
            states = None if only_outputs else of_all
            computed = ComputedStep(host_batch, slots, num_scheduled, states, step.max_drafts)
        if len(sampling_slots) == 0:
            _, draft_s, _ = self._propose(computed)
            return _nothing_sampled(step.step_id, [prompt.fetch() for prompt in prompts], draft_s)
        if len(host_batch.logits_indices) < len(hidden):
            hidden = hidden[batch.logits_indices]
        logits = self._logits_of(hidden, batch.logits_indices)
        # [P] the slot of each sampled position, and the number of tokens before what is sampled
        num_places = host_batch.num_places
        slots = sampling_slots if num_places is None else np.repeat(sampling_slots, num_places)
        num_tokens = host_batch.positions[host_batch.logits_indices] + 1
        plan = self.sampler.plan(slots, num_tokens=num_tokens)
        if num_places is not None:
            plan = self.sampler.with_drafts(plan, slots, num_tokens)
        if step.bitmask is not None:
            rows = _places_of(np.array(step.constrained_slots, np.int64), slots)
            plan = self.sampler.constrain(plan, rows, step.bitmask)
        sampled = self.sampler.sample(logits, plan, upload(num_tokens, self._device))
        token_ids = sampled.token_ids.cpu().numpy()
        logprobs = collect([(plan.asking, sampled.logprobs)], len(slots), 1)
        if num_places is None:
            # -1 where all tokens were forbidden: the next step may already be scheduled and needs a valid id
            self._batch.append(slots, token_ids.clip(min=0) if plan.needed & MASKS else token_ids)
            table = token_ids[:, None]
        else:
            table = self._batch.accept(sampling_slots, num_places, token_ids)
            logprobs = None if logprobs is None else by_place(logprobs, num_places)
        drafts, draft_s, read_s = self._propose(computed)
        return StepOutput(
            step_id=step.step_id,
            slots=sampling_slots.astype(np.int32),
            sampled_token_ids=table,
            logprobs=logprobs,
            prompt_logprobs=[prompt.fetch() for prompt in prompts],
            drafts=drafts,
            draft_s=draft_s,
            read_s=read_s,
        )

    def _propose(self, computed: ComputedStep | None) -> tuple[Int32Array | None, float, float]:
        """[S, k] drafts of the rows that sampled, and `StepOutput.draft_s` and `read_s`.

        Without a step there are none, as without rows that may have any.
        """
        if self._proposer is None or computed is None:
            return None, 0.0, 0.0
        begin = time.perf_counter()
        drafts = self._proposer.propose(computed)
        draft_s = time.perf_counter() - begin
        return drafts, draft_s, min(self._proposer.read_s, draft_s)

    def _hidden(self, batch: ForwardBatch) -> torch.Tensor:
        """[T, H] of the step's tokens, or [S, H] of `ForwardBatch.output_indices`.

        Results of graphs are valid until the graphs run again.
        """
        for graphs in self._graphs:
            if batch.max_query_len in graphs.query_lens and (hidden := graphs.run(batch)) is not None:
                return hidden
        return self.forward(batch)

    def _logits(self, batch: ForwardBatch) -> torch.Tensor:
        """[T, V] of all of the step's tokens."""
        return self._logits_of(self._hidden(batch), slice(None))

    def _logits_of(self, hidden: torch.Tensor, tokens: torch.Tensor | slice) -> torch.Tensor:
        """hidden [n, H] of some of the step's tokens → [n, V]."""
        self._batch.row_state.state.logits_tokens = tokens
        return self._model.compute_logits(hidden)


def _places_of(wanted: Int64Array, slots: Int64Array) -> Int64Array:
    """Indices in `slots` of the wanted slots; the n-th occurrence in `wanted` gets the n-th index."""
    order, wanted_order = slots.argsort(kind="stable"), wanted.argsort(kind="stable")
    wanted = wanted[wanted_order]
    times = np.arange(len(wanted)) - np.searchsorted(wanted, wanted)
    places = np.empty_like(wanted)
    places[wanted_order] = order[np.searchsorted(slots, wanted, sorter=order) + times]
    return places


def _nothing_sampled(
    step_id: int, prompt_logprobs: list[PromptLogprobs] | None = None, draft_s: float = 0.0
) -> StepOutput:
    return StepOutput(
        step_id=step_id,
        slots=np.zeros(0, np.int32),
        sampled_token_ids=np.zeros((0, 1), np.int64),
        prompt_logprobs=prompt_logprobs or [],
        draft_s=draft_s,
        read_s=draft_s,
    )
