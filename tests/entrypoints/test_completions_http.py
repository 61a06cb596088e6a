"""POST /v1/completions on a real server, over a real socket."""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.server import Server, needs_curl

BASE = {"model": "tiny", "prompt": "Hello! How are you", "max_tokens": 8, "temperature": 0}


def ask(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json=BASE | fields)
    assert response.status_code == 200, response.text
    return response.json()


def ask_stream(http: httpx.Client, path: str = "/v1/completions", **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, which must end with [DONE]."""
    with http.stream("POST", path, json=BASE | fields | {"stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def tokens(http: httpx.Client, text: str) -> list[int]:
    return http.post("/tokenize", json={"prompt": text}).json()["tokens"]


def test_answer_has_every_key(http: httpx.Client) -> None:
    answer = ask(http)
    assert list(answer) == ["id", "object", "created", "model", "choices", "usage", "system_fingerprint"]
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert len(answer["id"]) == len("cmpl-") + 16
    choice = answer["choices"][0]
    assert choice == {
        "index": 0,
        "text": choice["text"],
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
        "prompt_logprobs": None,
        "sentence_length": len(choice["text"]),
        "cum_log_probs": None,
    }
    assert answer["usage"] == {
        "prompt_tokens": len(tokens(http, BASE["prompt"])),
        "total_tokens": len(tokens(http, BASE["prompt"])) + 8,
        "completion_tokens": 8,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def test_every_served_name_is_accepted_and_the_first_is_told(http: httpx.Client) -> None:
    assert ask(http, model="alias")["model"] == "tiny"
    assert ask(http, model=None)["model"] == "tiny"


def test_prompts_of_all_four_kinds(http: httpx.Client) -> None:
    texts = ["The quick brown fox", "Hello! How are you", "1 2 3 4"]
    alone = [ask(http, prompt=text)["choices"][0]["text"] for text in texts]
    assert len(set(alone)) == 3
    batch = ask(http, prompt=texts)
    assert [choice["text"] for choice in batch["choices"]] == alone
    assert [choice["index"] for choice in batch["choices"]] == [0, 1, 2]
    ids = [tokens(http, text) for text in texts]
    assert [choice["text"] for choice in ask(http, prompt=ids)["choices"]] == alone
    assert ask(http, prompt=ids[2])["choices"][0]["text"] == alone[2]
    assert batch["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert batch["usage"]["completion_tokens"] == 24


def test_a_stream_says_what_the_whole_answer_says(http: httpx.Client) -> None:
    whole = ask(http, max_tokens=400, ignore_eos=True)
    events = ask_stream(http, max_tokens=400, ignore_eos=True)
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]
    assert {event["id"] for event in events} != {whole["id"]}
    assert len({event["id"] for event in events}) == 1
    first, last = events[0], events[-1]
    assert list(first) == ["id", "object", "created", "model", "choices", "usage"]
    assert list(first["choices"][0]) == ["index", "text", "logprobs", "finish_reason", "stop_reason"]
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["choices"][0]["sentence_length"] == len(whole["choices"][0]["text"])
    assert all(event["usage"] is None for event in events)


def test_usage_of_streams(http: httpx.Client) -> None:
    fields: dict[str, Any] = {"prompt": ["Hello", "The sun"], "n": 2, "temperature": 1.0, "seed": 1}
    events = ask_stream(http, **fields, stream_options={"include_usage": True})
    expected = ask(http, **fields)["usage"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == expected
    assert expected["completion_tokens"] == 32
    assert all(event["usage"] is None for event in events[:-1])
    events = ask_stream(http, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 8
    assert all(event["usage"]["total_tokens"] > event["usage"]["completion_tokens"] for event in events)
    alone = ask_stream(http, stream_options={"continuous_usage_stats": True})
    assert all(event.get("usage") is None for event in alone)
    assert alone[-1]["choices"]


def test_streams_of_several_prompts_and_choices(http: httpx.Client) -> None:
    fields: dict[str, Any] = {"prompt": ["Hello", "The sun"], "n": 2, "temperature": 1.0, "seed": 7}
    whole = ask(http, **fields)["choices"]
    texts = [""] * 4
    ends = []
    for event in ask_stream(http, **fields):
        choice = event["choices"][0]
        texts[choice["index"]] += choice["text"]
        ends += [choice["index"]] * (choice["finish_reason"] is not None)
    assert texts == [choice["text"] for choice in whole]
    assert sorted(ends) == [0, 1, 2, 3]
    assert len(set(texts)) == 4


def test_seeds_repeat_and_choices_differ(http: httpx.Client) -> None:
    def texts(seed: int) -> list[str]:
        answer = ask(http, n=3, seed=seed, temperature=1.0, max_tokens=16)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        return [choice["text"] for choice in answer["choices"]]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)
    assert len(set(texts(1))) == 3


def test_the_best_of_several(http: httpx.Client) -> None:
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 6, "ignore_eos": True}
    everything = ask(http, **fields, n=4, logprobs=0)["choices"]
    answer = ask(http, **fields, prompt=[BASE["prompt"]] * 2, n=2, best_of=4)
    best = sorted(everything, key=lambda choice: -choice["cum_log_probs"])[:2]
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    for found, expected in zip(choices, best + best, strict=True):
        assert (found["text"], found["logprobs"]) == (expected["text"], None)
        assert found["cum_log_probs"] == pytest.approx(expected["cum_log_probs"], abs=1e-4)
    # of the choices that are returned
    assert answer["usage"]["completion_tokens"] == 24


def test_best_of_streams_if_all_are_returned(http: httpx.Client) -> None:
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 5, "n": 2}
    plain = ask(http, **fields)["choices"]
    texts = ["", ""]
    for event in ask_stream(http, **fields, best_of=2):
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == [choice["text"] for choice in plain]
    body = BASE | fields | {"best_of": 3, "stream": True}
    refused = http.post("/v1/completions", json=body)
    assert refused.status_code == 400
    assert refused.json()["message"] == "best_of must equal n to use output_kind=DELTA"
    assert refused.json()["param"] == "best_of"


BEAMS: dict[str, Any] = {"use_beam_search": True, "best_of": 3, "n": 2, "max_tokens": 5, "return_token_ids": True}


def test_beam_search(http: httpx.Client) -> None:
    answer = ask(http, **BEAMS)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    ids = tokens(http, BASE["prompt"])
    for choice in answer["choices"]:
        assert choice["finish_reason"] in ("length", "stop")
        assert choice["logprobs"] is None
        generated = choice["token_ids"]
        # the model's own probability of each token after those before it
        total = 0.0
        for position, token in enumerate(generated):
            single = ask(http, prompt=ids + generated[:position], max_tokens=1, allowed_token_ids=[token], logprobs=0)
            total += single["choices"][0]["logprobs"]["token_logprobs"][0]
        assert choice["cum_log_probs"] == pytest.approx(total, abs=1e-3)
    # output only, and of the choices that are returned
    assert answer["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in answer["choices"])
    assert answer["usage"]["prompt_tokens"] == len(ids)


def test_beam_search_takes_nulls_and_one_beam(http: httpx.Client) -> None:
    greedy = ask(http, ignore_eos=True)["choices"][0]["text"]
    nulls = dict.fromkeys(("temperature", "top_p", "top_k", "n", "best_of", "early_stopping", "length_penalty"))
    assert ask(http, use_beam_search=True, ignore_eos=True, **nulls)["choices"][0]["text"] == greedy
    assert ask(http, use_beam_search=False, **nulls | {"temperature": 0})["choices"][0]["text"]


@pytest.mark.parametrize("rule", [None, True, False, "never"])
def test_a_stream_of_beams_has_one_event_a_choice(http: httpx.Client, rule: Any) -> None:
    fields = BEAMS | {"early_stopping": rule, "length_penalty": 0.5, "stream_options": {"include_usage": True}}
    whole = ask(http, **fields | {"stream_options": None})
    events = ask_stream(http, **fields)
    choices = [event["choices"][0] for event in events[:-1]]
    for choice, expected in zip(choices, whole["choices"], strict=True):
        assert {name: choice[name] for name in choice} == {name: expected[name] for name in choice}
    assert events[-1]["usage"] == whole["usage"]


def test_stop_strings(http: httpx.Client) -> None:
    whole = ask(http, max_tokens=40)["choices"][0]["text"]
    stop = whole[10:13]
    cut = whole.index(stop)
    choice = ask(http, max_tokens=40, stop=["never there", stop])["choices"][0]
    assert choice["text"] == whole[:cut]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    kept = ask(http, max_tokens=40, stop=stop, include_stop_str_in_output=True)["choices"][0]
    assert kept["text"] == whole[: cut + len(stop)]
    streamed = ask_stream(http, max_tokens=40, stop=stop)
    assert "".join(event["choices"][0]["text"] for event in streamed) == whole[:cut]
    assert streamed[-1]["choices"][0]["stop_reason"] == stop


def test_stop_tokens_and_token_rules(http: httpx.Client) -> None:
    ids = ask(http, return_token_ids=True, max_tokens=12)["choices"][0]["token_ids"]
    assert len(ids) == 12
    stop = ids[5]
    choice = ask(http, max_tokens=12, stop_token_ids=[stop], return_token_ids=True)["choices"][0]
    assert choice["token_ids"] == ids[: ids.index(stop) + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    longer = ask(http, max_tokens=12, min_tokens=10, stop_token_ids=[stop], return_token_ids=True)["choices"][0]
    assert len(longer["token_ids"]) >= 10
    forced = ask(http, logit_bias={"77": 100}, return_token_ids=True, max_tokens=4)["choices"][0]
    assert forced["token_ids"] == [77] * 4
    allowed = ask(http, allowed_token_ids=[70, 71], return_token_ids=True, temperature=1.0)["choices"][0]
    assert set(allowed["token_ids"]) <= {70, 71}


def test_end_of_text_and_ignoring_it(http: httpx.Client) -> None:
    fields: dict[str, Any] = {"logit_bias": {"2": 100}, "max_tokens": 5, "return_token_ids": True}
    choice = ask(http, **fields)["choices"][0]
    assert (choice["token_ids"], choice["text"], choice["finish_reason"]) == ([2], "", "stop")
    assert choice["stop_reason"] is None
    ignored = ask(http, **fields, ignore_eos=True)["choices"][0]
    assert ignored["token_ids"] == [2] * 5
    assert ignored["finish_reason"] == "length"
    shown = ask(http, **fields, ignore_eos=True, skip_special_tokens=False)["choices"][0]
    assert shown["text"] == "<|im_end|>" * 5


def by_forcing(http: httpx.Client, ids: list[int]) -> list[float]:
    """Log-probability of each token but the first, each as the output of a request of its own."""
    found = []
    for position in range(1, len(ids)):
        answer = ask(http, prompt=ids[:position], max_tokens=1, allowed_token_ids=[ids[position]], logprobs=0)
        found += answer["choices"][0]["logprobs"]["token_logprobs"]
    return found


def test_prompt_logprobs(http: httpx.Client) -> None:
    ids = tokens(http, BASE["prompt"])
    choices = ask(http, prompt_logprobs=2, n=2, temperature=1.0, seed=1)["choices"]
    assert choices[0]["prompt_logprobs"] == choices[1]["prompt_logprobs"]
    first, *rest = choices[0]["prompt_logprobs"]
    assert first is None
    for id_, position in zip(ids[1:], rest, strict=True):
        assert next(iter(position)) == str(id_)
        assert len(position) == 2 + (position[str(id_)]["rank"] > 2)
        assert all(list(entry) == ["logprob", "rank", "decoded_token"] for entry in position.values())
        assert {1, 2} <= {entry["rank"] for entry in position.values()}
    own = [position[str(id_)] for id_, position in zip(ids[1:], rest, strict=True)]
    assert [entry["logprob"] for entry in own] == pytest.approx(by_forcing(http, ids), abs=1e-4)
    assert BASE["prompt"].endswith("".join(entry["decoded_token"] for entry in own))
    assert ask(http, prompt_logprobs=0)["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"prompt_logprobs": 21}, "Requested prompt logprobs of 21, which is greater than max allowed: 20"),
        ({"prompt_logprobs": 1, "stream": True}, "`prompt_logprobs` are not available when `stream=True`."),
    ],
)
def test_prompt_logprobs_that_are_refused(http: httpx.Client, fields: dict[str, Any], text: str) -> None:
    response = http.post("/v1/completions", json=BASE | fields)
    assert response.status_code == 400
    assert text in response.json()["message"]


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 4])
def test_echo_with_logprobs(http: httpx.Client, max_tokens: int, as_ids: bool) -> None:
    ids = tokens(http, BASE["prompt"])
    fields: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": max_tokens, "n": 2}
    fields |= {"temperature": 1.0, "seed": 1, "prompt": [ids if as_ids else BASE["prompt"]] * 2}
    plain = ask(http, **fields | {"echo": False, "max_tokens": max_tokens or 1})["choices"]
    choices = ask(http, **fields)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    for choice, unechoed in zip(choices, plain, strict=True):
        found = choice["logprobs"]
        assert [len(values) for values in found.values()] == [len(ids) + max_tokens] * 4
        assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
        assert found["token_logprobs"][1 : len(ids)] == pytest.approx(by_forcing(http, ids), abs=1e-4)
        assert found["tokens"][len(ids) :] == unechoed["logprobs"]["tokens"][:max_tokens]
        expected = unechoed["logprobs"]["token_logprobs"][:max_tokens]
        assert found["token_logprobs"][len(ids) :] == pytest.approx(expected, abs=1e-4)
        assert "".join(found["tokens"][: len(ids)]) == BASE["prompt"]
        assert choice["text"] == BASE["prompt"] + (unechoed["text"] if max_tokens else "")
        lengths = [len(token) for token in found["tokens"]]
        assert found["text_offset"] == [sum(lengths[:i]) for i in range(len(lengths))]
        pairs = zip(found["tokens"][1:], found["top_logprobs"][1:], strict=True)
        assert [top[token] for token, top in pairs] == found["token_logprobs"][1:]
        assert all(1 <= len(top) <= 2 for top in found["top_logprobs"][1:])
        pairs = zip(ids[1:], choice["prompt_logprobs"][1:], strict=True)
        assert [position[str(id_)]["logprob"] for id_, position in pairs] == found["token_logprobs"][1 : len(ids)]
    streamed: dict[int, dict[str, list[Any]]] = {}
    for event in ask_stream(http, **fields):
        choice = event["choices"][0]
        for name, values in choice["logprobs"].items():
            streamed.setdefault(choice["index"], {}).setdefault(name, []).extend(values)
    # whole answers have the best of a prompt's choices first
    told = sorted(streamed.values(), key=lambda found: found["tokens"])
    whole = sorted((choice["logprobs"] for choice in choices), key=lambda found: found["tokens"])
    assert len(told) == len(whole)
    for one, other in zip(told, whole, strict=True):
        assert (one["tokens"], one["text_offset"]) == (other["tokens"], other["text_offset"])
        assert one["token_logprobs"][0] is one["top_logprobs"][0] is None
        assert one["token_logprobs"][1:] == pytest.approx(other["token_logprobs"][1:], abs=1e-4)
        assert [list(top) for top in one["top_logprobs"][1:]] == [list(top) for top in other["top_logprobs"][1:]]


@pytest.mark.parametrize("num_top", [0, 3])
def test_logprobs(http: httpx.Client, num_top: int) -> None:
    choice = ask(http, logprobs=num_top, temperature=0.8, seed=3)["choices"][0]
    logprobs = choice["logprobs"]
    assert list(logprobs) == ["text_offset", "token_logprobs", "tokens", "top_logprobs"]
    assert [len(values) for values in logprobs.values()] == [8] * 4
    lengths = [len(token) for token in logprobs["tokens"]]
    assert logprobs["text_offset"] == [sum(lengths[:i]) for i in range(8)]
    for token, value, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert next(iter(top.items())) == (token, value)
        assert len(top) <= num_top + 1
    assert choice["cum_log_probs"] == pytest.approx(sum(logprobs["token_logprobs"]), abs=1e-4)
    pieces = [
        event["choices"][0]["logprobs"] for event in ask_stream(http, logprobs=num_top, temperature=0.8, seed=3)
    ]
    for name, values in logprobs.items():
        assert [value for piece in pieces if piece for value in piece[name]] == values


def test_tokens_shown_as_ids(http: httpx.Client) -> None:
    choice = ask(http, logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True)["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]


def test_echo(http: httpx.Client) -> None:
    text = ask(http)["choices"][0]["text"]
    assert ask(http, echo=True)["choices"][0]["text"] == BASE["prompt"] + text
    assert ask(http, echo=True, prompt=tokens(http, BASE["prompt"]))["choices"][0]["text"] == BASE["prompt"] + text
    only = ask(http, echo=True, max_tokens=0)
    assert only["choices"][0]["text"] == BASE["prompt"]
    assert only["choices"][0]["finish_reason"] == "length"
    assert only["choices"][0]["sentence_length"] == len(BASE["prompt"])
    events = ask_stream(http, echo=True, n=2, temperature=1.0, seed=1)
    first = {}
    for event in events:
        first.setdefault(event["choices"][0]["index"], event["choices"][0]["text"])
    assert all(value.startswith(BASE["prompt"]) for value in first.values())


def test_prompt_truncation_keeps_the_end(http: httpx.Client) -> None:
    ids = tokens(http, "The quick brown fox jumps over the lazy dog")
    assert len(ids) > 4
    expected = ask(http, prompt=ids[-4:])["choices"][0]["text"]
    for prompt in (ids, "The quick brown fox jumps over the lazy dog"):
        answer = ask(http, prompt=prompt, truncate_prompt_tokens=4)
        assert answer["usage"]["prompt_tokens"] == 4
        assert answer["choices"][0]["text"] == expected
        first = ask(http, prompt=prompt, truncate_prompt_tokens=4, truncation_side="right", return_token_ids=True)
        assert first["choices"][0]["prompt_token_ids"] == ids[:4]


def test_a_stream_may_ask_for_larger_pieces(http: httpx.Client) -> None:
    events = ask_stream(http, stream_interval=3, return_token_ids=True)
    pieces = [choice["token_ids"] for event in events for choice in event["choices"]]
    ends = list(itertools.accumulate(map(len, pieces)))
    # pieces that are not read in time come together
    assert set(ends) <= {1, 4, 7, 8}
    assert list(itertools.chain(*pieces)) == ask(http, return_token_ids=True)["choices"][0]["token_ids"]
    assert len(ask_stream(http, stream_interval=100)) <= 2


def test_the_official_client(client: openai.OpenAI, http: httpx.Client) -> None:
    expected = ask(http)["choices"][0]["text"]
    answer = client.completions.create(**BASE)
    assert answer.choices[0].text == expected
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    pieces = list(client.completions.create(**BASE, stream=True, stream_options={"include_usage": True}))
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == expected
    assert pieces[-1].usage is not None
    assert pieces[-1].usage == answer.usage
    with pytest.raises(openai.NotFoundError):
        client.completions.create(**BASE | {"model": "nope"})
    with pytest.raises(openai.BadRequestError, match="temperature must be non-negative"):
        client.completions.create(**BASE | {"temperature": -1})


@needs_curl
def test_curl_as_documented(openai_server: Server) -> None:
    body = (
        '{"model":"tiny","prompt":"hello","max_tokens":3,"top_k":-1,"top_p":1,"temperature":0,'
        '"ignore_eos":false,"stream":false}'
    )
    command = ["curl", "-sS", "-X", "POST", f"{openai_server.url}/v1/completions"]
    done = subprocess.run(
        [*command, "-H", "Content-Type: application/json", "-d", body], capture_output=True, check=True, timeout=30
    )
    assert json.loads(done.stdout)["usage"]["completion_tokens"] == 3


def test_request_ids_are_honoured(http: httpx.Client) -> None:
    for _ in range(2):
        response = http.post("/v1/completions", json=BASE, headers={"X-Request-Id": "mine"})
        assert response.json()["id"] == "cmpl-mine"
    assert ask(http, request_id="other")["id"] == "cmpl-other"
    assert ask_stream(http, request_id="other")[0]["id"] == "cmpl-other"


@pytest.fixture
def caching(developer_server: Server) -> Iterator[httpx.Client]:
    """A client of a server with a prefix cache, priorities and several steps at once."""
    with httpx.Client(base_url=developer_server.url, timeout=60) as client:
        assert client.post("/reset_prefix_cache").status_code == 200
        yield client


def cached_tokens(usage: dict[str, Any]) -> int:
    return usage["prompt_tokens_details"]["cached_tokens"]


def test_cached_tokens_are_told(caching: httpx.Client) -> None:
    prompt = [5 + i for i in range(70)]
    first, second = (ask(caching, prompt=prompt) for _ in range(2))
    assert [cached_tokens(answer["usage"]) for answer in (first, second)] == [0, 64]
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = ask_stream(caching, prompt=prompt, stream_options=options)
    assert [cached_tokens(event["usage"]) for event in events] == [64] * len(events)
    # sequences share their prompt, which counts once, and prompts add up
    fields: dict[str, Any] = {"n": 3, "temperature": 1.0}
    assert cached_tokens(ask(caching, prompt=prompt, **fields)["usage"]) == 64
    assert cached_tokens(ask(caching, prompt=[prompt, prompt[:40]], **fields)["usage"]) == 64 + 32
    assert cached_tokens(ask(caching, prompt=prompt, **BEAMS)["usage"]) == 64


def test_cached_tokens_of_a_chat(caching: httpx.Client) -> None:
    messages = [{"role": "user", "content": "The quick brown fox jumps over the lazy dog. " * 4}]
    body = {"messages": messages, "max_tokens": 4, "temperature": 0}
    first, second = (caching.post("/v1/chat/completions", json=body).json()["usage"] for _ in range(2))
    assert cached_tokens(first) == 0
    assert cached_tokens(second) == first["prompt_tokens"] // 16 * 16 > 0
    stream = body | {"stream": True, "stream_options": {"include_usage": True}}
    with caching.stream("POST", "/v1/chat/completions", json=stream) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert json.loads(events[-2])["usage"] == second


def test_a_salt_keeps_prefixes_apart(caching: httpx.Client) -> None:
    prompt = [100 + i for i in range(50)]

    def cached(salt: str | None) -> int:
        return cached_tokens(ask(caching, prompt=prompt, cache_salt=salt)["usage"])

    assert [cached("a"), cached("a"), cached("b"), cached(None), cached("b")] == [0, 48, 0, 0, 48]


def test_priorities_are_taken(caching: httpx.Client) -> None:
    expected = ask(caching)["choices"][0]["text"]
    for priority in (-3, 0, 7):
        assert ask(caching, priority=priority)["choices"][0]["text"] == expected
    refused = caching.post("/v1/completions", json=BASE | {"priority": 1 << 70})
    assert (refused.status_code, refused.json()["param"]) == (400, "priority")


def test_tokens_of_several_steps_come_one_by_one(caching: httpx.Client) -> None:
    whole = ask(caching, max_tokens=11, ignore_eos=True, return_token_ids=True)["choices"][0]["token_ids"]
    events = ask_stream(caching, max_tokens=11, ignore_eos=True, return_token_ids=True)
    assert [event["choices"][0]["token_ids"] for event in events] == [[id_] for id_ in whole]


def test_unknown_fields_are_ignored(http: httpx.Client, openai_server: Server) -> None:
    assert ask(http, store=True, metadata={}, zzz=1)["choices"][0]["text"] == ask(http)["choices"][0]["text"]
    assert "'zzz'" in openai_server.log


def test_text_in_other_scripts_comes_back_whole(http: httpx.Client) -> None:
    prompt = "héllo 你好 🙂 \u2028"
    assert ask(http, prompt=prompt, echo=True, max_tokens=1)["choices"][0]["text"].startswith(prompt)


def test_bad_words(http: httpx.Client) -> None:
    free = ask(http, return_token_ids=True)["choices"][0]
    word = http.post("/detokenize", json={"tokens": free["token_ids"][2:3]}).json()["prompt"]
    # the text of a token that is itself again
    assert tokens(http, word) == free["token_ids"][2:3]
    choice = ask(http, return_token_ids=True, bad_words=[word])["choices"][0]
    assert choice["token_ids"][:2] == free["token_ids"][:2]
    assert free["token_ids"][2] not in choice["token_ids"]
    assert ask(http, bad_words=[])["choices"][0]["text"] == free["text"]
