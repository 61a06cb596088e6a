"""Drafts by a model of their own, one after another: what draft models and EAGLE heads have in common.

After each step the draft model computes what it lacks of the step's rows, in the blocks that the rows have. From the
last hidden state of a row comes its first draft; each further draft takes a pass of one token for each row. Drafts of
requests that sample are drawn by the ordinary sampler with the draws that the target will use at the same positions,
so that similar distributions give the same tokens; KV of drafts is written again when their tokens are known.

Letters: M slots, R rows of a step, S rows that sampled, T tokens of a pass, H hidden size, V vocabulary, k most
drafts of a row.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ascend_vllm.attention.backend import AttentionBackend, ForwardBatch, LayerCache
from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.config.graphs import GraphMode
from ascend_vllm.layers.attention import Attention
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.models.blocks import CausalLM
from ascend_vllm.ops.decode_inputs import DecodeInputs
from ascend_vllm.ops.kept_states import copy_states
from ascend_vllm.ops.native import load_native_library
from ascend_vllm.ops.sampling import arg_max
from ascend_vllm.types.step import NO_DRAFT, SchedulerOutput
from ascend_vllm.worker.input_batch import InputBatch, Int32Array, upload, upload_all
from ascend_vllm.worker.sampling.columns import LOGPROBS, RANDOM, Int64Array, ragged_arange
from ascend_vllm.worker.sampling.sampler import Sampler
from ascend_vllm.worker.speculation.chain_tapes import ChainTapes
from ascend_vllm.worker.speculation.proposer import ComputedStep
from ascend_vllm.worker.tape_runner import TapeRunner


@dataclasses.dataclass(frozen=True)
class Drafter:
    """A draft model and where it runs.

    Attributes:
        model: with its weights, whole on this worker.
        device: of the model.
        backend: computes attention in all layers of target and draft model.
        kv_caches: of the draft model's layers.
        max_drafts: most drafts of a row, k.
        tape_query_lens: passes of so many tokens for each row are replayed from tapes; empty: none are.
        max_model_len: longest sequence of the draft model, in tokens.
    """

    model: CausalLM
    device: torch.device
    backend: AttentionBackend
    kv_caches: list[LayerCache]
    max_drafts: int
    tape_query_lens: tuple[int, ...]
    max_model_len: int

    @classmethod
    def make(
        cls,
        config: EngineConfig,
        model: CausalLM,
        context: BuildContext,
        backend: AttentionBackend,
        kv_caches: Sequence[LayerCache],
        max_model_len: int,
    ) -> Drafter:
        """Makes one for an engine's configuration."""
        records = config.graphs.mode == GraphMode.RECORDED and load_native_library()
        assert config.speculation is not None
        max_drafts = config.speculation.num_speculative_tokens
        query_lens = tuple(range(1, max_drafts + 2)) if records else ()
        return cls(model, context.device, backend, list(kv_caches), max_drafts, query_lens, max_model_len)


