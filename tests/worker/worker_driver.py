"""Drives a real worker with real step diffs, the way the engine core does, but step by step at a test's will."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import transformers

from ascend_vllm.args.hf_files import read_hf_config
from ascend_vllm.config.arch import ArchConfig
from ascend_vllm.config.cache import CacheConfig
from ascend_vllm.config.engine import DeviceConfig, EngineConfig, ObservabilityConfig, ParallelConfig
from ascend_vllm.config.model import LoadConfig, ModelConfig
from ascend_vllm.config.scheduler import SchedulerConfig
from ascend_vllm.core.engine_core import EngineCore, build
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.messages import EngineCoreOutput, EngineCoreRequest
from ascend_vllm.types.step import UNLIMITED, MoveKind, NewRow, SchedulerOutput, StepOutput
from ascend_vllm.worker.worker import Worker

BLOCK_SIZE = 16
NUM_BLOCKS = 256
MAX_MODEL_LEN = 400

GREEDY = SamplingParams(temperature=0.0)
BUSY = SamplingParams(
    temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, repetition_penalty=1.2, logit_bias={7: 1.0}, min_tokens=5
)


def make_config(directory: str, **options: Any) -> EngineConfig:
    """The configuration of an engine for a checkpoint; `options` go to the section that has them."""
    hf_config = read_hf_config(directory)
    model: dict[str, Any] = {
        "model": directory,
        "served_model_names": ("tiny",),
        "tokenizer": directory,
        "architecture": hf_config["architectures"][0],
        "arch": ArchConfig.from_hf(hf_config),
        "generation_config": {},
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
    }
    # a pool of 4 MiB, so that audits of it are quick
    cache: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_gpu_blocks_override": NUM_BLOCKS, "swap_space_gib": 2**-8}
    scheduler: dict[str, Any] = {"max_num_batched_tokens": 512, "max_num_seqs": 16, "max_model_len": MAX_MODEL_LEN}
    device: dict[str, Any] = {"device": "cpu"}
    parallel: dict[str, Any] = {}
    sections = (
        (model, ModelConfig),
        (cache, CacheConfig),
        (scheduler, SchedulerConfig),
        (device, DeviceConfig),
        (parallel, ParallelConfig),
    )
    for name, value in options.items():
        holders = [section for section, struct in sections if name in struct.__struct_fields__]
        assert holders, name
        for section in holders:
            section[name] = value
    return EngineConfig(
        model=ModelConfig(**model),
        load=LoadConfig(use_tqdm=False),
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(**scheduler),
        parallel=ParallelConfig(**parallel),
        device=DeviceConfig(**device),
        observability=ObservabilityConfig(),
    )


@functools.cache
def started_worker(directory: str, **options: Any) -> Worker:
    """A worker with model and cache, one per set of options: rows of earlier tests have left their slots."""
    worker = Worker(make_config(directory, **options))
    worker.load_model()
    worker.initialize_cache(worker.determine_num_blocks())
    return worker


@contextlib.contextmanager
def running_core(directory: str, **options: Any) -> Iterator[EngineCore]:
    """An engine core on a real worker, whose accounts balance in the end."""
    core = build(make_config(directory, **options))
    try:
        yield core
        assert core.audit()["violations"] == []
    finally:
        core.shutdown()


def outputs_of(core: EngineCore, requests: Iterable[EngineCoreRequest]) -> dict[str, list[EngineCoreOutput]]:
    """Runs requests to their ends; returns the outputs of each."""
    found: dict[str, list[EngineCoreOutput]] = {}
    for request in requests:
        core.add_request(request)
        found[request.request_id] = []
    while core.has_unfinished():
        for output in core.step().outputs:
            found[output.request_id].append(output)
    return found


def token_ids_of(outputs: Iterable[EngineCoreOutput]) -> list[int]:
    """The tokens of a request's outputs."""
    return [token_id for output in outputs for token_id in output.new_token_ids]


@functools.cache
def transformers_model(directory: str) -> Any:
    """The same checkpoint in transformers, float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def transformers_logits(directory: str, token_ids: Sequence[int]) -> torch.Tensor:
    """[len(token_ids), V] float32 logits of one full forward; the caller's own copy."""
    return _logits(directory, tuple(token_ids)).clone()


# tests in several modes ask for the same
@functools.lru_cache(128)
@torch.no_grad()
def _logits(directory: str, token_ids: tuple[int, ...]) -> torch.Tensor:
    logits: torch.Tensor = transformers_model(directory)(torch.tensor([token_ids])).logits[0].float()
    return logits


@dataclasses.dataclass
class Row:
    """What the engine core knows of a row."""

    slot: int
    tokens: list[int]
    num_prompt_tokens: int
    computed: int
    blocks: list[int]
    stop_token_ids: tuple[int, ...] = ()
    min_num_tokens: int = 0
    max_num_tokens: int = UNLIMITED

    @property
    def ended(self) -> bool:
        """Whether its last token is the one that ends it."""
        stopped = len(self.tokens) >= self.min_num_tokens and self.tokens[-1] in self.stop_token_ids
        return stopped or len(self.tokens) >= self.max_num_tokens


