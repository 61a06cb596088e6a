"""K steps at once give exactly what K single steps give: tokens, log-probabilities, and what is in the KV cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ascend_vllm.attention.backend import ForwardBatch
from ascend_vllm.attention.cpu import CpuAttention
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.step import UNLIMITED, SchedulerOutput, StepLogprobs
from ascend_vllm.worker.model_runner import ModelRunner
from ascend_vllm.worker.worker import Worker
from tests.combinations import combinations
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import (
    GREEDY,
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    Driver,
    generate,
    make_config,
    make_prompt,
    started_worker,
)

NUM_TOKENS = 24


@dataclasses.dataclass(frozen=True)
class Asked:
    """A row of the test, and why it is there."""

    params: SamplingParams
    prompt_len: int = 12
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    # of generated tokens
    max_tokens: int = NUM_TOKENS


# likely enough that rows of temperature 2 end in the middle
COMMON = tuple(range(0, 384, 9))
ROWS = {
    "greedy": Asked(GREEDY),
    "random": Asked(SamplingParams(temperature=1.0, top_k=50, top_p=0.95), seed=3),
    "min_p": Asked(SamplingParams(temperature=1.4, min_p=0.05, logprobs=2), 30, seed=4),
    "penalised": Asked(
        SamplingParams(temperature=0.0, presence_penalty=0.8, frequency_penalty=0.5, repetition_penalty=1.2), 40
    ),
    "penalised, random": Asked(SamplingParams(temperature=0.9, repetition_penalty=1.4, logprobs=0), 7, seed=5),
    "biased": Asked(SamplingParams(temperature=0.0, logit_bias={5: 3.0, 8: 2.5, 13: 2.0}, logprobs=4), 15),
    "allowed": Asked(SamplingParams(temperature=1.5, allowed_token_ids=[7, 11, 200, 300]), 3, seed=6),
    "short": Asked(SamplingParams(temperature=0.0, logprobs=6), 16, max_tokens=5),
    "one token": Asked(GREEDY, 10, max_tokens=2),
    "stops": Asked(SamplingParams(temperature=2.0), 9, seed=12, stop_token_ids=COMMON),
    "stops later": Asked(
        SamplingParams(temperature=2.0, min_tokens=10, logprobs=1), 9, seed=16, stop_token_ids=COMMON
    ),
    "wants to stop": Asked(
        SamplingParams(temperature=0.0, min_tokens=6, logit_bias={17: 100.0, 2: 99.0}, presence_penalty=1.0),
        5,
        stop_token_ids=(2, 17),
    ),
    "no stop below one": Asked(
        SamplingParams(temperature=0.0, min_tokens=1, logit_bias={17: 100.0}), 5, stop_token_ids=(17,)
    ),
}


def masking_worker(**options: Any) -> Worker:
    """A worker that treats the CPU's memory as that of a device it must not wait for."""
    worker = Worker(make_config(tiny_model("qwen2"), **options))
    worker.load_model()
    worker.initialize_cache(NUM_BLOCKS)
    runner = worker._runner
    assert runner is not None
    mode = worker._config.model.logprobs_mode
    worker._runner = ModelRunner(
        runner._model,
        runner.forward,
        runner._mover,
        runner._batch,
        mode,
        runner._device,
        host_memory=False,
    )
    return worker


@dataclasses.dataclass
class Run:
    """What rows generated."""

    tokens: dict[str, list[int]]
    # of each token: ids, log-probabilities and rank as they were reported
    logprobs: dict[str, list[tuple[list[int], list[float], int]]]


def run(worker: Worker, rows: dict[str, Asked], num_steps: int) -> Run:
    """Decodes all rows together; one leaves in the step after its end."""
    found = Run({}, {name: [] for name in rows})
    with Driver(worker) as driver:
        for name, row in rows.items():
            driver.add(
                name,
                make_prompt(row.prompt_len, seed=row.prompt_len),
                row.params,
                seed=row.seed,
                stop_token_ids=row.stop_token_ids,
                max_num_tokens=row.prompt_len + row.max_tokens,
            )
        collect(found, driver, rows, driver.step().logprobs, dict.fromkeys(rows, 0))
        while driver.rows:
            for name in [name for name, row in driver.rows.items() if row.ended]:
                found.tokens[name] = driver.output(name)
                driver.free(name)
            if driver.rows:
                before = {name: len(driver.output(name)) for name in driver.rows}
                collect(found, driver, rows, driver.step(num_steps=num_steps).logprobs, before)
    return found


def collect(
    found: Run, driver: Driver, rows: dict[str, Asked], logprobs: StepLogprobs | None, before: dict[str, int]
) -> None:
    asking = [name for name in driver.rows if rows[name].params.logprobs is not None]
    assert (logprobs is not None) == bool(asking)
    if logprobs is None:
        return
    for place, name in enumerate(driver.rows):
        wanted = rows[name].params.logprobs
        if wanted is None:
            assert not logprobs.logprobs[place].any()
            continue
        for step in range(len(driver.output(name)) - before[name]):
            ids = logprobs.token_ids[place, step, : 1 + wanted].tolist()
            values = logprobs.logprobs[place, step, : 1 + wanted].tolist()
            found.logprobs[name].append((ids, values, int(logprobs.ranks[place, step])))


