"""An executor whose model is a hash: a token follows from the seed and all tokens before it.

It knows rows only from the diffs of SchedulerOutput, and has a paged "KV cache" of token ids that it reads through
its own block tables, and a second one for swapped blocks. Mistakes with slots, blocks, copies, diffs or recomputation
change tokens, or raise.

With async_scheduling, and with pipeline stages, a step is computed as late as possible, when its result is awaited;
the first stage computes it at once.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from ascend_vllm.config.cache import CacheConfig
from ascend_vllm.config.engine import DeviceConfig, EngineConfig, ObservabilityConfig, ParallelConfig
from ascend_vllm.config.model import LoadConfig, ModelConfig
from ascend_vllm.config.scheduler import SchedulerConfig
from ascend_vllm.config.speculation import SpeculativeConfig, SpeculativeMethod
from ascend_vllm.core.engine_core import EngineCore
from ascend_vllm.core.structured.manager import StructuredOutputManager
from ascend_vllm.executor.base import Executor
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.messages import BeamSequence, EngineCoreRequest, FinishReason
from ascend_vllm.types.step import (
    NO_DRAFT,
    NO_TOKEN,
    PADDING_TOKEN,
    REJECTED_TOKEN,
    KVCacheSize,
    MoveKind,
    NewRow,
    PromptLogprobs,
    SchedulerOutput,
    StepLogprobs,
    StepOutput,
)
from tests.core.first_stage import FirstStage
from tests.plain_arch import make_arch

VOCAB_SIZE = 40
EOS = 0


def next_token(seed: int, token_ids: list[int]) -> int:
    """The token that the "model" samples after a sequence."""
    data = struct.pack(f"<Q{len(token_ids)}H", seed, *token_ids)
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "little") % VOCAB_SIZE


def next_allowed_token(seed: int, token_ids: list[int], allowed: Sequence[int]) -> int:
    """The token that it samples of the allowed ones, in ascending order; NO_TOKEN if there are none."""
    data = struct.pack(f"<Q{len(token_ids)}H", seed, *token_ids)
    digest = hashlib.blake2b(data, digest_size=4).digest()
    return allowed[int.from_bytes(digest, "little") % len(allowed)] if allowed else NO_TOKEN


def next_logprobs(seed: int, token_ids: list[int]) -> list[float]:
    """Log-probabilities of all tokens after a sequence, in which beams are searched. No two are equal."""
    data = struct.pack(f"<Q{len(token_ids)}H", seed, *token_ids)
    digest = hashlib.blake2b(data, digest_size=VOCAB_SIZE).digest()
    logits = [byte / 64 + token / 1000 for token, byte in enumerate(digest)]
    total = math.log(sum(map(math.exp, logits)))
    return [logit - total for logit in logits]


def most_likely(seed: int, token_ids: list[int], count: int) -> tuple[list[int], list[float]]:
    """The most likely tokens after a sequence, best first, in float32 as the workers give them."""
    logprobs = next_logprobs(seed, token_ids)
    best = sorted(range(VOCAB_SIZE), key=lambda token: -logprobs[token])[:count]
    return best, np.array([logprobs[token] for token in best], np.float32).tolist()


def generate_alone(
    request: EngineCoreRequest, seed: int, max_num_computed: int
) -> tuple[list[int], FinishReason, int | None]:
    """Output, finish reason and stop reason of a request, computed without an engine.

    Args:
        request: what to generate.
        seed: key of its random stream.
        max_num_computed: most tokens whose KV a sequence can have.
    """
    params = request.sampling_params
    tokens = list(request.prompt_token_ids)
    output: list[int] = []
    while True:
        token = next_token(seed, tokens)
        tokens.append(token)
        output.append(token)
        if len(output) >= params.min_tokens:
            if token == request.eos_token_id and not params.ignore_eos:
                return output, FinishReason.STOP, None
            if token in (params.stop_token_ids or []):
                return output, FinishReason.STOP, token
        if len(tokens) > max_num_computed or len(output) == params.max_tokens:
            return output, FinishReason.LENGTH, None


@dataclasses.dataclass
class Slot:
    """A row as the worker knows it."""

    request_id: str
    token_ids: list[int]
    num_computed_tokens: int
    block_ids: list[int]
    seed: int
    params: SamplingParams
    stop_token_ids: list[int]
    num_prompt_tokens: int
    max_num_tokens: int

    @property
    def has_ended(self) -> bool:
        """Whether the row's last token ends it, as far as a worker knows."""
        num_tokens = len(self.token_ids)
        can_stop = num_tokens >= self.num_prompt_tokens + self.params.min_tokens
        return num_tokens >= self.max_num_tokens or (can_stop and self.token_ids[-1] in self.stop_token_ids)

    @property
    def is_wasted(self) -> bool:
        """Whether an earlier step ended the row, so that its further tokens are dropped."""
        return len(self.token_ids) > self.num_prompt_tokens and self.has_ended