class ChainProposer(abc.ABC):
    """Proposes drafts of a model of its own.

    Args:
        drafter: the model.
        batch: the slots.
        sampler: of the target.

    Attributes:
        input_shift: a token of place p in its row enters the draft model at position p - input_shift.
        feeds_hidden: the hidden state before a token enters with it.
    """

    needs_hidden: bool = False
    read_s: float = 0.0
    input_shift: int = 0
    feeds_hidden: bool = False

    def __init__(self, drafter: Drafter, batch: InputBatch, sampler: Sampler) -> None:
        self._drafter = drafter
        self._batch = batch
        self._sampler = sampler
        self._tapes: TapeRunner | None = None
        self._chains: ChainTapes | None = None
        num_slots, max_blocks = batch.block_table.shape
        self._inputs: DecodeInputs | None = None
        if DecodeInputs.is_available():
            columns = (batch.num_blocks, batch.num_computed_tokens, batch.num_tokens)
            arrays = (batch.token_ids, batch.block_table, *columns)
            self._inputs = DecodeInputs(*arrays, batch.block_size, 1 + drafter.max_drafts)
        if drafter.tape_query_lens:
            state = batch.row_state.state
            self._tapes = TapeRunner(
                self._recorded, num_slots, max_blocks, state, drafter.tape_query_lens, self._inputs
            )
            self._chains = ChainTapes(
                self._recorded_pass,
                self._best_tokens,
                self._logits,
                batch.block_table,
                batch.block_size,
                drafter.max_drafts,
            )
        # [M] the place of each slot among those that sampled in the last step that wanted drafts; -1: it did not
        self._place_of = np.full(num_slots, -1)
        # the largest token id that the draft model knows, which stands for those above; None: it knows all
        self._last_id: int | None = None
        # [M*q, H] hidden states that a recorded pass reads; None: none has been
        self._fixed_hidden: torch.Tensor | None = None
        # most tokens of a row in the last pass
        self._longest = 0

    @abc.abstractmethod
    def apply(self, step: SchedulerOutput) -> None:
        """As `Proposer.apply`."""

    @abc.abstractmethod
    def _catch_up(self, step: ComputedStep) -> tuple[Int64Array, torch.Tensor] | None:
        """Computes what the draft model lacks of the step's rows.

        Returns:
            Slots of the rows that computed something, and the hidden state behind each one's last token; None: no
            row lacks anything, or nothing is wanted.
        """

    def propose(self, step: ComputedStep) -> Int32Array | None:
        """As `Proposer.propose`."""
        begin = time.perf_counter()
        self._longest = 0
        sampling = step.batch.sampling_slots
        if step.max_drafts > 0:
            self._place_of.fill(-1)
            self._place_of[sampling] = np.arange(len(sampling))
        computed = self._catch_up(step)
        # what a step with drafts has computed of a row is read for its next drafts
        reads = self._longest > self._drafter.max_drafts + 1 or step.max_drafts == 0
        self.read_s = time.perf_counter() - begin if reads else 0.0
        if computed is None or step.max_drafts == 0 or len(sampling) == 0:
            return None
        slots, hidden = computed
        counts = self._num_drafts(slots, step.max_drafts) * (self._place_of[slots] >= 0)
        return self._draft(slots, hidden, counts, len(sampling), step.max_drafts)

    def _draft(
        self, slots: Int64Array, hidden: torch.Tensor, counts: Int64Array, num_sampling: int, max_drafts: int
    ) -> Int32Array | None:
        """[S, k] drafts of the rows that sampled, up to `counts` of the rows in `slots`."""
        if not counts.any():
            return None
        drafts = np.full((num_sampling, max_drafts), NO_DRAFT, np.int32)
        num_tokens, places = self._batch.num_tokens[slots], self._place_of[slots]
        if (tokens := self._by_tape(slots, hidden, counts, num_tokens)) is not None:
            drafts[places, : tokens.shape[1]] = tokens
            return drafts
        for number in range(max_drafts):
            going_on = np.flatnonzero(counts > number)
            if len(going_on) == 0:
                break
            if len(going_on) < len(slots):
                slots, counts, num_tokens = slots[going_on], counts[going_on], num_tokens[going_on]
                places = places[going_on]
                hidden = hidden[torch.from_numpy(going_on).to(hidden.device)]
            if number > 0:
                hidden = self._pass(slots, num_tokens + number - 1, hidden)
            # a row all of whose tokens are forbidden ends whatever its draft is
            tokens = self._choose(hidden, slots, num_tokens + number).clip(min=0)
            drafts[places, number] = tokens
            # what is behind a row's known tokens is undefined for everybody else; penalties of later drafts read it
            self._batch.token_ids[slots, num_tokens + number] = tokens
        return drafts

    def _by_tape(
        self, slots: Int64Array, hidden: torch.Tensor, counts: Int64Array, num_tokens: Int64Array
    ) -> Int64Array | None:
        """[R, k] drafts; None: rows draft differently many, something edits their logits, or there are no tapes."""
        num_drafts = int(counts[0])
        if self._chains is None or num_drafts == 0 or not (counts == num_drafts).all():
            return None
        plan = self._sampler.plan(slots, num_tokens=num_tokens)
        if plan.needed & ~(RANDOM | LOGPROBS):
            return None
        self._note_passes(slots, num_tokens + num_drafts - 1)
        starts = num_tokens - self.input_shift
        return self._chains.run(slots, hidden, starts, num_tokens, num_drafts, plan)

    def _note_passes(self, slots: Int64Array, num_tokens: Int64Array) -> None:  # noqa: B027 - most note nothing
        """Called before passes after which the model has computed so many tokens of rows, drafts included."""

    def _recorded_pass(self, batch: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor:
        return self._forward(batch, hidden if self.feeds_hidden else None)

    def _num_drafts(self, slots: Int64Array, max_drafts: int) -> Int64Array:
        """Most drafts of each row: their KV must have room in the blocks that it has, and its length ends them."""
        batch = self._batch
        # the last draft does not enter the draft model
        behind = self.input_shift + 1
        longest = min(self._drafter.max_model_len + behind, batch.token_ids.shape[1] - 1)
        room = np.minimum(batch.num_blocks[slots] * batch.block_size + behind, longest) - batch.num_tokens[slots]
        counts: Int64Array = np.maximum(np.minimum(room, max_drafts), 0)
        return counts

    def _choose(self, hidden: torch.Tensor, slots: Int64Array, num_tokens: Int64Array) -> Int64Array:
        """The next token of each row, of hidden states [R, H], with so many tokens before it."""
        plan = self._sampler.plan(slots, num_tokens=num_tokens)
        if plan.needed == 0:
            ids = self._best_tokens(hidden)
        else:
            logits = self._logits(hidden)
            ids = self._sampler.sample(logits, plan, upload(num_tokens, self._drafter.device)).token_ids
        tokens: Int64Array = ids.cpu().numpy()
        return tokens

    def _best_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, H] → [R] int64."""
        return arg_max(self._logits(hidden))

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, H] → [R, V], of the target's vocabulary."""
        return self._drafter.model.compute_logits(hidden)

    def _pass(self, slots: Int64Array, places: Int64Array, hidden: torch.Tensor) -> torch.Tensor:
        """Computes a draft of each row.

        Args:
            slots: [R].
            places: [R], of the drafts in their rows' tokens.
            hidden: [R, H], behind the tokens before.

        Returns:
            [R, H], valid until the next pass.
        """
        self._note_passes(slots, places + 1)
        return self._compute(slots, places - self.input_shift, np.ones_like(slots), hidden)

    def _compute(
        self,
        slots: Int64Array,
        starts: Int64Array,
        counts: Int64Array,
        hidden: torch.Tensor | None,
    ) -> torch.Tensor:
        """Computes some tokens of rows, by a tape where all rows have equally many.

        Args:
            slots: [R].
            starts: [R], first position of each.
            counts: [R], number of positions, 1 or more.
            hidden: [T, H] before the tokens, if they enter with them.

        Returns:
            [R, H], behind each row's last token, valid until the next pass.
        """
        batch = self._forward_batch(slots, starts, counts)
        self._longest = batch.max_query_len
        hidden = hidden if self.feeds_hidden else None
        if self._tapes is not None and batch.max_query_len in self._tapes.query_lens:
            if hidden is not None:
                self._fix(hidden)
            result = self._tapes.run(batch)
            if result is not None:
                return result[batch.max_query_len - 1 :: batch.max_query_len]
        return self._forward(batch, hidden)

    def _fix(self, hidden: torch.Tensor) -> None:
        """Copies hidden states [T, H] to where recorded passes read them."""
        if self._fixed_hidden is None:
            num_tokens = len(self._batch.num_tokens) * (1 + self._drafter.max_drafts)
            self._fixed_hidden = hidden.new_zeros(num_tokens, hidden.shape[1])
        copy_states(self._fixed_hidden, hidden)

    def _recorded(self, batch: ForwardBatch) -> torch.Tensor:
        """A pass whose inputs are in fixed memory."""
        hidden = None if self._fixed_hidden is None else self._fixed_hidden[: len(batch.input_ids)]
        return self._forward(batch, hidden)

    def _forward(self, batch: ForwardBatch, hidden: torch.Tensor | None) -> torch.Tensor:
        """[T, H], or [S, H] of `ForwardBatch.output_indices`."""
        drafter = self._drafter
        metadata = drafter.backend.prepare(batch)
        return drafter.model.forward(batch, drafter.kv_caches, drafter.backend, metadata, hidden)

    def _forward_batch(self, slots: Int64Array, starts: Int64Array, counts: Int64Array) -> ForwardBatch:
        """A pass over some rows, whose last tokens' results are wanted.

        Args:
            slots: [R].
            starts: [R], first position of each.
            counts: [R], number of positions, 1 or more.
        """
        batch, num_rows, num_tokens = self._batch, len(slots), int(counts.sum())
        block_size, inputs = batch.block_size, self._inputs
        max_seq_len = 0
        if inputs is not None and num_tokens <= len(inputs.input_ids):
            max_seq_len = inputs.gather_several(slots, starts, counts, self.input_shift)
        if inputs is not None and max_seq_len > 0:
            input_ids, positions = inputs.input_ids[:num_tokens], inputs.positions[:num_tokens]
            slot_mapping, outputs = inputs.slot_mapping[:num_tokens], inputs.last_tokens[:num_rows]
            query_start, seq_lens = inputs.query_start[: num_rows + 1], inputs.seq_lens[:num_rows]
            block_table = inputs.block_table[:num_rows, : math.ceil(max_seq_len / block_size)]
        else:
            positions, token_slots = ragged_arange(starts, counts), np.repeat(slots, counts)
            input_ids = batch.token_ids[token_slots, positions + self.input_shift].astype(np.int64)
            query_start = np.zeros(num_rows + 1, np.int32)
            counts.cumsum(out=query_start[1:])
            seq_lens = (starts + counts).astype(np.int32)
            max_seq_len = int(seq_lens.max())
            blocks = batch.block_table[token_slots, positions // block_size].astype(np.int64)
            slot_mapping = blocks * block_size + positions % block_size
            block_table = batch.block_table[slots, : math.ceil(max_seq_len / block_size)]
            outputs = query_start[1:].astype(np.int64) - 1
        if self._last_id is not None:
            np.minimum(input_ids, self._last_id, out=input_ids)
        arrays = (input_ids, positions, slot_mapping, query_start, seq_lens, block_table, outputs)
        tables = upload_all(arrays, self._drafter.device)
        ids, on_device, mapping, starts_on_device, lens_on_device, blocks_on_device, indices = tables
        return ForwardBatch(
            input_ids=ids,
            positions=on_device,
            slot_mapping=mapping,
            query_start=starts_on_device,
            seq_lens=lens_on_device,
            block_table=blocks_on_device,
            logits_indices=indices,
            query_start_np=query_start,
            seq_lens_np=seq_lens,
            max_query_len=int(counts.max()),
            max_seq_len=max_seq_len,
            output_indices=indices if num_rows < num_tokens else None,
        )


# makes a proposer of a draft model: (drafter, batch, sampler) → proposer
ProposerMaker = Callable[[Drafter, InputBatch, Sampler], ChainProposer]


class DraftingModel:
    """A `ProposerFactory`: a loaded draft model.

    Args:
        config: of the engine.
        model: the draft model, with its weights.
        context: in which it was built.
        max_model_len: longest sequence of the draft model, in tokens.
        maker: of the proposers.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: CausalLM,
        context: BuildContext,
        max_model_len: int,
        maker: ProposerMaker,
    ) -> None:
        self.attention_layers: Sequence[Attention] = model.attention_layers
        self._config = config
        self._model = model
        self._context = context
        self._max_model_len = max_model_len
        self._maker = maker

    def make(
        self, batch: InputBatch, sampler: Sampler, kv_caches: Sequence[LayerCache], backend: AttentionBackend
    ) -> ChainProposer:
        """As `ProposerFactory.make`."""
        drafter = Drafter.make(self._config, self._model, self._context, backend, kv_caches, self._max_model_len)
        return self._maker(drafter, batch, sampler)
