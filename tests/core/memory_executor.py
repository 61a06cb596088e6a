"""An executor whose model is a hash: a token follows from the seed and all tokens before it.

It knows rows only from the diffs of SchedulerOutput, and keeps a paged "KV cache" of token ids that it reads
back through its own block tables. Whatever goes wrong with slots, blocks, diffs or recomputation changes
tokens, or raises.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from concurrent.futures import Future

import numpy as np

from ascend_vllm.config.cache import CacheConfig
from ascend_vllm.config.engine import DeviceConfig, EngineConfig, ObservabilityConfig, ParallelConfig
from ascend_vllm.config.model import LoadConfig, ModelConfig
from ascend_vllm.config.scheduler import SchedulerConfig
from ascend_vllm.core.engine_core import EngineCore
from ascend_vllm.executor.base import Executor
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.messages import EngineCoreRequest, FinishReason
from ascend_vllm.types.step import KVCacheSize, NewRow, SchedulerOutput, StepLogprobs, StepOutput

VOCAB_SIZE = 40
EOS = 0


def next_token(seed: int, token_ids: list[int]) -> int:
    """What the "model" samples after a sequence."""
    data = struct.pack(f"<Q{len(token_ids)}H", seed, *token_ids)
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "little") % VOCAB_SIZE


def generate_alone(
    request: EngineCoreRequest, seed: int, max_num_computed: int
) -> tuple[list[int], FinishReason, int | None]:
    """Output, finish reason and stop reason of a request, worked out without an engine.

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


class MemoryExecutor(Executor):
    """See the module. `steps` holds every step it was given."""

    def __init__(self, config: EngineConfig, num_blocks: int) -> None:
        super().__init__(config)
        self.num_blocks = num_blocks
        self.block_size = config.cache.block_size
        self.slots: dict[int, Slot] = {}
        self.cache = np.full((num_blocks, self.block_size), -1, np.int64)
        self.steps: list[SchedulerOutput] = []
        self.fail_next: Exception | None = None
        self.is_shut_down = False

    def initialize(self) -> KVCacheSize:
        return KVCacheSize(self.num_blocks)

    def execute_model(self, step: SchedulerOutput) -> Future[StepOutput]:
        future: Future[StepOutput] = Future()
        if self.fail_next is not None:
            future.set_exception(self.fail_next)
        else:
            future.set_result(self._run(step))
        return future

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _run(self, step: SchedulerOutput) -> StepOutput:
        assert step.step_id == len(self.steps)
        self.steps.append(step)
        scheduler = self.config.scheduler
        assert len(set(step.slots)) == len(step.slots) == len(step.num_scheduled_tokens) > 0
        assert 0 < step.total_num_scheduled_tokens <= scheduler.max_num_batched_tokens
        for slot in step.freed_slots:
            self.slots.pop(slot)
        for row in step.new_rows:
            self._enter(row, scheduler.max_num_seqs)
        for slot, block_ids in step.new_blocks:
            assert slot not in {row.slot for row in step.new_rows}
            self.slots[slot].block_ids += block_ids
        sampled = []
        for slot, count in zip(step.slots, step.num_scheduled_tokens, strict=True):
            if self._compute(self.slots[slot], count):
                sampled.append(slot)
        return self._sample(step.step_id, sampled)

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
        )

    def _compute(self, slot: Slot, count: int) -> bool:
        """Stores a row's next tokens; whether it reaches its last."""
        assert count > 0
        end = slot.num_computed_tokens + count
        assert end <= len(slot.token_ids), "more tokens are to be computed than are known"
        for position in range(slot.num_computed_tokens, end):
            block, offset = divmod(position, self.block_size)
            self.cache[slot.block_ids[block], offset] = slot.token_ids[position]
        slot.num_computed_tokens = end
        return end == len(slot.token_ids)

    def _sample(self, step_id: int, slot_ids: list[int]) -> StepOutput:
        tokens = []
        for slot_id in slot_ids:
            slot = self.slots[slot_id]
            cached = self.cache[slot.block_ids].reshape(-1)[: slot.num_computed_tokens].tolist()
            assert cached == slot.token_ids, f"{slot.request_id}'s blocks hold other tokens than its own"
            tokens.append(next_token(slot.seed, cached))
            slot.token_ids.append(tokens[-1])
        asked = [self.slots[slot].params.logprobs for slot in slot_ids]
        width = max((num for num in asked if num is not None), default=-1)
        return StepOutput(
            step_id=step_id,
            slots=np.array(slot_ids, np.int32),
            sampled_token_ids=np.array(tokens, np.int64).reshape(-1, 1),
            logprobs=None if width < 0 else _logprobs(tokens, width),
        )


