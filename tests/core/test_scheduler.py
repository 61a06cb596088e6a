"""Order, budget, admission, preemption and ends, through the engine core on the hash model."""

from __future__ import annotations

import pytest

from ascend_vllm.core.request import RequestStatus
from ascend_vllm.errors import RequestError
from ascend_vllm.types.messages import FinishReason
from tests.core.memory_executor import (
    MemoryExecutor,
    add_all,
    assert_all_free,
    generate_alone,
    make_core,
    make_request,
    next_token,
    run,
    step,
    step_until,
)


def rows(executor: MemoryExecutor, index: int = -1) -> dict[str, int]:
    """A step's rows: request id → number of tokens. Works while the rows are in their slots."""
    made = executor.steps[index]
    return {
        executor.slots[slot].request_id: count
        for slot, count in zip(made.slots, made.num_scheduled_tokens, strict=True)
    }


# ---- order and budget -------------------------------------------------------------------------------------


def test_prompts_come_first_in_steps_of_their_own() -> None:
    core, executor = make_core(max_num_seqs=4)
    core.add_request(make_request("a", 5))
    core.step()
    core.add_request(make_request("b", 6))
    core.add_request(make_request("c", 3))
    core.step()
    assert rows(executor) == {"b": 6, "c": 3}
    core.step()
    assert rows(executor) == {"a": 1, "b": 1, "c": 1}


def test_whole_prompts_fill_the_budget_in_order() -> None:
    core, executor = make_core(max_num_batched_tokens=16, max_model_len=16)
    for name, length in {"a": 8, "b": 6, "c": 4, "d": 1}.items():
        core.add_request(make_request(name, length))
    core.step()
    # c does not fit, and d must not overtake it
    assert rows(executor) == {"a": 8, "b": 6}
    core.step()
    assert rows(executor) == {"c": 4, "d": 1}


def test_chunked_decodes_first_then_prompt_chunks() -> None:
    core, executor = make_core(max_num_batched_tokens=8, chunked=True)
    core.add_request(make_request("a", 3))
    core.add_request(make_request("b", 20))
    seen = []
    for _ in range(4):
        core.step()
        seen.append(rows(executor))
    assert seen == [{"a": 3, "b": 5}, {"a": 1, "b": 7}, {"a": 1, "b": 7}, {"a": 1, "b": 1}]
    # the last chunk sampled, so from then on both decode
    core.step()
    assert rows(executor) == {"a": 1, "b": 1}


def test_chunked_prompt_longer_than_the_budget_is_served() -> None:
    core, executor = make_core(max_num_batched_tokens=4, chunked=True, max_model_len=64)
    request = make_request("a", 30)
    core.add_request(request)
    result = run(core)["a"]
    assert result.token_ids == generate_alone(request, 1, 64)[0]
    assert [sum(step.num_scheduled_tokens) for step in executor.steps[:8]] == [4] * 7 + [2]


def test_slots_limit_the_running() -> None:
    core, executor = make_core(max_num_seqs=2)
    for name in "abc":
        core.add_request(make_request(name, 2, max_tokens=3))
    core.step()
    assert set(rows(executor)) == {"a", "b"}
    assert core.stats()["num_waiting"] == 1
    results = run(core)
    assert set(results) == {"a", "b", "c"}


def test_slots_are_persistent_and_reused() -> None:
    core, executor = make_core(max_num_seqs=2)
    core.add_request(make_request("a", 2, max_tokens=2))
    core.add_request(make_request("b", 2, max_tokens=9))
    core.step()
    core.step()
    core.add_request(make_request("c", 2))
    core.step()
    made = executor.steps[-1]
    assert made.freed_slots == [0]
    assert [(row.request_id, row.slot) for row in made.new_rows] == [("c", 0)]
    assert executor.slots[1].request_id == "b"