class _LateFuture(Future[StepOutput]):
    """A step that is computed when its result is awaited."""

    def __init__(self, executor: MemoryExecutor) -> None:
        super().__init__()
        self._executor = executor

    def result(self, timeout: float | None = None) -> StepOutput:
        self._executor.compute_until(self)
        return super().result(timeout)


class MemoryExecutor(Executor):
    """See the module.

    Attributes:
        steps: all that it was given.
        texts: prompts and answers that do not follow from the hash alone, by request.
    """

    def __init__(self, config: EngineConfig, num_blocks: int, num_cpu_blocks: int = 0) -> None:
        super().__init__(config)
        self.num_blocks = num_blocks
        self.num_cpu_blocks = num_cpu_blocks
        self.block_size = config.cache.block_size
        self.slots: dict[int, Slot] = {}
        self.cache = np.full((num_blocks, self.block_size), -1, np.int64)
        self.cpu_cache = np.full((num_cpu_blocks, self.block_size), -1, np.int64)
        self.moves: collections.Counter[MoveKind] = collections.Counter()
        self.late: collections.deque[tuple[SchedulerOutput, Future[StepOutput]]] = collections.deque()
        self.steps: list[SchedulerOutput] = []
        self.texts: dict[str, list[int]] = {}
        self.first_stage = FirstStage() if config.parallel.pipeline_parallel_size > 1 else None
        # slots of the step's rows that had ended, which the core did not know when it made the step
        self.wasted: set[int] = set()
        # slots of the step's constrained rows → allowed tokens, and those behind each draft
        self.allowed: dict[int, list[list[int]]] = {}
        self.fail_next: Exception | None = None
        self.is_shut_down = False
        # of collective_rpc
        self.calls: list[tuple[Any, ...]] = []

    def initialize(self) -> KVCacheSize:
        return KVCacheSize(self.num_blocks, self.num_cpu_blocks)

    def execute_model(self, step: SchedulerOutput) -> Future[StepOutput]:
        if self.first_stage is not None:
            self.first_stage.take(step)
        if self.config.scheduler.async_scheduling or self.first_stage is not None:
            late = _LateFuture(self)
            self.late.append((step, late))
            return late
        future: Future[StepOutput] = Future()
        self._fulfil(step, future)
        return future

    def compute_until(self, future: Future[StepOutput]) -> None:
        """Computes the steps up to a future's own."""
        while not future.done():
            self._fulfil(*self.late.popleft())

    def _fulfil(self, step: SchedulerOutput, future: Future[StepOutput]) -> None:
        if self.fail_next is not None:
            future.set_exception(self.fail_next)
        else:
            future.set_result(self._run(step))

    def check_health(self) -> None:
        pass

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,  # noqa: ARG002 - the interface's
        timeout: float | None = None,  # noqa: ARG002
    ) -> list[Any]:
        assert not self.late, "a step is under way"
        self.calls.append((method, *args))
        if method == "sleep":
            self.cache[:], self.cpu_cache[:] = -1, -1
        return [None]

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _run(self, step: SchedulerOutput) -> StepOutput:
        assert step.step_id == len(self.steps)
        self.steps.append(step)
        scheduler = self.config.scheduler
        assert len(set(step.slots)) == len(step.slots) == len(step.num_scheduled_tokens)
        assert sum(step.num_scheduled_tokens) <= scheduler.max_num_batched_tokens
        assert step.num_steps in (1, scheduler.num_scheduler_steps)
        self._apply(step)
        self.allowed = _allowed_tokens(step)
        assert not step.max_drafts or self.config.speculation is not None
        self.wasted = {slot for slot in step.slots if self.slots[slot].is_wasted}
        sampled = []
        scored = []
        drafts = dict(step.drafts)
        for slot, token_ids in step.drafts:
            row = self.slots[slot]
            assert len(row.token_ids) == row.num_computed_tokens + 1, "a row with drafts misses one token"
            row.token_ids += token_ids
        for slot, count in zip(step.slots, step.num_scheduled_tokens, strict=True):
            first = self.slots[slot].num_computed_tokens + 1
            if self._compute(self.slots[slot], count):
                sampled.append(slot)
            if self.slots[slot].params.prompt_logprobs is not None:
                scored += _prompt_logprobs(slot, self.slots[slot], first, first + count)
        if self.first_stage is not None:
            inputs = {slot: self.slots[slot].token_ids[: self.slots[slot].num_computed_tokens] for slot in step.slots}
            assert self.first_stage.inputs.popleft() == inputs, "stages compute different tokens"
        params = {slot: self.slots[slot].params.structured_outputs for slot in sampled}
        masked = {slot for slot, one in params.items() if one is not None}
        # others need no mask once their reasoning is over
        constrained = {slot for slot, one in params.items() if one is not None and one.constraints()}
        assert constrained <= set(self.allowed) <= masked, (
            "a constrained row samples without a mask, or a free one with"
        )
        assert step.num_steps == 1 or not constrained
        if drafts:
            assert step.num_steps == 1
            output = self._output_of_drafts(step.step_id, sampled, drafts)
            return self._finish(output, step, scored)
        columns = [self._sample(sampled, [True] * len(sampled))]
        for _ in range(step.num_steps - 1):
            assert sampled == step.slots
            assert set(step.num_scheduled_tokens) == {1}
            active = [not self.slots[slot].has_ended for slot in sampled]
            for slot, is_active in zip(sampled, active, strict=True):
                if is_active:
                    assert self._compute(self.slots[slot], 1)
            columns.append(self._sample(sampled, active))
        return self._finish(self._output(step.step_id, sampled, columns), step, scored)

    def _finish(self, output: StepOutput, step: SchedulerOutput, scored: list[PromptLogprobs]) -> StepOutput:
        output.prompt_logprobs = scored
        if step.max_drafts and len(output.slots):
            output.drafts = self._propose(output.slots.tolist(), step.max_drafts)
        return output

    def _propose(self, slot_ids: list[int], most: int) -> np.ndarray:
        """Drafts, some of them wrong, of rows some of which have fewer or none."""
        drafts = np.full((len(slot_ids), most), NO_DRAFT, np.int32)
        for line, slot_id in zip(drafts, slot_ids, strict=True):
            row = self.slots[slot_id]
            token_ids = list(row.token_ids)
            for place in range(len(token_ids) % (most + 1)):
                known = self.texts.get(row.request_id, [])[len(token_ids) :]
                right = known[0] if known else next_token(row.seed, token_ids)
                line[place] = right if len(token_ids) % 5 else (right + 1) % VOCAB_SIZE
                token_ids.append(int(line[place]))
        return drafts

    def _apply(self, step: SchedulerOutput) -> None:
        for slot in step.freed_slots:
            self.slots.pop(slot)
        for kind, source, target in step.block_moves:
            self.moves[MoveKind(kind)] += 1
            if kind == MoveKind.COPY:
                self.cache[target] = self.cache[source]
            elif kind == MoveKind.SWAP_OUT:
                self.cpu_cache[target] = self.cache[source]
            else:
                self.cache[target] = self.cpu_cache[source]
        for row in step.new_rows:
            self._enter(row, self.config.scheduler.max_num_seqs)
        self._fork(step.forks)
        for slot, block_ids in step.new_blocks:
            self.slots[slot].block_ids += block_ids
        for slot, index, block_id in step.replaced_blocks:
            self.slots[slot].block_ids[index] = block_id

    def _fork(self, forks: list[tuple[int, int, int]]) -> None:
        assert {source for _, source, _ in forks} <= {slot for slot, source, _ in forks if slot == source}
        sources = {source: self.slots[source] for _, source, _ in forks}
        for slot, source, token_id in forks:
            assert slot == source or slot not in self.slots, "a fork takes a slot that was not freed"
            row = sources[source]
            self.slots[slot] = dataclasses.replace(
                row,
                token_ids=[*row.token_ids[: row.num_computed_tokens], token_id],
                block_ids=row.block_ids.copy(),
            )

    def _enter(self, row: NewRow, max_num_seqs: int) -> None:
        assert 0 <= row.slot < max_num_seqs
        assert row.slot not in self.slots, "a slot is taken that was not freed"
        self.slots[row.slot] = Slot(
            row.request_id,
            list(row.token_ids),
            row.num_computed_tokens,
            list(row.block_ids),
            row.seed,
            row.sampling_params,
            row.stop_token_ids,
            row.num_prompt_tokens,
            row.max_num_tokens,
        )

    def _compute(self, slot: Slot, count: int) -> bool:
        """Stores a row's next tokens; returns whether these include its last one."""
        assert count > 0
        end = slot.num_computed_tokens + count
        assert end <= len(slot.token_ids), "more tokens are to be computed than are known"
        for position in range(slot.num_computed_tokens, end):
            block, offset = divmod(position, self.block_size)
            self.cache[slot.block_ids[block], offset] = slot.token_ids[position]
        slot.num_computed_tokens = end
        return end == len(slot.token_ids)

    def _sample(self, slot_ids: list[int], active: list[bool]) -> list[int]:
        """A token for each active row, 0 for the others."""
        tokens = []
        for slot_id, is_active in zip(slot_ids, active, strict=True):
            slot = self.slots[slot_id]
            if is_active:
                if slot_id not in self.wasted:
                    self._check_cache(slot)
                token = self._next_token(slot_id, 0)
                slot.token_ids.append(max(token, 0))
            tokens.append(token if is_active else 0)
        return tokens

    def _next_token(self, slot_id: int, place: int) -> int:
        """What a row samples behind so many drafts."""
        slot = self.slots[slot_id]
        if slot_id in self.allowed:
            return next_allowed_token(slot.seed, slot.token_ids, self.allowed[slot_id][place])
        return next_token(slot.seed, slot.token_ids)

    def _check_cache(self, slot: Slot, num_drafts: int = 0) -> None:
        """Checks that a row's blocks have all tokens that its last one and its drafts attend to."""
        count = slot.num_computed_tokens
        start = max(0, count - num_drafts - (self.config.cache.sliding_window or count))
        cached = self.cache[slot.block_ids].reshape(-1)[start:count].tolist()
        assert cached == slot.token_ids[start:], f"{slot.request_id}'s blocks hold other tokens"

    def _output_of_drafts(self, step_id: int, slot_ids: list[int], drafts: dict[int, list[int]]) -> StepOutput:
        """The output of a step in which rows have drafts."""
        num_columns = 1 + max(map(len, drafts.values()))
        table = np.full((len(slot_ids), num_columns), PADDING_TOKEN, np.int64)
        for line, slot_id in zip(table, slot_ids, strict=True):
            row, guesses = self.slots[slot_id], drafts.get(slot_id, [])
            if slot_id not in self.wasted:
                self._check_cache(row, len(guesses))
            assert 0 <= min(guesses, default=0) <= max(guesses, default=0) < VOCAB_SIZE
            del row.token_ids[len(row.token_ids) - len(guesses) :]
            line[: len(guesses) + 1] = REJECTED_TOKEN
            for place in range(len(guesses) + 1):
                line[place] = self._next_token(slot_id, place)
                row.token_ids.append(max(int(line[place]), 0))
                if guesses[place : place + 1] != [line[place]]:
                    break
            row.num_computed_tokens = len(row.token_ids) - 1
        asked = [self.slots[slot].params.logprobs for slot in slot_ids]
        width = max((num for num in asked if num is not None), default=-1)
        logprobs = None
        if width >= 0:
            logprobs = _logprobs(table, min(width, VOCAB_SIZE))
            self._add_candidates(logprobs, slot_ids)
        return StepOutput(step_id, np.array(slot_ids, np.int32), table, logprobs)

    def _output(self, step_id: int, slot_ids: list[int], columns: list[list[int]]) -> StepOutput:
        sampled = np.array(columns, np.int64).T.reshape(len(slot_ids), len(columns))
        asked = [self.slots[slot].params.logprobs for slot in slot_ids]
        width = max((num for num in asked if num is not None), default=-1)
        logprobs = None
        if width >= 0:
            logprobs = _logprobs(sampled, min(width, VOCAB_SIZE))
            self._add_candidates(logprobs, slot_ids)
        return StepOutput(step_id, np.array(slot_ids, np.int32), sampled, logprobs)

    def _add_candidates(self, logprobs: StepLogprobs, slot_ids: list[int]) -> None:
        """Sets the candidates of beam searches' rows, which have "#" in their ids."""
        for index, slot_id in enumerate(slot_ids):
            slot = self.slots[slot_id]
            if "#" in slot.request_id:
                count = logprobs.token_ids.shape[-1] - 1
                best = most_likely(slot.seed, slot.token_ids[: slot.num_computed_tokens], count)
                logprobs.token_ids[index, 0, 1:], logprobs.logprobs[index, 0, 1:] = best


