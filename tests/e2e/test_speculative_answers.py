"""Speculative decoding changes no answer: not a token, a text, a reason to end or a log-probability (float32).

Requests with every field that has an influence on tokens are served by engines with n-grams, a draft model, an EAGLE
and an EAGLE-3 head, and compared with what an engine without drafts answers. The draft model is the target with
noise, and the heads have learned some of the answers, so that drafts are accepted and rejected.

An ordinary run has every proposer with some of the other features; `--all` has every combination.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import shutil
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.engine.llm_engine import LLMEngine
from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.errors import RequestError
from ascend_vllm.lora.request import LoRARequest
from ascend_vllm.outputs import CompletionOutput, RequestOutput
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.structured_outputs import StructuredOutputsParams
from tests import quantized_checkpoints as formats
from tests.eagle_heads import head_config, learn_eagle, learn_eagle3, save_head
from tests.lora_adapters import VOCABULARY, Adapter, write_adapter
from tests.tiny_models import VOCAB_SIZE, tiny_model, tiny_root
from tests.worker.drafting import noisy_copy
from tests.worker.test_quantized_formats import ROUNDING_INPUTS, WEIGHT_ONLY

TARGET, HIDDEN, LAYERS, NUM_DRAFTED = "llama", 64, (0, 1, 2), 300
ROUNDING = 1e-4
TEXT = "The quick brown fox jumps over 12 lazy dogs; what does a server of models say while the sun shines? "

# name → fields of the request; every token of three stays likely to be drafted right
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "long": {"temperature": 0, "max_tokens": 60},
    "unseeded": {"temperature": 0.6},
    "seeded": {"seed": 1, "temperature": 0.7, "logprobs": 2},
    "top-k": {"seed": 2, "top_k": 12, "temperature": 1.3},
    "top-p": {"seed": 3, "top_p": 0.8},
    "min-p": {"seed": 4, "min_p": 0.1, "logprobs": 0},
    "bias": {"seed": 5, "logit_bias": {65: 8.0, 70: 7.0, 71: -4.0}},
    "penalties": {"temperature": 0, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "few tokens": {"seed": 6, "allowed_token_ids": [65, 66, 67], "temperature": 0.9, "frequency_penalty": 0.1},
    "few greedy": {"temperature": 0, "allowed_token_ids": [65, 66, 67], "max_tokens": 50, "logprobs": 1},
    "bad words": {"temperature": 0, "bad_words": ["a", "e", "server of"], "allowed_token_ids": list(range(3, 180))},
    "at least": {"temperature": 0, "min_tokens": 7, "stop_token_ids": list(range(0, 384, 2)), "ignore_eos": False},
    "stop ids": {"seed": 7, "stop_token_ids": list(range(0, 384, 9)), "ignore_eos": False},
    "stop": {"seed": 8, "stop": ["abc", "ca"], "allowed_token_ids": [67, 68, 69], "min_tokens": 4, "temperature": 30},
    "regex": {"seed": 12, "temperature": 20, "structured_outputs": StructuredOutputsParams(regex="(ab|ba|c){12}")},
    "choice": {"seed": 9, "structured_outputs": StructuredOutputsParams(choice=["abcabcabcabd", "abcabcabcabcx"])},
    "several": {"seed": 10, "n": 3, "top_k": 5, "logprobs": 0},
    "prompt": {"seed": 11, "prompt_logprobs": 1, "logprobs": 1},
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models are slower on several threads, and far slower on a busy machine."""
    num_threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(num_threads)


@functools.cache
def prompts() -> dict[str, list[int]]:
    """Of different lengths; every second one repeats itself."""
    encode = Tokenizer.from_directory(tiny_model(TARGET)).hf.encode
    found = {}
    for number, name in enumerate(REQUESTS):
        text = TEXT[number : number + 9] * 5 if number % 2 else TEXT[number:] + TEXT
        found[name] = encode(text, add_special_tokens=False)[: 12 + 3 * number]
    return found


@dataclasses.dataclass
class Served:
    """What an engine answered, and what became of its drafts."""

    answers: dict[str, RequestOutput]
    stats: dict[str, Any]

    def only(self, names: Iterable[str]) -> Served:
        return Served({name: self.answers[name] for name in names}, self.stats)

    def check_drafts(self) -> None:
        assert 0 < self.stats["drafts"]["num_accepted_tokens"] < self.stats["drafts"]["num_draft_tokens"]