def test_running_row_costs_two_integers() -> None:
    core, executor = make_core(block_size=4)
    core.add_request(make_request("a", 4, max_tokens=8))
    step(core, num_steps=6)
    new_blocks = [step.new_blocks for step in executor.steps[1:]]
    # the fifth and the ninth token need a new block
    assert [len(blocks) for blocks in new_blocks] == [1, 0, 0, 0, 1]
    assert all(not step.new_rows and not step.freed_slots for step in executor.steps[1:])


def test_watermark_holds_back_admission_only_while_others_run() -> None:
    core, executor = make_core(num_blocks=100, max_num_seqs=3, max_model_len=400, max_num_batched_tokens=400)
    core.add_request(make_request("a", 200))
    core.step()
    core.add_request(make_request("b", 200))
    core.step()
    assert rows(executor) == {"a": 1}
    core.abort_requests(["a", "b"])
    core.add_request(make_request("c", 400, max_tokens=1))
    core.step()
    assert_all_free(core)
    assert len(executor.steps[-1].new_rows[0].block_ids) == 100


# ---- preemption -------------------------------------------------------------------------------------------


def test_the_last_request_is_preempted_and_keeps_its_tokens(package_log: pytest.LogCaptureFixture) -> None:
    core, executor = make_core(num_blocks=6, block_size=4, max_num_seqs=3)
    requests = [make_request(name, 4, max_tokens=12, seed=i) for i, name in enumerate("abc")]
    add_all(core, requests)
    # waits for a slot; it would fit into the blocks that c frees, but c comes first
    core.add_request(make_request("late", 2))
    collected = step_until(core, lambda: core.stats()["num_preemptions"])
    assert "c" not in {slot.request_id for slot in executor.slots.values()}
    assert core.stats()["num_waiting"] == 2
    run(core, collected)
    for index, request in enumerate(requests):
        assert collected[request.request_id].token_ids == generate_alone(request, index, 64)[0]
    entered = [row.request_id for made in executor.steps for row in made.new_rows]
    assert entered.index("late") > len(entered) - 1 - entered[::-1].index("c")
    resumed = [row for made in executor.steps for row in made.new_rows if row.request_id == "c"][-1]
    assert resumed.num_prompt_tokens == 4 < len(resumed.token_ids)
    assert resumed.num_computed_tokens == 0
    warnings = [record for record in package_log.records if "gives up its blocks" in record.getMessage()]
    assert len(warnings) == 1


def test_warning_comes_every_fifty_preemptions(package_log: pytest.LogCaptureFixture) -> None:
    core, _ = make_core(num_blocks=4, block_size=1, max_num_seqs=4, max_model_len=4)
    for index in range(150):
        core.add_request(make_request(f"r{index}", 1, max_tokens=4))
    run(core)
    count = core.stats()["num_preemptions"]
    assert count > 100
    warnings = [record for record in package_log.records if "gives up its blocks" in record.getMessage()]
    assert len(warnings) == (count - 1) // 50 + 1


def test_prompt_tokens_count_once_though_recomputed() -> None:
    core, _ = make_core(num_blocks=9, block_size=4, max_num_seqs=6, max_model_len=32, max_num_batched_tokens=32)
    for index in range(12):
        core.add_request(make_request(f"r{index}", 6, max_tokens=20))
    prompt_tokens = generated = 0
    preemptions: dict[str, int] = {}
    while core.has_unfinished():
        outputs = core.step()
        stats = outputs.stats
        assert stats is not None
        prompt_tokens += stats.num_prompt_tokens
        generated += stats.num_generation_tokens
        preemptions |= {output.request_id: output.num_preemptions for output in outputs.outputs}
    assert core.stats()["num_preemptions"] > 0
    # each output has its own sequence's count
    assert sum(preemptions.values()) == core.stats()["num_preemptions"]
    assert (prompt_tokens, generated) == (12 * 6, 12 * 20)


# ---- requests that do not fit -----------------------------------------------------------------------------


