"""LMDeploy's `pipeline` with real tiny models."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import logging
import pathlib
import re
import shutil
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import tokenizers
import torch
import transformers

from ascend_vllm import (
    LLM,
    ChatTemplateConfig,
    GenerationConfig,
    PytorchEngineConfig,
    Response,
    SamplingParams,
    TurbomindEngineConfig,
    pipeline,
)
from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.entrypoints.lmdeploy.pipeline import Pipeline, WordTokens, _make_engine_config
from ascend_vllm.errors import ConfigError, RequestError
from tests.benchmark_modules import run_here
from tests.lora_adapters import Adapter, write_adapter
from tests.tiny_models import VOCAB_SIZE, tiny_model

NUM_BLOCKS = 128
PROMPTS = ["Hello! How are you today?", "The quick"]
GREEDY = GenerationConfig(max_new_tokens=12, ignore_eos=True)

# the examples of LMDeploy's page, their import changed and nothing else
EXAMPLES = {
    "defaults": """
from ascend_vllm import pipeline

pipe = pipeline('internlm/internlm-chat-7b')
response = pipe(['Hi, pls intro yourself', 'Shanghai is'])
print(response)
""",
    "tp": """
from ascend_vllm import pipeline, TurbomindEngineConfig

backend_config = TurbomindEngineConfig(tp=2)
pipe = pipeline('internlm/internlm-chat-7b',
                backend_config=backend_config)
response = pipe(['Hi, pls intro yourself', 'Shanghai is'])
print(response)
""",
    "sampling": """
from ascend_vllm import pipeline, GenerationConfig, TurbomindEngineConfig

backend_config = TurbomindEngineConfig(tp=2)
gen_config = GenerationConfig(top_p=0.8,
                              top_k=40,
                              temperature=0.8,
                              max_new_tokens=1024)
pipe = pipeline('internlm/internlm-chat-7b',
                backend_config=backend_config)
response = pipe(['Hi, pls intro yourself', 'Shanghai is'],
                gen_config=gen_config)
print(response)
""",
    "messages": """
from ascend_vllm import pipeline, GenerationConfig, TurbomindEngineConfig

backend_config = TurbomindEngineConfig(tp=2)
gen_config = GenerationConfig(top_p=0.8,
                              top_k=40,
                              temperature=0.8,
                              max_new_tokens=1024)
pipe = pipeline('internlm/internlm-chat-7b',
                backend_config=backend_config)
prompts = [[{
    'role': 'user',
    'content': 'Hi, pls intro yourself'
}], [{
    'role': 'user',
    'content': 'Shanghai is'
}]]
response = pipe(prompts,
                gen_config=gen_config)
print(response)
""",
    "pytorch": """
from ascend_vllm import pipeline, GenerationConfig, PytorchEngineConfig

backend_config = PytorchEngineConfig(session_len=2024)
gen_config = GenerationConfig(top_p=0.8,
                              top_k=40,
                              temperature=0.8,
                              max_new_tokens=1024)
pipe = pipeline('internlm/internlm-chat-7b',
                backend_config=backend_config)
