"""AsyncLLM against a real engine core with a tiny model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.engine.async_llm import AsyncLLM
from ascend_vllm.errors import AscendVllmError, EngineBusyError, EngineDeadError, ModelLoadError, RequestError
from ascend_vllm.lora.request import LoRARequest
from ascend_vllm.outputs import RequestOutput
from ascend_vllm.sampling_params import RequestOutputKind, SamplingParams
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

# A request that does not finish during a test: the tiny model makes thousands of tokens a second.
LONG = 16_000
MAX_MODEL_LEN = 16_384
NUM_BLOCKS = MAX_MODEL_LEN // 16
FINAL = RequestOutputKind.FINAL_ONLY
DELTA = RequestOutputKind.DELTA


def make_engine(**options: Any) -> AsyncLLM:
    args = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "num_gpu_blocks_override": NUM_BLOCKS}
    args |= {"block_size": 16, "max_num_batched_tokens": MAX_MODEL_LEN}
    return AsyncLLM.from_engine_args(EngineArgs(model=tiny_model("qwen2-tied"), **(args | options)))


@pytest.fixture(scope="module", autouse=True)
def longer_than_the_model_says() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
        yield


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine() -> AsyncIterator[AsyncLLM]:
    """Two sequences run at once, two requests may wait."""
    engine = make_engine(max_num_seqs=2, max_num_queued_reqs=2)
    try:
        await engine.ready()
        yield engine
    finally:
        engine.shutdown()


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def nothing_is_left(engine: AsyncLLM) -> AsyncIterator[None]:
    """Checks after every test that the core has freed all blocks and slots."""
    yield
    if engine.errored:
        return
    audit = await engine.call_utility("audit")
    assert (audit["num_free_blocks"], audit["num_running"], audit["num_waiting"]) == (NUM_BLOCKS, 0, 0)
    assert audit["violations"] == []
    assert engine._output.num_requests == 0


def params(max_tokens: int = 8, **options: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens} | options))


async def final(engine: AsyncLLM, request_id: str, sampling: SamplingParams, prompt: Any = "Hello!") -> RequestOutput:
    outputs = [output async for output in engine.generate(prompt, sampling, request_id)]
    assert outputs[-1].finished
    return outputs[-1]


async def settle(engine: AsyncLLM) -> dict[str, Any]:
    """The core's audit once nothing runs."""
    for _ in range(500):
        audit: dict[str, Any] = await engine.call_utility("audit")
        if audit["num_running"] == audit["num_waiting"] == 0:
            return audit
        await asyncio.sleep(0.01)
    raise AssertionError(f"still running: {audit}")


def metric(engine: AsyncLLM, name: str, **labels: str) -> float:
    text = generate_latest(engine.metrics).decode()
    return next(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"vllm:{name}" and labels.items() <= sample.labels.items()
    )


async def test_output_kinds_agree(engine: AsyncLLM) -> None:
    whole = await final(engine, "a", params(200, output_kind=FINAL))
    cumulative = [output async for output in engine.generate("Hello!", params(200), "b")]
    deltas = [output async for output in engine.generate("Hello!", params(200, output_kind=DELTA), "c")]
    completion = whole.outputs[0]
    assert len(completion.token_ids) == 200
    assert completion.finish_reason == "length"
    assert cumulative[-1].outputs[0].text == completion.text
    assert "".join(output.outputs[0].text for output in deltas) == completion.text
    assert [i for output in deltas for i in output.outputs[0].token_ids] == completion.token_ids
    assert whole.prompt == "Hello!"


async def test_outputs_come_while_the_request_runs(engine: AsyncLLM) -> None:
    """Their number depends on the reader: unread outputs are merged."""
    whole = await final(engine, "whole", params(200, output_kind=FINAL))
    token_ids: list[int] = []
    async with contextlib.aclosing(engine.generate("Hello!", params(LONG, output_kind=DELTA), "long")) as deltas:
        for _ in range(7):
            output = await anext(deltas)
            assert output.outputs[0].token_ids
            assert not output.finished
            token_ids += output.outputs[0].token_ids
    assert len(token_ids) < LONG
    assert token_ids[:200] == whole.outputs[0].token_ids[: len(token_ids)]
    await settle(engine)


async def test_a_seeded_request_repeats_and_its_sequences_differ(engine: AsyncLLM) -> None:
    sampling = params(16, temperature=1.0, seed=11, n=2, output_kind=FINAL)
    first, second = [await final(engine, f"s{i}", sampling) for i in range(2)]
    assert [part.token_ids for part in first.outputs] == [part.token_ids for part in second.outputs]
    assert first.outputs[0].token_ids != first.outputs[1].token_ids
    single = await final(engine, "single", params(16, temperature=1.0, seed=11, output_kind=FINAL))
    assert single.outputs[0].token_ids == first.outputs[0].token_ids


