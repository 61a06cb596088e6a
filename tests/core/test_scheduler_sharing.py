"""Sequences that share blocks: those of a request with n > 1, and the beams of a search."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ascend_vllm.config.speculation import SpeculativeConfig, SpeculativeMethod
from ascend_vllm.core.engine_core import EngineCore
from ascend_vllm.core.request import RequestStatus
from ascend_vllm.types.messages import BeamSearchSpec, EngineCoreRequest, FinishReason
from ascend_vllm.types.step import MoveKind
from tests.core.memory_executor import (
    Collected,
    MemoryExecutor,
    add_all,
    assert_all_free,
    assert_tokens,
    entries,
    make_config,
    make_core,
    make_request,
    run,
    scheduled,
    serve,
    step,
    step_until,
)
from tests.core.test_scheduler_stateful import search_alone

# two full blocks of 4, and two tokens
PROMPT = list(range(1, 11))


def make_siblings(count: int, prompt: list[int] = PROMPT, **params: Any) -> list[EngineCoreRequest]:
    """The engine core's requests of a client's request with n = count: p, c1, c2, …"""
    first = make_request("p", prompt, seed=0, **params)
    return [
        first,
        *(make_request(f"c{i}", prompt, seed=i, message={"parent_id": "p"}, **params) for i in range(1, count)),
    ]


# ---- n ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_siblings_share_full_blocks_and_copy_the_last(prefix_caching: bool, async_scheduling: bool) -> None:
    core, executor = make_core(prefix_caching=prefix_caching, async_scheduling=async_scheduling)
    requests = make_siblings(3)
    add_all(core, requests)
    collected = step(core, num_steps=2)
    # the prompt is computed once; of it the siblings compute the last token, which they sample from
    assert scheduled(executor)[:2] == [{"p": 10}, {"p": 1, "c1": 1, "c2": 1}]
    parent, *children = (entries(executor, request.request_id)[0] for request in requests)
    for child in children:
        assert child.block_ids[:2] == parent.block_ids[:2]
        assert child.num_computed_tokens == 9
    lasts = [row.block_ids[2] for row in (parent, *children)]
    assert len(set(lasts)) == 3
    pool = core._scheduler.kv_cache.pool
    assert [pool.reference_counts[block_id] for block_id in (*parent.block_ids[:2], *lasts)] == [3, 3, 1, 1, 1]
    assert executor.steps[1].block_moves == [(MoveKind.COPY, lasts[0], last) for last in lasts[1:]]
    assert_tokens(run(core, collected), requests)
    assert len({tuple(result.token_ids) for result in collected.values()}) == 3
    assert executor.moves == {MoveKind.COPY: 2}


@pytest.mark.parametrize(("length", "num_copies", "num_blocks"), [(9, 0, 6), (8, 3, 6), (1, 0, 4), (13, 0, 7)])
def test_copies_of_four(length: int, num_copies: int, num_blocks: int) -> None:
    # all tokens but the last are shared: these fill whole blocks if one more token follows
    core, executor = make_core(max_num_seqs=4)
    requests = make_siblings(4, PROMPT[:1] * length, max_tokens=2)
    add_all(core, requests)
    step(core)
    core._scheduler.schedule()
    # the full blocks once, and one that each writes; with 8 the parent begins its third
    assert core.num_blocks - core.audit()["num_free_blocks"] == num_blocks
    core.abort_requests(["p", "c1", "c2", "c3"])
    assert_all_free(core)
    core, executor = make_core(max_num_seqs=4)
    serve(core, requests)
    assert executor.moves[MoveKind.COPY] == num_copies


def test_with_chunks_siblings_wait_for_the_last_one() -> None:
    core, executor = make_core(chunked=True, max_num_batched_tokens=4)
    requests = make_siblings(2)
    serve(core, requests)
    assert scheduled(executor)[:4] == [{"p": 4}, {"p": 4}, {"p": 2}, {"p": 1, "c1": 1}]
    assert executor.moves[MoveKind.COPY] == 1


def test_siblings_that_come_later_share_what_still_runs() -> None:
    core, executor = make_core(max_num_seqs=2)
    # c1 has to wait until q has ended; by then p has seven more tokens
    q = make_request("q", 3, max_tokens=8)
    requests = make_siblings(2, max_tokens=20)
    serve(core, [q, *requests])
    assert entries(executor, "c1")[0].num_computed_tokens == 9
    assert entries(executor, "c1")[0].block_ids[:2] == entries(executor, "p")[0].block_ids[:2]


def test_a_parent_whose_window_left_the_prompt_shares_nothing() -> None:
    core, executor = make_core(max_num_seqs=2, sliding_window=4)
    q = make_request("q", 3, max_tokens=8)
    requests = make_siblings(2, max_tokens=20)
    serve(core, [q, *requests])
    assert entries(executor, "c1")[0].num_computed_tokens == 0
    assert not executor.moves


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_parent_that_is_aborted_before(num_steps: int) -> None:
    core, executor = make_core(max_num_seqs=1 + num_steps)
    requests = make_siblings(3)
    add_all(core, requests)
    step(core, num_steps=num_steps)
    core.abort_requests(["p"])
    assert_tokens(run(core), requests[1:])
    # another one computes the prompt, and shares it with the other children
    shared = [entries(executor, name)[0].num_computed_tokens for name in ("c1", "c2")]
    assert shared == ([0, 9] if num_steps else [0, 0])


@pytest.mark.parametrize(("prefix_caching", "num_found"), [(False, 0), (True, 8)])
def test_a_parent_that_has_finished_before(prefix_caching: bool, num_found: int) -> None:
    core, executor = make_core(prefix_caching=prefix_caching)
    requests = make_siblings(3, max_tokens=1)
    results = serve(core, requests)
    assert scheduled(executor)[1] == ({"c1": 2, "c2": 2} if prefix_caching else {"c1": 10, "c2": 10})
    assert [results[name].num_cached_tokens for name in ("p", "c1", "c2")] == [0, num_found, num_found]


def test_shared_blocks_outlive_the_parent() -> None:
    core, executor = make_core()
    requests = make_siblings(3)
    add_all(core, requests)
    collected = step(core, num_steps=3)
    core.abort_requests(["p"])
    shared = entries(executor, "p")[0].block_ids
    pool = core._scheduler.kv_cache.pool
    assert [pool.reference_counts[block_id] for block_id in shared] == [2, 2, 0]
    # a new request gets free blocks only
    other = make_request("other", 20)
    core.add_request(other)
    assert_tokens(run(core, collected), [*requests[1:], other])


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_parent_that_is_preempted_before(mode: str) -> None:
    core, executor = make_core(num_cpu_blocks=8, max_num_seqs=1, policy="priority", preemption_mode=mode)
    parent, child = make_siblings(2)
    parent.priority, child.priority = 1, 0
    core.add_request(parent)
    collected = step(core)
    core.add_request(child)
    step(core, collected)
    assert core._scheduler.requests["p"].status is not RequestStatus.RUNNING
    assert_tokens(run(core, collected), [parent, child])
    assert entries(executor, "c1")[0].num_computed_tokens == 0


def test_a_parent_that_waits_behind_its_child() -> None:
    core, _ = make_core(policy="priority")
    parent, child = make_siblings(2)
    parent.priority = 1
    serve(core, [parent, child])


@pytest.mark.parametrize("num_cpu_blocks", [0, 30])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_siblings_under_pressure(async_scheduling: bool, num_cpu_blocks: int) -> None:
    core, executor = make_core(
        num_blocks=9, num_cpu_blocks=num_cpu_blocks, max_num_seqs=5, async_scheduling=async_scheduling
    )
    requests = make_siblings(5, max_tokens=14)
    serve(core, requests)
    assert core.stats()["num_preemptions"] > 0
    # by default, requests of several sequences are swapped
    assert (executor.moves[MoveKind.SWAP_OUT] > 0) is (num_cpu_blocks > 0)


# ---- beam search ------------------------------------------------------------------------------------------


def make_search(
    request_id: str = "b", prompt: list[int] | int = 6, width: int = 3, stream: bool = False, **params: Any
) -> EngineCoreRequest:
    spec = BeamSearchSpec(width, width, early_stopping=None, stream=stream)
    settings: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, **params}
    return make_request(request_id, prompt, message={"beam_search": spec}, **settings)


def assert_search(result: Collected, request: EngineCoreRequest, max_num_computed: int = 64) -> None:
    assert result.beams == search_alone(request, request.sampling_params.seed or 0, max_num_computed)
    assert result.beams[0].token_ids


def test_a_search_wider_than_the_slots_is_an_error() -> None:
    core, _ = make_core(max_num_seqs=3)
    core.add_request(make_search("wide", width=4))
    core.add_request(make_search("fits", width=3))
    results = run(core)
    assert results["wide"].finish_reason is FinishReason.ERROR
    assert "width 4 needs more sequences than --max-num-seqs (3)" in (results["wide"].error or "")
    assert results["wide"].beams is None
    assert_search(results["fits"], make_search("fits", width=3))


@pytest.mark.parametrize(("max_num_seqs", "num_beside"), [(3, 0), (4, 1), (5, 2)])
def test_slots_are_kept_for_the_beams_to_come(max_num_seqs: int, num_beside: int) -> None:
    core, executor = make_core(max_num_seqs=max_num_seqs)
    search = make_search(width=3)
    requests = [make_request(f"r{i}", 4, max_tokens=30, seed=i) for i in range(3)]
    add_all(core, [search, *requests])
    collected = step(core)
    # the search has only one row so far, but only this many others are admitted
    assert list(scheduled(executor)[0]) == ["b#0", "r0", "r1", "r2"][: 1 + num_beside]
    assert core.stats()["num_waiting"] == 3 - num_beside
    assert core.audit()["num_free_slots"] == 0
    run(core, collected)
    assert_search(collected["b"], search)
    assert_tokens(collected, requests)


def test_a_search_waits_for_all_its_slots_and_is_not_overtaken() -> None:
    core, executor = make_core(max_num_seqs=3)
    first = [make_request("r0", 4, max_tokens=3), make_request("r1", 4, max_tokens=6)]
    search, last = make_search(width=3), make_request("r2", 4)
    add_all(core, [*first, search, last])
    results = run(core)
    assert_tokens(results, [*first, last])
    assert_search(results["b"], search)
    # one slot was free from the beginning, two since r0 had ended
    order = [row.request_id.split("#")[0] for made in executor.steps for row in made.new_rows]
    assert order == ["r0", "r1", "b", "r2"]
    assert min(index for index, counts in enumerate(scheduled(executor)) if "b#0" in counts) == 6


def tight_search(**given: Any) -> tuple[EngineCore, MemoryExecutor, EngineCoreRequest, EngineCoreRequest]:
    """An older request and a search that is preempted for it."""
    core, executor = make_core(num_blocks=9, num_cpu_blocks=20, max_num_seqs=4, **given)
    old, search = make_request("old", 4, max_tokens=28), make_search(prompt=10, max_tokens=14, stream=True)
    add_all(core, [old, search])
    return core, executor, old, search


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_search_is_swapped_as_a_whole_and_its_beams_still_share(async_scheduling: bool) -> None:
    core, executor, old, search = tight_search(async_scheduling=async_scheduling)
    root = core._scheduler.requests["b"]
    collected = step_until(core, lambda: root.status is RequestStatus.SWAPPED)
    rows = root.kind.rows_of(root)
    assert len(rows) == 3
    assert {row.status for row in rows} == {RequestStatus.SWAPPED}
    assert core.audit()["num_running"] == 1
    tables = [row.cpu_block_ids for row in rows]
    distinct = {block_id for table in tables for block_id in table}
    # all beams share at least the prompt's two full blocks
    assert len(distinct) <= sum(map(len, tables)) - 4
    assert core.stats()["cpu_cache_usage"] == pytest.approx(len(distinct) / 20)
    assert core.stats()["num_swapped"] == core.stats()["num_waiting"] == core.stats()["num_preemptions"] == 1
    run(core, collected)
    assert_search(collected["b"], search)
    assert_tokens(collected, [old])
    assert executor.moves[MoveKind.SWAP_IN] == executor.moves[MoveKind.SWAP_OUT] >= len(distinct)
    # nothing was recomputed; beams that had sampled when others lacked blocks miss no token
    entered, *resumed = (row for made in executor.steps for row in made.new_rows if row.request_id.startswith("b#"))
    assert (entered.num_computed_tokens, len(entered.token_ids)) == (0, 10)
    assert len(resumed) == 3 * core.stats()["num_preemptions"]
    assert all(row.num_computed_tokens >= len(row.token_ids) - 1 for row in resumed)


def test_a_recomputed_search_restarts_and_emits_nothing_twice() -> None:
    core, executor, old, search = tight_search(preemption_mode="recompute")
    lengths: list[int] = []
    collected: dict[str, Collected] = {}
    while core.has_unfinished():
        for output in core.step().outputs:
            result = collected.setdefault(output.request_id, Collected())
            result.token_ids += output.new_token_ids
            result.finish_reason = output.finish_reason
            if output.beams is not None:
                result.beams = output.beams
                lengths.append(max(len(beam.token_ids) for beam in output.beams))
        assert core.audit()["violations"] == []
    assert core.stats()["num_preemptions"] > 0
    assert not executor.moves[MoveKind.SWAP_OUT]
    starts = [row for made in executor.steps for row in made.new_rows if row.request_id.startswith("b#")]
    assert len(starts) == 1 + core.stats()["num_preemptions"]
    # each time from the prompt
    assert [(len(row.token_ids), row.num_computed_tokens) for row in starts] == [(10, 0)] * len(starts)
    # though it computed the first tokens several times, each length was emitted once
    assert lengths == list(range(1, 15))
    assert_search(collected["b"], search)
    assert_tokens(collected, [old])
    assert_all_free(core)


def test_a_search_that_outgrows_the_cache_ends_with_length() -> None:
    core, _ = make_core(num_blocks=6, max_num_seqs=3, max_model_len=24)
    search, after = make_search(prompt=6, width=3, max_tokens=18), make_request("after", 4)
    add_all(core, [search, after])
    results = run(core)
    result = results["b"]
    assert result.finish_reason is FinishReason.LENGTH
    assert result.beams is not None
    assert [beam.finish_reason for beam in result.beams] == [FinishReason.LENGTH] * 3
    lengths = {len(beam.token_ids) for beam in result.beams}
    # the result of a search that ends at this length
    assert len(lengths) == 1
    shorter = make_search(prompt=6, width=3, max_tokens=lengths.pop())
    assert 1 < (shorter.sampling_params.max_tokens or 0) < 18
    assert_search(result, shorter)
    assert_tokens(results, [after])
    assert core.stats()["num_preemptions"] == 0


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 6])
def test_an_abort_in_the_middle_frees_everything(num_steps: int, async_scheduling: bool) -> None:
    core, _ = make_core(max_num_seqs=4, async_scheduling=async_scheduling)
    beside, search = make_request("beside", 3, max_tokens=12), make_search()
    add_all(core, [beside, search])
    collected = step(core, num_steps=num_steps)
    core.abort_requests(["b"])
    audit = core.audit()
    assert (audit["violations"], audit["num_free_slots"], set(audit["blocks_by_request"])) == ([], 3, {"beside"})
    again = make_search("again", prompt=5)
    core.add_request(again)
    run(core, collected)
    assert "b" not in collected
    assert_tokens(collected, [beside])
    assert_search(collected["again"], again)


def test_an_abort_while_swapped_frees_everything() -> None:
    core, _, old, _ = tight_search()
    collected = step_until(core, lambda: core._scheduler.requests["b"].status is RequestStatus.SWAPPED)
    core.abort_requests(["b"])
    assert core.stats()["num_swapped"] == 0
    assert core.stats()["cpu_cache_usage"] == 0.0
    assert_tokens(run(core, collected), [old])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"chunked": True, "max_num_batched_tokens": 8},
        {"num_scheduler_steps": 4},
        {"prefix_caching": True},
        {"sliding_window": 5},
        {"policy": "priority"},
        {"num_blocks": 16},
        {"num_blocks": 16, "preemption_mode": "recompute"},
    ],
)
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_searches_beside_others(settings: dict[str, Any], async_scheduling: bool) -> None:
    core, executor = make_core(
        max_num_seqs=6, async_scheduling=async_scheduling, num_cpu_blocks=40, **{"num_blocks": 64, **settings}
    )
    searches = [
        make_search("b1", 6, 3),
        make_search("b2", 6, 2, eos=3, ignore_eos=False),
        make_search("b3", 9, 4, max_tokens=5),
    ]
    requests = [
        make_request("r1", 5, max_tokens=30),
        make_request("r2", 7, max_tokens=12, seed=4, eos=3, ignore_eos=False),
        make_request("r3", 3, max_tokens=24, seed=5, logprobs=2),
    ]
    add_all(core, [requests[0], searches[0], requests[1], searches[1], searches[2], requests[2]])
    results = run(core)
    assert_tokens(results, requests)
    for search in searches:
        assert_search(results[search.request_id], search)
    steps = settings.get("num_scheduler_steps", 1)
    assert max(made.num_steps for made in executor.steps) == steps
    # beams of one parent share its last block until one of them writes
    assert sum(len(made.forks) for made in executor.steps) > 0
    assert executor.moves[MoveKind.COPY] > 0
    assert any(made.replaced_blocks for made in executor.steps)


# ---- room for others --------------------------------------------------------------------------------------


def make_many(count: int, **params: Any) -> list[EngineCoreRequest]:
    """The sequences of one client's request."""
    prompts = [make_request(f"p{i}", PROMPT, message={"is_further": i > 0}, **params) for i in range(count)]
    for index, request in enumerate(prompts):
        request.arrival_time = float(index)
    return prompts


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_request_of_many_sequences_leaves_slots_to_others(policy: str, chunked: bool) -> None:
    core, executor = make_core(num_blocks=200, max_num_seqs=16, policy=policy, chunked=chunked)
    requests = make_many(40, max_tokens=30)
    add_all(core, requests)
    collected = step(core, num_steps=6)
    # the first one, and as many further ones as leave an eighth of the slots
    assert len(collected) == 14
    later = make_request("later", PROMPT, max_tokens=4)
    later.arrival_time = 100.0
    core.add_request(later)
    step(core, collected, 8)
    assert collected["later"].finish_reason is not None
    assert_tokens(run(core, collected), [*requests, later])
    assert max(len(rows) for rows in scheduled(executor)) <= 16


