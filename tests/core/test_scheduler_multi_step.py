"""Steps of several forward passes (--num-scheduler-steps)."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ascend_vllm.core.engine_core import EngineCore
from ascend_vllm.types.messages import BeamSearchSpec, EngineCoreOutput, EngineCoreRequest, FinishReason
from tests.core.memory_executor import (
    Collected,
    MemoryExecutor,
    add_all,
    assert_all_free,
    assert_tokens,
    entries,
    generate_alone,
    make_core,
    make_request,
    run,
    scheduled,
    serve,
    step,
)


def outputs_of(core: EngineCore) -> list[EngineCoreOutput]:
    """All outputs up to the end."""
    outputs: list[EngineCoreOutput] = []
    while core.has_unfinished():
        outputs += core.step().outputs
        assert core.audit()["violations"] == []
    return outputs


def num_steps(executor: MemoryExecutor) -> list[int]:
    """Forward passes of each step."""
    return [made.num_steps for made in executor.steps]


def test_a_step_gives_several_tokens() -> None:
    core, executor = make_core(num_scheduler_steps=4)
    request = make_request("a", 3, max_tokens=9)
    core.add_request(request)
    outputs = outputs_of(core)
    # the prompt is a step of its own
    assert num_steps(executor) == [1, 4, 4]
    assert [len(output.new_token_ids) for output in outputs] == [1, 4, 4]
    assert scheduled(executor) == [{"a": 3}, {"a": 1}, {"a": 1}]
    tokens = [token for output in outputs for token in output.new_token_ids]
    assert tokens == generate_alone(request, 1, 64)[0]
    assert_all_free(core)


def test_blocks_are_reserved_ahead() -> None:
    core, executor = make_core(block_size=4, num_scheduler_steps=8)
    core.add_request(make_request("a", 4, max_tokens=20))
    core.step()
    core.step()
    # the step computes the 5th to the 12th token
    assert [made.new_blocks for made in executor.steps] == [[], [(0, [1, 2])]]
    assert len(core._scheduler.requests["a"].block_ids) == 3


def test_no_blocks_are_reserved_beyond_the_end() -> None:
    core, executor = make_core(block_size=4, num_scheduler_steps=8)
    request = make_request("a", 4, max_tokens=5)
    core.add_request(request)
    core.step()
    outputs = core.step().outputs
    # its ninth token is sampled, not computed
    assert [made.new_blocks for made in executor.steps] == [[], [(0, [1])]]
    assert num_steps(executor) == [1, 8]
    assert (len(outputs[0].new_token_ids), outputs[0].finish_reason) == (4, FinishReason.LENGTH)


def test_steps_with_prompts_are_single() -> None:
    core, executor = make_core(num_scheduler_steps=4, chunked=True, max_num_batched_tokens=8)
    requests = [make_request("a", 3, max_tokens=20), make_request("b", 12, max_tokens=9)]
    core.add_request(requests[0])
    collected = step(core, num_steps=2)
    core.add_request(requests[1])
    run(core, collected)
    counts = scheduled(executor)
    assert counts[:4] == [{"a": 3}, {"a": 1}, {"a": 1, "b": 7}, {"a": 1, "b": 5}]
    assert num_steps(executor)[:6] == [1, 4, 1, 1, 4, 4]
    assert_tokens(collected, requests)


def test_steps_are_single_if_blocks_are_short() -> None:
    core, executor = make_core(num_blocks=5, block_size=4, num_scheduler_steps=8)
    requests = [make_request("a", 4, max_tokens=9), make_request("b", 4, max_tokens=9)]
    add_all(core, requests)
    collected = step(core, num_steps=2)
    # a has both blocks that it may need, b has the last one
    assert executor.steps[1].new_blocks == [(0, [2, 3]), (1, [4])]
    assert num_steps(executor) == [1, 1]
    assert scheduled(executor)[1] == {"a": 1, "b": 1}
    assert core.stats()["num_preemptions"] == 0
    run(core, collected)
    # after the other has ended there are blocks
    assert num_steps(executor)[-1] == 8
    assert_tokens(collected, requests)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_tokens_after_an_end_are_dropped(async_scheduling: bool) -> None:
    core, _ = make_core(num_scheduler_steps=8, async_scheduling=async_scheduling)
    prompt = [1, 2, 3]
    alone = generate_alone(make_request("x", prompt, max_tokens=20), 1, 64)[0]
    stop = alone[4]
    assert stop not in alone[:4]
    requests = [
        make_request("goes on", prompt, max_tokens=20),
        make_request("stop", prompt, stop_token_ids=[stop], max_tokens=20),
        make_request("eos", prompt, eos=stop, ignore_eos=False, max_tokens=20),
        make_request("length", prompt, max_tokens=3),
    ]
    add_all(core, requests)
    num_emitted = num_generated = 0
    collected: dict[str, Collected] = {}
    while core.has_unfinished():
        made = core.step()
        assert made.stats is not None
        num_generated += made.stats.num_generation_tokens
        for output in made.outputs:
            num_emitted += len(output.new_token_ids)
            result = collected.setdefault(output.request_id, Collected())
            assert result.finish_reason is None
            result.token_ids += output.new_token_ids
            result.finish_reason, result.stop_reason = output.finish_reason, output.stop_reason
    assert_tokens(collected, requests)
    assert {name: len(result.token_ids) for name, result in collected.items()} == {
        "goes on": 20,
        "stop": 5,
        "eos": 5,
        "length": 3,
    }
    # dropped tokens are not counted
    assert num_emitted == num_generated == 33
    assert_all_free(core)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("steps", [2, 5, 8])
def test_rows_near_the_greatest_length(steps: int, async_scheduling: bool) -> None:
    core, _ = make_core(
        num_blocks=12,
        block_size=4,
        max_num_seqs=4,
        max_model_len=12,
        num_scheduler_steps=steps,
        async_scheduling=async_scheduling,
    )
    # 3 blocks are enough for a sequence; together they take the whole cache
    requests = [make_request(f"{length}", length, max_tokens=50, seed=length) for length in (12, 11, 9, 5)]
    results = serve(core, requests, 12)
    assert [len(results[request.request_id].token_ids) for request in requests] == [1, 2, 4, 8]
    assert core.stats()["num_preemptions"] == 0


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    ("num_blocks", "settings"),
    [
        (64, {}),
        (64, {"prefix_caching": True}),
        (9, {}),
        (9, {"preemption_mode": "swap", "num_cpu_blocks": 12}),
        (9, {"sliding_window": 6}),
    ],
)
def test_nothing_changes_but_the_number_of_calls(
    num_blocks: int, settings: dict[str, Any], chunked: bool, async_scheduling: bool
) -> None:
    source = random.Random(5)
    requests = [random_request(source, index) for index in range(24)]
    num_calls = []
    for steps in (1, 2, 3, 8):
        core, executor = make_core(
            num_blocks=num_blocks,
            block_size=4,
            max_num_seqs=5,
            max_model_len=32,
            chunked=chunked,
            async_scheduling=async_scheduling,
            num_scheduler_steps=steps,
            **settings,
        )
        serve(core, requests, 32)
        num_calls.append(len(executor.steps))
        assert max(made.num_steps for made in executor.steps) == steps
    if num_blocks == 64:
        # with few blocks, reserving some for a step causes preemptions
        assert num_calls[0] > num_calls[1] > num_calls[2] > num_calls[3]


def random_request(source: random.Random, index: int) -> EngineCoreRequest:
    return make_request(
        f"r{index}",
        [source.randrange(40) for _ in range(source.randint(1, 16))],
        max_tokens=source.randint(1, 30),
        seed=index,
        ignore_eos=source.random() < 0.5,
        stop_token_ids=[source.randrange(40)],
        logprobs=source.choice([None, 0, 2]),
    )


def test_logprobs_of_several_tokens() -> None:
    core, executor = make_core(num_scheduler_steps=4)
    requests = [
        make_request("none", 3, max_tokens=7),
        make_request("zero", 3, max_tokens=7, logprobs=0),
        make_request("two", 3, max_tokens=7, logprobs=2),
    ]
    add_all(core, requests)
    outputs = outputs_of(core)
    assert num_steps(executor) == [1, 4, 4]
    assert all(output.new_logprobs is None for output in outputs if output.request_id == "none")
    for request_id, width in {"zero": 0, "two": 2}.items():
        own = [output for output in outputs if output.request_id == request_id]
        assert [len(output.new_token_ids) for output in own] == [1, 4, 2]
        for output in own:
            logprobs = output.new_logprobs or []
            assert [entry.token_ids for entry in logprobs] == [[t, *range(width)] for t in output.new_token_ids]
            assert [entry.rank for entry in logprobs] == [token + 1 for token in output.new_token_ids]
            assert [entry.logprobs[0] for entry in logprobs] == [-token for token in output.new_token_ids]


def test_beam_searches_make_steps_single_which_is_logged_once(
    package_log: pytest.LogCaptureFixture,
) -> None:
    core, executor = make_core(num_scheduler_steps=4, max_num_seqs=6)
    plain = make_request("plain", 3, max_tokens=30)
    core.add_request(plain)
    for name in ("b1", "b2"):
        core.add_request(
            make_request(name, 3, message={"beam_search": BeamSearchSpec(2, 1)}, max_tokens=4, temperature=0.0)
        )
    results = run(core)
    assert_tokens(results, [plain])
    for made, counts in zip(executor.steps, scheduled(executor), strict=True):
        if counts.keys() != {"plain"}:
            assert made.num_steps == 1
    assert num_steps(executor)[-1] == 4
    lines = [record.getMessage() for record in package_log.records if "--num-scheduler-steps" in record.getMessage()]
    assert len(lines) == 1
    assert "not 4" in lines[0]


def test_single_steps_are_not_logged_where_all_are(
    package_log: pytest.LogCaptureFixture,
) -> None:
    core, _ = make_core()
    core.add_request(make_request("b", 3, message={"beam_search": BeamSearchSpec(2, 1)}, temperature=0.0))
    assert run(core)["b"].beams
    assert "--num-scheduler-steps" not in package_log.text


def test_new_requests_join_between_steps() -> None:
    core, executor = make_core(num_scheduler_steps=4)
    core.add_request(make_request("a", 3, max_tokens=9))
    core.step()
    core.step()
    core.add_request(make_request("b", 3, max_tokens=5))
    core.step()
    core.step()
    assert scheduled(executor) == [{"a": 3}, {"a": 1}, {"b": 3}, {"a": 1, "b": 1}]
    assert num_steps(executor) == [1, 4, 1, 4]
    assert len(entries(executor, "a")) == len(entries(executor, "b")) == 1
    assert not core.has_unfinished()
