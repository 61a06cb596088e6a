"""Methods of `LLM` beside generating: sleeping, workers, metrics, queued prompts; its names and records."""

from __future__ import annotations

import dataclasses
import gzip
import inspect
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

import ascend_vllm
from ascend_vllm import LLM, CompletionOutput, ModelRegistry, RequestOutput, SamplingParams
from ascend_vllm.engine.metrics_reader import Counter, Gauge, Histogram, Metric
from ascend_vllm.errors import RequestError
from ascend_vllm.lora.request import LoRARequest
from ascend_vllm.outputs import RequestMetrics
from tests.tiny_models import tiny_model

MIB = 1 << 20
PROMPTS = ["Hello! How are you today?", "The quick", "1 2 3 4 5"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
# a cache of 96 MiB: three layers, two heads of 16, keys and values in float32
NUM_BLOCKS = 96 * MIB // (3 * 2 * 2 * 16 * 4 * 16)
# of the weights' bytes, which the tiny checkpoints do not have
WIDE = {"vocab_size": 98304, "tie_word_embeddings": False}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Its weights are random and take 48 MiB: an embedding and a head of 98304 rows of 64."""
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_TORCH_PROFILER_DIR", str(tmp_path_factory.mktemp("traces") / "new"))
    llm = LLM(
        tiny_model("qwen2"),
        dtype="float32",
        max_model_len=256,
        block_size=16,
        num_gpu_blocks_override=NUM_BLOCKS,
        swap_space=0,
        enable_sleep_mode=True,
        disable_log_stats=False,
        load_format="dummy",
        hf_overrides=WIDE,
    )
    patch.undo()
    yield llm
    assert llm.llm_engine.call_utility("audit")["num_free_blocks"] == NUM_BLOCKS
    llm.shutdown()


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def fill_cache(llm: LLM) -> None:
    """Writes to all of the cache, so that the system has given its memory."""
    runner_of = "_runner"
    llm.collective_rpc(lambda worker: [cache.fill_(0) for cache in getattr(worker, runner_of).forward._kv_caches])


@pytest.mark.parametrize(("level", "freed_mib"), [(1, 85), (2, 125)])
def test_sleeping_frees_memory_and_changes_no_output(llm: LLM, level: int, freed_mib: int) -> None:
    before = tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    fill_cache(llm)
    awake = resident_bytes()
    assert not llm.is_sleeping()
    llm.sleep(level)
    assert llm.is_sleeping()
    assert awake - resident_bytes() > freed_mib * MIB
    with pytest.raises(RequestError, match="The engine sleeps: call wake_up"):
        llm.generate("Hello", GREEDY, use_tqdm=False)
    llm.wake_up(tags=["weights"])
    assert llm.is_sleeping()
    llm.wake_up(tags=["kv_cache"])
    assert not llm.is_sleeping()
    assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == before


def test_sleeping_may_keep_what_is_queued(llm: LLM) -> None:
    expected = tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    llm.enqueue(PROMPTS, GREEDY)
    llm.llm_engine.step()
    llm.sleep(1, mode="keep")
    llm.wake_up()
    assert tokens(llm.wait_for_completion(use_tqdm=False)) == expected
    llm.enqueue(PROMPTS, GREEDY)
    llm.sleep(0)
    assert not llm.is_sleeping()
    llm.wake_up()
    assert llm.wait_for_completion(use_tqdm=False) == []
    with pytest.raises(RequestError, match="mode must be 'abort' or 'keep', got 'wait'"):
        llm.sleep(1, mode="wait")


def test_queued_prompts_run_when_they_are_waited_for(llm: LLM) -> None:
    expected = tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    first = llm.enqueue(PROMPTS[:2], GREEDY)
    # a call in between brings them to their ends, and keeps what came of them
    assert tokens(llm.generate(PROMPTS[1], GREEDY, use_tqdm=False)) == expected[1:2]
    second = llm.enqueue(PROMPTS[2], [GREEDY])
    outputs = llm.wait_for_completion(RequestOutput, use_tqdm=False)
    assert [output.request_id for output in outputs] == [*first, *second]
    assert tokens(outputs) == expected
    assert llm.wait_for_completion(use_tqdm=False) == []
    llm.enqueue("a", GREEDY)
    with pytest.raises(TypeError, match="an output is of type RequestOutput"):
        llm.wait_for_completion(CompletionOutput, use_tqdm=False)
    with pytest.raises(RequestError, match="The lengths of prompts and params must be the same"):
        llm.enqueue(PROMPTS, [GREEDY])
    with pytest.raises(RequestError, match="lora_request must be a LoRARequest"):
        llm.enqueue("a", GREEDY, object())
    assert not llm.llm_engine.has_unfinished_requests()


def test_prompts_as_lists_of_ids(llm: LLM) -> None:
    (text,) = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    for prompts in (text.prompt_token_ids, [text.prompt_token_ids]):
        (ids,) = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert (ids.prompt, tokens([ids])) == (None, tokens([text]))


def test_calling_the_worker(llm: LLM) -> None:
    assert llm.apply_model(lambda model: type(model).__name__) == ["Qwen2ForCausalLM"]
    assert llm.collective_rpc("determine_num_blocks") == [NUM_BLOCKS]
    assert llm.collective_rpc(lambda worker, a, b: (type(worker).__name__, a, b), args=(1,), kwargs={"b": 2}) == [
        ("Worker", 1, 2)
    ]
    with pytest.raises(RequestError, match="workers have no method 'nope'"):
        llm.collective_rpc("nope")
    with pytest.raises(TypeError):
        llm.collective_rpc("get_model", args=(1,))
    assert tokens(llm.generate("a", GREEDY, use_tqdm=False))


def test_a_trace_of_what_was_computed(llm: LLM) -> None:
    (directory,) = llm.collective_rpc(lambda worker: pathlib.Path(worker._profiler._directory))
    llm.start_profile()
    llm.generate("a", GREEDY, use_tqdm=False)
    llm.stop_profile()
    (path,) = directory.iterdir()
    names = {event.get("name", "") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
    assert any(name.startswith("ascend_vllm::") for name in names)
    # without a beginning there is nothing to write
    llm.stop_profile()
    assert len(list(directory.iterdir())) == 1


def test_metrics_as_records(llm: LLM) -> None:
    def read() -> dict[str, Metric]:
        return {metric.name: metric for metric in llm.get_metrics()}

    before = read()
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    after = read()
    generated, ended = after["vllm:generation_tokens"], before["vllm:generation_tokens"]
    assert isinstance(generated, Counter)
    assert isinstance(ended, Counter)
    assert generated.value - ended.value == 3 * 12
    assert generated.labels["engine"] == "0"
    running = after["vllm:num_requests_running"]
    assert isinstance(running, Gauge)
    assert running.value == 0.0
    lengths = after["vllm:request_generation_tokens"]
    assert isinstance(lengths, Histogram)
    assert lengths.buckets["+Inf"] == lengths.count
    assert lengths.buckets["10.0"] <= lengths.buckets["20.0"]
    assert lengths.sum >= 3 * 12


def test_without_the_switches() -> None:
    llm = LLM(tiny_model("qwen2"), dtype="float32", max_model_len=64, num_gpu_blocks_override=8, block_size=16)
    with pytest.raises(RequestError, match="Please use --enable-sleep-mode to enable it"):
        llm.sleep()
    with pytest.raises(RuntimeError, match="Stat logging disabled"):
        llm.get_metrics()
    with pytest.raises(RequestError, match="Profiler is not enabled"):
        llm.start_profile()
    engine = llm.llm_engine
    engine.check_health()
    engine.do_log_stats()
    assert engine.get_tokenizer() is llm.get_tokenizer()
    assert engine.get_model_config().max_model_len == engine.get_scheduler_config().max_model_len == 64
    assert engine.get_parallel_config().tensor_parallel_size == 1
    with pytest.raises(RequestError, match=r"Got lora_request .* but LoRA is not enabled!"):
        engine.add_request("a", "a", GREEDY, None, LoRARequest("a", 1, "/a"))
    llm.shutdown()


def test_the_exports_of_vllm() -> None:
    names = [
        "LLM",
        "ModelRegistry",
        "PromptType",
        "TextPrompt",
        "TokensPrompt",
        "SamplingParams",
        "RequestOutput",
        "CompletionOutput",
        "PoolingOutput",
        "PoolingRequestOutput",
        "EmbeddingOutput",
        "EmbeddingRequestOutput",
        "ClassificationOutput",
        "ClassificationRequestOutput",
        "ScoringOutput",
        "ScoringRequestOutput",
        "LLMEngine",
        "EngineArgs",
        "AsyncLLMEngine",
        "AsyncEngineArgs",
        "initialize_ray_cluster",
        "PoolingParams",
        "__version__",
    ]
    assert set(names) <= set(ascend_vllm.__all__)
    assert all(getattr(ascend_vllm, name) is not None for name in ascend_vllm.__all__)


def test_the_fields_of_outputs() -> None:
    def names(record: Any) -> list[str]:
        return [field.name for field in dataclasses.fields(record)]

    assert names(RequestOutput)[:10] == [
        "request_id", "prompt", "prompt_token_ids", "prompt_logprobs", "outputs", "finished", "metrics",
        "lora_request", "encoder_prompt", "encoder_prompt_token_ids",
    ]  # fmt: skip
    assert {"num_cached_tokens", "kv_transfer_params"} <= set(names(RequestOutput))
    assert names(CompletionOutput) == [
        "index", "text", "token_ids", "cumulative_logprob", "logprobs", "finish_reason", "stop_reason",
        "lora_request",
        # not vLLM's: of speculative decoding
        "num_drafts", "num_accepted_drafts",
    ]  # fmt: skip
    assert names(RequestMetrics) == [
        "arrival_time", "last_token_time", "first_scheduled_time", "first_token_time", "time_in_queue",
        "finished_time", "scheduler_time", "model_forward_time", "model_execute_time",
    ]  # fmt: skip
    made = RequestOutput("a", None, [1], None, [CompletionOutput(0, "", [], None, None)], finished=False)
    assert (made.metrics, made.lora_request, made.encoder_prompt) == (None, None, None)


def test_the_order_of_arguments_is_0_6_3s() -> None:
    def names(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)[1:]

    assert names(LLM.__init__)[:20] == [
        "model", "tokenizer", "tokenizer_mode", "skip_tokenizer_init", "trust_remote_code", "tensor_parallel_size",
        "dtype", "quantization", "revision", "tokenizer_revision", "seed", "gpu_memory_utilization", "swap_space",
        "cpu_offload_gb", "enforce_eager", "max_context_len_to_capture", "max_seq_len_to_capture",
        "disable_custom_all_reduce", "disable_async_output_proc", "mm_processor_kwargs",
    ]  # fmt: skip
    assert names(LLM.generate)[:8] == [
        "prompts", "sampling_params", "prompt_token_ids", "use_tqdm", "lora_request", "prompt_adapter_request",
        "guided_options_request", "priority",
    ]  # fmt: skip
    engines = ["request_id", "prompt", "params", "arrival_time", "lora_request", "trace_headers",
               "prompt_adapter_request", "priority"]  # fmt: skip
    assert names(ascend_vllm.LLMEngine.add_request)[:8] == engines
    assert names(ascend_vllm.AsyncLLMEngine.generate)[:7] == [
        "prompt", "sampling_params", "request_id", "lora_request", "trace_headers", "prompt_adapter_request",
        "priority",
    ]  # fmt: skip


def test_registering_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from ascend_vllm.config.arch import ArchConfig, read_decoder
    from ascend_vllm.models import registry
    from ascend_vllm.models.qwen2 import Qwen2ForCausalLM

    monkeypatch.setattr(registry, "MODELS", dict(registry.MODELS))
    for given in (Qwen2ForCausalLM, "ascend_vllm.models.qwen2:Qwen2ForCausalLM"):
        ModelRegistry.register_model("MyForCausalLM", given)
        assert "MyForCausalLM" in ModelRegistry.get_supported_archs()
        assert registry.resolve_model_class("MyForCausalLM") is Qwen2ForCausalLM
    ModelRegistry.register_model("MyForCausalLM", Qwen2ForCausalLM, lambda hf: read_decoder(hf, qkv_bias=True))
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    hf_config = {"architectures": ["MyForCausalLM"]} | dict.fromkeys(sizes, 2)
    assert ArchConfig.from_hf(hf_config).qkv_bias
    del registry.READERS["MyForCausalLM"]
    assert not ArchConfig.from_hf(hf_config).qkv_bias
    with pytest.raises(ValueError, match="Expected a string in the format `<module>:<class>`"):
        ModelRegistry.register_model("MyForCausalLM", "somewhere")
    with pytest.raises(TypeError, match="is no CausalLM"):
        ModelRegistry.register_model("MyForCausalLM", dict)  # type: ignore[arg-type]