prompts = [[{
    'role': 'user',
    'content': 'Hi, pls intro yourself'
}], [{
    'role': 'user',
    'content': 'Shanghai is'
}]]
response = pipe(prompts, gen_config=gen_config)
print(response)
""",
}


@pytest.fixture(scope="module", autouse=True)
def log_level_is_restored() -> Iterator[None]:
    logger = logging.getLogger("ascend_vllm")
    level = logger.level
    yield
    logger.setLevel(level)


def make_pipe(model: str = "qwen2-tied", **options: Any) -> Pipeline:
    return pipeline(tiny_model(model), **({"dtype": "float32", "num_gpu_blocks_override": NUM_BLOCKS} | options))


@pytest.fixture(scope="module")
def pipe() -> Iterator[Pipeline]:
    with make_pipe(block_size=16) as pipe:
        yield pipe


@pytest.fixture(autouse=True)
def every_block_is_free(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "pipe" in request.fixturenames:
        # a request that was left ends with the next step
        pipe = request.getfixturevalue("pipe")
        pipe("a", gen_config=GenerationConfig(max_new_tokens=1))
        audit = pipe.llm_engine.call_utility("audit")
        assert audit["num_free_blocks"] == NUM_BLOCKS
        assert audit["violations"] == []


def make_model(directory: pathlib.Path, **changes: Any) -> str:
    """A tiny model in a directory of its own, its config.json changed."""
    shutil.copytree(tiny_model("qwen2-tied"), directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return str(directory)


def without_template(directory: str) -> None:
    pathlib.Path(directory, "chat_template.jinja").unlink()


@pytest.mark.parametrize(
    "name",
    [
        # those that start two workers, which the next test does too
        pytest.param(name, marks=[pytest.mark.exhaustive] * ("tp=2" in EXAMPLES[name]))
        for name in EXAMPLES
    ],
)
def test_examples_of_the_page(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path / "internlm" / "internlm-chat-7b", max_position_embeddings=2048)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(EXAMPLES[name], names)
    limit = 512 if name in ("defaults", "tp") else 1024
    responses = names["response"]
    names["pipe"].close()
    assert [response.index for response in responses] == [0, 1]
    for response in responses:
        assert response.text
        assert response.finish_reason == ("length" if response.generate_token_len == limit else "stop")


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        # the argument says the same
        pytest.param(
            {"backend_config": TurbomindEngineConfig(tp=2, cache_block_seq_len=16)},
            None,
            marks=pytest.mark.exhaustive,
        ),
        ({"backend_config": PytorchEngineConfig(block_size=16), "tp": 2}, "The argument tp is deprecated"),
    ],
)
def test_tp_computes_on_several_devices(pipe: Pipeline, options: Any, warning: str | None) -> None:
    """Two workers, each with a part of the model, answer what one does."""
    before = set(psutil.Process().children())
    with pytest.warns(DeprecationWarning, match=warning) if warning else contextlib.nullcontext():
        shared = make_pipe(**options)
    with shared:
        workers = [one for one in set(psutil.Process().children()) - before if "worker_process" in str(one.cmdline())]
        assert len(workers) == 2
        answers, expected = shared(PROMPTS, GREEDY), pipe(PROMPTS, GREEDY)
        assert isinstance(answers, list) and isinstance(expected, list)
        assert [one.text for one in answers] == [one.text for one in expected]
    assert psutil.wait_procs(workers, timeout=30)[1] == []
    with pytest.raises(RuntimeError, match="shut down"):
        shared("Hello", GREEDY)


def test_several_devices_take_their_share_of_the_memory_together() -> None:
    """The share is of the whole machine, and a part of a block is smaller than the block."""
    configs = [
        _make_engine_config(
            tiny_model("qwen2-tied"),
            TurbomindEngineConfig(tp=tp, cache_block_seq_len=16, enable_prefix_caching=True),
            {},
        )
        for tp in (1, 2)
    ]
    assert [config.parallel.tensor_parallel_size for config in configs] == [1, 2]
    one, two = (config.cache.kv_cache_memory_bytes for config in configs)
    assert one is not None and two is not None
    assert two == pytest.approx(one / 2, rel=0.2)


def test_the_example_program(tmp_path: pathlib.Path) -> None:
    words = ["--model", tiny_model("qwen2-tied"), "--max-tokens", "5", "Is anyone there?"]
    stdout, _ = run_here("examples/lmdeploy_pipeline.py", *words, directory=tmp_path)
    assert stdout.splitlines()[0] == "User: Is anyone there?"
    answer = stdout.split("Assistant: ")[1].split("\n\nUser: ")[0]
    assert stdout.endswith(f"Assistant, piece by piece: {answer}\n")


def test_answers_are_those_of_llm(pipe: Pipeline) -> None:
    llm = LLM(tiny_model("qwen2-tied"), dtype="float32", num_gpu_blocks_override=NUM_BLOCKS, block_size=16)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    conversations = [[{"role": "user", "content": text}] for text in PROMPTS]
    expected = [output.outputs[0] for output in llm.chat(conversations, params, use_tqdm=False)]
    as_they_are = [output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    llm.shutdown()
    for prompts in (PROMPTS, conversations):
        responses = pipe(prompts, gen_config=GREEDY)
        assert isinstance(responses, list)
        assert [(one.text, one.token_ids) for one in responses] == [(one.text, one.token_ids) for one in expected]
        assert {(one.generate_token_len, one.finish_reason) for one in responses} == {(12, "length")}
        assert [one.index for one in responses] == [0, 1]
    responses = pipe(PROMPTS, gen_config=GREEDY, do_preprocess=False)
    assert isinstance(responses, list)
    assert [one.token_ids for one in responses] == [one.token_ids for one in as_they_are]
    assert [one.input_token_len for one in responses] == [len(pipe._tokenizer.encode(text)) for text in PROMPTS]


def test_one_prompt_gives_one_response(pipe: Pipeline) -> None:
    one = pipe(PROMPTS[0], gen_config=GREEDY)
    messages = pipe([{"role": "user", "content": [{"type": "text", "text": PROMPTS[0]}]}], gen_config=GREEDY)
    assert isinstance(one, Response)
    assert isinstance(messages, Response)
    assert one.token_ids == messages.token_ids
    assert one.session_id != messages.session_id
    assert pipe([], gen_config=GREEDY) == []


def test_a_configuration_for_each_prompt(pipe: Pipeline) -> None:
    configs = [
        GenerationConfig(max_new_tokens=3, ignore_eos=True),
        GenerationConfig(max_new_tokens=5, ignore_eos=True),
    ]
    responses = pipe.batch_infer(PROMPTS, configs)
    assert isinstance(responses, list)
    assert [one.generate_token_len for one in responses] == [3, 5]
    with pytest.raises(RequestError, match="The lengths of prompts and gen_config must be the same"):
        pipe.batch_infer(PROMPTS, configs[:1])


def test_sampling_without_a_configuration(pipe: Pipeline) -> None:
    """A call samples, batch_infer is greedy; with a configuration a call's other arguments count for nothing."""
    greedy = pipe(PROMPTS * 4, request_output_len=16, top_k=1, ignore_eos=True)
    sampled = pipe(PROMPTS * 4, request_output_len=16, ignore_eos=True)
    ignored = pipe(PROMPTS * 4, GenerationConfig(max_new_tokens=16, ignore_eos=True), 3, top_k=40, temperature=2.0)
    batch = pipe.batch_infer(PROMPTS * 4, GenerationConfig(max_new_tokens=16, ignore_eos=True))
    ids = [[one.token_ids for one in responses] for responses in (greedy, sampled, ignored, batch)]  # type: ignore[union-attr]
    assert ids[0] == ids[2] == ids[3]
    assert ids[0][:2] * 4 == ids[0]
    # each prompt draws with a seed of its own
    assert len({tuple(one) for one in ids[1]}) == 8