def serve(names: Mapping[str, LoRARequest | None] | None = None, target: str | None = None, **options: Any) -> Served:
    """Serves requests by an engine, two more in each step.

    Args:
        names: of `REQUESTS`, all by default, and their adapters.
        target: directory of the model.
        **options: of the engine.
    """
    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 8,
        "block_size": 16,
        "num_gpu_blocks_override": 90,
        "swap_space": 0.01,
        "preemption_mode": "recompute",
    }
    settings |= options
    # a larger batch than any: all rows have drafts, whatever they cost
    if "speculative_config" in settings:
        settings["speculative_config"] = settings["speculative_config"] | {"disable_by_batch_size": 100}
    elif "speculative_model" in settings:
        settings["speculative_disable_by_batch_size"] = 100
    engine = LLMEngine.from_engine_args(EngineArgs(model=target or tiny_model(TARGET), **settings))
    try:
        arriving = list((names or dict.fromkeys(REQUESTS)).items())
        found: dict[str, RequestOutput] = {}
        while arriving or engine.has_unfinished_requests():
            for number, (name, lora) in enumerate(arriving[:2]):
                params = SamplingParams(**{"max_tokens": 20, "ignore_eos": True} | REQUESTS[name])
                priority = number if options.get("scheduling_policy") == "priority" else 0
                engine.add_request(
                    name, {"prompt_token_ids": prompts()[name]}, params, priority=priority, lora_request=lora
                )
            del arriving[:2]
            found |= {output.request_id: output for output in engine.step() if output.finished}
        audit, stats = engine.call_utility("audit"), engine.call_utility("stats")
    finally:
        engine.shutdown()
    assert audit["violations"] == []
    return Served(found, stats)


def facts(one: CompletionOutput) -> tuple[Any, ...]:
    return one.index, one.token_ids, one.text, one.finish_reason, one.stop_reason


def assert_same(found: Served, expected: Served) -> None:
    """Equal in everything, log-probabilities up to rounding."""
    assert found.answers.keys() == expected.answers.keys()
    for name, other in expected.answers.items():
        one = found.answers[name]
        assert list(map(facts, one.outputs)) == list(map(facts, other.outputs)), name
        lists = [(one.prompt_logprobs, other.prompt_logprobs)]
        lists += [(a.logprobs, b.logprobs) for a, b in zip(one.outputs, other.outputs, strict=True)]
        for positions, references in lists:
            for position, reference in zip(positions or [], references or [], strict=True):
                assert list(position or {}) == list(reference or {}), name
                for token, entry in (position or {}).items():
                    assert entry.logprob == pytest.approx((reference or {})[token].logprob, abs=ROUNDING), name


@functools.cache
def without_drafts() -> Served:
    return serve()


# ---- proposers -----------------------------------------------------------------------------------------------


def texts() -> list[tuple[list[int], int]]:
    """Answers that heads learn, as many as they can."""
    answers = without_drafts().answers
    chosen = [answers[name] for name in ("greedy", "penalties", "bad words", "at least", "seeded", "top-k")]
    tokens = [(answer.prompt_token_ids, answer.outputs[0].token_ids) for answer in chosen]
    return [([*prompt, *output], len(output)) for prompt, output in tokens]


def target_weight(name: str) -> torch.Tensor:
    weights = load_file(pathlib.Path(tiny_model(TARGET)) / "model.safetensors")
    return weights.get(name, weights.get(f"model.{name}"))


@functools.cache
def eagle_head(*, is_whole: bool = False) -> str:
    """EAGLE-1, without the target's embedding and LM head unless it `is_whole`."""
    directory = tiny_root() / f"eagle-{is_whole}"
    tensors = learn_eagle(tiny_model(TARGET), texts())
    if is_whole:
        tensors |= {name: target_weight(name) for name in ("embed_tokens.weight", "lm_head.weight")}
    save_head(directory, tensors, head_config(HIDDEN, VOCAB_SIZE), as_bin=not is_whole)
    return str(directory)


