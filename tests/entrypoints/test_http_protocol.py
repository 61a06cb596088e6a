"""Validation of requests by the pydantic models: defaults, refusals, and errors."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest

from ascend_vllm.entrypoints.http.errors import BodyError, to_http_error
from ascend_vllm.entrypoints.http.validation import decode_json
from ascend_vllm.entrypoints.openai import protocol_common
from ascend_vllm.entrypoints.openai.protocol_chat import ChatCompletionRequest
from ascend_vllm.entrypoints.openai.protocol_common import GenerationRequest, parse_logit_bias
from ascend_vllm.entrypoints.openai.protocol_completion import CompletionRequest
from ascend_vllm.entrypoints.openai.request_limits import check_request, n_limit
from ascend_vllm.errors import (
    EngineBusyError,
    EngineDeadError,
    ModelNotFoundError,
    RequestError,
)
from ascend_vllm.sampling_params import RequestOutputKind, SamplingParams


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "x"} | fields)


def chat(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "x"}]} | fields)


def test_sampling_defaults_come_from_the_model_unless_given() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1}
    params = completion(top_k=5, min_p=None).sampling_params(defaults, 10, False)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.6, 5, 0.95, 0.0)
    assert params.repetition_penalty == 1.1
    assert params.max_tokens == 10
    assert params.output_kind is RequestOutputKind.FINAL_ONLY
    bare = completion(stream=True).sampling_params({}, 10, False)
    assert (bare.temperature, bare.top_k, bare.top_p, bare.repetition_penalty) == (1.0, -1, 1.0, 1.0)
    assert bare.output_kind is RequestOutputKind.DELTA


def test_logprobs_of_both_endpoints() -> None:
    assert completion(logprobs=0).sampling_params({}, 1, False).logprobs == 0
    assert completion().sampling_params({}, 1, False).logprobs is None
    assert completion().sampling_params({}, 1, True).logprobs == 0
    assert chat(logprobs=True).sampling_params({}, 1, False).logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).sampling_params({}, 1, False).logprobs == 3
    assert chat(top_logprobs=0).sampling_params({}, 1, False).logprobs is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"logprobs": 3}, None),
        ({"echo": True}, None),
        ({"echo": True, "logprobs": 3}, 3),
        ({"echo": True, "logprobs": 3, "prompt_logprobs": 1}, 1),
        ({"prompt_logprobs": 0}, 0),
        ({"echo": True, "logprobs": 3, "stream": True}, 3),
    ],
)
def test_prompt_logprobs_of_completions(fields: dict[str, Any], expected: int | None) -> None:
    assert completion(**fields).sampling_params({}, 1, False).prompt_logprobs == expected


@pytest.mark.parametrize("name", sorted(GenerationRequest.REFUSALS))
def test_a_field_without_a_feature_is_refused_by_name(name: str) -> None:
    values: dict[str, Any] = {
        "logprob_token_ids": [1],
        "thinking_token_budget": 3,
        "repetition_detection": {"x": 1},
        "kv_transfer_params": {"x": 1},
        "mm_processor_kwargs": {"x": 1},
    }
    makers = [
        make
        for make, model in ((completion, CompletionRequest), (chat, ChatCompletionRequest))
        if name in model.model_fields and name in model.REFUSALS
    ]
    assert makers, "a name in the table that no request has"
    for make in makers:
        with pytest.raises(RequestError, match=rf"^`?{name}`? is not (currently )?supported") as caught:
            make(**{name: values.get(name, "xyz")}).check_supported()
        assert caught.value.param == name
        for neutral in GenerationRequest.REFUSALS[name].neutral:
            make(**{name: neutral}).check_supported()


def test_what_the_engine_serves_is_not_refused() -> None:
    served = {"best_of": 2, "n": 1, "priority": 1, "response_format": {"type": "json_object"}, "echo": True}
    completion(**served).check_supported()


@pytest.mark.parametrize("make", [completion, chat])
def test_beam_search_ignores_the_server_s_sampling_defaults(make: Any) -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.1}
    params = make(use_beam_search=True, best_of=4, n=2).sampling_params(defaults, 10, True)
    assert params == SamplingParams(
        use_beam_search=True,
        n=2,
        best_of=4,
        temperature=0.0,
        max_tokens=10,
        early_stopping=None,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    # one beam is legal where vLLM 0.6.3's rule holds; the older rules need two
    assert make(use_beam_search=True, stream=True).sampling_params({}, 10, False).num_sequences == 1
    given = make(
        use_beam_search=True, n=2, temperature=0, top_p=1, top_k=-1, early_stopping="never", length_penalty=2
    )
    params = given.sampling_params(defaults, 10, False)
    assert (params.early_stopping, params.length_penalty, params.num_sequences) == ("never", 2.0, 2)


@pytest.mark.parametrize("make", [completion, chat])
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"use_beam_search": True, "temperature": 0.5}, "temperature must be 0 when using beam search."),
        ({"use_beam_search": True, "top_p": 0.5}, "top_p must be 1 when using beam search."),
        ({"use_beam_search": True, "top_k": 5}, "top_k must be -1 when using beam search."),
        ({"use_beam_search": True, "n": 2, "logprobs": True}, "logprobs cannot be used with beam search."),
        ({"use_beam_search": True, "stop": "x"}, "stop cannot be used with beam search."),
        (
            {"use_beam_search": True, "early_stopping": False},
            "best_of must be greater than 1 when using beam search. Got 1.",
        ),
        (
            {"use_beam_search": True, "n": 2, "early_stopping": "soon"},
            "early_stopping must be True, False, or 'never', got soon.",
        ),
        ({"early_stopping": True}, "early_stopping is not effective and must be False when not using beam search."),
        ({"length_penalty": 2.0}, "length_penalty is not effective and must be the default value of 1.0"),
        ({"n": 2, "best_of": 1}, "best_of must be greater than or equal to n, got n=2 and best_of=1."),
        ({"best_of": 3, "stream": True}, "best_of must equal n to use output_kind=DELTA"),
    ],
)
def test_sampling_errors_name_the_field(make: Any, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError) as caught:
        make(**fields).sampling_params({}, 10, False)
    assert text in str(caught.value)
    assert caught.value.param == text.split(" ")[0]


def test_unknown_fields_are_accepted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    protocol_common._logged_fields.discard("never_heard_of")
    for _ in range(2):
        request = completion(never_heard_of=1, tools=[{"not": "a completion field"}])
        request.check_supported()
    assert sum("never_heard_of" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("model", "fields", "text"),
    [
        ("c", {"stream_options": {"include_usage": True}}, "Stream options can only be defined when `stream=True`."),
        ("c", {"logprobs": -1}, "`logprobs` must be a positive value."),
        ("c", {"seed": 2**63}, "less than or equal to 9223372036854775807"),
        ("c", {"prompt": [1, -1]}, "greater than or equal to 0"),
        ("c", {"temperature": "x"}, "unable to parse string as a number"),
        ("c", {"truncate_prompt_tokens": 0}, "greater than or equal to 1"),
        ("h", {"messages": "hi"}, "valid list"),
        ("h", {"messages": [{"content": "x"}]}, "Field required"),
        ("h", {"top_logprobs": 1}, "when using `top_logprobs`, `logprobs` must be set to true."),
        ("h", {"logprobs": True, "top_logprobs": -1}, "`top_logprobs` must be a positive value."),
        ("h", {"tool_choice": "required"}, "When using `tool_choice`, `tools` must be set."),
        (
            "h",
            {"continue_final_message": True, "add_generation_prompt": True},
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
        ),
    ],
)
def test_validation_errors_name_the_field(model: str, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        (completion if model == "c" else chat)(**fields)
    status, body = to_http_error(caught.value)
    assert status == 400
    assert text in body["message"]
    if caught.value.errors()[0]["loc"]:
        assert (body["type"], body["param"].split(".")[0]) == ("Bad Request", "body")
    else:
        # a check of several fields at once: the field is the one that its text names
        assert body["type"] == "BadRequestError"
        assert body["param"] in fields


def test_a_validation_error_is_short_however_wrong_the_request() -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        completion(prompt=["a", *range(10_000)])
    message = to_http_error(caught.value).body["message"]
    assert "validation errors" in message
    assert len(message) < 6000


def test_continuing_a_message_switches_the_generation_prompt_off() -> None:
    assert chat(continue_final_message=True).add_generation_prompt is False


def test_max_completion_tokens_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=3).effective_max_tokens == 3
    assert chat(max_tokens=5).effective_max_tokens == 5
    assert chat().effective_max_tokens is None
    assert completion(max_tokens=None).effective_max_tokens == 16


def test_n_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    assert n_limit(8) == 8
    monkeypatch.setenv("VLLM_MAX_N_SEQUENCES", "4")
    assert (n_limit(8), n_limit(3)) == (4, 3)
    check_request(completion(n=4), 2, 8, n_limit(8))
    for fields in ({"n": 5}, {"best_of": 10**9}):
        ((name, value),) = fields.items()
        with pytest.raises(RequestError, match=f"^{name} must be at most 4, got {value}") as caught:
            check_request(chat(**fields), 1, 8, n_limit(8))
        assert caught.value.param == name


def test_logit_bias() -> None:
    assert parse_logit_bias({"1": 200, " 2 ": -300.5, "-3": 0}) == {1: 100.0, 2: -100.0, -3: 0.0}
    with pytest.raises(RequestError, match=r"cannot be converted to integer token IDs: \['abc'\]"):
        parse_logit_bias({"abc": 1.0})


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "Field required"),
        (b"{x", "JSON decode error"),
        (b'{"a": "\\ud800"}', "cannot be decoded"),
        (b'{"a": "\xff"}', "cannot be decoded"),
        (b"[" * 100_000, "cannot be decoded"),
    ],
)
def test_bodies_that_are_no_json(body: bytes, text: str) -> None:
    with pytest.raises(BodyError, match=text):
        decode_json(body)


def test_nan_is_read_and_then_refused_by_range() -> None:
    fields = decode_json(b'{"prompt": "x", "temperature": NaN}')
    with pytest.raises(RequestError, match="temperature must be a finite number, got nan"):
        CompletionRequest.model_validate(fields).sampling_params({}, 1, False)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("m", "p"), 400, "BadRequestError"),
        (ModelNotFoundError("m", "p"), 404, "NotFoundError"),
        (EngineBusyError("m", "p"), 503, "ServiceUnavailableError"),
        (EngineDeadError("m"), 500, "InternalServerError"),
    ],
)
def test_errors_carry_both_shapes(error: Exception, status: int, kind: str) -> None:
    inner = {"message": "m", "type": kind, "param": getattr(error, "param", None), "code": status}
    assert to_http_error(error) == (status, {"error": inner, "object": "error"} | inner)


def test_an_unexpected_error_tells_no_details() -> None:
    status, body = to_http_error(KeyError("secret"))
    assert status == 500
    assert body["type"] == "InternalServerError"
    assert "secret" not in str(body)