@pytest.mark.parametrize("seed", [0, -1, 7, 2**64 - 1])
def test_a_seed_repeats(pipe: Pipeline, seed: int) -> None:
    config = GenerationConfig(max_new_tokens=16, top_k=40, temperature=1.0, random_seed=seed, ignore_eos=True)
    other = GenerationConfig(max_new_tokens=16, top_k=40, temperature=1.0, ignore_eos=True)
    first, second, third = pipe("Hello", config), pipe(["Hello", "a"], config), pipe("Hello", other)
    assert isinstance(first, Response) and isinstance(third, Response) and isinstance(second, list)
    assert first.token_ids == second[0].token_ids
    assert first.token_ids != third.token_ids


def test_a_stop_word_stops_at_every_token_that_holds_it(pipe: Pipeline) -> None:
    texts = {id_: pipe._tokenizer.token_text(id_) for id_ in range(VOCAB_SIZE)}
    config = GenerationConfig(max_new_tokens=200, random_seed=1, top_k=0, temperature=2.0, ignore_eos=True)
    free = pipe("Hello", config)
    assert isinstance(free, Response)
    place = next(i for i, id_ in enumerate(free.token_ids) if "e" in texts[id_] and texts[id_] != "e")
    config.stop_words = ["e"]
    stopped = pipe("Hello", config)
    assert isinstance(stopped, Response)
    first = next(i for i, id_ in enumerate(free.token_ids) if "e" in texts[id_])
    assert first <= place
    assert stopped.token_ids == free.token_ids[:first]
    assert (stopped.generate_token_len, stopped.finish_reason) == (first, "stop")
    assert stopped.text == pipe._tokenizer.decode(stopped.token_ids, skip_special_tokens=True)
    config.include_stop_str_in_output = True
    kept = pipe("Hello", config)
    assert isinstance(kept, Response)
    assert kept.token_ids == free.token_ids[: first + 1]


def test_bad_words_are_never_generated(pipe: Pipeline) -> None:
    texts = {id_: pipe._tokenizer.token_text(id_) for id_ in range(VOCAB_SIZE)}
    config = GenerationConfig(max_new_tokens=200, random_seed=1, top_k=0, temperature=2.0, ignore_eos=True)
    free = pipe("Hello", config)
    assert isinstance(free, Response)
    assert any("e" in texts[id_] for id_ in free.token_ids)
    config.bad_words = ["e"]
    response = pipe("Hello", config)
    assert isinstance(response, Response)
    assert not any("e" in texts[id_] for id_ in response.token_ids)
    # even if hardly anything else is left
    left = [50, 60, 70]
    config = GenerationConfig(
        max_new_tokens=40, top_k=0, ignore_eos=True, bad_token_ids=[i for i in range(VOCAB_SIZE) if i not in left]
    )
    response = pipe("Hello", config)
    assert isinstance(response, Response)
    assert set(response.token_ids) <= set(left)
    config.bad_token_ids = list(range(VOCAB_SIZE))
    with pytest.raises(RequestError, match="bad_words leave no token"):
        pipe("Hello", config)