def test_further_sequences_take_turns_with_a_stream_of_other_requests() -> None:
    core, _ = make_core(num_blocks=200, max_num_seqs=8)
    requests = make_many(12, max_tokens=4)
    add_all(core, requests)
    collected: dict[str, Collected] = {}
    # enough others to fill the slots
    for number in range(60):
        others = [make_request(f"other{number}.{i}", 3, max_tokens=8) for i in range(2)]
        add_all(core, others)
        requests += others
        step(core, collected)
    assert all(collected[f"p{i}"].finish_reason is not None for i in range(12))
    assert_tokens(run(core, collected), requests)


def test_nothing_is_preempted_for_a_further_sequence_beyond_its_limit() -> None:
    core, _ = make_core(num_blocks=200, max_num_seqs=16, policy="priority")
    requests = [make_request("idle", 3, max_tokens=20, message={"priority": 5}), *make_many(30, max_tokens=20)]
    add_all(core, requests)
    collected = step(core, num_steps=10)
    assert core._scheduler.stats().num_running == 15
    run(core, collected)
    assert core._scheduler.stats().num_preemptions == 0
    assert_tokens(collected, requests)


def test_a_request_of_very_many_sequences_runs_some_of_them_at_a_time() -> None:
    core, _ = make_core(num_blocks=2000, max_num_seqs=200, max_num_batched_tokens=4000)
    requests = make_many(180, max_tokens=3)
    add_all(core, requests)
    collected = step(core, num_steps=2)
    assert core._scheduler.stats().num_running == 64
    assert_tokens(run(core, collected), requests)