def _allowed_tokens(step: SchedulerOutput) -> dict[int, list[list[int]]]:
    """Slot → tokens that the bitmasks of a step's constrained rows allow, next and behind each draft."""
    if step.bitmask is None:
        assert step.constrained_slots == []
        return {}
    assert step.bitmask.shape == (len(step.constrained_slots), -(-VOCAB_SIZE // 32))
    bits = np.unpackbits(step.bitmask.view(np.uint8), axis=1, bitorder="little")
    assert not bits[:, VOCAB_SIZE:].any()
    allowed: dict[int, list[list[int]]] = {}
    for slot, row in zip(step.constrained_slots, bits, strict=True):
        allowed.setdefault(slot, []).append(np.flatnonzero(row).tolist())
    drafts = dict(step.drafts)
    assert all(len(masks) == 1 + len(drafts.get(slot, [])) for slot, masks in allowed.items())
    return allowed


def _logprobs(sampled: np.ndarray, width: int) -> StepLogprobs:
    """[S, N] sampled tokens with −(their ids), then tokens 0 … width-1 with −(place)."""
    top = np.broadcast_to(np.arange(width), (*sampled.shape, width))
    return StepLogprobs(
        token_ids=np.concatenate([sampled[..., None], top], axis=-1).astype(np.int32),
        logprobs=np.concatenate([-sampled[..., None], -top], axis=-1).astype(np.float32),
        ranks=sampled.astype(np.int32) + 1,
    )


def make_config(
    *,
    block_size: int = 4,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 64,
    chunked: bool = False,
    seed: int = 0,
    prefix_caching: bool = False,
    sliding_window: int | None = None,
    num_stages: int = 1,
    enable_sleep_mode: bool = False,
    num_drafts: int = 0,
    looks_ahead: bool = False,
    **scheduler: Any,
) -> EngineConfig:
    """A configuration of the hash model; further settings are SchedulerConfig's.

    With `looks_ahead` blocks are allocated for the drafts after the next ones, as for draft models.
    """
    model = ModelConfig(
        "hash",
        ("hash",),
        "hash",
        "Hash",
        make_arch(),
        {},
        "float32",
        max_model_len,
        seed=seed,
        enable_sleep_mode=enable_sleep_mode,
    )
    draft = model if looks_ahead else None
    speculation = SpeculativeConfig(SpeculativeMethod.NGRAM, num_drafts, draft, max_model_len=max_model_len)
    return EngineConfig(
        model=model,
        load=LoadConfig(),
        cache=CacheConfig(block_size=block_size, enable_prefix_caching=prefix_caching, sliding_window=sliding_window),
        scheduler=SchedulerConfig(max_num_batched_tokens, max_num_seqs, max_model_len, chunked, **scheduler),
        parallel=ParallelConfig(pipeline_parallel_size=num_stages),
        device=DeviceConfig(),
        observability=ObservabilityConfig(),
        speculation=speculation if num_drafts else None,
    )


def _prompt_logprobs(slot_id: int, slot: Slot, start: int, end: int) -> list[PromptLogprobs]:
    """Log-probabilities of the prompt's tokens from `start` to `end` - 1."""
    token_ids = np.array(slot.token_ids[start : min(end, slot.num_prompt_tokens)], np.int32)
    if not token_ids.size:
        return []
    width = 1 + (slot.params.prompt_logprobs or 0)
    columns = np.repeat(token_ids[:, None], width, axis=1)
    return [
        PromptLogprobs(slot_id, start, columns, np.zeros(columns.shape, np.float32), np.ones(len(columns), np.int32))
    ]


def make_core(
    num_blocks: int = 64,
    num_cpu_blocks: int = 0,
    structured: StructuredOutputManager | None = None,
    **settings: Any,
) -> tuple[EngineCore, MemoryExecutor]:
    """An engine core on the hash model; further settings are those of `make_config`."""
    config = make_config(**settings)
    executor = MemoryExecutor(config, num_blocks, num_cpu_blocks)
    return EngineCore(config, executor, structured), executor


def make_request(
    request_id: str,
    prompt: list[int] | int,
    eos: int | None = EOS,
    message: dict[str, Any] | None = None,
    **params: object,
) -> EngineCoreRequest:
    """A request; an integer prompt is a length. By default it ignores EOS and has a seed.

    `message` has further fields of EngineCoreRequest.
    """
    if isinstance(prompt, int):
        prompt = [(7 * i + len(request_id)) % VOCAB_SIZE for i in range(prompt)]
    settings: dict[str, object] = {"max_tokens": 8, "ignore_eos": True, "seed": 1, **params}
    sampling_params = SamplingParams(**settings)  # type: ignore[arg-type]
    return EngineCoreRequest(request_id, prompt, sampling_params, eos, arrival_time=0.0, **(message or {}))


@dataclasses.dataclass
class Collected:
    """All outputs of one request."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
    error_class: str | None = None
    num_cached_tokens: int = 0
    beams: list[BeamSequence] | None = None


def add_all(core: EngineCore, requests: Iterable[EngineCoreRequest]) -> None:
    """Adds requests in their order."""
    for request in requests:
        core.add_request(request)


def step(core: EngineCore, into: dict[str, Collected] | None = None, num_steps: int = 1) -> dict[str, Collected]:
    """Makes steps, adds their outputs to those of their requests, and checks that none follows a last one."""
    into = {} if into is None else into
    for _ in range(num_steps):
        for output in core.step().outputs:
            collected = into.setdefault(output.request_id, Collected())
            assert collected.finish_reason is None, f"{output.request_id} has outputs after its end"
            collected.token_ids += output.new_token_ids
            collected.finish_reason = output.finish_reason
            collected.stop_reason = output.stop_reason
            collected.error = output.error
            collected.error_class = output.error_class
            collected.num_cached_tokens += output.num_cached_tokens
            collected.beams = output.beams or collected.beams
    return into


def step_until(
    core: EngineCore, is_reached: Callable[[], object], into: dict[str, Collected] | None = None
) -> dict[str, Collected]:
    """Makes audited steps until a condition holds, before the last request has ended."""
    into = {} if into is None else into
    while not is_reached():
        assert core.has_unfinished()
        step(core, into)
        assert core.audit()["violations"] == []
    return into


def run(core: EngineCore, into: dict[str, Collected] | None = None, max_steps: int = 10_000) -> dict[str, Collected]:
    """Makes audited steps until nothing is left to do; if no request is held back, everything is free then."""
    into = {} if into is None else into
    for _ in range(max_steps):
        if not core.has_unfinished():
            if not core._scheduler.requests:
                assert_all_free(core)
            return into
        step(core, into)
        assert core.audit()["violations"] == []
    raise AssertionError(f"requests are still running after {max_steps} steps")


def serve(
    core: EngineCore, requests: Sequence[EngineCoreRequest], max_num_computed: int = 64
) -> dict[str, Collected]:
    """Adds requests, runs them to their ends and checks their outputs, see `assert_tokens`."""
    add_all(core, requests)
    results = run(core)
    assert_tokens(results, requests, max_num_computed)
    return results


def scheduled(executor: MemoryExecutor) -> list[dict[str, int]]:
    """For each step: request id → number of tokens; beams count as their search's first row."""
    request_ids: dict[int, str] = {}
    steps = []
    for made in executor.steps:
        for slot in made.freed_slots:
            del request_ids[slot]
        request_ids |= {row.slot: row.request_id for row in made.new_rows}
        request_ids |= {slot: request_ids[source] for slot, source, _ in made.forks}
        tokens: collections.Counter[str] = collections.Counter()
        for slot, count in zip(made.slots, made.num_scheduled_tokens, strict=True):
            tokens[request_ids[slot]] += count
        steps.append(dict(tokens))
    return steps


def entries(executor: MemoryExecutor, request_id: str) -> list[NewRow]:
    """The rows that the workers got for a request, one for each admission."""
    return [row for made in executor.steps for row in made.new_rows if row.request_id == request_id]


def assert_tokens(
    results: dict[str, Collected], requests: Sequence[EngineCoreRequest], max_num_computed: int = 64
) -> None:
    """Checks outputs and ends of requests with seeds against `generate_alone`."""
    for request in requests:
        result = results[request.request_id]
        expected = generate_alone(request, request.sampling_params.seed or 0, max_num_computed)
        assert (result.token_ids, result.finish_reason, result.stop_reason) == expected, request.request_id


def assert_all_free(core: EngineCore) -> None:
    """Checks that every block and every slot is free."""
    audit = core.audit()
    assert audit["violations"] == []
    assert audit["num_free_blocks"] == audit["num_blocks"]
    assert audit["num_free_slots"] == audit["num_slots"]
    assert audit["blocks_by_request"] == {}
    assert audit["num_running"] == audit["num_waiting"] == 0
