"""The offline `LLM` with real tiny models, compared with transformers."""

from __future__ import annotations

import gc
import json
import re
import types
import weakref
from collections.abc import Iterator
from typing import Any, Literal

import pydantic
import pytest
import torch
import transformers

from ascend_vllm import LLM, BeamSearchOutput, BeamSearchParams, SamplingParams
from ascend_vllm.errors import ConfigError, RequestError
from ascend_vllm.structured_outputs import GuidedDecodingParams
from tests.tiny_models import tiny_model

NUM_BLOCKS = 256
PROMPTS = ["Hello! How are you today?", "The quick", "1 2 3 4 5 6 7 8 9 10", "a"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
CHAT = [{"role": "user", "content": "Hello!"}]


def make_llm(model: str = "qwen2-tied", **options: Any) -> LLM:
    defaults = {"dtype": "float32", "max_model_len": 384, "num_gpu_blocks_override": NUM_BLOCKS, "block_size": 16}
    return LLM(tiny_model(model), **(defaults | options))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = make_llm()
    yield llm
    llm.shutdown()


@pytest.fixture(autouse=True)
def every_block_is_free(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "llm" in request.fixturenames:
        audit = request.getfixturevalue("llm").llm_engine.call_utility("audit")
        assert audit["num_free_blocks"] == NUM_BLOCKS
        assert audit["violations"] == []


def tensor_bytes() -> int:
    """Memory of all tensors that Python knows."""
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return sum(
        {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values()
    )


def greedy_of_transformers(model: str, prompt_ids: list[int], max_tokens: int) -> list[int]:
    reference = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(model), dtype=torch.float32)
    ids = torch.tensor([prompt_ids])
    with torch.inference_mode():
        output = reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens,
            min_new_tokens=max_tokens, pad_token_id=0,
        )  # fmt: skip
    return output[0, len(prompt_ids) :].tolist()


@pytest.mark.parametrize("model", ["qwen2-tied", "opt"])
def test_greedy_equals_transformers(model: str) -> None:
    llm = make_llm(model)
    # min_tokens as in the reference, where it also forbids the end of sequence
    params = SamplingParams(temperature=0.0, max_tokens=24, min_tokens=24)
    prompts = [*PROMPTS, {"prompt_token_ids": [i % 300 + 3 for i in range(290)]}]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert len(outputs) == len(prompts)
    for output in outputs:
        expected = greedy_of_transformers(model, output.prompt_token_ids, 24)
        assert output.outputs[0].token_ids == expected
        tokenizer = llm.get_tokenizer()
        before = tokenizer.decode(output.prompt_token_ids, skip_special_tokens=True)
        whole = tokenizer.decode(output.prompt_token_ids + expected, skip_special_tokens=True)
        assert before + output.outputs[0].text == whole
    llm.shutdown()


def test_prompt_forms_order_and_ids(llm: LLM) -> None:
    first = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.prompt for output in first] == PROMPTS
    ids = [output.prompt_token_ids for output in first]
    expected = [output.outputs[0].token_ids for output in first]
    for prompts, token_ids in [
        ([{"prompt": prompt} for prompt in PROMPTS], None),
        ([{"prompt_token_ids": one} for one in ids], None),
        (None, ids),
        (PROMPTS, ids),
    ]:
        outputs = llm.generate(prompts, GREEDY, token_ids, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
    for prompts, token_ids in [(PROMPTS[0], None), ({"prompt": PROMPTS[0]}, None), (None, ids[0])]:
        (output,) = llm.generate(prompts, GREEDY, token_ids, use_tqdm=False)
        assert output.outputs[0].token_ids == expected[0]
    last = int(output.request_id)
    numbers = [int(output.request_id) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    assert numbers == list(range(last + 1, last + 5))
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_params_for_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (3, 1, 5, 2)]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 1, 5, 2]
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)