@functools.cache
def eagle3_head(*, is_whole: bool = False) -> str:
    """EAGLE-3, with the target's embedding if it `is_whole`."""
    directory = tiny_root() / f"eagle3-{is_whole}"
    config = head_config(
        HIDDEN,
        VOCAB_SIZE,
        draft_vocab_size=NUM_DRAFTED,
        eagle_config={"eagle_aux_hidden_state_layer_ids": LAYERS},
    )
    tensors = learn_eagle3(tiny_model(TARGET), texts(), LAYERS, NUM_DRAFTED)
    if is_whole:
        tensors["embed_tokens.weight"] = target_weight("embed_tokens.weight")
    save_head(directory, tensors, config)
    return str(directory)


def flags_of(proposer: str, num_tokens: int = 3) -> dict[str, Any]:
    """Of both generations."""
    content: dict[str, Any] = {"num_speculative_tokens": num_tokens}
    if proposer == "padded n-grams":
        lookup = {"ngram_prompt_lookup_max": 3, "use_v2_block_manager": True}
        return {"speculative_model": "[ngram]", **content, **lookup}
    if proposer == "draft model":
        return {"speculative_model": noisy_copy(tiny_model(TARGET)), **content}
    if proposer == "n-grams":
        content |= {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4}
    else:
        content |= {"method": proposer, "model": eagle_head() if proposer == "eagle" else eagle3_head()}
    return {"speculative_config": content}


PROPOSERS = ("n-grams", "padded n-grams", "draft model", "eagle", "eagle3")
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 32,
        "enable_prefix_caching": True,
        "num_gpu_blocks_override": 16,
        "scheduling_policy": "priority",
    },
    "swapping": {"num_gpu_blocks_override": 16, "preemption_mode": "swap", "enable_prefix_caching": True},
    "eager": {"enforce_eager": True, "async_scheduling": False},
    "few": {"max_num_seqs": 2, "block_size": 32, "enable_chunked_prefill": True, "max_num_batched_tokens": 16},
    "bytes": {"kv_cache_dtype": "int8"},
}
ORDINARY = {
    ("n-grams", "plain"),
    ("draft model", "everything"),
    ("eagle", "swapping"),
    ("eagle3", "everything"),
}


@pytest.mark.parametrize(
    ("proposer", "setting"),
    [
        pytest.param(*pair, marks=() if pair in ORDINARY else pytest.mark.exhaustive)
        for pair in ((proposer, setting) for proposer in PROPOSERS for setting in SETTINGS)
    ],
)
def test_answers_are_those_without_drafts(proposer: str, setting: str) -> None:
    options = SETTINGS[setting]
    found = serve(**flags_of(proposer), **options)
    # numbers of a cache in bytes are others
    assert_same(found, serve(**options) if setting == "bytes" else without_drafts())
    found.check_drafts()
    assert (found.stats["num_preemptions"] > 0) == ("num_gpu_blocks_override" in options)


def test_the_requests_are_worth_comparing() -> None:
    answers = without_drafts().answers
    assert {(one.finish_reason, type(one.stop_reason)) for answer in answers.values() for one in answer.outputs} == {
        ("length", type(None)),
        ("stop", type(None)),
        ("stop", int),
        ("stop", str),
    }
    assert len({tuple(one.token_ids) for one in answers["several"].outputs}) == 3
    assert len(set(answers["regex"].outputs[0].text)) == 3


@pytest.mark.parametrize(
    "proposer", ["eagle", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("draft model", "eagle3"))]
)
def test_draft_on_one_of_two_workers(proposer: str) -> None:
    """Two ranks of the target, the draft model whole on one of them."""
    flags = flags_of(proposer)
    if proposer == "draft model":
        flags["speculative_draft_tensor_parallel_size"] = 1
    else:
        make = eagle_head if proposer == "eagle" else eagle3_head
        flags["speculative_config"]["model"] = make(is_whole=True)
    names = dict.fromkeys(["greedy", "long", "seeded", "penalties", "few tokens", "regex", "several"])
    found = serve(names, **flags, tensor_parallel_size=2)
    assert_same(found, without_drafts().only(names))
    found.check_drafts()