def test_prompt_beyond_the_model_ends_with_length(package_log: pytest.LogCaptureFixture) -> None:
    core, executor = make_core(max_model_len=16)
    core.add_request(make_request("long", 17))
    core.add_request(make_request("full", 16))
    results = run(core)
    assert (results["long"].token_ids, results["long"].finish_reason) == ([], FinishReason.LENGTH)
    assert "Input prompt (17 tokens) is too long and exceeds limit of 16" in package_log.text
    # a sequence of max_model_len samples one token
    assert (len(results["full"].token_ids), results["full"].finish_reason) == (1, FinishReason.LENGTH)
    assert len(executor.steps) == 1


def test_whole_prompts_beyond_the_budget_end_with_length() -> None:
    core, _ = make_core(max_model_len=32, max_num_batched_tokens=10)
    core.add_request(make_request("long", 11))
    core.add_request(make_request("grows", 8, max_tokens=20))
    results = run(core)
    assert (results["long"].token_ids, results["long"].finish_reason) == ([], FinishReason.LENGTH)
    # a sequence beyond the budget could not be recomputed after a preemption
    assert (len(results["grows"].token_ids), results["grows"].finish_reason) == (3, FinishReason.LENGTH)


@pytest.mark.parametrize("chunked", [False, True])
def test_sequences_beyond_the_cache_end_with_length(chunked: bool, package_log: pytest.LogCaptureFixture) -> None:
    core, _ = make_core(num_blocks=3, block_size=4, max_model_len=64, chunked=chunked)
    core.add_request(make_request("long", 13))
    core.add_request(make_request("grows", 6, max_tokens=20))
    core.add_request(make_request("fits", 6, max_tokens=3))
    results = run(core)
    assert (results["long"].token_ids, results["long"].finish_reason) == ([], FinishReason.LENGTH)
    assert "(13 tokens) is too long and exceeds the capacity of the KV cache, 12 tokens" in package_log.text
    assert (len(results["grows"].token_ids), results["grows"].finish_reason) == (7, FinishReason.LENGTH)
    assert (len(results["fits"].token_ids), results["fits"].finish_reason) == (3, FinishReason.LENGTH)


def test_empty_prompt_is_an_error() -> None:
    core, _ = make_core()
    core.add_request(make_request("empty", []))
    result = run(core)["empty"]
    assert (result.finish_reason, result.error) == (FinishReason.ERROR, "Prompt cannot be empty")


def test_an_unservable_request_ends_without_waiting() -> None:
    core, _ = make_core(max_num_seqs=1, max_model_len=16)
    core.add_request(make_request("runs", 4, max_tokens=10))
    core.step()
    core.add_request(make_request("waits", 4))
    core.add_request(make_request("long", 17))
    outputs = {output.request_id: output for output in core.step().outputs}
    assert outputs["long"].finish_reason is FinishReason.LENGTH
    assert outputs["runs"].finish_reason is None


# ---- ends -------------------------------------------------------------------------------------------------


def test_stop_conditions_through_the_core() -> None:
    core, _ = make_core(max_num_seqs=8)
    prompt = [1, 2, 3]
    third = generate_alone(make_request("x", prompt, max_tokens=8), 1, 64)[0][2]
    requests = [
        make_request("eos", prompt, eos=third, ignore_eos=False),
        make_request("ignored", prompt, eos=third, ignore_eos=True),
        make_request("stop", prompt, stop_token_ids=[third]),
        make_request("min", prompt, stop_token_ids=[third], min_tokens=4),
        make_request("one", prompt, max_tokens=1),
    ]
    add_all(core, requests)
    results = run(core)
    for request in requests:
        result = results[request.request_id]
        assert (result.token_ids, result.finish_reason, result.stop_reason) == generate_alone(request, 1, 64)
    assert results["eos"].token_ids[-1] == third
    assert (results["stop"].stop_reason, results["eos"].stop_reason) == (third, None)
    assert len(results["ignored"].token_ids) == 8


