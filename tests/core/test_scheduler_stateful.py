"""Random traffic over tiny caches: accounts balance after each step, and every request gets its own tokens.

Arrivals of all lengths and priorities, prompts that begin alike, sequences that share a prompt, beam searches,
constraints, aborts, and caches so small that requests are preempted all the time, under every combination of the
scheduler's settings.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import random
from typing import Any, ClassVar

import hypothesis
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ascend_vllm.config.structured import StructuredOutputsConfig
from ascend_vllm.core.beam.search import BeamSearch
from ascend_vllm.core.engine_core import EngineCore
from ascend_vllm.core.prompt_chunks import ChunkSizeController
from ascend_vllm.core.structured.manager import StructuredOutputManager
from ascend_vllm.types.messages import BeamSearchSpec, BeamSequence, EngineCoreRequest, FinishReason
from ascend_vllm.types.step import SchedulerOutput
from tests.core.constrained_requests import CONSTRAINTS, PROCESSES, VOCABULARY, constrain_alone, constrained
from tests.core.memory_executor import (
    EOS,
    VOCAB_SIZE,
    Collected,
    MemoryExecutor,
    assert_all_free,
    generate_alone,
    make_core,
    make_request,
    most_likely,
    run,
    step,
)
from tests.moody_drafts import Moody

# far more than any drawn traffic takes, so that an endless loop fails
MAX_STEPS = 5_000
# minimum number of audited steps, and of each of these events; four times as many with --all
MIN_STEPS = 5_000
MIN_EVENTS = 25
EVENTS = (
    "preemptions",
    "prefix_hits",
    "forks",
    "copy",
    "swap_out",
    "swap_in",
    "several_steps_at_once",
    "chunks",
    "prompts_beside_decodes",
    "beam_searches",
    "aborts",
    "tokens_for_stages",
    "masks",
    "drafts",
    "watched_drafts",
    "right_drafts",
    "masked_drafts",
)
# examples are drawn in rounds until these are reached, which takes about three rounds, or five
EXAMPLES_OF_A_ROUND = 40
MAX_ROUNDS = 40
# prompts that begin with these share blocks
STEMS = [[], [3] * 8, [3] * 8 + [5, 6, 7, 8, 9]]


def search_alone(request: EngineCoreRequest, seed: int, max_num_computed: int) -> list[BeamSequence]:
    """The best sequences of a beam search, computed without an engine."""
    assert request.beam_search is not None
    params, prompt = request.sampling_params, request.prompt_token_ids
    eos = None if params.ignore_eos else request.eos_token_id
    end_ids = frozenset(params.stop_token_ids or ()) | (frozenset() if eos is None else {eos})
    search = BeamSearch(
        request.beam_search,
        len(prompt),
        min(max_num_computed + 1, len(prompt) + (params.max_tokens or 0)),
        end_ids,
        eos,
        len(prompt) + params.min_tokens,
        max_num_computed,
    )
    while not search.is_done:
        live = [search.output_token_ids(index) for index in range(search.num_live)]
        search.advance([most_likely(seed, prompt + tokens, search.num_candidates) for tokens in live])
    return search.best()


@functools.cache
def warm_manager() -> StructuredOutputManager:
    """Has all grammars compiled already, so that examples are reproducible."""
    core, _ = make_core()
    manager = StructuredOutputManager(
        StructuredOutputsConfig(), core.config.model, lambda: VOCABULARY, processes=PROCESSES
    )
    core, _ = make_core(structured=manager)
    for index, constraint in enumerate(CONSTRAINTS):
        core.add_request(constrained(str(index), constraint))
    run(core)
    return manager


@dataclasses.dataclass
class Sent:
    """A request and the seed of its tokens."""

    message: EngineCoreRequest
    seed: int


class LongSteps(ChunkSizeController):
    """All steps count as long, though those of this executor are short."""

    steps_are_long = True  # type: ignore[assignment]


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, aborts and steps in any order; `teardown` runs the remaining requests to their end."""

    core: EngineCore
    executor: MemoryExecutor
    # events of all examples
    seen: ClassVar[collections.Counter[str]] = collections.Counter()

    @initialize(
        num_blocks=st.integers(1, 14),
        num_cpu_blocks=st.sampled_from([0, 3, 20]),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 6),
        extra_budget=st.integers(0, 24),
        max_model_len=st.integers(2, 30),
        seed=st.integers(0, 3),
        window=st.sampled_from([None, None, None, 1, 5]),
        flags=st.fixed_dictionaries(
            {
                "chunked": st.booleans(),
                "mixed_steps": st.booleans(),
                "max_decode_pause_s": st.sampled_from([None, 1e-6]),
                "prefix_caching": st.booleans(),
                "num_scheduler_steps": st.sampled_from([1, 1, 2, 5]),
                "policy": st.sampled_from(["fcfs", "fcfs", "priority"]),
                "preemption_mode": st.sampled_from([None, "recompute", "swap"]),
                "async_scheduling": st.booleans(),
                "num_stages": st.sampled_from([1, 1, 1, 1, 2, 3]),
                "delay_factor": st.sampled_from([0.0, 0.0, 0.5]),
                "max_num_partial_prefills": st.integers(1, 3),
                "long_prefill_token_threshold": st.sampled_from([0, 0, 3, 10]),
                "num_drafts": st.sampled_from([0, 0, 1, 3]),
                "looks_ahead": st.booleans(),
            }
        ),
    )
    def start(
        self,
        num_blocks: int,
        num_cpu_blocks: int,
        block_size: int,
        max_num_seqs: int,
        extra_budget: int,
        max_model_len: int,
        seed: int,
        window: int | None,
        flags: dict[str, Any],
    ) -> None:
        budget = max_num_seqs + extra_budget
        if not flags["chunked"]:
            flags |= {"max_num_partial_prefills": 1, "long_prefill_token_threshold": 0}
        if flags["num_drafts"]:
            # start-up refuses them together
            flags |= {"num_stages": 1, "num_scheduler_steps": 1}
        self.core, self.executor = make_core(
            num_blocks=num_blocks,
            num_cpu_blocks=num_cpu_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            seed=seed,
            structured=warm_manager(),
            # not both: blocks of a cached prefix may have left the window, so start-up refuses them together
            sliding_window=None if flags["prefix_caching"] else window,
            **flags,
        )
        self.core._scheduler._chunk_size.__class__ = LongSteps
        if flags["num_drafts"]:
            self.core._scheduler._drafting._costs = Moody(flags["num_drafts"], seed)
        self.chunked = flags["chunked"]
        self.mixed = self.chunked or flags["mixed_steps"]
        # limits of a sequence: the model's, without chunks the step's, and the cache's
        self.max_model_len = max_model_len if self.chunked else min(max_model_len, budget)
        self.capacity = num_blocks * block_size
        self.seeds = random.Random(seed)
        self.sent: dict[str, Sent] = {}
        self.aborted: set[str] = set()
        self.collected: dict[str, Collected] = {}

    @rule(
        stem=st.sampled_from(STEMS),
        prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=24),
        max_tokens=st.integers(1, 24),
        min_tokens=st.integers(0, 4),
        seed=st.none() | st.integers(0, 5),
        stop_token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=2),
        ignore_eos=st.booleans(),
        logprobs=st.sampled_from([None, None, 0, 2]),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "", "a", "b"]),
        n=st.sampled_from([1, 1, 1, 2, 3]),
    )
    def add(self, stem: list[int], prompt: list[int], min_tokens: int, salt: str, n: int, **given: Any) -> None:
        message = {"priority": given.pop("priority"), "content_keys": [(0, salt)] if salt else []}
        for index in range(n):
            request = make_request(
                f"r{len(self.sent)}",
                stem + prompt,
                message=message,
                min_tokens=min(min_tokens, given["max_tokens"]),
                **given,
            )
            if index == 0 and n > 1:
                message = {**message, "parent_id": request.request_id, "is_further": True}
            self.send(request)

    @rule(
        prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12),
        max_tokens=st.integers(1, 10),
        min_tokens=st.integers(0, 3),
        stop_token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=2),
        ignore_eos=st.booleans(),
        width=st.integers(1, 4),
        length_penalty=st.sampled_from([0.0, 1.0, 2.0]),
        early_stopping=st.sampled_from([None, False, True, "never"]),
        stream=st.booleans(),
    )
    def search(
        self,
        prompt: list[int],
        min_tokens: int,
        width: int,
        length_penalty: float,
        early_stopping: bool | str | None,
        stream: bool,
        **given: Any,
    ) -> None:
        spec = BeamSearchSpec(width, max(1, width - 1), length_penalty, early_stopping, stream)
        self.send(
            make_request(
                f"b{len(self.sent)}",
                prompt,
                message={"beam_search": spec},
                min_tokens=min(min_tokens, given["max_tokens"]),
                temperature=0.0,
                eos=EOS,
                **given,
            )
        )

    @rule(
        constraint=st.sampled_from(CONSTRAINTS),
        stem=st.sampled_from(STEMS),
        prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12),
        n=st.integers(1, 3),
        min_tokens=st.integers(0, 3),
        max_tokens=st.integers(3, 16),
        stop_token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=2),
        ignore_eos=st.booleans(),
        seed=st.integers(0, 1000),
    )
    def constrain(
        self, constraint: dict[str, Any], stem: list[int], prompt: list[int], n: int, seed: int, **given: Any
    ) -> None:
        first = f"c{len(self.sent)}"
        for index in range(n):
            message = {"parent_id": first, "is_further": True} if index else None
            request_id = f"c{len(self.sent)}"
            self.send(constrained(request_id, constraint, stem + prompt, seed=seed + index, message=message, **given))

    def send(self, request: EngineCoreRequest) -> None:
        if request.sampling_params.structured_outputs is not None:
            answer = constrain_alone(request, self.max_model_len).token_ids
            self.executor.texts[request.request_id] = [*request.prompt_token_ids, *answer]
        drawn = self.seeds.getrandbits(63)
        seed = request.sampling_params.seed
        self.sent[request.request_id] = Sent(request, drawn if seed is None else seed)
        self.core.add_request(request)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.sent)))
        if request_id in self.core._scheduler.requests:
            self.aborted.add(request_id)
        self.core.abort_requests([request_id])

    @rule()
    def reset_prefix_cache(self) -> None:
        assert self.core.call_utility("reset_prefix_cache", [])

    @rule(count=st.integers(1, 12))
    def run_steps(self, count: int) -> None:
        for _ in range(count):
            step(self.core, self.collected)
            self.check()

    @invariant()
    def check(self) -> None:
        """The audit finds nothing, and the worker's rows equal the core's."""
        if not hasattr(self, "core"):
            return
        assert self.core.audit()["violations"] == []
        if not self.core._in_flight:
            self.check_worker()
        if self.executor.steps and not self.mixed:
            made = self.executor.steps[-1]
            new_slots = {row.slot for row in made.new_rows}
            if max(_num_known(made), default=0) > 1:
                assert set(made.slots) <= new_slots, "prompts and decodes in one step"

    def check_worker(self) -> None:
        unsent = {slot for slot, _ in self.core._scheduler.rows.forks.items()}
        for slot_id, request in self.core._scheduler.rows.by_slot.items():
            if slot_id in unsent:
                # sent with the next step
                continue
            slot = self.executor.slots[slot_id]
            assert slot.request_id.split("#")[0] == request.request_id.split("#")[0]
            held = [block_id for block_id in request.block_ids if block_id >= 0]
            assert slot.block_ids[len(slot.block_ids) - len(held) :] == held
            if request.num_missing_tokens:
                assert slot.token_ids == request.token_ids
            assert slot.num_computed_tokens == request.num_computed_tokens

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for _ in range(MAX_STEPS):
            if not self.core.has_unfinished():
                break
            step(self.core, self.collected)
            self.check()
        assert_all_free(self.core)
        for request_id, sent in self.sent.items():
            result = self.collected.get(request_id, Collected())
            if sent.message.beam_search is not None:
                self.check_search(request_id, sent, result)
            else:
                self.check_tokens(request_id, sent, result)
        # freed slots are sent with the next step, so only those of the last step are left
        assert len(self.executor.slots) <= self.core.config.scheduler.max_num_seqs
        self.count()

    def count(self) -> None:
        steps, stats = self.executor.steps, self.core._scheduler.stats()
        self.seen.update({kind.name.lower(): count for kind, count in self.executor.moves.items()})
        self.seen.update(
            steps=len(steps),
            preemptions=stats.num_preemptions,
            prefix_hits=stats.num_prefix_hits,
            forks=sum(len(made.forks) for made in steps),
            several_steps_at_once=sum(made.num_steps > 1 for made in steps),
            chunks=sum(self.chunked and max(_num_known(made), default=0) > 1 for made in steps),
            prompts_beside_decodes=sum(not self.chunked and self.mixes(made) for made in steps),
            beam_searches=sum(result.beams is not None for result in self.collected.values()),
            aborts=len(self.aborted),
            tokens_for_stages=sum(len(made.sampled) for made in steps),
            masks=sum(len(made.constrained_slots) for made in steps),
            drafts=sum(len(made.drafts) for made in steps),
            masked_drafts=sum(slot in made.constrained_slots for made in steps for slot, _ in made.drafts),
            watched_drafts=sum(made.max_drafts > 0 and not made.drafts for made in steps),
            right_drafts=0 if stats.drafts is None else stats.drafts.num_accepted_tokens,
        )

    @staticmethod
    def mixes(made: SchedulerOutput) -> bool:
        new_slots = {row.slot for row in made.new_rows}
        return not new_slots.isdisjoint(made.slots) and not new_slots.issuperset(made.slots)

    def fits(self, message: EngineCoreRequest) -> bool:
        return len(message.prompt_token_ids) <= min(self.max_model_len, self.capacity)

    def check_tokens(self, request_id: str, sent: Sent, result: Collected) -> None:
        expected: list[int] = []
        reason, stop_reason = FinishReason.LENGTH, None
        # the only running row may outgrow the cache, unless a window frees blocks
        limits = {self.max_model_len}
        if self.core.config.cache.sliding_window is None:
            limits = {min(self.max_model_len, self.capacity)}
        elif self.capacity < self.max_model_len:
            limits.update(range(self.capacity, self.max_model_len))
        if self.fits(sent.message):
            allowed = [_alone(sent, limit) for limit in sorted(limits)]
        else:
            allowed = [(expected, reason, stop_reason)]
        if request_id in self.aborted:
            assert result.finish_reason is None
            longest = allowed[-1][0]
            assert result.token_ids == longest[: len(result.token_ids)]
        else:
            assert (result.token_ids, result.finish_reason, result.stop_reason) in allowed

    def check_search(self, request_id: str, sent: Sent, result: Collected) -> None:
        if request_id in self.aborted:
            assert result.finish_reason is None
        elif not self.fits(sent.message):
            assert (result.finish_reason, result.beams) == (FinishReason.LENGTH, None)
        elif sent.message.beam_search.width > self.core.config.scheduler.max_num_seqs:  # type: ignore[union-attr]
            assert result.finish_reason is FinishReason.ERROR
            assert "--max-num-seqs" in (result.error or "")
        else:
            assert result.beams is not None
            expected = search_alone(sent.message, sent.seed, self.max_model_len)
            if result.beams != expected:
                # it was the only one running and outgrew the cache
                assert result.finish_reason is FinishReason.LENGTH
                width = sent.message.beam_search.width  # type: ignore[union-attr]
                most = len(sent.message.prompt_token_ids) + width * (sent.message.sampling_params.max_tokens or 0)
                assert most > self.capacity - (width + 1) * self.core.config.cache.block_size