@pytest.mark.parametrize("proposer", ["n-grams", "draft model", "eagle", "eagle3"])
def test_adapters_of_the_target(proposer: str) -> None:
    """Rows with adapters, of the vocabulary's matrices, too, beside rows without; drafts know nothing of them."""
    names = ("greedy", "seeded", "long", "penalties", "few tokens", "few greedy")
    adapters = (Adapter("small"), Adapter("words", modules=("q_proj", "v_proj", *VOCABULARY)))
    requests: list[LoRARequest | None] = [None]
    for number, adapter in enumerate(adapters, 1):
        directory = tiny_root() / f"speculative-{adapter.name}"
        if not directory.exists():
            write_adapter(directory, tiny_model(TARGET), adapter)
        requests.append(LoRARequest(adapter.name, number, str(directory)))
    asked = {name: requests[number % 3] for number, name in enumerate(names)}
    options: dict[str, Any] = {"enable_lora": True, "max_loras": 2}
    expected = serve(asked, **options)
    found = serve(asked, **flags_of(proposer), **options)
    assert_same(found, expected)
    assert found.stats["drafts"]["num_accepted_tokens"] > 0
    plain = without_drafts().answers
    changed = {name for name in names if facts(expected.answers[name].outputs[0]) != facts(plain[name].outputs[0])}
    assert changed
    assert changed <= {name for name, lora in asked.items() if lora is not None}


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("awq", "gptq"),
        pytest.param("W8A8", "awq", marks=pytest.mark.exhaustive),
    ],
)
def test_quantized_targets_and_drafts(target: str, draft: str, tmp_path: pathlib.Path) -> None:
    """Each is in a format of its own, which is what --speculative-model-quantization names."""
    directories = {}
    for role, name in (("target", target), ("draft", draft)):
        if name in WEIGHT_ONLY:
            writer, declared, options = WEIGHT_ONLY[name]
            directories[role], _ = formats.write(tmp_path / role, writer, declared, **options)
        else:
            directories[role], _ = formats.write(tmp_path / role, *ROUNDING_INPUTS[name][:2])
    names = dict.fromkeys(["greedy", "long", "seeded", "penalties", "few tokens", "few greedy"])
    expected = serve(names, directories["target"])
    flags = {"speculative_model": directories["draft"], "num_speculative_tokens": 3}
    found = serve(names, directories["target"], **flags)
    assert_same(found, expected)
    found.check_drafts()


def test_vocabularies_that_are_padded_differently() -> None:
    """A draft model with fewer entries drafts what it has, and reads what it has not as something else."""
    smaller = tiny_root() / "fewer-entries"
    shutil.copytree(noisy_copy(tiny_model(TARGET)), smaller)
    tensors = load_file(smaller / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:200].contiguous()
    save_file(tensors, smaller / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((smaller / "config.json").read_text()) | {"vocab_size": 200}
    (smaller / "config.json").write_text(json.dumps(config))
    found = serve(speculative_model=str(smaller), num_speculative_tokens=3)
    assert_same(found, without_drafts())
    found.check_drafts()
    assert any(token >= 200 for answer in found.answers.values() for token in answer.outputs[0].token_ids)


# ---- flags that change what is reported, and requests that are refused ----------------------------------------


def test_log_probabilities_can_be_left_out() -> None:
    """--disable-logprobs-during-spec-decoding: 0 and rank -1, as vLLM 0.6.3 reports them, and the same tokens."""
    names = dict.fromkeys(["seeded", "few greedy", "several", "greedy"])
    found = serve(names, **flags_of("n-grams"), disable_logprobs_during_spec_decoding=True)
    for name, answer in found.answers.items():
        for one, other in zip(answer.outputs, without_drafts().answers[name].outputs, strict=True):
            assert one.token_ids == other.token_ids
            if name == "greedy":
                assert one.logprobs is None
                continue
            assert one.logprobs is not None and len(one.logprobs) == len(one.token_ids)
            for token, position in zip(one.token_ids, one.logprobs, strict=True):
                assert list(position) == [token]
                assert (position[token].logprob, position[token].rank) == (0.0, -1)
            assert one.cumulative_logprob == 0


def test_beam_searches_are_refused() -> None:
    engine = LLMEngine.from_engine_args(
        EngineArgs(model=tiny_model(TARGET), dtype="float32", max_model_len=64, **flags_of("n-grams"))
    )
    params = SamplingParams(use_beam_search=True, n=2, temperature=0, max_tokens=4)
    try:
        with pytest.raises(RequestError, match=r"^Speculative decoding does not support beam search\."):
            engine.add_request("0", {"prompt_token_ids": [1, 2]}, params)
    finally:
        engine.shutdown()
