"""Every argument of vLLM 0.32's and 0.6.3's `LLM` is taken, or refused by its name."""

from __future__ import annotations

import dataclasses
import inspect
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ascend_vllm import LLM, BeamSearchParams, EngineArgs, SamplingParams
from ascend_vllm.entrypoints.offline.arguments import REFUSED, REFUSED_METHODS
from ascend_vllm.errors import RequestError, UnsupportedFlagError
from ascend_vllm.lora.request import LoRARequest
from tests.tiny_models import tiny_model

# version → "LLM", "EngineArgs": names of arguments; "methods": name → names of its arguments
PARAMETERS: dict[str, dict[str, Any]] = json.loads(
    (pathlib.Path(__file__).parent / "llm_parameters.json").read_text()
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
CONVERSATION = [{"role": "user", "content": "Hello"}]
# names of arguments of methods that are refused, whatever the method is
NOT_SUPPORTED = {
    "prompt_adapter_request", "tokenization_kwargs", "mm_processor_kwargs", "reset_running_requests",
    "reset_connector", "profile_prefix", "delay_iterations", "max_iterations",
}  # fmt: skip


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM(tiny_model("qwen2"), dtype="float32", max_model_len=128, num_gpu_blocks_override=32, block_size=16)
    yield llm
    assert llm.llm_engine.call_utility("audit")["num_free_blocks"] == 32
    llm.shutdown()


def names_of(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


@pytest.mark.parametrize("version", PARAMETERS)
def test_arguments_of_the_constructor(version: str) -> None:
    names = {*PARAMETERS[version]["LLM"], *PARAMETERS[version]["EngineArgs"]}
    taken = names_of(LLM.__init__) | {field.name for field in dataclasses.fields(EngineArgs)}
    refused = {name for group in REFUSED.values() for name in group}
    assert names <= taken | refused
    # what has come to exist is not refused any more
    assert not taken & refused
    if version == "0.6.3":
        assert not names & refused


@pytest.mark.parametrize(
    ("name", "default", "reason"),
    [(name, default, reason) for reason, group in REFUSED.items() for name, default in group.items()],
)
def test_refused_by_name(name: str, default: Any, reason: str) -> None:
    with pytest.raises(UnsupportedFlagError) as refused:
        LLM("nowhere", **{name: "something"})
    assert str(refused.value) == f"{name} is not supported: {reason}"
    for nothing in (default, None):
        # the next thing that is wrong
        with pytest.raises(UnsupportedFlagError, match="--enable-prompt-adapter is not supported"):
            LLM("nowhere", enable_prompt_adapter=True, **{name: nothing})


def test_what_asks_for_something() -> None:
    with pytest.raises(TypeError, match="no_such_thing"):
        LLM("nowhere", no_such_thing=1)
    with pytest.raises(UnsupportedFlagError, match="optimization_level is not supported"):
        LLM("nowhere", optimization_level=0)
    with pytest.raises(UnsupportedFlagError, match="enable_eplb is not supported"):
        LLM("nowhere", enable_eplb=True)
    with pytest.raises(UnsupportedFlagError, match="mm_device_do_normalize is not supported"):
        LLM("nowhere", mm_device_do_normalize=False)
    with pytest.raises(UnsupportedFlagError, match="--enable-prompt-adapter is not supported"):
        LLM("nowhere", hf_token=True, enable_prompt_adapter=True)


@pytest.mark.parametrize("version", PARAMETERS)
def test_arguments_of_methods(version: str) -> None:
    for method, names in PARAMETERS[version]["methods"].items():
        if method in REFUSED_METHODS:
            with pytest.raises(AttributeError, match=rf"LLM\.{method} is not supported: "):
                getattr(object.__new__(LLM), method)
        elif method == "score":
            # texts have no names, as in vLLM
            assert set(names) <= names_of(LLM.score), method
        else:
            assert set(names) <= names_of(getattr(LLM, method)), method
    assert not any(name in vars(owner) for owner in LLM.__mro__ for name in REFUSED_METHODS)
    with pytest.raises(AttributeError, match=r"LLM\.no_such_thing does not exist"):
        _ = object.__new__(LLM).no_such_thing


def test_what_methods_do_not_support(llm: LLM) -> None:
    calls: dict[str, tuple[Any, ...]] = {
        "generate": ("a",),
        "chat": (CONVERSATION,),
        "enqueue": ("a",),
        "enqueue_chat": (CONVERSATION,),
        "beam_search": (["a"], BeamSearchParams(2, 3)),
        "encode": ("a",),
        "embed": ("a",),
        "classify": ("a",),
        "score": ("a", "b"),
        "reset_prefix_cache": (),
        "start_profile": (),
    }
    num_refused = 0
    for method, positional in calls.items():
        for name in names_of(getattr(LLM, method)) & (
            NOT_SUPPORTED | ({"chat_template"} if method == "score" else set())
        ):
            with pytest.raises(RequestError, match=f"^{name} is not supported in this version.$"):
                getattr(llm, method)(*positional, **{name: {"a": 1}})
            num_refused += 1
    assert num_refused >= 20
    assert not llm.llm_engine.has_unfinished_requests()
    # what asks for nothing is no matter
    (output,) = llm.generate(
        "a", GREEDY, use_tqdm=False, lora_request=[None], tokenization_kwargs={}, mm_processor_kwargs={}
    )
    assert len(output.outputs[0].token_ids) == 6
    assert llm.reset_prefix_cache(reset_running_requests=False, reset_connector=False)


def test_a_list_of_adapters(llm: LLM) -> None:
    with pytest.raises(RequestError, match="The lengths of prompts and lora_request must be the same"):
        llm.generate(["a", "b"], GREEDY, lora_request=[object()])
    with pytest.raises(RequestError, match="lora_request must be a LoRARequest"):
        llm.generate(["a", "b"], GREEDY, lora_request=[None, object()])
    with pytest.raises(RequestError, match=r"Got lora_request .* but LoRA is not enabled!"):
        llm.generate(["a", "b"], GREEDY, lora_request=LoRARequest("a", 1, "/a"))
    assert not llm.llm_engine.has_unfinished_requests()


def test_the_constructor_by_position() -> None:
    """0.6.3's order; today's vLLM takes names only."""
    directory = tiny_model("qwen2")
    arguments = [
        directory,
        None,
        "auto",
        False,
        False,
        1,
        "float32",
        None,
        None,
        None,
        7,
        0.5,
        0,
        0,
        True,
        None,
        4096,
    ]
    llm = LLM(*arguments, False, True, None, max_model_len=64, num_gpu_blocks_override=8, block_size=16)
    config = llm.llm_engine.config
    assert (config.model.dtype, config.model.seed, config.model.enforce_eager) == ("float32", 7, True)
    assert (config.cache.gpu_memory_utilization, config.cache.swap_space_gib) == (0.5, 0)
    assert not config.scheduler.async_scheduling
    llm.shutdown()


def test_queued_conversations(llm: LLM) -> None:
    conversations: Any = [CONVERSATION, [{"role": "user", "content": "The quick"}]]
    expected = llm.chat(conversations, GREEDY, use_tqdm=False)
    ids = llm.enqueue_chat(conversations, GREEDY)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert [output.prompt_token_ids for output in outputs] == [output.prompt_token_ids for output in expected]
    assert [output.outputs[0].text for output in outputs] == [output.outputs[0].text for output in expected]
    assert len(llm.enqueue_chat(CONVERSATION, GREEDY)) == 1
    assert len(llm.wait_for_completion(use_tqdm=False)) == 1


def test_searching_few_at_a_time(llm: LLM) -> None:
    params = BeamSearchParams(2, 4, ignore_eos=True)
    prompts = ["Hello", "The quick", "a"]
    expected = llm.beam_search(prompts, params)
    assert llm.beam_search(prompts, params, concurrency_limit=2) == expected
    with pytest.raises(RequestError, match="concurrency_limit must be at least 1, got 0"):
        llm.beam_search(prompts, params, concurrency_limit=0)


def test_there_are_no_images_to_forget(llm: LLM) -> None:
    llm.reset_mm_cache()
    llm.reset_encoder_cache()
    assert llm.get_world_size() == llm.get_world_size(include_dp=False) == 1