@pytest.fixture(scope="module")
def single() -> dict[str, Run]:
    """One step at a time."""
    modes = ("raw_logprobs", "processed_logprobs")
    return {mode: run(started_worker(tiny_model("qwen2"), logprobs_mode=mode), ROWS, 1) for mode in modes}


def test_the_rows_are_worth_the_test(single: dict[str, Run]) -> None:
    """They end by length and by stop ids, at many places, some on the first token they could."""
    tokens = single["raw_logprobs"].tokens
    assert set(tokens) == set(ROWS)
    lengths = {name: len(found) for name, found in tokens.items()}
    assert lengths["greedy"] == lengths["allowed"] == NUM_TOKENS
    assert (lengths["short"], lengths["one token"], lengths["no stop below one"]) == (5, 2, 2)
    assert lengths["wants to stop"] == 7
    assert 2 < lengths["stops"] < 10 < lengths["stops later"] < NUM_TOKENS
    logprobs = single["raw_logprobs"].logprobs
    assert {len(found) for found in logprobs.values()} == {0, NUM_TOKENS, 5, lengths["stops later"]}
    assert logprobs["biased"] != single["processed_logprobs"].logprobs["biased"]


@pytest.mark.parametrize(("mode", "num_steps"), combinations(["raw_logprobs", "processed_logprobs"], [2, 3, 8, 32]))
def test_rows_that_leave_change_nothing(single: dict[str, Run], mode: str, num_steps: int) -> None:
    assert run(started_worker(tiny_model("qwen2"), logprobs_mode=mode), ROWS, num_steps) == single[mode]


@pytest.mark.parametrize(("mode", "num_steps"), combinations(["raw_logprobs", "processed_logprobs"], [2, 8, 32]))
def test_rows_that_are_masked_change_nothing(single: dict[str, Run], mode: str, num_steps: int) -> None:
    worker = masking_worker(logprobs_mode=mode)
    assert run(worker, ROWS, 1) == single[mode]
    assert run(worker, ROWS, num_steps) == single[mode]


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_the_block_size_changes_nothing(single: dict[str, Run], block_size: int) -> None:
    worker = started_worker(tiny_model("qwen2"), block_size=block_size)
    found = run(worker, ROWS, 5)
    assert found.tokens == single["raw_logprobs"].tokens


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "opt", "llama-dynamic"])
def test_every_family_decodes_several_steps(name: str) -> None:
    worker = started_worker(tiny_model(name))
    rows = {
        "a": ROWS["greedy"],
        "b": ROWS["stops later"],
        "long": dataclasses.replace(ROWS["random"], prompt_len=130),
    }
    assert run(worker, rows, 7) == run(worker, rows, 1)