async def test_stop_strings_end_the_sequence_in_the_core(engine: AsyncLLM) -> None:
    text = (await final(engine, "whole", params(40, output_kind=FINAL))).outputs[0].text
    stop = text[10:12]
    output = await final(engine, "stopped", params(200, stop=[stop], output_kind=FINAL))
    assert output.outputs[0].text == text[: text.index(stop)]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    assert len(output.outputs[0].token_ids) < 40
    await settle(engine)


async def test_logprobs(engine: AsyncLLM) -> None:
    output = await final(engine, "l", params(4, logprobs=3, output_kind=FINAL))
    completion = output.outputs[0]
    assert len(completion.logprobs) == 4
    total = 0.0
    for token_id, position in zip(completion.token_ids, completion.logprobs, strict=True):
        assert position[token_id].rank == 1  # greedy
        assert len(position) == 3
        total += position[token_id].logprob
    assert completion.cumulative_logprob == pytest.approx(total)


@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [
        ("", params(), "Prompt cannot be empty"),
        ({"prompt_token_ids": [384]}, params(), "Token id 384 is out of vocabulary"),
        (
            {"prompt_token_ids": [1] * MAX_MODEL_LEN},
            params(),
            f"maximum context length is {MAX_MODEL_LEN} tokens",
        ),
        ("a", params(logprobs=21), "greater than max allowed: 20"),
        ("a", params(prompt_logprobs=21), "Requested prompt logprobs of 21"),
    ],
)
async def test_wrong_requests_are_refused_at_once(
    engine: AsyncLLM, prompt: Any, sampling: SamplingParams, words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        await anext(engine.generate(prompt, sampling, "wrong"))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"lora_request": LoRARequest("a", 1, "/a")}, r"Got lora_request .* but LoRA is not enabled!"),
        ({"prompt_adapter_request": object()}, "prompt_adapter_request is not supported"),
        (
            {"sampling_params": params(logits_processors=[lambda _, logits: logits])},
            "logits_processors are functions, which only LLM and LLMEngine can call",
        ),
    ],
)
async def test_what_cannot_be_is_refused_where_the_answer_is_waited_for(
    engine: AsyncLLM, more: dict[str, Any], words: str
) -> None:
    answer = engine.generate(**{"prompt": "Hello!", "sampling_params": params(), "request_id": "refused"} | more)
    with pytest.raises(RequestError, match=words):
        await anext(answer)
    assert engine.running_request_ids() == []


async def test_a_request_id_is_taken_while_it_runs(engine: AsyncLLM) -> None:
    async with contextlib.aclosing(engine.generate("Hello!", params(LONG), "twin")) as first:
        await anext(first)
        with pytest.raises(RequestError, match=r"Request twin already exists\."):
            await anext(engine.generate("Hello!", params(), "twin"))
        assert not (await anext(first)).finished
    await settle(engine)
    assert (await final(engine, "twin", params())).finished


@pytest.mark.parametrize("how", ["close", "cancel", "abort"])
async def test_a_request_nobody_reads_is_aborted(engine: AsyncLLM, how: str) -> None:
    aborted = metric(engine, "request_success_total", finished_reason="abort")
    generator = engine.generate("Hello!", params(LONG, output_kind=DELTA), "gone")
    await anext(generator)
    if how == "close":
        await generator.aclose()
    elif how == "cancel":

        async def read() -> None:
            async for _ in generator:
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        await engine.abort("gone")
        last = [output async for output in generator][-1]
        assert last.outputs[0].finish_reason == "abort"
    assert (await settle(engine))["num_free_blocks"] == NUM_BLOCKS
    assert metric(engine, "request_success_total", finished_reason="abort") == aborted + 1
    assert metric(engine, "num_requests_running") == 0


async def test_a_full_queue_refuses(engine: AsyncLLM) -> None:
    rejections = metric(engine, "admission_rejections_total")
    generators = [engine.generate("Hello!", params(LONG, output_kind=DELTA), f"q{i}") for i in range(4)]
    reads = [asyncio.ensure_future(anext(generator)) for generator in generators]
    await asyncio.sleep(0)  # all four are admitted: two to run, two to wait
    with pytest.raises(EngineBusyError, match="The engine is currently busy and cannot accept new requests"):
        await anext(engine.generate("Hello!", params(), "refused"))
    assert metric(engine, "admission_rejections_total") == rejections + 1
    await asyncio.gather(*reads[:2])
    for read, generator in zip(reads, generators, strict=True):
        read.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await read
        await generator.aclose()
    await settle(engine)
    assert (await final(engine, "afterwards", params())).finished