def _num_known(made: SchedulerOutput) -> list[int]:
    """Tokens of each row but for drafts."""
    drafts = dict(made.drafts)
    pairs = zip(made.slots, made.num_scheduled_tokens, strict=True)
    return [count - len(drafts.get(slot, [])) for slot, count in pairs]


def _alone(sent: Sent, limit: int) -> tuple[list[int], FinishReason, int | None]:
    """Expected output, finish reason and stop reason of a request."""
    if sent.message.sampling_params.structured_outputs is None:
        return generate_alone(sent.message, sent.seed, limit)
    alone = constrain_alone(sent.message, limit)
    return alone.token_ids, alone.finish_reason, alone.stop_reason


@pytest.mark.slow
def test_random_traffic(runs_all: bool) -> None:
    seen = SchedulerMachine.seen
    times = 4 if runs_all else 1
    seen.clear()
    first_seed = 0 if settings().derandomize else random.getrandbits(32)
    for number in range(MAX_ROUNDS):
        round_ = hypothesis.seed(first_seed + number)(type("Round", (SchedulerMachine,), {}))
        run_state_machine_as_test(
            round_,
            settings=settings(max_examples=EXAMPLES_OF_A_ROUND, stateful_step_count=60, derandomize=False),
        )
        # all events must have happened often enough
        if seen["steps"] >= times * MIN_STEPS and all(seen[what] >= times * MIN_EVENTS for what in EVENTS):
            return
    pytest.fail(f"the traffic passes by what it is there for: {seen}")