@pytest.mark.parametrize("chunked", [False, True])
def test_later_sequences_share_the_prompt_of_those_that_run(chunked: bool) -> None:
    """Many sequences run some at a time: their prompt is computed once, also after the first has ended."""
    core, executor = make_core(num_blocks=200, max_num_seqs=4, chunked=chunked)
    prompt = make_request("p", 21).prompt_token_ids
    requests = [make_request("p", prompt, max_tokens=2)]
    requests += [
        make_request(f"c{i}", prompt, seed=i, max_tokens=3 + i % 3, message={"parent_id": "p", "is_further": True})
        for i in range(12)
    ]
    serve(core, requests)
    computed = [count for made in scheduled(executor) for count in made.values() if count > 1]
    assert computed == [21]


def test_beams_have_no_blocks_for_drafts_beside_a_draft_model() -> None:
    """They never draft, and would share blocks that they have not reached."""
    config = make_config(max_num_seqs=4)
    speculation = SpeculativeConfig(
        SpeculativeMethod.DRAFT_MODEL, 3, draft=config.model, max_model_len=config.model.max_model_len
    )
    config = msgspec.structs.replace(config, speculation=speculation)
    core = EngineCore(config, MemoryExecutor(config, 64))
    request = make_search(width=2, max_tokens=12)
    core.add_request(request)
    # audits each step
    assert_search(run(core)["b"], request)