def test_a_word_of_several_tokens_is_ignored(pipe: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("ascend_vllm.entrypoints.lmdeploy.pipeline")
    logger.addHandler(caplog.handler)
    logger.setLevel("WARNING")
    try:
        expected = pipe("Hello", GREEDY)
        response = pipe("Hello", GenerationConfig(max_new_tokens=12, ignore_eos=True, bad_words=["zebra quilt"]))
    finally:
        logger.removeHandler(caplog.handler)
        logger.setLevel("NOTSET")
    assert isinstance(expected, Response) and isinstance(response, Response)
    assert response.token_ids == expected.token_ids
    assert "The word 'zebra quilt' is" in caplog.text
    assert "only words of one token can be used" in caplog.text


def test_words_of_a_vocabulary_without_bytes() -> None:
    vocabulary = ["<unk>", "▁", "▁a", "ing", "▁sing", "song", "▁king", "<stop>"]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: id_ for id_, word in enumerate(vocabulary)}, unk_token="<unk>")
    )
    tokenizer.add_special_tokens(["<stop>"])
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    words = WordTokens(Tokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)), len(vocabulary))
    assert words.find("ing") == [3, 4, 6]
    assert words.find("<stop>") == [7]


@pytest.mark.parametrize("name", ["stop_words", "bad_words"])
@pytest.mark.parametrize("words", ["a", [1], ("a",)])
def test_words_must_be_a_list(pipe: Pipeline, name: str, words: Any) -> None:
    with pytest.raises(AssertionError) as error:
        pipe("Hello", GenerationConfig(**{name: words}))
    assert str(error.value) == f"{name} must be a list of str but got {type(words)}"


def test_finish_reasons(pipe: Pipeline) -> None:
    """The end of sequence counts as "stop" and is not part of the answer, be it at the last place."""
    eos = pipe._tokenizer.eos_token_id
    assert eos is not None
    others = [id_ for id_ in range(VOCAB_SIZE) if id_ != eos]
    config = GenerationConfig(max_new_tokens=1, bad_token_ids=others)
    response = pipe("Hello", config)
    assert isinstance(response, Response)
    assert (response.text, response.generate_token_len, response.finish_reason) == ("", 0, "stop")
    response = pipe(
        "Hello", GenerationConfig(max_new_tokens=4, bad_token_ids=others, min_new_tokens=1, ignore_eos=True)
    )
    assert isinstance(response, Response)
    assert (response.token_ids, response.finish_reason) == ([eos] * 4, "length")


def test_a_prompt_without_room(pipe: Pipeline) -> None:
    num_tokens = pipe("Hello", GREEDY).input_token_len  # type: ignore[union-attr]
    room = pipe.session_len - num_tokens
    configs = [GenerationConfig(max_new_tokens=n, ignore_eos=True) for n in (room, room - 1)]
    refused, accepted = pipe.batch_infer(["Hello", "Hello"], configs)  # type: ignore[misc]
    assert (refused.text, refused.generate_token_len, refused.finish_reason) == ("", 0, "length")
    assert refused.input_token_len == num_tokens
    assert (accepted.generate_token_len, accepted.finish_reason) == (room - 1, "length")
    (piece,) = pipe.stream_infer("Hello", configs[0])
    assert (piece.text, piece.generate_token_len, piece.finish_reason) == ("", 0, "length")


def test_log_probabilities(pipe: Pipeline) -> None:
    config = GenerationConfig(max_new_tokens=5, ignore_eos=True, logprobs=2)
    response = pipe("Hello", config)
    assert isinstance(response, Response)
    assert response.logprobs is not None
    assert [next(iter(position)) for position in response.logprobs] == response.token_ids
    # greedy: the token itself is the most likely one
    assert [max(position.values()) for position in response.logprobs] == [
        next(iter(position.values())) for position in response.logprobs
    ]
    streamed = [entry for piece in pipe.stream_infer("Hello", config) for entry in piece.logprobs or []]
    assert streamed == response.logprobs


def test_a_stream_is_the_answer_in_pieces(pipe: Pipeline) -> None:
    expected = pipe(PROMPTS, gen_config=GREEDY)
    pieces = list(pipe.stream_infer(PROMPTS, gen_config=GREEDY))
    for index, answer in enumerate(expected):
        own = [piece for piece in pieces if piece.index == index]
        assert "".join(piece.text for piece in own) == answer.text
        assert [id_ for piece in own for id_ in piece.token_ids] == answer.token_ids
        assert [piece.generate_token_len for piece in own] == list(range(1, 13))
        assert [piece.finish_reason for piece in own] == [None] * 11 + ["length"]


def test_streams_and_calls_in_turns(pipe: Pipeline) -> None:
    expected = pipe(PROMPTS, gen_config=GREEDY)
    streams = [pipe.stream_infer(text, gen_config=GREEDY) for text in PROMPTS]
    texts = ["", ""]
    for pair in zip(*streams, strict=True):
        texts = [text + piece.text for text, piece in zip(texts, pair, strict=True)]
        assert pipe(PROMPTS, gen_config=GREEDY)[0].text == expected[0].text  # type: ignore[index]
    assert texts == [one.text for one in expected]


