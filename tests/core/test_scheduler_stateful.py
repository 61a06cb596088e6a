"""Random traffic over tiny caches: accounts balance after each step, and every request gets its own tokens."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ascend_vllm.core.engine_core import EngineCore
from ascend_vllm.types.messages import EngineCoreRequest
from tests.core.memory_executor import (
    VOCAB_SIZE,
    Collected,
    MemoryExecutor,
    assert_all_free,
    generate_alone,
    make_core,
    make_request,
    step,
)

# far more than any drawn traffic takes; a scheduler that loops does not end within it
MAX_STEPS = 5_000


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, aborts and steps in any order; `teardown` runs what is left to its end."""

    core: EngineCore
    executor: MemoryExecutor

    @initialize(
        num_blocks=st.integers(1, 10),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 5),
        extra_budget=st.integers(0, 24),
        max_model_len=st.integers(2, 30),
        chunked=st.booleans(),
        seed=st.integers(0, 3),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        extra_budget: int,
        max_model_len: int,
        chunked: bool,
        seed: int,
    ) -> None:
        budget = max_num_seqs + extra_budget
        self.core, self.executor = make_core(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            chunked=chunked,
            seed=seed,
        )
        self.chunked = chunked
        # what limits a sequence: the model, the cache, and without chunks the step
        self.max_num_computed = min(max_model_len, num_blocks * block_size, max_model_len if chunked else budget)
        self.seeds = random.Random(seed)
        self.requests: dict[str, tuple[EngineCoreRequest, int]] = {}
        self.aborted: set[str] = set()
        self.collected: dict[str, Collected] = {}

    @rule(
        prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=32),
        max_tokens=st.integers(1, 24),
        min_tokens=st.integers(0, 4),
        seed=st.none() | st.integers(0, 5),
        stop_token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=2),
        ignore_eos=st.booleans(),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        min_tokens: int,
        seed: int | None,
        stop_token_ids: list[int],
        ignore_eos: bool,
    ) -> None:
        request = make_request(
            f"r{len(self.requests)}",
            prompt,
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            seed=seed,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
        )
        drawn = self.seeds.getrandbits(63)
        self.requests[request.request_id] = (request, drawn if seed is None else seed)
        self.core.add_request(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        if request_id in self.core._scheduler._requests:
            self.aborted.add(request_id)
        self.core.abort_requests([request_id])

    @rule(count=st.integers(1, 6))
    def run_steps(self, count: int) -> None:
        for _ in range(count):
            step(self.core, self.collected)
            self.check()

    @invariant()
    def check(self) -> None:
        """The core's accounts balance, and the worker knows its rows as the core does."""
        if not hasattr(self, "core"):
            return
        assert self.core.audit()["violations"] == []
        for slot_id, request in self.core._scheduler._rows.items():
            slot = self.executor.slots[slot_id]
            assert slot.request_id == request.request_id
            assert slot.block_ids == request.block_ids
            assert slot.token_ids == request.token_ids
            assert slot.num_computed_tokens == request.num_computed_tokens
        if self.executor.steps and not self.chunked:
            made = self.executor.steps[-1]
            assert len(made.new_rows) in (0, len(made.slots)), "prompts and decodes in one step"

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for _ in range(MAX_STEPS):
            if not self.core.has_unfinished():
                break
            step(self.core, self.collected)
            self.check()
        assert_all_free(self.core)
        for request_id, (request, seed) in self.requests.items():
            result = self.collected.get(request_id, Collected())
            if len(request.prompt_token_ids) > self.max_num_computed:
                expected: list[int] = []
            else:
                expected, reason, stop_reason = generate_alone(request, seed, self.max_num_computed)
            if request_id in self.aborted:
                assert result.finish_reason is None
                assert result.token_ids == expected[: len(result.token_ids)]
            else:
                assert result.token_ids == expected
                assert result.finish_reason is not None
                if expected:
                    assert (result.finish_reason, result.stop_reason) == (reason, stop_reason)
        # a freed row is told with the next step at the latest, so nothing stale is left but of the last one
        assert len(self.executor.slots) <= self.core.config.scheduler.max_num_seqs


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