def test_workers_get_what_ends_the_sequence() -> None:
    core, executor = make_core()
    core.add_request(make_request("a", 3, eos=5, ignore_eos=False, stop_token_ids=[7]))
    core.step()
    row = executor.steps[0].new_rows[0]
    assert (row.stop_token_ids, row.seed, row.num_prompt_tokens) == ([5, 7], 1, 3)


def test_first_output_has_the_time_of_scheduling() -> None:
    core, _ = make_core()
    core.add_request(make_request("a", 3))
    outputs = [core.step().outputs[0] for _ in range(3)]
    assert outputs[0].first_scheduled_time is not None
    assert [output.first_scheduled_time for output in outputs[1:]] == [None, None]


def test_unseeded_requests_draw_from_the_engines_seed() -> None:
    def seeds(engine_seed: int) -> list[int]:
        core, executor = make_core(seed=engine_seed)
        for name in "abc":
            core.add_request(make_request(name, 2, seed=None))
        core.step()
        return [row.seed for row in executor.steps[0].new_rows]

    assert seeds(0) == seeds(0)
    assert len({*seeds(0), *seeds(1)}) == 6


def test_logprobs_are_emitted_if_wanted() -> None:
    core, _ = make_core()
    core.add_request(make_request("none", 2))
    core.add_request(make_request("zero", 2, logprobs=0))
    core.add_request(make_request("two", 2, logprobs=2))
    outputs = {output.request_id: output for output in core.step().outputs}
    assert outputs["none"].new_logprobs is None
    zero, two = outputs["zero"].new_logprobs, outputs["two"].new_logprobs
    assert zero is not None
    assert two is not None
    token = outputs["two"].new_token_ids[0]
    assert (two[0].token_ids, two[0].logprobs, two[0].rank) == ([token, 0, 1], [-float(token), 0.0, -1.0], token + 1)
    assert zero[0].token_ids == outputs["zero"].new_token_ids


# ---- aborts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.PREEMPTED])
def test_abort_in_every_state(status: RequestStatus) -> None:
    core, _ = make_core(num_blocks=5, block_size=4, max_num_seqs=2)
    other, victim = make_request("other", 4, max_tokens=12), make_request("victim", 4, max_tokens=12)
    core.add_request(other)
    core.add_request(victim)
    request = core._scheduler.requests["victim"]
    collected = step_until(core, lambda: request.status is status)
    core.abort_requests(["victim", "unknown"])
    assert request.status is RequestStatus.FINISHED_ABORTED
    assert core.audit()["violations"] == []
    core.abort_requests(["victim"])
    run(core, collected)
    assert collected["other"].token_ids == generate_alone(other, 1, 64)[0]
    assert "victim" not in collected or collected["victim"].finish_reason is None


def test_abort_while_a_prompt_is_half_computed() -> None:
    core, executor = make_core(max_num_batched_tokens=4, chunked=True)
    core.add_request(make_request("a", 20))
    core.step()
    core.abort_requests(["a"])
    assert_all_free(core)
    request = make_request("b", 3)
    core.add_request(request)
    assert run(core)["b"].token_ids == generate_alone(request, 1, 64)[0]
    assert executor.steps[1].freed_slots == [0]


def test_a_duplicate_id_is_refused_without_effect() -> None:
    core, _ = make_core()
    request = make_request("a", 3)
    core.add_request(request)
    with pytest.raises(RequestError, match="Request a already exists"):
        core.add_request(make_request("a", 5))
    assert run(core)["a"].token_ids == generate_alone(request, 1, 64)[0]
    # an id can be used again after its request has ended
    core.add_request(request)
    assert len(run(core)["a"].token_ids) == 8


def test_hash_model_depends_on_everything_before() -> None:
    assert len({next_token(1, [1, 2, 3]), next_token(2, [1, 2, 3]), next_token(1, [1, 2, 4])}) > 1
