"""SamplingParams: what is accepted, with which words other values are refused, and what is made of them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ascend_vllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams, SamplingType
from ascend_vllm.structured_outputs import GuidedDecodingParams, StructuredOutputsParams

BEAMS: dict[str, Any] = {"use_beam_search": True, "n": 2, "temperature": 0.0}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 0}, "n must be at least 1, got 0."),
        ({"n": 2.0}, "n must be an int, but is of type <class 'float'>"),
        ({"n": 2, "best_of": 1}, "best_of must be greater than or equal to n, got n=2 and best_of=1."),
        ({"presence_penalty": 3}, "presence_penalty must be in [-2, 2], got 3."),
        ({"frequency_penalty": -2.5}, "frequency_penalty must be in [-2, 2], got -2.5."),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be greater than zero, got 0.0."),
        ({"temperature": -1.0}, "temperature must be non-negative, got -1.0."),
        ({"temperature": float("nan")}, "temperature must be a finite number, got nan."),
        ({"top_p": 0.0}, "top_p must be in (0, 1], got 0.0."),
        ({"top_p": 1.5}, "top_p must be in (0, 1], got 1.5."),
        ({"top_k": -2}, "top_k must be -1 (disable), or at least 1, got -2."),
        ({"min_p": 2.0}, "min_p must be in [0, 1], got 2.0."),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0."),
        ({"min_tokens": -1}, "min_tokens must be greater than or equal to 0, got -1."),
        ({"min_tokens": 10, "max_tokens": 3}, "min_tokens must be less than or equal to max_tokens=3, got 10."),
        ({"logprobs": -1}, "logprobs must be non-negative, got -1."),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be non-negative, got -1."),
        ({"bad_words": ["a", ""]}, "bad_words cannot contain an empty string, got ['a', '']."),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be >= 1, got 0"),
        ({"stop": [""]}, "stop cannot contain an empty string."),
        (
            {"stop": "x", "detokenize": False},
            "stop strings are only supported when detokenize is True. Set detokenize=True to use stop.",
        ),
        ({"n": 2, "temperature": 0.0}, "n must be 1 when using greedy sampling, got 2."),
        ({"best_of": 2, "temperature": 0.0}, "n must be 1 when using greedy sampling, got 2."),
        (
            {"n": 2, "best_of": 3, "output_kind": RequestOutputKind.DELTA},
            "best_of must equal n to use output_kind=DELTA",
        ),
        (
            {"early_stopping": True},
            "early_stopping is not effective and must be False when not using beam search.",
        ),
        (
            {"early_stopping": None},
            "early_stopping is not effective and must be False when not using beam search.",
        ),
        (
            {"length_penalty": 2.0},
            "length_penalty is not effective and must be the default value of 1.0 when not using beam search.",
        ),
        ({"length_penalty": float("inf")}, "length_penalty must be a finite number, got inf."),
        (BEAMS | {"n": 1}, "best_of must be greater than 1 when using beam search. Got 1."),
        (BEAMS | {"n": 1, "best_of": 1}, "best_of must be greater than 1 when using beam search. Got 1."),
        (BEAMS | {"n": 3, "best_of": 2}, "best_of must be greater than or equal to n, got n=3 and best_of=2."),
        ({"use_beam_search": True, "best_of": 2}, "temperature must be 0 when using beam search."),
        (BEAMS | {"top_p": 0.9}, "top_p must be 1 when using beam search."),
        (BEAMS | {"top_k": 3}, "top_k must be -1 when using beam search."),
        (BEAMS | {"early_stopping": "often"}, "early_stopping must be True, False, or 'never', got often."),
        (BEAMS | {"early_stopping": 1}, "early_stopping must be True, False, or 'never', got 1."),
        (BEAMS | {"presence_penalty": 1.0}, "presence_penalty cannot be used with beam search."),
        (BEAMS | {"frequency_penalty": 1.0}, "frequency_penalty cannot be used with beam search."),
        (BEAMS | {"repetition_penalty": 1.1}, "repetition_penalty cannot be used with beam search."),
        (BEAMS | {"min_p": 0.1}, "min_p cannot be used with beam search."),
        (BEAMS | {"stop": "x"}, "stop cannot be used with beam search."),
        (BEAMS | {"logprobs": 0}, "logprobs cannot be used with beam search."),
        (BEAMS | {"prompt_logprobs": 0}, "prompt_logprobs cannot be used with beam search."),
        (BEAMS | {"bad_words": ["a"]}, "bad_words cannot be used with beam search."),
        (BEAMS | {"logit_bias": {3: 1.0}}, "logit_bias cannot be used with beam search."),
        (BEAMS | {"allowed_token_ids": [3]}, "allowed_token_ids cannot be used with beam search."),
    ],
)
def test_wrong_values(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**fields)
    assert str(error.value) == words


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"top_k": 1.0}, "top_k must be an integer, got float"),
        ({"max_tokens": 1.5}, "max_tokens must be an integer, got float"),
        ({"seed": "1"}, "seed must be an integer, got str"),
        ({"stop": [1]}, "stop must be a string or a list of strings"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids must be a list of integers"),
        ({"allowed_token_ids": [1.0]}, "allowed_token_ids must be a list of integers"),
        ({"use_beam_search": 1}, "use_beam_search must be a bool, got int"),
    ],
)
def test_wrong_types(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError) as error:
        SamplingParams(**fields)
    assert str(error.value) == words
    with pytest.raises(TypeError):
        SamplingParams(temprature=1.0)


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.max_tokens) == (1, 1.0, 1.0, -1, 16)
    assert params.stop == params.stop_token_ids == []
    assert SamplingParams(top_k=0, repetition_penalty=3.0)  # today's wider ranges


def test_normalisation() -> None:
    params = SamplingParams(stop="x", seed=-1, logprobs=True, prompt_logprobs=True)
    assert (params.stop, params.seed, params.logprobs, params.prompt_logprobs) == (["x"], None, 1, 1)
    greedy = SamplingParams(temperature=1e-6, top_p=0.5, top_k=5, min_p=0.5)
    assert (greedy.temperature, greedy.top_p, greedy.top_k, greedy.min_p) == (0.0, 1.0, -1, 0.0)
    assert SamplingParams(temperature=0.005).temperature == 0.01


def test_sampling_types() -> None:
    assert SamplingParams(temperature=0.0).sampling_type is SamplingType.GREEDY
    assert SamplingParams().sampling_type is SamplingType.RANDOM
    assert SamplingParams(seed=0).sampling_type is SamplingType.RANDOM_SEED


def test_copies_are_independent_and_survive_the_wire() -> None:
    params = SamplingParams(seed=5, logit_bias={3: 1.0}, stop=["a"])
    changed = params.clone(seed=6, n=1)
    assert (params.seed, changed.seed) == (5, 6)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_beam_search() -> None:
    params = SamplingParams(**BEAMS | {"best_of": 4, "length_penalty": 2, "early_stopping": "never", "top_k": 0})
    assert (params.n, params.best_of, params.num_sequences) == (2, 4, 4)
    assert params.sampling_type is SamplingType.GREEDY
    neutral = {"logit_bias": {}, "stop": [], "min_tokens": 2, "stop_token_ids": [5], "ignore_eos": True, "seed": 3}
    assert SamplingParams(**BEAMS | neutral).num_sequences == 2
    # a stream of whole answers may return fewer sequences than there are beams
    assert SamplingParams(**BEAMS | {"best_of": 3, "output_kind": RequestOutputKind.DELTA}).num_sequences == 3
    # 0.6.3's rule takes a single beam
    assert SamplingParams(**BEAMS | {"n": 1, "early_stopping": None}).num_sequences == 1
    for one in (params, SamplingParams(**BEAMS | {"n": 1, "early_stopping": None})):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=SamplingParams) == one


def test_sequences_to_generate() -> None:
    assert SamplingParams().num_sequences == 1
    assert SamplingParams(n=3).num_sequences == 3
    assert SamplingParams(n=3, best_of=5).num_sequences == 5
    assert SamplingParams(n=3, best_of=5).n == 3


def test_positional_order_is_0_6_3s() -> None:
    names = list(SamplingParams.__struct_fields__)
    assert names[:5] == ["n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty"]
    order = names.index("output_kind")
    assert names[order : order + 4] == ["output_kind", "guided_decoding", "logit_bias", "allowed_token_ids"]
    assert names[-4:] == ["early_stopping", "bad_words", "structured_outputs", "stream_interval"]


def test_structured_outputs_have_two_names() -> None:
    wanted = StructuredOutputsParams(regex="[0-9]+")
    for params in (
        SamplingParams(structured_outputs=wanted),
        SamplingParams(guided_decoding=GuidedDecodingParams(regex="[0-9]+")),
    ):
        assert params.structured_outputs == wanted and params.guided_decoding is None
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    # no constraint at all is none
    assert SamplingParams(structured_outputs=StructuredOutputsParams()).structured_outputs is None
    with pytest.raises(ValueError, match="two names of one field"):
        SamplingParams(structured_outputs=wanted, guided_decoding=wanted)
    with pytest.raises(TypeError, match="structured_outputs must be StructuredOutputsParams, got dict"):
        SamplingParams(structured_outputs={"regex": "a"})
    with pytest.raises(ValueError, match="only use one kind of structured outputs constraint but multiple"):
        StructuredOutputsParams(regex="a", choice=["a"])
    with pytest.raises(ValueError, match="only use one kind of guided decoding but multiple"):
        GuidedDecodingParams(regex="a", choice=["a"])
    with pytest.raises(ValueError, match="choice must hold at least one string"):
        StructuredOutputsParams(choice=[])


def test_beam_search_params() -> None:
    params = BeamSearchParams(3, 20, True, 0.0, 0.5, True).to_sampling_params()
    assert params == SamplingParams(
        n=3,
        best_of=3,
        max_tokens=20,
        ignore_eos=True,
        temperature=0.0,
        include_stop_str_in_output=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        use_beam_search=True,
        length_penalty=0.5,
        early_stopping=None,
    )
    assert BeamSearchParams(beam_width=1, max_tokens=2).to_sampling_params().num_sequences == 1
    assert BeamSearchParams(2, 2, early_stopping=True).to_sampling_params().early_stopping is True


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"beam_width": 0}, ValueError, "beam_width must be at least 1, got 0."),
        ({"beam_width": 2.0}, TypeError, "beam_width must be an integer, got float"),
        ({"max_tokens": 0}, ValueError, "max_tokens must be at least 1, got 0."),
        ({"temperature": 0.5}, ValueError, "temperature must be 0 when using beam search."),
        ({"length_penalty": float("nan")}, ValueError, "length_penalty must be a finite number, got nan."),
        ({"early_stopping": "x"}, ValueError, "early_stopping must be True, False, or 'never', got x."),
        (
            {"beam_width": 1, "early_stopping": False},
            ValueError,
            "best_of must be greater than 1 when using beam search. Got 1.",
        ),
    ],
)
def test_wrong_beam_search_params(fields: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as found:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4} | fields)
    assert str(found.value) == words