class Driver:
    """Keeps rows, gives them blocks, sends the diffs. Leaves the worker's slots free when used as a context."""

    def __init__(self, worker: Worker, num_slots: int = 16) -> None:
        self.worker = worker
        self.block_size = worker._config.cache.block_size
        self.rows: dict[str, Row] = {}
        self.free_slots = list(range(num_slots))
        self.free_blocks = list(range(worker._config.cache.num_gpu_blocks_override or NUM_BLOCKS))
        self.pending = SchedulerOutput(0, [], [], [], [], [])

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.rows):
            self.free(name)
        self.worker.execute_model(self.pending)

    def add(
        self,
        name: str,
        tokens: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        seed: int = 0,
        num_prompt_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
        max_num_tokens: int = UNLIMITED,
        bad_words: Sequence[list[int]] = (),
    ) -> None:
        """A row enters a slot; it has blocks for the tokens it comes with."""
        row = Row(self.free_slots.pop(), list(tokens), num_prompt_tokens or len(tokens), 0, [])
        row.stop_token_ids, row.min_num_tokens = tuple(stop_token_ids), row.num_prompt_tokens + params.min_tokens
        row.max_num_tokens = min(max_num_tokens, MAX_MODEL_LEN + 1)
        self.rows[name] = row
        self.pending.new_rows.append(
            NewRow(
                row.slot,
                name,
                list(tokens),
                row.num_prompt_tokens,
                0,
                self._grow(row, len(tokens)),
                params,
                seed,
                list(stop_token_ids),
                max_num_tokens,
                bad_words=list(bad_words),
            )
        )

    def free(self, name: str) -> Row:
        """A row leaves its slot."""
        row = self.rows.pop(name)
        self.free_slots.append(row.slot)
        self.free_blocks += row.blocks
        self.pending.freed_slots.append(row.slot)
        return row

    def fork(self, name: str, source: str, token: int) -> None:
        """A row becomes a copy of another up to its computed tokens, followed by a token.

        They share full blocks; a block begun is copied for the new row.
        """
        original = self.rows[source]
        tokens = [*original.tokens[: original.computed], token]
        if name == source:
            original.tokens = tokens
            self.pending.forks.append((original.slot, original.slot, token))
            return
        row = Row(self.free_slots.pop(), tokens, original.num_prompt_tokens, original.computed, [*original.blocks])
        self.rows[name] = row
        self.pending.forks.append((row.slot, original.slot, token))
        if row.computed % self.block_size:
            index, copy = row.computed // self.block_size, self.free_blocks.pop()
            self.pending.block_moves.append((MoveKind.COPY, row.blocks[index], copy))
            self.pending.replaced_blocks.append((row.slot, index, copy))
            row.blocks[index] = copy

    def swap_out(self, name: str, cpu_blocks: Sequence[int]) -> Row:
        """A row leaves its slot; its blocks go to the CPU pool."""
        row = self.free(name)
        for source, target in zip(row.blocks, cpu_blocks, strict=True):
            self.pending.block_moves.append((MoveKind.SWAP_OUT, source, target))
        return row

    def swap_in(
        self, name: str, gone: Row, params: SamplingParams, cpu_blocks: Sequence[int], *, seed: int = 0
    ) -> None:
        """A row that was swapped out enters a slot again, with what it had computed."""
        row = Row(self.free_slots.pop(0), gone.tokens, gone.num_prompt_tokens, gone.computed, [])
        self.rows[name] = row
        self._grow(row, len(cpu_blocks) * self.block_size)
        for source, target in zip(cpu_blocks, row.blocks, strict=True):
            self.pending.block_moves.append((MoveKind.SWAP_IN, source, target))
        self.pending.new_rows.append(
            NewRow(
                row.slot,
                name,
                list(row.tokens),
                row.num_prompt_tokens,
                row.computed,
                list(row.blocks),
                params,
                seed,
                [],
            )
        )

    def step(self, counts: dict[str, int] | None = None, num_steps: int = 1) -> StepOutput:
        """Runs some rows (all of them, each with all it misses, by default) and appends what they sample."""
        if counts is None:
            counts = {name: len(row.tokens) - row.computed for name, row in self.rows.items()}
        step = self.pending
        step.num_steps = num_steps
        entered = {row.slot for row in step.new_rows}
        for name, count in counts.items():
            row = self.rows[name]
            added = self._grow(row, min(row.computed + count + num_steps - 1, row.max_num_tokens - 1))
            if added and row.slot in entered:
                next(new for new in step.new_rows if new.slot == row.slot).block_ids.extend(added)
            elif added:
                step.new_blocks.append((row.slot, added))
            step.slots.append(row.slot)
            step.num_scheduled_tokens.append(count)
        output = self.worker.execute_model(step)
        assert output.step_id == step.step_id
        for name, count in counts.items():
            self.rows[name].computed += count
        by_slot = {row.slot: row for row in self.rows.values()}
        for slot, ids in zip(output.slots.tolist(), output.sampled_token_ids.tolist(), strict=True):
            row = by_slot[slot]
            row.tokens.append(ids[0])
            # what follows the end is void
            for token in ids[1:]:
                if row.ended:
                    break
                row.tokens.append(token)
                row.computed += 1
        self.pending = SchedulerOutput(step.step_id + 1, [], [], [], [], [])
        return output

    def steps(self, count: int) -> None:
        """Runs so many steps of all rows."""
        for _ in range(count):
            self.step()

    def output(self, name: str) -> list[int]:
        """What a row has generated."""
        row = self.rows[name]
        return row.tokens[row.num_prompt_tokens :]

    def _grow(self, row: Row, length: int) -> list[int]:
        added = [self.free_blocks.pop() for _ in range(-(-length // self.block_size) - len(row.blocks))]
        row.blocks += added
        return added


def generate(worker: Worker, prompt: Sequence[int], params: SamplingParams, num_tokens: int, **row: Any) -> list[int]:
    """What a row generates alone."""
    with Driver(worker) as driver:
        driver.add("alone", prompt, params, **row)
        driver.steps(num_tokens)
        return driver.output("alone")


def make_prompt(length: int, seed: int = 0, vocab_size: int = 384) -> list[int]:
    """Random tokens."""
    tokens: list[int] = np.random.default_rng(seed).integers(3, vocab_size, length).tolist()
    return tokens