def test_leaving_a_stream_ends_its_requests(pipe: Pipeline) -> None:
    stream = pipe.stream_infer(PROMPTS, gen_config=GenerationConfig(max_new_tokens=300, ignore_eos=True))
    assert next(stream).generate_token_len == 1
    assert pipe.llm_engine.get_num_unfinished_requests() == 2
    stream.close()  # type: ignore[attr-defined]
    assert pipe.llm_engine.get_num_unfinished_requests() == 0
    # one that is never read does not begin
    pipe.stream_infer(PROMPTS, gen_config=GREEDY)
    assert pipe.llm_engine.get_num_unfinished_requests() == 0


def test_calls_from_several_threads(pipe: Pipeline) -> None:
    texts = [f"{word} {number}" for word in ("The", "quick", "Hello") for number in range(4)]
    expected = [one.token_ids for one in pipe(texts, gen_config=GREEDY)]
    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda text: pipe(text, gen_config=GREEDY), texts))
    assert [one.token_ids for one in found] == expected


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"type": "regex_schema", "regex_schema": "call me [A-Za-z]{1,10}"}, "call me [A-Za-z]{1,10}"),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["cat", "dog"]}}},
            '"(cat|dog)"',
        ),
        ({"type": "text"}, "(?s).*"),
    ],
)
def test_response_format(pipe: Pipeline, form: dict[str, Any], pattern: str) -> None:
    config = GenerationConfig(response_format=form, max_new_tokens=30)
    assert re.fullmatch(pattern, pipe("Hello", gen_config=config).text)
    assert re.fullmatch(pattern, "".join(piece.text for piece in pipe.stream_infer(["Hello"], gen_config=config)))


def test_a_response_format_of_each_prompt(pipe: Pipeline) -> None:
    """Any JSON object, when there is room for it; the others are as free as before."""
    schema = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 9, "minimum": 0}}}
    schema |= {"required": ["age"], "additionalProperties": False}
    forms: list[Any] = [{"type": "json_object"}, None, {"type": "json_schema", "json_schema": {"schema": schema}}]
    sampled = [
        GenerationConfig(response_format=form, max_new_tokens=40, top_k=0, temperature=2.0, random_seed=3)
        for form in forms
    ]
    whole, free, age = pipe(["Hello"] * 3, gen_config=sampled)
    assert whole.text.lstrip().startswith("{")
    if whole.finish_reason == "stop":
        assert isinstance(json.loads(whole.text), dict)
    assert free.token_ids == pipe("Hello", gen_config=sampled[1]).token_ids
    assert json.loads(age.text)["age"] in range(10)


def test_logits_processors(pipe: Pipeline) -> None:
    """They see all ids as one tensor, and change the logits one after another."""
    seen: list[list[int]] = []

    def count_up(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        seen.append(ids.tolist())
        assert (ids.dtype, logits.dtype, logits.shape) == (torch.int64, torch.float32, (VOCAB_SIZE,))
        return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor([50 + len(seen)]), 0.0)

    def next_but_one(_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits.roll(2)

    config = GenerationConfig(max_new_tokens=4, ignore_eos=True, logits_processors=[count_up, next_but_one])
    counted, plain = pipe(["Hello", "a"], gen_config=[config, GREEDY])
    assert counted.token_ids == [53, 54, 55, 56]
    assert seen[-1] == [*seen[0], 53, 54, 55]
    assert len(seen[0]) == counted.input_token_len
    assert plain.token_ids == pipe("a", gen_config=GREEDY).token_ids
    seen.clear()
    assert [one.token_ids for one in pipe.stream_infer("Hello", gen_config=config)] == [[53], [54], [55], [56]]


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        (5, {}, "prompts must be a string, messages or a list of these, but is of type int"),
        ([5], {}, "a prompt must be a string or a list of messages, but is of type int"),
        ([("text", "image")], {}, "not a multimodal model"),
        ([[]], {}, "empty conversation"),
        ([{"content": "x"}], {}, "A message has no role"),
        ("\ud800", {}, "not valid Unicode"),
        ([{"role": "user", "content": "x"}], {"do_preprocess": False}, "do_preprocess must be True for messages"),
        ("", {"do_preprocess": False}, "Prompt cannot be empty"),
        ("x", {"gen_config": {"top_k": 1}}, "gen_config must be a GenerationConfig, but is of type dict"),
        ("x", {"gen_config": GenerationConfig(n=2)}, "n must be 1"),
        ("x", {"gen_config": GenerationConfig(response_format={"type": "json"})}, "response_format must be a dict"),
        ("x", {"gen_config": GenerationConfig(logits_processors=["no function"])}, "must be a list of functions"),  # type: ignore[list-item]
        ("x", {"gen_config": GenerationConfig(output_logits="all")}, "output_logits is not supported"),
        ("x", {"gen_config": GenerationConfig(stop_token_ids=[VOCAB_SIZE])}, "stop_token_ids must be a list"),
        ("x", {"gen_config": GenerationConfig(repetition_penalty=0)}, "repetition_penalty must be greater than zero"),
        ("x", {"gen_config": GenerationConfig(max_new_tokens=2, min_new_tokens=3)}, "min_tokens must be less"),
    ],
)
def test_what_is_wrong_is_refused(pipe: Pipeline, prompts: Any, options: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        pipe(prompts, **options)
    assert pipe.llm_engine.get_num_unfinished_requests() == 0


def test_defaults_of_the_records() -> None:
    config = GenerationConfig()
    assert vars(config) | {"stop_words": None} == vars(config)
    assert (config.n, config.max_new_tokens, config.top_p, config.top_k, config.temperature) == (1, 512, 1.0, 1, 0.8)
    assert (config.repetition_penalty, config.ignore_eos, config.random_seed) == (1.0, False, None)
    turbomind, torch = TurbomindEngineConfig(), PytorchEngineConfig()
    assert list(vars(turbomind).values())[:9] == [None, None, 1, None, 128, 0.5, 0, 0.0, False]
    assert list(vars(torch).values())[:11] == ["", 1, None, 128, "recompute", 16, 64, 0, 0, None, 16384]


def test_do_sample_of_later_versions() -> None:
    assert GenerationConfig(do_sample=True).top_k == 50
    assert not GenerationConfig(do_sample=True).is_greedy
    assert GenerationConfig(do_sample=False, top_k=40).is_greedy
    assert GenerationConfig(top_p=0.0, top_k=40).is_greedy


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"n": 0}, "n is not a positive integer"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a positive integer, got 0"),
        ({"top_p": 1.1}, "top_p should be in range [0, 1], but found 1.1"),
        ({"top_k": -1}, "top_k can not be a negative integer"),
        ({"top_k": 1.5}, "top_k must be an integer, got 1.5"),
        ({"temperature": 2.5}, "temperature should be in range [0, 2], but found 2.5"),
        ({"min_p": -0.1}, "min_p should be in range [0, 1], but found -0.1"),
        ({"random_seed": "1"}, "random_seed must be an integer, got '1'"),
    ],
)
def test_ranges_of_sampling(options: Any, text: str) -> None:
    with pytest.raises(AssertionError) as error:
        GenerationConfig(**options)
    assert str(error.value) == text


