"""Requests: what is accepted, error texts, and the core's requests."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ascend_vllm.core.request import Request, RequestStatus
from ascend_vllm.engine.input_processor import InputProcessor, derive_seed
from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.errors import RequestError
from ascend_vllm.sampling_params import RequestOutputKind, SamplingParams
from ascend_vllm.types.messages import BeamSearchSpec, EngineCoreRequest, SequencesOfRequest
from tests.engine.engine_for_tests import make_config


def processor(tokenizer: Tokenizer | None, **config: Any) -> InputProcessor:
    return InputProcessor(make_config(**config), tokenizer)


def test_prompt_forms(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("The quick brown fox")
    inputs = processor(byte_level)
    for prompt, text in [
        ("The quick brown fox", "The quick brown fox"),
        ({"prompt": "The quick brown fox"}, "The quick brown fox"),
        ({"prompt_token_ids": ids}, None),
        ({"prompt": "shown", "prompt_token_ids": tuple(ids), "multi_modal_data": None}, "shown"),
    ]:
        request = inputs.process("r", prompt, SamplingParams())
        assert (request.prompt, request.prompt_token_ids) == (text, ids)
        assert request.core_requests[0].prompt_token_ids == ids


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "Prompt cannot be empty"),
        ({"prompt": ""}, "Prompt cannot be empty"),
        ({"prompt_token_ids": []}, "Prompt cannot be empty"),
        ({"prompt_token_ids": [1, 600]}, "Token id 600 is out of vocabulary"),
        ({"prompt_token_ids": [-1, 3]}, "Token id -1 is out of vocabulary"),
        ({"prompt_token_ids": [1, "a"]}, "prompt_token_ids must be integers, but one is 'a'"),
        ({"prompt_token_ids": [1, True]}, "prompt_token_ids must be integers, but one is True"),
        ({"prompt_token_ids": "12"}, "prompt_token_ids must be a list of integers, but is str"),
        ({"prompt": 3}, "prompt must be a string, but is of type int"),
        ({}, "the prompt has neither prompt nor prompt_token_ids"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "not a multimodal model"),
        ({"prompt": "a", "promt": "b"}, "unknown key(s) in the prompt: promt"),
        ([1, 2], "prompt must be a string"),
        ("\ud800", "prompt is not valid Unicode text"),
        (
            {"prompt_token_ids": [1] * 64},
            "This model's maximum context length is 64 tokens. However, your prompt contains 64 input tokens, which "
            "exceeds this limit even without any output tokens. Please reduce the length of the input prompt.",
        ),
    ],
)
def test_wrong_prompts(byte_level: Tokenizer, prompt: Any, words: str) -> None:
    with pytest.raises(RequestError) as error:
        processor(byte_level).process("r", prompt, SamplingParams())
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("params", "words", "param"),
    [
        ({"logprobs": 21}, "Requested sample logprobs of 21, which is greater than max allowed: 20", "logprobs"),
        (
            {"prompt_logprobs": 21},
            "Requested prompt logprobs of 21, which is greater than max allowed: 20",
            "prompt_logprobs",
        ),
        (
            {"logit_bias": {600: 1.0, 3: 1.0}},
            "token_id(s) [600] in logit_bias contain out-of-vocab token ids. Vocabulary size: 600",
            "logit_bias",
        ),
        ({"allowed_token_ids": []}, "allowed_token_ids is not None and empty!", "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids contains out-of-vocab token id!", "allowed_token_ids"),
        ({"seed": 1 << 63}, "seed must be a signed 64-bit integer", "seed"),
    ],
)
def test_wrong_params(byte_level: Tokenizer, params: dict[str, Any], words: str, param: str) -> None:
    with pytest.raises(RequestError) as error:
        processor(byte_level).process("r", "a", SamplingParams(**params))
    assert words in str(error.value)
    assert error.value.param == param


def test_priority_needs_its_policy(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match="Got priority 1 but Priority scheduling is not enabled"):
        processor(byte_level).process("r", "a", SamplingParams(), priority=1)
    inputs = processor(byte_level, policy="priority")
    assert [core.priority for core in inputs.process("r", "a", SamplingParams(n=2), priority=-7).core_requests] == [
        -7,
        -7,
    ]
    with pytest.raises(RequestError, match="priority must be a signed 64-bit integer") as error:
        inputs.process("r", "a", SamplingParams(), priority=1 << 63)
    assert error.value.param == "priority"


def test_a_cache_salt_is_part_of_what_blocks_hold(byte_level: Tokenizer) -> None:
    inputs = processor(byte_level)
    cores = inputs.process("r", "a", SamplingParams(n=2), cache_salt="mine").core_requests
    assert [core.content_keys for core in cores] == [[(0, "salt:mine")]] * 2
    assert inputs.process("r", "a", SamplingParams()).core_requests[0].content_keys == []
    for wrong in ("", 3, "\ud800"):
        with pytest.raises(RequestError, match="cache_salt") as error:
            inputs.process("r", "a", SamplingParams(), cache_salt=wrong)  # type: ignore[arg-type]
        assert error.value.param == "cache_salt"


def test_best_of_cannot_be_streamed_in_pieces(byte_level: Tokenizer) -> None:
    params = SamplingParams(n=1, best_of=2)
    params.output_kind = RequestOutputKind.DELTA
    with pytest.raises(RequestError, match="best_of must equal n to use output_kind=DELTA"):
        processor(byte_level).process("r", "a", params)
    params.best_of = 1
    processor(byte_level).process("r", "a", params)


@pytest.mark.parametrize(
    ("fields", "count", "logprobs"),
    [
        ({"n": 3}, 3, None),
        ({"n": 2, "best_of": 2}, 2, None),
        ({"n": 2, "best_of": 4}, 4, 0),
        ({"best_of": 2, "logprobs": 3}, 2, 3),
    ],
)
def test_sequences_share_the_prompt_of_the_first(
    byte_level: Tokenizer, fields: dict[str, Any], count: int, logprobs: int | None
) -> None:
    cores = processor(byte_level).process("r", "a", SamplingParams(**fields)).core_requests
    first = cores[0].request_id
    assert [core.parent_id for core in cores] == [None] + [first] * (count - 1)
    assert [core.sampling_params.logprobs for core in cores] == [logprobs] * count
    assert all(core.beam_search is None for core in cores)
    assert len({core.request_id for core in cores}) == count


@pytest.mark.parametrize(
    ("fields", "spec"),
    [
        ({"n": 2}, BeamSearchSpec(2, 2, stream=True)),
        (
            {"n": 1, "best_of": 3, "length_penalty": 2.0, "early_stopping": "never"},
            BeamSearchSpec(3, 1, 2.0, "never"),
        ),
        ({"early_stopping": None}, BeamSearchSpec(1, 1, 1.0, None)),
    ],
)
def test_a_beam_search_is_one_request_of_the_core(
    byte_level: Tokenizer, fields: dict[str, Any], spec: BeamSearchSpec
) -> None:
    kind = RequestOutputKind.CUMULATIVE if spec.stream else RequestOutputKind.FINAL_ONLY
    params = SamplingParams(use_beam_search=True, temperature=0.0, max_tokens=5, output_kind=kind, **fields)
    (core,) = processor(byte_level).process("r", "a", params).core_requests
    assert (core.beam_search, core.parent_id) == (spec, None)
    # what is left is a greedy sequence
    assert core.sampling_params == SamplingParams(temperature=0.0, max_tokens=5, output_kind=kind)


@pytest.mark.parametrize(("asked", "got"), [(None, 54), (5, 5), (54, 54), (1000, 54)])
def test_max_tokens_fits_the_model(byte_level: Tokenizer, asked: int | None, got: int) -> None:
    params = SamplingParams(max_tokens=asked)
    request = processor(byte_level).process("r", {"prompt_token_ids": [5] * 10}, params)
    assert request.core_requests[0].sampling_params.max_tokens == got
    assert params.max_tokens == asked


def test_a_smaller_limit_of_the_engine_counts(byte_level: Tokenizer) -> None:
    inputs = processor(byte_level)
    inputs.max_model_len = 12
    assert (
        inputs.process("r", {"prompt_token_ids": [5] * 10}, SamplingParams())
        .core_requests[0]
        .sampling_params.max_tokens
        == 2
    )
    with pytest.raises(RequestError, match="maximum context length is 12 tokens"):
        inputs.process("r", {"prompt_token_ids": [5] * 12}, SamplingParams())


def test_end_of_sequence_ids(byte_level: Tokenizer) -> None:
    eos = byte_level.eos_token_id
    inputs = processor(byte_level, generation_config={"eos_token_id": [7, eos, 8]})
    core = inputs.process("r", "a", SamplingParams(stop_token_ids=[9, 7, 600, -3])).core_requests[0]
    assert core.eos_token_id == eos
    # user's first, the model's others, none twice, none outside the vocabulary
    assert core.sampling_params.stop_token_ids == [9, 7, 8]
    core = inputs.process("r", "a", SamplingParams(stop_token_ids=[9], ignore_eos=True)).core_requests[0]
    assert (core.eos_token_id, core.sampling_params.stop_token_ids) == (None, [9])


def test_end_of_sequence_ids_of_config_json(byte_level: Tokenizer) -> None:
    core = processor(byte_level, eos_token_ids=(7,)).process("r", "a", SamplingParams()).core_requests[0]
    assert (core.eos_token_id, core.sampling_params.stop_token_ids) == (byte_level.eos_token_id, [7])
    no_tokenizer = processor(None, eos_token_ids=(7, 8))
    core = no_tokenizer.process("r", {"prompt_token_ids": [1]}, SamplingParams(detokenize=False)).core_requests[0]
    assert (core.eos_token_id, core.sampling_params.stop_token_ids) == (7, [8])


def test_without_a_tokenizer() -> None:
    inputs = processor(None)
    with pytest.raises(RequestError, match="prompt must be given as prompt_token_ids"):
        inputs.process("r", "text", SamplingParams(detokenize=False))
    with pytest.raises(RequestError, match="detokenize must be false"):
        inputs.process("r", {"prompt_token_ids": [1]}, SamplingParams())


def test_sequences_of_a_request_have_ids_and_seeds_of_their_own(byte_level: Tokenizer) -> None:
    inputs = processor(byte_level)
    cores = [
        core
        for request_id in ("r", "r")  # the same id again, after an abort
        for core in inputs.process(request_id, "a", SamplingParams(n=3, seed=5)).core_requests
    ]
    assert len({core.request_id for core in cores}) == 6
    seeds = [core.sampling_params.seed for core in cores]
    assert seeds[:3] == seeds[3:]
    assert len(set(seeds)) == 3
    assert all(core.sampling_params.n == 1 for core in cores)
    unseeded = inputs.process("r", "a", SamplingParams(n=2)).core_requests
    assert [core.sampling_params.seed for core in unseeded] == [None, None]


def test_derived_seeds_are_63_bits_and_unrelated() -> None:
    seeds = {derive_seed(seed, index) for seed in (0, 1, 2, -5, (1 << 63) - 1, -(1 << 63)) for index in range(4)}
    assert len(seeds) == 6 * 4 - 1  # the first seeds of 0 and of -2**63 are both 0: only 63 bits count
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert derive_seed(7, 0) == 7


def test_core_requests_survive_the_wire(byte_level: Tokenizer) -> None:
    params = SamplingParams(n=2, best_of=2, seed=-1, stop=["x"], min_tokens=60, max_tokens=100, logit_bias={3: 1.0})
    core = processor(byte_level).process("r", {"prompt_token_ids": [5] * 10}, params).core_requests[1]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(core), type=EngineCoreRequest) == core


def test_min_tokens_never_exceeds_max_tokens(byte_level: Tokenizer) -> None:
    core = (
        processor(byte_level)
        .process("r", {"prompt_token_ids": [5] * 60}, SamplingParams(min_tokens=50, max_tokens=None))
        .core_requests[0]
    )
    assert core.sampling_params.max_tokens == core.sampling_params.min_tokens == 4


def test_top_k_of_the_whole_vocabulary_is_none(byte_level: Tokenizer) -> None:
    # among them one that does not fit into the sampler's arrays
    for asked, got in ((7, 7), (2**40, -1), (0, 0), (-1, -1)):
        request = processor(byte_level).process("r", {"prompt_token_ids": [5]}, SamplingParams(top_k=asked))
        assert request.core_requests[0].sampling_params.top_k == got


def test_truncation_keeps_the_end(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    params = SamplingParams(truncate_prompt_tokens=3)
    request = processor(byte_level).process("r", {"prompt_token_ids": [5, 6, 7, 8]}, params)
    assert request.prompt_token_ids == [6, 7, 8]
    hf = sentencepiece.hf
    hf.truncation_side = "left"
    text = "The quick brown fox jumps"
    expected = hf(text, truncation=True, max_length=3).input_ids
    hf.backend_tokenizer.no_truncation()
    assert processor(sentencepiece).process("r", text, params).prompt_token_ids == expected
    assert expected[0] == sentencepiece.bos_token_id


def test_sampling_defaults_come_from_the_model(byte_level: Tokenizer) -> None:
    config = {
        "temperature": 0.7,
        "top_k": 20,
        "max_new_tokens": 9,
        "top_p": None,
        "do_sample": True,
        "eos_token_id": 1,
    }
    defaults = processor(byte_level, generation_config=config).default_sampling_params()
    assert defaults == {"temperature": 0.7, "top_k": 20, "max_tokens": 9}
    SamplingParams(**defaults)


async def test_async_processing_is_the_same(byte_level: Tokenizer) -> None:
    inputs = processor(byte_level)
    request = await inputs.process_async("r", "The quick", SamplingParams(), arrival_time=3.0)
    assert request.prompt_token_ids == byte_level.encode("The quick")
    assert request.core_requests[0].arrival_time == 3.0
    with pytest.raises(RequestError, match="Prompt cannot be empty"):
        await inputs.process_async("r", "", SamplingParams())


def test_the_prompt_of_many_sequences_is_told_once() -> None:
    """A thousand sequences of a prompt of 30,000 ids were 53 MB for the core to read, and held 650 MB there."""
    prompt = [number % 90 for number in range(20_000)]
    params = SamplingParams(n=1000, seed=3, prompt_logprobs=2, detokenize=False)
    inputs = processor(None)
    inputs.max_model_len = 30_000
    requests = inputs.process("r", {"prompt_token_ids": prompt}, params).core_requests
    frame = msgspec.msgpack.encode(SequencesOfRequest.of(requests))
    assert len(frame) < 2 * len(msgspec.msgpack.encode(requests[0])) + 50 * len(requests)
    found = msgspec.msgpack.decode(frame, type=SequencesOfRequest).requests()
    assert found == requests
    waiting = [Request(request, 30_000, 0) for request in found]
    assert all(request.token_ids is waiting[0].token_ids for request in waiting)
    waiting[1].transition(RequestStatus.RUNNING)
    waiting[1].append_output([7])
    assert waiting[0].token_ids == prompt


def test_bad_words_are_tokenised_with_and_without_a_space(byte_level: Tokenizer) -> None:
    params = SamplingParams(bad_words=["fox", " fox", "quick brown"], n=2)
    requests = processor(byte_level).process("r", "a", params).core_requests
    texts = ["fox", " fox", "quick brown", " quick brown"]
    expected = [byte_level.encode(text, add_special_tokens=False) for text in texts]
    assert [request.bad_words for request in requests] == [expected, expected]
    assert requests[0].sampling_params.bad_words is None
    assert processor(byte_level).process("r", "a", SamplingParams()).core_requests[0].bad_words == []


def test_bad_words_outside_the_vocabulary(byte_level: Tokenizer) -> None:
    small = InputProcessor(make_config(vocab_size=10), byte_level)
    with pytest.raises(RequestError, match="bad_words has token ids") as error:
        small.process("r", {"prompt_token_ids": [1]}, SamplingParams(bad_words=["fox"]))
    assert error.value.param == "bad_words"


def test_bad_words_need_a_tokenizer() -> None:
    bare = InputProcessor(make_config(), None)
    with pytest.raises(RequestError, match="bad_words need a tokenizer"):
        bare.process("r", {"prompt_token_ids": [1]}, SamplingParams(bad_words=["a"], detokenize=False))