def test_default_params(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams()
    (output,) = llm.generate("Hello", use_tqdm=False)
    assert 1 <= len(output.outputs[0].token_ids) <= 16


def test_several_sequences_are_distinct_and_seeds_repeat(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
    first, second = llm.generate(["Hello", "Hello"], params, use_tqdm=False)
    texts = [tuple(sequence.token_ids) for sequence in first.outputs]
    assert len(set(texts)) == 4
    assert [tuple(sequence.token_ids) for sequence in second.outputs] == texts
    (unseeded,) = llm.generate("Hello", SamplingParams(n=3, max_tokens=12, ignore_eos=True), use_tqdm=False)
    assert len({tuple(sequence.token_ids) for sequence in unseeded.outputs}) == 3


def test_more_requests_than_slots_and_blocks() -> None:
    """Waiting, preemption and resumption leave no mark on the output."""
    llm = make_llm(max_num_seqs=8, num_gpu_blocks_override=24, max_model_len=128, max_num_batched_tokens=256)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    alone = [llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids for prompt in PROMPTS]
    outputs = llm.generate(PROMPTS * 5, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == alone * 5
    assert llm.llm_engine.call_utility("stats")["num_preemptions"] > 0
    assert llm.llm_engine.call_utility("audit")["num_free_blocks"] == 24
    llm.shutdown()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "Either prompts or prompt_token_ids must be provided."),
        ({"prompts": ["a", "b"], "sampling_params": [GREEDY]}, "The lengths of prompts and params must be the same."),
        (
            {"prompts": ["a", "b"], "prompt_token_ids": [[1]]},
            "The lengths of prompts and prompt_token_ids must be the same.",
        ),
        ({"prompts": ["a"], "priority": [0, 0]}, "The lengths of prompts and priority must be the same."),
        ({"prompts": "a", "priority": [1]}, "Got priority 1 but Priority scheduling is not enabled."),
        ({"prompts": "a", "lora_request": object()}, "lora_request must be a LoRARequest"),
        (
            {"prompts": "a", "guided_options_request": {"guided": "x"}},
            "guided_options_request has unknown field(s): guided",
        ),
        (
            {"prompts": "a", "guided_options_request": {"guided_regex": "a", "guided_choice": ["a"]}},
            "You can only use one guided decoding but multiple is specified: {'guided_regex': 'a'",
        ),
        (
            {
                "prompts": "a",
                "guided_options_request": {"guided_regex": "a"},
                "sampling_params": SamplingParams(guided_decoding=GuidedDecodingParams(regex="b")),
            },
            "Cannot set both guided_options_request and params.guided_decoding.",
        ),
        ({"prompts": ["a", ""]}, "Prompt cannot be empty"),
        ({"prompts": ["a", {"prompt_token_ids": [384]}]}, "Token id 384 is out of vocabulary"),
        ({"prompts": ["a", {"prompt_token_ids": [1] * 384}]}, "maximum context length is 384 tokens"),
        ({"prompts": "a", "sampling_params": SamplingParams(logprobs=21)}, "greater than max allowed: 20"),
    ],
)
def test_wrong_calls_leave_nothing_behind(llm: LLM, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        llm.generate(**arguments, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.generate("a", GREEDY, use_tqdm=False)[0].finished


class Kind(pydantic.BaseModel):
    """A schema."""

    model_config = pydantic.ConfigDict(extra="forbid")

    kind: Literal["cat", "dog"]


def test_guided_options(llm: LLM) -> None:
    def texts(options: Any, **params: Any) -> list[str]:
        given = SamplingParams(temperature=0, max_tokens=60, **params)
        outputs = llm.generate(["Hello", "The"], given, guided_options_request=options, use_tqdm=False)
        return [output.outputs[0].text for output in outputs]

    request = types.SimpleNamespace(guided_regex="[0-9]{3}", guided_json=None)
    for options in ({"guided_regex": "[0-9]{3}"}, request):
        assert all(re.fullmatch("[0-9]{3}", text) for text in texts(options))
    assert set(texts({"guided_choice": ["left", "right"]})) <= {"left", "right"}
    for schema in (Kind, Kind.model_json_schema(), json.dumps(Kind.model_json_schema())):
        for text in texts({"guided_json": schema, "guided_whitespace_pattern": " ?"}):
            assert json.loads(text)["kind"] in ("cat", "dog")
    free = texts(None)
    assert texts({}) == free
    assert texts(None, guided_decoding=GuidedDecodingParams(choice=["left"])) == ["left", "left"]


def test_beam_search(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    ids = [llm.get_tokenizer().encode(prompt) for prompt in PROMPTS]
    outputs = llm.beam_search(PROMPTS, params)
    tokenizer = llm.get_tokenizer()
    for prompt, output in zip(ids, outputs, strict=True):
        assert isinstance(output, BeamSearchOutput)
        assert len(output.sequences) == 3
        assert len({tuple(sequence.tokens) for sequence in output.sequences}) == 3
        logprobs = [sequence.cum_logprob for sequence in output.sequences]
        assert 0 > logprobs[0] > logprobs[1] > logprobs[2]
        for sequence in output.sequences:
            assert sequence.tokens[: len(prompt)] == prompt
            assert len(sequence.tokens) == len(prompt) + 6
            assert (sequence.finish_reason, sequence.stop_reason) == ("length", None)
            assert sequence.text == tokenizer.decode(sequence.tokens)
    forms: list[Any] = [ids[0], {"prompt": PROMPTS[0]}, {"prompt_token_ids": ids[0]}, PROMPTS[0]]
    assert llm.beam_search(forms, params) == [outputs[0]] * 4
    assert llm.beam_search(PROMPTS[0], params) == [outputs[0]]
    assert llm.beam_search([], params) == []


def test_a_single_beam_is_greedy(llm: LLM) -> None:
    outputs = llm.beam_search(PROMPTS, BeamSearchParams(1, 12, ignore_eos=True))
    for output, greedy in zip(outputs, llm.generate(PROMPTS, GREEDY, use_tqdm=False), strict=True):
        (sequence,) = output.sequences
        assert sequence.tokens == greedy.prompt_token_ids + greedy.outputs[0].token_ids


def test_beam_search_shows_its_progress_if_asked(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    params = BeamSearchParams(2, 3)
    llm.beam_search(PROMPTS, params)
    assert "Processed prompts" not in capsys.readouterr().err
    llm.beam_search(PROMPTS, params, use_tqdm=True)
    assert re.search(r"Processed prompts: 100%\|█+\| 4/4 \[", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("prompts", "width", "words"),
    [
        (["a", ""], 2, "Prompt cannot be empty"),
        (["a", [384]], 2, "Token id 384 is out of vocabulary"),
        (["a"], 257, "beams of a search must be at most 256 (--max-num-seqs), got 257"),
    ],
)
def test_wrong_beam_searches(llm: LLM, prompts: list[Any], width: int, words: str) -> None:
    with pytest.raises(RequestError, match=re.escape(words)):
        llm.beam_search(prompts, BeamSearchParams(width, 4))
    assert not llm.llm_engine.has_unfinished_requests()


def test_resetting_the_prefix_cache() -> None:
    llm = make_llm(enable_prefix_caching=True)
    prompt = {"prompt_token_ids": [i % 300 + 3 for i in range(100)]}

    def num_cached_tokens() -> int:
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        return output.num_cached_tokens

    assert [num_cached_tokens(), num_cached_tokens()] == [0, 96]
    assert llm.reset_prefix_cache() is True
    assert [num_cached_tokens(), num_cached_tokens()] == [0, 96]
    llm.shutdown()


def test_priorities() -> None:
    """Of requests that wait, the lower number is served first."""
    llm = make_llm(scheduling_policy="priority", max_num_seqs=1)
    order: list[str] = []
    step = llm.llm_engine.step

    def watched() -> Any:
        outputs = step()
        order.extend(output.prompt for output in outputs)
        return outputs

    llm.llm_engine.step = watched
    llm.generate(PROMPTS, GREEDY, use_tqdm=False, priority=[3, 1, 2, 0])
    assert order == [PROMPTS[3], PROMPTS[1], PROMPTS[2], PROMPTS[0]]
    llm.shutdown()


def test_encode_is_for_embedding_models(llm: LLM) -> None:
    with pytest.raises(ValueError, match=re.escape("LLM.encode() is only supported for embedding models (XModel).")):
        llm.encode("a")


def test_the_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, GREEDY)
    bar = capsys.readouterr().err
    assert re.search(r"Processed prompts:   0%\|", bar)
    last = bar.strip().split("\r")[-1]
    assert re.match(r"Processed prompts: 100%\|█+\| 4/4 \[", last)
    assert re.search(r"est\. speed input: \d+\.\d\d toks/s, output: \d+\.\d\d toks/s\]$", last)
    speeds = [float(speed) for speed in re.findall(r"(\d+\.\d\d) toks/s", last)]
    assert all(speed > 0 for speed in speeds)
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_chat(llm: LLM) -> None:
    text = "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
    (output,) = llm.chat(CHAT, GREEDY, use_tqdm=False)
    assert output.prompt == text
    assert output.prompt_token_ids == llm.get_tokenizer().encode(text, add_special_tokens=False)
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}]
    same, other = llm.chat([parts, [*CHAT, {"role": "assistant", "content": "x"}]], GREEDY, use_tqdm=False)
    assert same.outputs[0].token_ids == output.outputs[0].token_ids
    assert other.prompt == text.replace("assistant\n", "assistant\nx<|im_end|>\n<|im_start|>assistant\n")
    (open_end,) = llm.chat(
        [*CHAT, {"role": "assistant", "content": "Well,"}],
        GREEDY,
        use_tqdm=False,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert open_end.prompt == f"{text}Well,"
    (own,) = llm.chat(CHAT, GREEDY, use_tqdm=False, chat_template="{{ messages[0].content }}|{{ x }}",
                      chat_template_kwargs={"x": 5})  # fmt: skip
    assert own.prompt == "Hello!|5"


def test_wrong_conversations(llm: LLM) -> None:
    with pytest.raises(RequestError, match="Cannot apply chat template to an empty conversation"):
        llm.chat([], GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="Cannot set both `continue_final_message` and `add_generation_prompt`"):
        llm.chat(CHAT, GREEDY, use_tqdm=False, continue_final_message=True)
    with pytest.raises(RequestError, match="mm_processor_kwargs is not supported"):
        llm.chat(CHAT, GREEDY, use_tqdm=False, mm_processor_kwargs={"a": 1})


def test_another_tokenizer(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert isinstance(tokenizer, transformers.PreTrainedTokenizerBase)
    changed = transformers.AutoTokenizer.from_pretrained(tiny_model("qwen2-tied"))
    changed.add_tokens(["Hello!"])
    try:
        llm.set_tokenizer(changed)
        assert llm.get_tokenizer() is changed
        (output,) = llm.generate("a", GREEDY, use_tqdm=False)
        assert output.prompt_token_ids == changed.encode("a")
        assert changed.encode("Hello!") == [384]
        with pytest.raises(RequestError, match="Token id 384 is out of vocabulary"):
            llm.generate("Hello!", GREEDY, use_tqdm=False)
    finally:
        llm.set_tokenizer(tokenizer)


def test_without_a_tokenizer() -> None:
    llm = make_llm(skip_tokenizer_init=True)
    params = SamplingParams(temperature=0.0, max_tokens=4, detokenize=False)
    (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
    assert (output.outputs[0].text, len(output.outputs[0].token_ids)) == ("", 4)
    (beams,) = llm.beam_search([[5, 6, 7]], BeamSearchParams(2, 4, ignore_eos=True))
    assert [(sequence.text, len(sequence.tokens)) for sequence in beams.sequences] == [(None, 7)] * 2
    with pytest.raises(RequestError, match="there is no tokenizer"):
        llm.get_tokenizer()
    llm.shutdown()


def test_interrupting_leaves_a_usable_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, steps = llm.llm_engine.step, iter(range(3))

    def interrupted() -> Any:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.llm_engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    monkeypatch.undo()
    assert llm.llm_engine.get_num_unfinished_requests() == 0
    assert llm.generate("a", GREEDY, use_tqdm=False)[0].finished


def test_unknown_and_unsupported_keywords() -> None:
    with pytest.raises(TypeError, match="max_modle_len"):
        make_llm(max_modle_len=5)
    with pytest.raises(ConfigError, match="enable-prompt-adapter"):
        make_llm(enable_prompt_adapter=True)
    with pytest.raises(ConfigError, match="appears path-like, but doesn't exist"):
        make_llm(chat_template="absent.jinja")


def test_two_in_a_process_and_memory_after_deletion() -> None:
    first = make_llm()
    second = make_llm("opt")
    outputs = [
        llm.generate("Hello", GREEDY, use_tqdm=False)[0].outputs[0].token_ids for llm in (first, second, first)
    ]
    assert outputs[0] == outputs[2] != outputs[1]
    cores = [weakref.ref(llm.llm_engine.core) for llm in (first, second)]
    assert all(core() is not None for core in cores)
    before = tensor_bytes()
    del first, second
    gc.collect()
    assert [core() for core in cores] == [None, None]
    # of the caches alone: keys and values of 3 layers, 2 and 4 KV heads of 16 floats
    caches = 2 * 3 * (2 + 4) * 16 * 4 * 16 * NUM_BLOCKS
    assert before - tensor_bytes() > caches


def test_shutdown_may_come_twice() -> None:
    llm = make_llm()
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(RuntimeError, match="the engine was shut down"):
        llm.generate("a", GREEDY, use_tqdm=False)


def test_prompt_logprobs_of_a_batch(llm: LLM) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(tiny_model("qwen2-tied"), dtype=torch.float32)
    outputs = llm.generate(PROMPTS, GREEDY.clone(prompt_logprobs=3))
    assert [output.prompt for output in outputs] == PROMPTS
    for output in outputs:
        ids = output.prompt_token_ids
        with torch.inference_mode():
            expected = torch.log_softmax(reference(torch.tensor([ids])).logits[0], -1)
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(ids)
        for id_, position, row in zip(ids[1:], output.prompt_logprobs[1:], expected[:-1], strict=True):
            assert position is not None
            assert next(iter(position)) == id_
            found = torch.tensor([entry.logprob for entry in position.values()])
            torch.testing.assert_close(found, row[list(position)], atol=1e-4, rtol=0)
    assert llm.generate("a", GREEDY)[0].prompt_logprobs is None