def test_the_repr_of_a_response() -> None:
    assert repr(Response("a\n'", 2, "stop", 5)) == (
        "text=\"a\\n'\"\ngenerate_token_len=2\nfinish_reason='stop'\ninput_token_len=5\nsession_id=0\ntoken_ids=[]\n"
        "logprobs=None\nindex=0"
    )


def test_turbomind_settings_reach_the_engine() -> None:
    backend = TurbomindEngineConfig(
        session_len=160,
        max_batch_size=3,
        rope_scaling_factor=2.0,
        cache_block_seq_len=16,
        enable_prefix_caching=False,
    )
    with pipeline(tiny_model("qwen2-tied"), backend_config=backend) as pipe:
        config = pipe.llm_engine.config
        assert (config.scheduler.max_model_len, config.scheduler.max_num_seqs) == (160, 3)
        assert pipe.session_len == 160
        rope = config.model.arch.rope
        assert rope is not None
        assert (rope.rope_type, rope.number("factor"), rope.theta) == ("dynamic", 2.0, 10000.0)
        # half of the machine's memory is more than three sequences of ten blocks can fill
        assert pipe.llm_engine.call_utility("audit")["num_blocks"] == 30


def test_pytorch_settings_reach_the_engine() -> None:
    backend = PytorchEngineConfig(
        session_len=256, max_batch_size=4, eviction_type="copy", block_size=16, num_gpu_blocks=20, num_cpu_blocks=50,
        max_prefill_token_num=100, dtype="bfloat16",
    )  # fmt: skip
    with pipeline(tiny_model("qwen2-tied"), backend_config=backend) as pipe:
        config = pipe.llm_engine.config
        assert config.scheduler.preemption_mode == "swap"
        assert config.cache.block_size == 16
        assert (config.scheduler.max_num_batched_tokens, config.scheduler.enable_chunked_prefill) == (100, True)
        assert config.model.dtype == "bfloat16"
        assert pipe.llm_engine.call_utility("audit")["num_blocks"] == 20
        assert pipe.llm_engine.core.num_cpu_blocks == 50