def _logprobs(tokens: list[int], width: int) -> StepLogprobs:
    """The sampled token with −(its id), then tokens 0 … width-1 with −(place)."""
    count = len(tokens)
    top = np.broadcast_to(np.arange(width), (count, width))
    sampled = np.array(tokens).reshape(-1, 1)
    return StepLogprobs(
        token_ids=np.concatenate([sampled, top], axis=1).astype(np.int32)[:, None],
        logprobs=np.concatenate([-sampled, -top], axis=1).astype(np.float32)[:, None],
        ranks=(np.array(tokens, np.int32) + 1)[:, None],
    )


def make_config(
    *,
    block_size: int = 4,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 64,
    chunked: bool = False,
    seed: int = 0,
) -> EngineConfig:
    """A configuration of the hash model."""
    return EngineConfig(
        model=ModelConfig("hash", ("hash",), "hash", "Hash", {}, {}, "float32", max_model_len, seed=seed),
        load=LoadConfig(),
        cache=CacheConfig(block_size=block_size),
        scheduler=SchedulerConfig(max_num_batched_tokens, max_num_seqs, max_model_len, chunked),
        parallel=ParallelConfig(),
        device=DeviceConfig(),
        observability=ObservabilityConfig(),
    )


def make_core(num_blocks: int = 64, **settings: int) -> tuple[EngineCore, MemoryExecutor]:
    """An engine core on the hash model; settings are those of `make_config`."""
    config = make_config(**settings)  # type: ignore[arg-type]
    executor = MemoryExecutor(config, num_blocks)
    return EngineCore(config, executor), executor


def make_request(
    request_id: str, prompt: list[int] | int, eos: int | None = EOS, **params: object
) -> EngineCoreRequest:
    """A request; an integer prompt is a length. Unless told otherwise it ignores EOS and brings its own seed."""
    if isinstance(prompt, int):
        prompt = [(7 * i + len(request_id)) % VOCAB_SIZE for i in range(prompt)]
    settings: dict[str, object] = {"max_tokens": 8, "ignore_eos": True, "seed": 1, **params}
    return EngineCoreRequest(request_id, prompt, SamplingParams(**settings), eos, arrival_time=0.0)  # type: ignore[arg-type]


@dataclasses.dataclass
class Collected:
    """All outputs of one request."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None


def step(core: EngineCore, into: dict[str, Collected]) -> None:
    """One step; sorts its outputs by request, and checks that nothing follows an end."""
    for output in core.step().outputs:
        collected = into.setdefault(output.request_id, Collected())
        assert collected.finish_reason is None, f"{output.request_id} has outputs after its end"
        collected.token_ids += output.new_token_ids
        collected.finish_reason = output.finish_reason
        collected.stop_reason = output.stop_reason
        collected.error = output.error


def run(core: EngineCore, max_steps: int = 10_000) -> dict[str, Collected]:
    """Steps until nothing is left, auditing after each."""
    collected: dict[str, Collected] = {}
    for _ in range(max_steps):
        if not core.has_unfinished():
            return collected
        step(core, collected)
        assert core.audit()["violations"] == []
    raise AssertionError(f"requests are still running after {max_steps} steps")


def assert_all_free(core: EngineCore) -> None:
    """Every block and every slot is free."""
    audit = core.audit()
    assert audit["violations"] == []
    assert audit["num_free_blocks"] == audit["num_blocks"]
    assert audit["num_free_slots"] == audit["num_slots"]
    assert audit["blocks_by_request"] == {}
    assert audit["num_running"] == audit["num_waiting"] == 0