@pytest.mark.parametrize("masks", [False, True])
def test_a_row_that_ended_writes_no_key(masks: bool) -> None:
    """Its blocks behind its end keep what was in them, though it had them for all steps."""
    worker = masking_worker() if masks else started_worker(tiny_model("qwen2"))
    assert worker._runner is not None
    caches = worker._runner.forward._kv_caches
    rows = {name: ROWS[name] for name in ("greedy", "short", "stops")}
    lengths = {name: len(tokens) for name, tokens in run(worker, rows, 1).tokens.items()}
    for cache in caches:
        cache.fill_(-77.0)
    with Driver(worker) as driver:
        for name, row in rows.items():
            prompt = make_prompt(row.prompt_len, seed=row.prompt_len)
            limit = row.prompt_len + row.max_tokens
            driver.add(
                name,
                prompt,
                row.params,
                seed=row.seed,
                stop_token_ids=row.stop_token_ids,
                max_num_tokens=limit,
            )
        driver.step()
        driver.step(num_steps=NUM_TOKENS - 1)
        for name, row in driver.rows.items():
            assert row.ended
            # the token that ends a row is never computed
            computed = rows[name].prompt_len + lengths[name] - 1
            for cache in caches:
                # [2, K, B*S, D]
                kept = cache[:, row.blocks].transpose(1, 2).flatten(2, 3)
                assert not (kept[:, :, :computed] == -77.0).any(), name
                assert (kept[:, :, computed:] == -77.0).all(), name
        touched = sum((cache != -77.0).any(dim=(0, 2, 3, 4)).sum().item() for cache in caches) // len(caches)
        assert touched == sum(-(-row.computed // driver.block_size) for row in driver.rows.values())


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("length", [MAX_MODEL_LEN - 5, MAX_MODEL_LEN - 1])
def test_a_row_ends_at_max_model_len_without_being_told(masks: bool, length: int) -> None:
    """Positions beyond have no rotation, no block and no place in the slot."""
    worker = masking_worker() if masks else started_worker(tiny_model("qwen2"))
    prompt = make_prompt(length)
    expected = generate(worker, prompt, GREEDY, MAX_MODEL_LEN + 1 - length)
    with Driver(worker) as driver:
        driver.add("full", prompt, SamplingParams(temperature=0.0, presence_penalty=1e-9), max_num_tokens=UNLIMITED)
        driver.add("other", make_prompt(8), GREEDY)
        driver.step()
        driver.step(num_steps=16)
        assert driver.output("full") == expected
        assert len(driver.rows["full"].tokens) == MAX_MODEL_LEN + 1
        assert driver.output("other") == generate(worker, make_prompt(8), GREEDY, 17)


def test_a_row_goes_on_step_by_step_afterwards() -> None:
    worker = started_worker(tiny_model("qwen2"))
    params = SamplingParams(temperature=1.0, repetition_penalty=1.2)
    with Driver(worker) as driver:
        driver.add("row", make_prompt(30), params, seed=2)
        for num_steps in (1, 4, 1, 1, 9, 1, 2):
            driver.step(num_steps=num_steps)
        assert driver.output("row") == generate(worker, make_prompt(30), params, 19, seed=2)


class Recorder(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


# their results' shapes or values are the host's, which would have to wait for the device
WAITING = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique",
    "aten::equal",
    "aten::is_nonzero",
    "aten::repeat_interleave",
}


def test_nothing_waits_for_the_device_between_passes() -> None:
    worker = masking_worker()
    with Driver(worker) as driver:
        for name, row in ROWS.items():
            prompt = make_prompt(row.prompt_len, seed=row.prompt_len)
            driver.add(name, prompt, row.params, seed=row.seed, stop_token_ids=row.stop_token_ids)
        driver.step()
        with Recorder() as recorder:
            driver.step(num_steps=4)
    forwards = recorder.names.count("ascend_vllm::paged_attention")
    assert forwards == 4 * 3
    assert WAITING.isdisjoint(recorder.names)


@pytest.mark.parametrize("masks", [False, True])
def test_lengths_on_the_host_are_those_on_the_device(monkeypatch: pytest.MonkeyPatch, masks: bool) -> None:
    worker = masking_worker() if masks else started_worker(tiny_model("qwen2"))
    num_rows = []

    def prepare(_backend: CpuAttention, batch: ForwardBatch) -> None:
        assert batch.query_start_np.tolist() == batch.query_start.tolist()
        assert batch.seq_lens_np.tolist() == batch.seq_lens.tolist()
        num_rows.append(len(batch.seq_lens_np))

    monkeypatch.setattr(CpuAttention, "prepare", prepare)
    run(worker, ROWS, 8)
    assert max(num_rows) == len(ROWS)
    assert len(num_rows) > NUM_TOKENS // 8


def test_a_row_that_misses_more_than_a_token_is_refused() -> None:
    worker = started_worker(tiny_model("qwen2"))
    with Driver(worker) as driver:
        driver.add("row", make_prompt(5), GREEDY)
        with pytest.raises(ValueError, match=r"misses one token: slot .* from 0 up to 5"):
            driver.step(num_steps=2)
        driver.pending = SchedulerOutput(9, [], [], [], [], [])


def test_blocks_that_do_not_last_are_refused() -> None:
    worker = started_worker(tiny_model("qwen2"))
    with Driver(worker) as driver:
        driver.add("row", make_prompt(14), GREEDY)
        driver.step()
        row = driver.rows["row"]
        step = SchedulerOutput(5, [], [], [row.slot], [1], [], num_steps=3)
        with pytest.raises(ValueError, match=r"do not last: slot .* up to 17, 15 tokens known, 1 blocks of 16"):
            worker.execute_model(step)
        step.num_steps = 2
        assert worker.execute_model(step).sampled_token_ids.shape == (1, 2)


def test_void_columns_are_there_so_that_shapes_do_not_vary() -> None:
    worker = started_worker(tiny_model("qwen2"))
    with Driver(worker) as driver:
        driver.add("row", make_prompt(4), SamplingParams(temperature=0.0, logprobs=2), max_num_tokens=6)
        driver.step()
        output = driver.step(num_steps=8)
        assert output.sampled_token_ids.shape == (1, 8)
        assert output.sampled_token_ids.dtype == np.int64
        assert output.logprobs is not None
        assert output.logprobs.logprobs.shape == (1, 8, 3)
        assert output.logprobs.ranks.shape == (1, 8)
        assert len(driver.output("row")) == 2


def test_padded_lists_of_stop_ids() -> None:
    """Rows without stop ids share a batch with rows that have many."""
    worker = started_worker(tiny_model("qwen2"))
    assert worker._runner is not None
    table = worker._runner._batch.sampling.stop_ids
    table.set(0, [4, 5, 6])
    table.set(2, [9])
    assert table.padded(np.array([2, 1, 0]), -1).tolist() == [[9, -1, -1], [-1, -1, -1], [4, 5, 6]]
    assert table.padded(np.array([1, 3]), -1).shape == (2, 0)
    table.set(0, ())
    table.set(2, ())
    assert torch.equal(torch.from_numpy(table.padded(np.array([0]), -1)), torch.zeros(1, 0, dtype=torch.int64))