def test_adapters_answer_by_their_names(tmp_path: pathlib.Path) -> None:
    model = tiny_model("qwen2-tied")
    made = (Adapter("low", rank=4, ranks={"q_proj": 20}), Adapter("high", rank=16))
    adapters = {adapter.name: write_adapter(tmp_path / adapter.name, model, adapter) for adapter in made}
    config = GenerationConfig(max_new_tokens=8, ignore_eos=True)
    prompts = ["Hello", "1 2 3"]
    backend = PytorchEngineConfig(session_len=128, block_size=16, num_gpu_blocks=40, adapters=adapters)
    with pipeline(model, backend_config=backend, dtype="float32") as pipe:
        limits = pipe.llm_engine.config.lora
        assert limits is not None
        assert (limits.max_rank, limits.max_loras) == (32, 2)
        answers = {}
        for name in (None, *adapters):
            responses = pipe(prompts, config, adapter_name=name)
            assert isinstance(responses, list)
            answers[name] = [one.text for one in responses]
        assert len({tuple(texts) for texts in answers.values()}) == 3
        for name, texts in answers.items():
            streamed = ["", ""]
            for part in pipe.stream_infer(prompts, config, adapter_name=name):
                streamed[part.index] += part.text
            assert streamed == texts
        with pytest.raises(RequestError, match="There is no adapter 'middle'; the pipeline's adapters: low, high"):
            pipe(prompts, config, adapter_name="middle")


@pytest.mark.parametrize("eviction_type", ["recompute", "copy"])
def test_eviction_changes_no_answer(eviction_type: str) -> None:
    config = GenerationConfig(max_new_tokens=60, ignore_eos=True)
    prompts = [f"Hello {number}" for number in range(4)]
    with make_pipe(block_size=16) as pipe:
        expected = [one.token_ids for one in pipe(prompts, config)]
    # each needs six blocks in the end
    backend = PytorchEngineConfig(
        session_len=192, eviction_type=eviction_type, block_size=16, num_gpu_blocks=12, num_cpu_blocks=24
    )
    with pipeline(tiny_model("qwen2-tied"), backend_config=backend, dtype="float32", disable_log_stats=False) as pipe:
        assert [one.token_ids for one in pipe(prompts, config)] == expected
        assert pipe.llm_engine.call_utility("audit")["num_free_blocks"] == 12
        registry = pipe.llm_engine.metrics.registry
        samples = [sample for family in registry.collect() for sample in family.samples]
        assert sum(sample.value for sample in samples if sample.name == "vllm:num_preemptions_total") > 0


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        (PytorchEngineConfig(adapters={"a": "/a"}), r"adapters 'a': /a/adapter_config.json"),
        (PytorchEngineConfig(device_type="cuda"), "--device cuda"),
        (PytorchEngineConfig(block_size=17), "--block-size must be one of"),
        (TurbomindEngineConfig(use_logn_attn=True), "use_logn_attn is not supported"),
        (TurbomindEngineConfig(model_format="awq"), "model_format 'awq' is not supported"),
        (TurbomindEngineConfig(model_name="absent"), None),
    ],
)
def test_what_a_backend_cannot_do(backend: Any, words: str | None, tmp_path: pathlib.Path) -> None:
    model = make_model(tmp_path / "model")
    if words is None:
        without_template(model)
        words = "'absent' is not a chat template; the built-in ones are base, llama, internlm"
    with pytest.raises(ConfigError, match=words):
        pipeline(model, backend_config=backend)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (TurbomindEngineConfig, {"tp": 0}, "tp must be a positive integer, got 0"),
        (TurbomindEngineConfig, {"cache_max_entry_count": 1.0}, "cache_max_entry_count must be between 0 and 1"),
        (TurbomindEngineConfig, {"model_format": "zip"}, "model_format must be one of"),
        (TurbomindEngineConfig, {"quant_policy": 3}, "quant_policy must be one of 0, 4, 8, got 3"),
        (TurbomindEngineConfig, {"rope_scaling_factor": -1.0}, "rope_scaling_factor must not be negative"),
        (PytorchEngineConfig, {"session_len": 0}, "session_len must be a positive integer, got 0"),
        (PytorchEngineConfig, {"max_batch_size": "8"}, "max_batch_size must be a positive integer, got '8'"),
        (PytorchEngineConfig, {"eviction_type": "drop"}, "eviction_type must be one of 'recompute', 'copy'"),
        (PytorchEngineConfig, {"num_cpu_blocks": -1}, "num_cpu_blocks must not be negative, got -1"),
    ],
)
def test_ranges_of_backends(kind: Any, options: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        kind(**options)


def test_arguments_of_pipeline() -> None:
    with pytest.raises(AssertionError) as error:
        pipeline(tiny_model("qwen2-tied"), backend_config={"tp": 1})  # type: ignore[arg-type]
    assert str(error.value).startswith(
        "Please use TurbomindEngineConfig imported from lmdeploy.messages for turbomind backend"
    )
    with pytest.raises(ConfigError, match="log_level must be one of"):
        pipeline(tiny_model("qwen2-tied"), log_level="LOUD")
    with pytest.raises(TypeError, match="absent"):
        pipeline(tiny_model("qwen2-tied"), absent=1)


MESSAGES = [
    {"role": "user", "content": "A"},
    {"role": "assistant", "content": "B"},
    {"role": "user", "content": "C"},
]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("base", "ABC"),
        ("internlm-chat-7b", "<|User|>:A\n<|Bot|>:B<eoa>\n<|User|>:C\n<|Bot|>:"),
        (
            "internlm2-chat",
            "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\nB<|im_end|>\n<|im_start|>user\nC<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        ("vicuna", "USER: A\nASSISTANT: B</s>\nUSER: C\nASSISTANT: "),
        ("llama2", "[INST] <<SYS>>\n\n<</SYS>>\n\nA [/INST] B</s><s>[INST] C [/INST] "),
        ("baichuan2-chat", "<reserved_106>A<reserved_107>B<reserved_106>C<reserved_107>"),
    ],
)
def test_built_in_templates(name: str, expected: str) -> None:
    assert ChatTemplateConfig(name).chat_template.messages2prompt(MESSAGES) == expected


