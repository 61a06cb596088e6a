"""The sampler's parameters of a step's rows, gathered once for all tokens that are sampled in the step.

Letters: S sampling rows of a step, A rows that requested log-probabilities, E entries of all rows' lists,
P tokens of bad words without the last one of each.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from ascend_vllm.ops.sampling import largest_top_k, philox_uniform
from ascend_vllm.worker.input_batch import InputBatch, upload, upload_all
from ascend_vllm.worker.sampling import columns
from ascend_vllm.worker.sampling.acceptance import LikelyDrafts
from ascend_vllm.worker.sampling.columns import Int64Array
from ascend_vllm.worker.sampling.counts import TokenCounts

Index = tuple[torch.Tensor, torch.Tensor]
Features = npt.NDArray[np.int32]

# a step with drafts has a plan of all its positions, and one of its rows for the next drafts
_MOST_KEPT = 8
_NEED_HISTORY = columns.PENALTIES | columns.BAD_WORDS | columns.PROCESSORS


@dataclasses.dataclass(frozen=True, slots=True)
class History:
    """The rows' tokens, for penalties, bad words and logits processors."""

    # [rows, more than the longest row] int32: tokens of each row; sampled tokens are added
    token_ids: torch.Tensor
    # [S] int64: row of the table
    table_rows: torch.Tensor
    # [S] int32
    prompt_lens: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class BadWords:
    """Sequences that must not be generated, and the P tokens before the last one of each."""

    # [E]: row, and last id, of each sequence
    index: Index
    # [P] int64: the tokens before the last ones
    prefixes: torch.Tensor
    # [P] int64: sequence of each of them, its row, and its distance from the end of the row's tokens
    sequences: torch.Tensor
    rows: torch.Tensor
    distances: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class IdValues:
    """A value for some ids of rows."""

    # [E]: row and id of each entry
    index: Index
    # [E]
    values: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class TokenMasks:
    """Masks of the allowed tokens of some rows."""

    # [G] int64: those rows
    rows: torch.Tensor
    # [G, ceil(V / 32)] int32: bit t % 32 of word t // 32 is token t's
    bitmask: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Draws:
    """Random numbers drawn on the host, and bounds of the filters: arguments of `draw_tokens`."""

    # [N, S] float32: of each token that the rows get in the step
    uniforms: torch.Tensor
    largest_top_k: int
    has_top_p: bool


@dataclasses.dataclass(frozen=True, slots=True)
class FusedStep:
    """Arguments of `edit_and_sample`, which replaces filters, draws, penalties and a mask of the plan."""

    # [M, V] int16, see `TokenCounts`, or a row that none uses
    counts: torch.Tensor
    # [S] int64 each: rows of the table, -1: no penalties; tokens to count
    count_rows: torch.Tensor
    fresh_ids: torch.Tensor
    # [S] float32 each: repetition, frequency, presence
    penalties: list[torch.Tensor]
    # [G, ceil(V / 32)] int32, [S] int64: the mask of each row, -1: none
    bitmask: torch.Tensor
    mask_rows: torch.Tensor
    # [S] each: temperature, top_k, top_p, min_p; int64 seeds
    filters: list[torch.Tensor]
    seeds: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingPlan:
    """Sampling parameters of rows on the device. Fields that no row needs are None."""

    # the union of the rows' features
    needed: int
    # [A] int64, host: rows that requested log-probabilities
    asking: Int64Array
    # the same on the device; None if it is all rows, or none
    asking_index: torch.Tensor | None
    # most likely tokens to report beside the sampled one: the largest number that any row requested
    num_logprobs: int
    # [S] each: temperature, top_k, top_p, min_p
    filters: list[torch.Tensor] | None = None
    # of random rows: [S] int64 seeds if the device shares the host's memory, otherwise draws
    seeds: torch.Tensor | None = None
    draws: Draws | None = None
    allowed: TokenMasks | None = None
    # int64: ids that are forbidden until their row has this number of tokens
    forbidden: IdValues | None = None
    # float32: added to logits
    bias: IdValues | None = None
    # [S] float32 each: repetition, frequency, presence
    penalties: list[torch.Tensor] | None = None
    bad_words: BadWords | None = None
    # rows with logits processors, and the processors
    processors: list[tuple[int, list[columns.LogitsProcessor]]] | None = None
    # set if there are penalties, bad words or processors
    history: History | None = None
    # of one token only
    constraints: TokenMasks | None = None
    # of one token only: drafts that decide by their probability which token a row has
    likely_drafts: LikelyDrafts | None = None
    # set where one op does what it has arguments for; the fields that it replaces are None
    fused: FusedStep | None = None

    @property
    def edits_logits(self) -> bool:
        """Whether logits are modified before sampling."""
        masks = (self.constraints, self.allowed, self.bad_words, self.forbidden)
        return any(part is not None for part in (*masks, self.bias, self.penalties, self.processors))


