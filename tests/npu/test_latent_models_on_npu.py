"""Models with latent attention on a simulated NPU: what one on the CPU computes, and what eager steps compute."""

from __future__ import annotations

import functools
import logging
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from ascend_vllm import GenerationConfig, TurbomindEngineConfig, pipeline
from ascend_vllm.config.graphs import GraphMode
from ascend_vllm.errors import ConfigError
from ascend_vllm.worker.worker import Worker
from tests.npu import test_worker_npu
from tests.npu.test_graphs import PROMPTS, decode_step_launches, generate, make_engine
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import Driver, make_config, make_prompt

# caches 512 and 64 numbers a token
MODEL = "deepseek-v3-512"
PROMPT = make_prompt(150)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables as users have them who set none."""
    monkeypatch.delenv("INFER_MODE", raising=False)
    # what makes expandable segments has tests of its own
    monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:False")


@functools.cache
def worker_on(device: str) -> Worker:
    worker = Worker(make_config(tiny_model(MODEL), device=device, dtype="float16", block_size=64))
    worker.load_model()
    worker.initialize_cache(256, 8)
    return worker


def in_chunks(worker: Worker) -> list[list[int]]:
    """What follows a prompt that is computed at once, or expanded over cached tokens and then in the latent space."""
    outputs = []
    for chunks in ((150,), (70, 67, 13)):
        with Driver(worker) as driver:
            driver.add("row", PROMPT)
            for chunk in chunks:
                driver.step({"row": chunk})
            driver.steps(4)
            outputs.append(driver.output("row"))
    return outputs


@pytest.mark.parametrize(
    "scenario",
    [in_chunks, test_worker_npu.behind_a_cached_prefix, test_worker_npu.forked, test_worker_npu.swapped],
    ids=lambda scenario: scenario.__name__,
)
def test_tokens_are_those_of_the_cpu(scenario: Callable[[Worker], Any]) -> None:
    assert scenario(worker_on("npu")) == scenario(worker_on("cpu"))


def test_other_widths_are_refused() -> None:
    config = make_config(tiny_model("deepseek-v2-lite"), device="npu", dtype="float16", block_size=64)
    with pytest.raises(ConfigError, match=r"serve this model \(ascend_latent: its operators need kv_lora_rank 512"):
        Worker(config).load_model()


@functools.cache
def eager_answers() -> list[tuple[int, ...]]:
    return generate(make_engine(MODEL, enforce_eager=True))


@pytest.mark.parametrize("num_scheduler_steps", [1, 4])
def test_captured_graphs(num_scheduler_steps: int) -> None:
    """Rows end one after the other, so that batches are padded."""
    engine = make_engine(MODEL, num_scheduler_steps=num_scheduler_steps, enable_prefix_caching=True)
    assert generate(engine) == eager_answers()
    assert decode_step_launches(engine, PROMPTS[:3]) == [False]
    # over what is cached of them
    assert generate(engine, PROMPTS[1:4]) == eager_answers()[1:4]


# the compiler, and what it is made of, have warnings of their own
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_compiled_graphs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFER_MODE", "PTA")
    monkeypatch.setenv("TORCHAIR_CACHE_HOME", str(tmp_path / "cache"))
    # it writes what tests never read, as long as anybody listens, which pytest does
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    engine = make_engine(MODEL, (2,))
    assert engine.config.graphs.mode == GraphMode.COMPILED
    assert generate(engine, PROMPTS[:2]) == eager_answers()[:2]
    assert decode_step_launches(engine, PROMPTS[:2]) == [False]
    # no cache is copied: what is compiled writes in place
    (module,) = tmp_path.rglob("compiled_module")
    compiled = module.read_bytes().decode("latin1")
    assert "ascend_rotate_and_store.default" in compiled
    assert "_functional.default" not in compiled
    assert "aten.copy_" not in compiled


@pytest.mark.exhaustive
def test_two_devices_share_the_heads() -> None:
    """Each has all latents; sums of rounded numbers are in another order, but the best tokens lead clearly."""
    texts = []
    for tp in (1, 2):
        backend = TurbomindEngineConfig(tp=tp, enable_prefix_caching=True, dtype="float16")
        with pipeline(tiny_model(MODEL), backend_config=backend, device="npu") as pipe:
            config = GenerationConfig(max_new_tokens=12)
            responses = pipe(["Hello! How are you today?", "The quick"], config, do_preprocess=False)
            texts.append([response.text for response in responses])
    assert texts[0] == texts[1]