async def test_many_requests_give_what_each_gives_alone(engine: AsyncLLM) -> None:
    prompts = ["Hello!", "The quick brown fox", "1 2 3 4", "Serving a model means"]
    alone = [
        (await final(engine, f"x{i}", params(20, output_kind=FINAL), p)).outputs[0] for i, p in enumerate(prompts)
    ]
    together = await asyncio.gather(
        *(final(engine, f"y{i}", params(20, output_kind=FINAL), prompt) for i, prompt in enumerate(prompts))
    )
    assert [output.outputs[0].token_ids for output in together] == [output.token_ids for output in alone]


async def test_metrics(engine: AsyncLLM) -> None:
    names = ("prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_count")
    before = [metric(engine, name) for name in names]
    decoded = metric(engine, "time_per_output_token_seconds_count")
    await final(engine, "m", params(7, n=1), {"prompt_token_ids": [1, 2, 3, 4, 5]})
    assert [metric(engine, name) for name in names] == [before[0] + 5, before[1] + 7, before[2] + 1]
    assert metric(engine, "time_per_output_token_seconds_count") == decoded + 6
    assert metric(engine, "gpu_cache_usage_perc") == metric(engine, "num_requests_running") == 0
    assert metric(engine, "cache_config_info", num_gpu_blocks=str(NUM_BLOCKS)) == 1


async def test_state(engine: AsyncLLM) -> None:
    await engine.check_health()
    assert engine.is_running
    assert not engine.errored
    assert engine.max_model_len == MAX_MODEL_LEN
    assert engine.default_sampling_params() == {}
    with pytest.raises(AscendVllmError, match="unknown utility"):
        await engine.call_utility("explode")


async def test_a_dead_core_ends_all_requests() -> None:
    """Whether the core has read them or not, none of them hangs."""
    engine = make_engine(max_num_seqs=1, disable_log_stats=True)
    try:
        # not ready yet: generate waits for it
        async for _ in engine.generate("Hello!", params(2), "first"):
            pass
        # stopped, the core cannot finish anything before all requests are sent
        os.kill(engine.core_pid, signal.SIGSTOP)
        requests = [asyncio.create_task(final(engine, f"d{i}", params(240, output_kind=FINAL))) for i in range(3)]
        async with asyncio.timeout(30):
            while engine._output.num_requests < 3:
                await asyncio.sleep(0.001)
        os.kill(engine.core_pid, signal.SIGKILL)
        results = await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), 30)
        assert [type(result) for result in results] == [EngineDeadError] * 3
        assert engine.errored
        assert not engine.is_running
        with pytest.raises(EngineDeadError, match="was killed by signal 9"):
            await engine.check_health()
        with pytest.raises(EngineDeadError):
            await final(engine, "late", params())
        assert b"vllm:" not in generate_latest(engine.metrics)
    finally:
        engine.shutdown()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def limited() -> AsyncIterator[AsyncLLM]:
    """Its core may be silent for a second while it has work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENGINE_ITERATION_TIMEOUT_S", "1")
        engine = make_engine(max_num_seqs=4)
        try:
            await engine.ready()
            yield engine
        finally:
            engine.shutdown()


async def test_a_core_that_works_does_not_time_out(limited: AsyncLLM) -> None:
    """Nor does an idle one."""
    for turn in range(4):
        many = (final(limited, f"{turn}-{i}", params(60 if i else 240)) for i in range(40))
        assert all(output.finished for output in await asyncio.gather(*many))
        assert limited._client._cores[0].watchdog._timer is None
    async with contextlib.aclosing(limited.generate("Hello!", params(LONG), "gone")) as gone:
        await anext(gone)
        assert limited._client._cores[0].watchdog._timer is not None
    assert limited._client._cores[0].watchdog._timer is None
    await asyncio.sleep(1.2)  # longer than the limit
    assert limited.is_running
    assert (await final(limited, "last", params())).finished


async def test_a_core_that_hangs_ends_all_requests(limited: AsyncLLM) -> None:
    """The last of the tests that share this engine."""
    running = limited.generate("Hello!", params(LONG), "running")
    await anext(running)
    os.kill(limited.core_pid, signal.SIGSTOP)
    requests = [asyncio.create_task(final(limited, f"h{i}", params(240))) for i in range(3)]
    with pytest.raises(EngineDeadError, match="VLLM_ENGINE_ITERATION_TIMEOUT_S"):
        async for _ in running:
            pass
    for result in await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), 30):
        assert isinstance(result, EngineDeadError) and "VLLM_ENGINE_ITERATION_TIMEOUT_S" in str(result)
    assert limited.errored
    with pytest.raises(EngineDeadError, match="VLLM_ENGINE_ITERATION_TIMEOUT_S"):
        await limited.check_health()


async def test_the_prefix_cache_is_forgotten(engine: AsyncLLM) -> None:
    assert await engine.reset_prefix_cache() is True


async def test_a_wrong_tokenizer_leaves_no_process(tmp_path: Any) -> None:
    with pytest.raises(ModelLoadError, match="cannot load the tokenizer"):
        make_engine(tokenizer=str(tmp_path))