class Planner:
    """Makes the plans of one worker.

    Args:
        batch: the slots.
        device: of the sampler.
        raw_logprobs: log-probabilities are computed of the raw logits, without sampling parameters.
        host_memory: tensors on the device are in host memory, so that the slots' tokens need no upload.
        fused: plan for `edit_and_sample` where it does what is needed.
    """

    def __init__(
        self, batch: InputBatch, device: torch.device, *, raw_logprobs: bool, host_memory: bool, fused: bool = False
    ) -> None:
        self._batch = batch
        self._params = batch.sampling
        self._device = device
        self._raw_logprobs = raw_logprobs
        self._host_memory = host_memory
        self._counts = TokenCounts(batch, device) if fused else None
        # [M, L+1] int32
        self._all_token_ids = torch.from_numpy(batch.token_ids) if host_memory else None
        # by slots: plans that any step of these rows can use, and the version of the parameters that they are of
        self._kept: dict[bytes, SamplingPlan] = {}
        self._kept_version = -1

    def make(self, slots: Int64Array, num_steps: int = 1, num_tokens: Int64Array | None = None) -> SamplingPlan:
        """Makes the plan of rows for all tokens that they sample in a step.

        Args:
            slots: [S]; a slot that samples at several positions is repeated.
            num_steps: maximum tokens that a row samples.
            num_tokens: [S] tokens before the position at which each samples, drafts included; None: all tokens.
        """
        version, key = self._params.version, slots.tobytes()
        if version != self._kept_version or len(self._kept) > _MOST_KEPT:
            self._kept.clear()
            self._kept_version = version
        if (kept := self._kept.get(key)) is not None:
            return kept
        plan = self._make(slots, num_steps, self._batch.num_tokens[slots] if num_tokens is None else num_tokens)
        # of a device with memory of its own, draws and histories are the step's
        depends_on_step = not self._host_memory or plan.needed & columns.MIN_TOKENS or plan.fused is not None
        if not depends_on_step:
            self._kept[key] = plan
        return plan

    def _make(self, slots: Int64Array, num_steps: int, num_tokens: Int64Array) -> SamplingPlan:
        params, device = self._params, self._device
        features = params.features[slots]
        needed = int(np.bitwise_or.reduce(features))
        asking = np.flatnonzero(features & columns.LOGPROBS)
        asking_index = upload(asking, device) if 0 < len(asking) < len(slots) else None
        num_logprobs = int(params.num_logprobs[slots].max())
        if needed == 0:
            return SamplingPlan(needed, asking, asking_index, num_logprobs)
        scores_filtered = len(asking) > 0 and not self._raw_logprobs
        fused = None if scores_filtered else self._fused(slots, features, num_tokens, num_steps)
        # what is left for other ops
        needed_here = (
            needed if fused is None else needed & ~(columns.RANDOM | columns.PENALTIES | columns.ALLOWED_IDS)
        )
        random = bool(needed_here & columns.RANDOM)
        return SamplingPlan(
            needed,
            asking,
            asking_index,
            num_logprobs,
            filters=self._filters(slots) if random or scores_filtered else None,
            seeds=upload(params.seed[slots], device) if random and self._host_memory else None,
            draws=self._draws(slots, num_tokens, num_steps) if random and not self._host_memory else None,
            allowed=self._allowed(slots, features) if needed_here & columns.ALLOWED_IDS else None,
            forbidden=self._forbidden(slots, num_tokens, features) if needed & columns.MIN_TOKENS else None,
            bias=self._bias(slots) if needed & columns.LOGIT_BIAS else None,
            penalties=self._penalties(slots) if needed_here & columns.PENALTIES else None,
            bad_words=self._bad_words(slots, features) if needed & columns.BAD_WORDS else None,
            processors=self._processors(slots, features) if needed & columns.PROCESSORS else None,
            history=self._history(slots, num_tokens, num_steps) if needed_here & _NEED_HISTORY else None,
            fused=fused,
        )

    def constrain(self, plan: SamplingPlan, rows: Int64Array, bitmask: npt.NDArray[np.int32]) -> SamplingPlan:
        """Adds masks for some rows to a plan for one token.

        Args:
            plan: of S rows.
            rows: [G], each below S.
            bitmask: [G, ceil(V / 32)].
        """
        needed, fused = plan.needed | columns.CONSTRAINED, plan.fused
        if fused is not None and not plan.needed & columns.ALLOWED_IDS:
            masks, mask_rows = self._masks(rows, bitmask, len(fused.seeds))
            return dataclasses.replace(
                plan, needed=needed, fused=dataclasses.replace(fused, bitmask=masks, mask_rows=mask_rows)
            )
        constraints = TokenMasks(upload(rows, self._device), upload(bitmask, self._device))
        return dataclasses.replace(plan, needed=needed, constraints=constraints)

    def _fused(
        self, slots: Int64Array, features: Features, num_tokens: Int64Array, num_steps: int
    ) -> FusedStep | None:
        """None where the op is not used."""
        if self._counts is None:
            return None
        params = self._params
        penalised = np.flatnonzero(features & columns.PENALTIES)
        counts, count_rows, fresh_ids = self._counts.unused, np.full(len(slots), -1), np.full(len(slots), -1)
        rows = slots[penalised]
        if len(np.unique(rows)) < len(rows):
            # each position of a row with drafts has counts of its own
            counts = self._counts.at_positions(rows, num_tokens[penalised])
            count_rows[penalised] = np.arange(len(rows))
        elif len(rows):
            counts, fresh_ids[penalised] = self._counts.bring_up(rows, num_tokens[penalised], num_steps)
            count_rows[penalised] = rows
        allowed = np.flatnonzero(features & columns.ALLOWED_IDS)
        bitmask, mask_rows = self._masks(allowed, params.allowed_ids[slots[allowed]], len(slots))
        on_device = upload_all((count_rows, fresh_ids, params.seed[slots]), self._device)
        return FusedStep(
            counts=counts,
            count_rows=on_device[0],
            fresh_ids=on_device[1],
            penalties=self._penalties(slots),
            bitmask=bitmask,
            mask_rows=mask_rows,
            filters=self._filters(slots),
            seeds=on_device[2],
        )

    def _masks(
        self, rows: Int64Array, bitmask: npt.NDArray[np.int32], num_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`FusedStep.bitmask` and `mask_rows` of masks, [G, ceil(V / 32)], for rows, [G]."""
        mask_rows = np.full(num_rows, -1)
        mask_rows[rows] = np.arange(len(rows))
        if len(rows) == 0:
            bitmask = np.zeros((1, self._params.allowed_ids.shape[1]), np.int32)
        uploaded = upload_all((bitmask, mask_rows), self._device)
        return uploaded[0], uploaded[1]

    def _filters(self, slots: Int64Array) -> list[torch.Tensor]:
        params = self._params
        parameters = (params.temperature, params.top_k, params.top_p, params.min_p)
        return upload_all([column[slots] for column in parameters], self._device)

    def _draws(self, slots: Int64Array, num_tokens: Int64Array, num_steps: int) -> Draws:
        """Random numbers. They depend only on seeds and positions, so that they are computed on the host."""
        params = self._params
        places = num_tokens + np.arange(num_steps)[:, None]
        seeds = np.tile(params.seed[slots], num_steps)
        numbers: torch.Tensor = philox_uniform(torch.from_numpy(seeds), torch.from_numpy(places.ravel()))
        # rounded down to float32, since rounding up may give 1
        uniforms = ((numbers * 2**24).floor() * 2.0**-24).float().view(places.shape)
        return Draws(
            upload(uniforms.numpy(), self._device),
            largest_top_k(params.top_k[slots], params.vocab_size),
            bool((params.top_p[slots] < 1).any()),
        )

    def _allowed(self, slots: Int64Array, features: Features) -> TokenMasks:
        rows = np.flatnonzero(features & columns.ALLOWED_IDS)
        return TokenMasks(*upload_all((rows, self._params.allowed_ids[slots[rows]]), self._device))

    def _forbidden(self, slots: Int64Array, num_tokens: Int64Array, features: Features) -> IdValues | None:
        rows = np.flatnonzero(features & columns.MIN_TOKENS)
        below = self._batch.prompt_lens[slots[rows]] + self._params.min_tokens[slots[rows]]
        too_short = num_tokens[rows] < below
        rows, below = rows[too_short], below[too_short]
        if len(rows) == 0:
            return None
        index, ids, _ = self._params.stop_ids.gather(slots[rows])
        return IdValues(self._index(rows[index], ids), upload(below[index], self._device))

    def _bias(self, slots: Int64Array) -> IdValues:
        rows, ids, values = self._params.logit_bias.gather(slots)
        return IdValues(self._index(rows, ids), upload(values, self._device))

    def _penalties(self, slots: Int64Array) -> list[torch.Tensor]:
        params = self._params
        factors = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        return upload_all([column[slots] for column in factors], self._device)

    def _bad_words(self, slots: Int64Array, features: Features) -> BadWords:
        rows = np.flatnonzero(features & columns.BAD_WORDS)
        # a loop over rows with bad words, since their tables have different sizes
        tables = [self._params.bad_words[slot] for slot in slots[rows].tolist()]
        counts = np.concatenate([table.counts for table in tables])
        index = np.repeat(rows, [len(table.last) for table in tables])
        sequences = np.repeat(np.arange(len(counts)), counts)
        parts = (
            np.concatenate([table.prefixes for table in tables]),
            sequences,
            index[sequences],
            np.concatenate([table.distances for table in tables]),
        )
        last = np.concatenate([table.last for table in tables])
        return BadWords(self._index(index, last), *upload_all(parts, self._device))

    def _processors(self, slots: Int64Array, features: Features) -> list[tuple[int, list[columns.LogitsProcessor]]]:
        # a loop over rows with processors, which are Python functions
        rows = np.flatnonzero(features & columns.PROCESSORS).tolist()
        return [(row, self._params.processors[int(slots[row])]) for row in rows]

    def _history(self, slots: Int64Array, num_tokens: Int64Array, num_steps: int) -> History:
        batch, device = self._batch, self._device
        if self._all_token_ids is not None:
            token_ids, table_rows = self._all_token_ids, upload(slots, device)
        else:
            width = int(num_tokens.max()) + num_steps
            token_ids = upload(batch.token_ids[slots, :width], device)
            table_rows = torch.arange(len(slots), device=device)
        return History(token_ids, table_rows, upload(batch.prompt_lens[slots].astype(np.int32), device))

    def _index(self, rows: Int64Array, ids: Int64Array) -> Index:
        on_device = upload_all((rows, ids), self._device)
        return on_device[0], on_device[1]
