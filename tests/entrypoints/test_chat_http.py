"""POST /v1/chat/completions on a real server, with the official client and by hand."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello! How are you?"}]
BASE: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "temperature": 0}


def ask(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = http.post("/v1/chat/completions", json=BASE | fields)
    assert response.status_code == 200, response.text
    return response.json()


def ask_stream(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    with http.stream("POST", "/v1/chat/completions", json=BASE | fields | {"stream": True}) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def content(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


# what only models that answer with more than text have
NO_MORE = dict.fromkeys(("reasoning", "refusal", "annotations", "audio", "function_call"))


def test_answer_has_every_key(http: httpx.Client) -> None:
    answer = ask(http)
    assert {key: answer[key] for key in ("object", "model", "prompt_logprobs")} == {
        "object": "chat.completion",
        "model": "tiny",
        "prompt_logprobs": None,
    }
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": content(answer), "tool_calls": []} | NO_MORE,
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert answer["usage"]["completion_tokens"] == 8


def test_the_prompt_is_the_template_s(http: httpx.Client) -> None:
    found = http.post("/tokenize", json={"messages": MESSAGES}).json()
    text = http.post("/detokenize", json={"tokens": found["tokens"]}).json()["prompt"]
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello! How are you?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    answer = ask(http)
    assert answer["usage"]["prompt_tokens"] == found["count"]
    completion = http.post(
        "/v1/completions", json={"prompt": found["tokens"], "max_tokens": 8, "temperature": 0}
    ).json()
    assert completion["choices"][0]["text"] == content(answer)


def test_order_of_a_stream_s_events(http: httpx.Client) -> None:
    # long enough that a busy machine does not merge them all
    fields = {"max_tokens": 300, "ignore_eos": True}
    events = ask_stream(http, **fields)
    choices = [event["choices"][0] for event in events]
    assert list(events[0]) == ["id", "object", "created", "model", "choices"]
    assert choices[0] == {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    assert list(choices[1]) == ["index", "delta", "logprobs", "finish_reason"]
    assert all("role" not in choice["delta"] for choice in choices[1:])
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert ["stop_reason" in choice for choice in choices] == [False] * (len(choices) - 1) + [True]
    assert "".join(choice["delta"]["content"] for choice in choices) == content(ask(http, **fields))


def test_usage_of_streams(http: httpx.Client) -> None:
    fields: dict[str, Any] = {"n": 2, "temperature": 1.0, "seed": 5}
    events = ask_stream(http, **fields, stream_options={"include_usage": True})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == ask(http, **fields)["usage"]
    assert all(event["usage"] is None for event in events[:-1])
    every = ask_stream(http, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert every[0]["usage"]["completion_tokens"] == 0
    assert every[-2]["usage"] == every[-1]["usage"]
    alone = ask_stream(http, stream_options={"continuous_usage_stats": True})
    assert all(event.get("usage") is None for event in alone)
    assert alone[-1]["choices"]


def test_several_choices(http: httpx.Client) -> None:
    fields: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 11}
    whole = {choice["index"]: choice["message"]["content"] for choice in ask(http, **fields)["choices"]}
    assert len(set(whole.values())) == 3
    events = ask_stream(http, **fields)
    assert [event["choices"][0]["index"] for event in events[:3]] == [0, 1, 2]
    texts = dict.fromkeys(range(3), "")
    for event in events:
        texts[event["choices"][0]["index"]] += event["choices"][0]["delta"]["content"]
    assert texts == whole


def test_the_best_of_several(http: httpx.Client) -> None:
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 5, "ignore_eos": True}
    scores, texts = [], []
    for choice in ask(http, **fields, n=4, logprobs=True)["choices"]:
        scores.append(sum(entry["logprob"] for entry in choice["logprobs"]["content"]))
        texts.append(choice["message"]["content"])
    answer = ask(http, **fields, best_of=4)
    (choice,) = answer["choices"]
    assert (choice["index"], choice["logprobs"]) == (0, None)
    assert choice["message"]["content"] == texts[scores.index(max(scores))]
    assert answer["usage"]["completion_tokens"] == 8


def test_beam_search(http: httpx.Client) -> None:
    fields: dict[str, Any] = {"use_beam_search": True, "n": 2, "length_penalty": 0.5}
    answer = ask(http, **fields)
    whole = [(choice["index"], choice["message"]["content"], choice["finish_reason"]) for choice in answer["choices"]]
    assert [index for index, _, _ in whole] == [0, 1]
    assert {reason for _, _, reason in whole} <= {"stop", "length"}
    assert answer["usage"]["completion_tokens"] <= 16
    events = ask_stream(http, **fields, stream_options={"include_usage": True})
    choices = [event["choices"][0] for event in events[:-1]]
    assert [choice["delta"] for choice in choices[:2]] == [{"role": "assistant", "content": ""}] * 2
    assert [(choice["index"], choice["delta"]["content"], choice["finish_reason"]) for choice in choices[2:]] == whole
    assert events[-1]["usage"] == answer["usage"]
    assert content(ask(http, use_beam_search=True, ignore_eos=True)) == content(ask(http, ignore_eos=True))


def test_logprobs(http: httpx.Client) -> None:
    entries = ask(http, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert len(entries) == 8
    for entry in entries:
        assert entry["bytes"] == list(entry["token"].encode())
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        # greedy: the token is the most likely one
        assert (values[0], len(values)) == (entry["logprob"], 2)
    bare = ask(http, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in bare] == pytest.approx([entry["logprob"] for entry in entries], abs=1e-5)
    assert all(entry["top_logprobs"] == [] for entry in bare)
    streamed = [event["choices"][0]["logprobs"] for event in ask_stream(http, logprobs=True, top_logprobs=2)[1:]]
    assert [entry["token"] for piece in streamed for entry in piece["content"]] == [
        entry["token"] for entry in entries
    ]


def test_lengths(http: httpx.Client) -> None:
    assert ask(http, max_completion_tokens=3)["usage"]["completion_tokens"] == 3
    answer = ask(http, max_tokens=None, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == 512
    assert answer["choices"][0]["finish_reason"] == "length"


def test_continuing_and_echoing_the_last_message(http: httpx.Client) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "I am"}]
    fields: dict[str, Any] = {
        "messages": messages,
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    answer = ask(http, **fields)
    assert answer["choices"][0]["message"]["role"] == "assistant"
    # the continuation only, as a prompt that ends like the message shows
    prompt = http.post("/tokenize", json={"model": "tiny", **fields}).json()["tokens"]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": answer["usage"]["completion_tokens"], "temperature": 0}
    continuation = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert content(answer) == continuation
    assert "".join(event["choices"][0]["delta"]["content"] for event in ask_stream(http, **fields)) == continuation
    # 0.6.3's answer, with the message
    assert content(ask(http, **fields, echo=True)) == "I am" + continuation
    events = ask_stream(http, **fields, echo=True)
    assert events[1]["choices"][0]["delta"] == {"content": "I am"}
    assert "".join(event["choices"][0]["delta"]["content"] for event in events) == "I am" + continuation
    plain = ask(http, messages=messages)
    assert content(ask(http, messages=messages, echo=True)) == "I am" + content(plain)


def test_content_parts(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "Hello!"}, {"type": "text", "text": "How are you?"}]
    joined = ask(http, messages=[{"role": "user", "content": "Hello!\nHow are you?"}])
    assert content(ask(http, messages=[{"role": "user", "content": parts}])) == content(joined)


def test_the_official_client(client: openai.OpenAI, http: httpx.Client) -> None:
    expected = content(ask(http))
    answer = client.chat.completions.create(**BASE)
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].message.role == "assistant"
    stream = client.chat.completions.create(**BASE, stream=True, stream_options={"include_usage": True})
    pieces = list(stream)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == expected
    assert pieces[-1].usage == answer.usage
    with_logprobs = client.chat.completions.create(**BASE, logprobs=True, top_logprobs=1)
    assert with_logprobs.choices[0].logprobs is not None
    assert len(with_logprobs.choices[0].logprobs.content or []) == 8
    beams = client.chat.completions.create(**BASE, n=2, extra_body={"use_beam_search": True, "best_of": 3})
    assert [choice.index for choice in beams.choices] == [0, 1]
    assert len({choice.message.content for choice in beams.choices}) == 2
    with pytest.raises(openai.BadRequestError, match="early_stopping must be True, False, or 'never'"):
        client.chat.completions.create(**BASE, n=2, extra_body={"use_beam_search": True, "early_stopping": "no"})


async def test_the_official_async_client(openai_server: Any) -> None:
    async with openai.AsyncOpenAI(base_url=f"{openai_server.url}/v1", api_key="x", max_retries=0) as client:
        stream = await client.chat.completions.create(**BASE, stream=True)
        text = "".join([piece.choices[0].delta.content or "" async for piece in stream])
        answer = await client.chat.completions.create(**BASE)
    assert text == answer.choices[0].message.content


def test_prompt_logprobs_of_a_conversation(http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    found = ask(http, prompt_logprobs=1)["prompt_logprobs"]
    completion = http.post("/v1/completions", json={"prompt": ids, "max_tokens": 1, "prompt_logprobs": 1}).json()
    assert found == completion["choices"][0]["prompt_logprobs"]
    assert found[0] is None
    assert [next(iter(position)) for position in found[1:]] == [str(id_) for id_ in ids[1:]]