def test_system_messages_of_built_in_templates() -> None:
    template = ChatTemplateConfig("internlm-chat", meta_instruction="S").chat_template
    assert template.messages2prompt("A") == "<|System|>:S\n<|User|>:A\n<|Bot|>:"
    own = [{"role": "system", "content": "T"}, MESSAGES[0]]
    assert template.messages2prompt(own) == "<|System|>:T\n<|User|>:A\n<|Bot|>:"
    assert (
        ChatTemplateConfig("qwen")
        .chat_template.messages2prompt("A")
        .startswith("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n")
    )
    assert ChatTemplateConfig("vicuna", capability="completion").chat_template.messages2prompt("A") == "A"
    with pytest.raises(RequestError, match="role must be one of system, user, assistant, got 'tool'"):
        template.messages2prompt([{"role": "tool", "content": "A"}])


def test_templates_of_ones_own(tmp_path: pathlib.Path) -> None:
    values = {"model_name": "mine", "user": "U:", "eoh": "\n", "assistant": "A:", "eoa": "|", "separator": "\n"}
    config = ChatTemplateConfig.from_json(json.dumps(values))
    assert config.chat_template.messages2prompt(MESSAGES) == "U:A\nA:B|\nU:C\nA:"
    path = tmp_path / "template.json"
    path.write_text(json.dumps(values))
    assert ChatTemplateConfig.from_json(str(path)) == config
    with pytest.raises(ConfigError, match="'mine' is not a chat template"):
        _ = ChatTemplateConfig("mine").chat_template
    with pytest.raises(ConfigError, match="capability must be 'chat' or 'completion'"):
        ChatTemplateConfig("llama2", capability="infilling")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("/absent.json", "cannot be read"),
        ("{", "is not JSON"),
        ("{}", "must be a JSON object with a model_name"),
        ('{"model_name": "x", "users": "y"}', r"unknown key\(s\) in the chat template: users"),
    ],
)
def test_a_broken_template_file(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ChatTemplateConfig.from_json(text)


@pytest.mark.parametrize(
    ("has_own", "options", "expected"),
    [
        (True, {}, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
        (True, {"model_name": "vicuna"}, "USER: hi\nASSISTANT: "),
        (True, {"backend_config": TurbomindEngineConfig(model_name="vicuna")}, "USER: hi\nASSISTANT: "),
        (
            True,
            {"chat_template_config": ChatTemplateConfig("own", meta_instruction="S")},
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        ),
        (True, {"chat_template_config": ChatTemplateConfig("own", capability="completion")}, "hi"),
        (True, {"model_name": "llama2", "chat_template_config": ChatTemplateConfig("own", user="U:")}, "U:hi"),
        (False, {}, "<|User|>:hi\n<|Bot|>:"),
    ],
)
def test_which_template_is_taken(has_own: bool, options: Any, expected: str, tmp_path: pathlib.Path) -> None:
    model = make_model(tmp_path / "internlm-chat-7b")
    if not has_own:
        without_template(model)
    with pipeline(model, dtype="float32", num_gpu_blocks_override=32, **options) as pipe:
        assert pipe.chat_template.messages2prompt("hi") == expected
        response = pipe("hi", GREEDY)
        assert isinstance(response, Response)
        assert response.input_token_len == len(pipe._tokenizer.encode(expected))


def test_the_stop_words_of_a_template() -> None:
    with make_pipe(model_name="chatml") as pipe:
        stop = pipe._tokenizer.encode("<|im_start|>")[0]
        only = [id_ for id_ in range(VOCAB_SIZE) if id_ != stop]
    stopping = ChatTemplateConfig("chatml", stop_words=["<|im_start|>"])
    with make_pipe(chat_template_config=stopping) as pipe:
        response = pipe("hi", GenerationConfig(max_new_tokens=4, bad_token_ids=only))
        assert isinstance(response, Response)
        assert (response.generate_token_len, response.finish_reason) == (0, "stop")
        response = pipe("hi", GenerationConfig(max_new_tokens=4, bad_token_ids=only, ignore_eos=True))
        assert isinstance(response, Response)
        assert (response.generate_token_len, response.finish_reason) == (4, "length")
