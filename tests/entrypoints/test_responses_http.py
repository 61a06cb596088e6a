"""POST /v1/responses and stored responses, by the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import ResponseStreamEvent

from ascend_vllm.engine.tokenization import Tokenizer
from tests.entrypoints.conftest import KEY, LONG_TOKENS
from tests.server import Server, is_idle, wait_until
from tests.tiny_models import VOCAB_SIZE

BASE: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 16}
HELLO: dict[str, Any] = {"role": "user", "content": "Hello!"}
WHO: dict[str, Any] = {"role": "user", "content": "Who are you?"}
TICK: dict[str, Any] = BASE | {"max_output_tokens": 400, "input": "Tick", "extra_body": {"ignore_eos": True}}
# long enough to run until it is stopped; for `patient`
ENDLESS: dict[str, Any] = TICK | {"max_output_tokens": LONG_TOKENS}
FIND: dict[str, Any] = {
    "type": "function",
    "name": "find",
    "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
}


def chat(client: openai.OpenAI, *messages: dict[str, Any], **fields: Any) -> openai.types.chat.ChatCompletion:
    """What /v1/chat/completions answers."""
    asked: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 16, "messages": messages} | fields
    answer: openai.types.chat.ChatCompletion = client.chat.completions.create(**asked)
    return answer


def chat_text(client: openai.OpenAI, *messages: dict[str, Any], **fields: Any) -> str:
    text = chat(client, *messages, **fields).choices[0].message.content
    assert text
    return text


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Names and contents of a stream's events."""
    events = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


# ---- whole answers -------------------------------------------------------------------------------------------


def test_text_in_text_out(client: openai.OpenAI, http: httpx.Client) -> None:
    response = client.responses.create(**BASE, input="Hello!", metadata={"a": "b"}, user="me", top_logprobs=3)
    expected = chat(client, HELLO)
    assert response.output_text == expected.choices[0].message.content
    (message,) = response.output
    assert message.type == "message"
    assert (message.role, message.status, message.id[:4]) == ("assistant", "incomplete", "msg_")
    assert message.content[0].to_dict() == {
        "annotations": [],
        "text": response.output_text,
        "type": "output_text",
        "logprobs": None,
    }
    assert response.id.startswith("resp_")
    assert len(response.id) == len("resp_") + 16
    assert (response.object, response.model, response.status) == ("response", "tiny", "incomplete")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert (response.metadata, response.user, response.top_logprobs) == ({"a": "b"}, "me", None)
    assert (response.temperature, response.top_p, response.max_output_tokens) == (0.0, 1.0, 16)
    assert (response.tool_choice, response.tools, response.parallel_tool_calls) == ("none", [], True)
    assert (response.background, response.truncation, response.previous_response_id) == (False, "disabled", None)
    assert expected.usage is not None
    assert response.usage is not None
    assert response.usage.input_tokens == expected.usage.prompt_tokens
    assert (response.usage.output_tokens, response.usage.output_tokens_details.reasoning_tokens) == (16, 0)
    assert response.usage.total_tokens == expected.usage.total_tokens
    assert http.get(f"/v1/responses/{response.id}").json() == response.to_dict()


def test_a_response_that_ends_by_itself(client: openai.OpenAI) -> None:
    stop = chat_text(client, HELLO)[3:6]
    response = client.responses.create(**BASE, input="Hello!", extra_body={"stop": [stop], "seed": 3})
    assert response.output_text == chat_text(client, HELLO, stop=[stop], seed=3)
    assert (response.status, response.incomplete_details) == ("completed", None)


def test_no_limit_means_what_fits(client: openai.OpenAI) -> None:
    response = client.responses.create(**BASE | {"max_output_tokens": None}, input="Hello!")
    assert response.usage is not None
    assert response.max_output_tokens == 512 - response.usage.input_tokens
    # more than fits is lowered
    more = client.responses.create(**BASE | {"max_output_tokens": 512}, input="Hello!")
    assert (more.max_output_tokens, more.output_text) == (response.max_output_tokens, response.output_text)


def test_long_conversations_can_be_cut(client: openai.OpenAI) -> None:
    response = client.responses.create(**BASE, input="Hello! " * 600, truncation="auto")
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (512 - 16, 16)
    assert response.truncation == "auto"


def text_parts(*texts: str, kind: str = "input_text") -> list[dict[str, Any]]:
    return [{"type": kind, "text": text} for text in texts]


CALLED: dict[str, Any] = {"type": "function_call", "call_id": "c1", "name": "find", "arguments": '{"text": "x"}'}
RETURNED: dict[str, Any] = {"type": "function_call_output", "call_id": "c1", "output": "found"}
THOUGHTS: dict[str, Any] = {"type": "reasoning", "id": "rs_1", "summary": []}
ANSWERED: dict[str, Any] = {"role": "assistant", "content": "Yes."}
CONVERSATIONS: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [
    ([HELLO], [HELLO]),
    ([{"type": "message"} | HELLO], [HELLO]),
    ([{"role": "user", "content": text_parts("one", "two")}], [{"role": "user", "content": "one\ntwo"}]),
    ([{"role": "developer", "content": "Be brief."}, HELLO], [{"role": "system", "content": "Be brief."}, HELLO]),
    ([HELLO, ANSWERED, WHO], [HELLO, ANSWERED, WHO]),
    (
        [
            HELLO,
            ANSWERED | {"type": "message", "id": "msg_1", "content": text_parts("Yes.", kind="output_text")},
            WHO,
        ],
        [HELLO, ANSWERED, WHO],
    ),
    (
        [HELLO, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, WHO],
        [HELLO, {"role": "assistant", "content": "No."}, WHO],
    ),
    ([HELLO, ANSWERED, CALLED, RETURNED], [HELLO, ANSWERED, {"role": "tool", "content": "found"}]),
    (
        [HELLO, CALLED, RETURNED | {"output": text_parts("a", "b")}],
        [HELLO, {"role": "assistant", "content": ""}, {"role": "tool", "content": "a\nb"}],
    ),
    ([HELLO, THOUGHTS | {"content": text_parts("hm")}, ANSWERED, WHO], [HELLO, ANSWERED, WHO]),
    ([HELLO, ANSWERED, ANSWERED, WHO], [HELLO, ANSWERED, ANSWERED, WHO]),
]


@pytest.mark.parametrize(("items", "messages"), CONVERSATIONS)
def test_items_are_messages(
    client: openai.OpenAI, items: list[dict[str, Any]], messages: list[dict[str, Any]]
) -> None:
    response = client.responses.create(**BASE, input=items)
    assert response.output_text == chat_text(client, *messages)
    told = client.responses.create(**BASE, input=items, instructions="Be brief.")
    assert told.output_text == chat_text(client, {"role": "system", "content": "Be brief."}, *messages)
    assert told.instructions == "Be brief."


def test_what_the_model_saw_and_wrote(http: httpx.Client) -> None:
    body = BASE | {"input": "Hello!", "enable_response_messages": True}
    answer = http.post("/v1/responses", json=body).json()
    (seen,), (written,) = answer["input_messages"], answer["output_messages"]
    assert seen["message"] == "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
    assert seen["tokens"] == http.post("/tokenize", json={"messages": [HELLO]}).json()["tokens"]
    assert written["message"] == answer["output"][0]["content"][0]["text"]
    assert len(written["tokens"]) == 16
    last = events_of(http.post("/v1/responses", json=body | {"stream": True}).text)[-1][1]["response"]
    assert (last["input_messages"], last["output_messages"]) == ([seen], [written])


def test_an_unfinished_message_is_continued(client: openai.OpenAI) -> None:
    begun = {"role": "assistant", "content": "Yes, I"}
    expected = chat_text(
        client, HELLO, begun, extra_body={"continue_final_message": True, "add_generation_prompt": False}
    ).removeprefix("Yes, I")
    for status in ("in_progress", "incomplete"):
        response = client.responses.create(**BASE, input=[HELLO, {"type": "message", "status": status} | begun])
        assert response.output_text == expected


def test_log_probabilities(client: openai.OpenAI, http: httpx.Client) -> None:
    asked = BASE | {"input": "Hello!", "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    response = http.post("/v1/responses", json=asked).json()
    expected = chat(client, HELLO, logprobs=True, top_logprobs=2).choices[0].logprobs
    assert expected is not None
    assert expected.content is not None
    assert response["output"][0]["content"][0]["logprobs"] == [entry.to_dict() for entry in expected.content]
    assert response["top_logprobs"] == 2
    events = events_of(http.post("/v1/responses", json=asked | {"stream": True}).text)
    deltas = [entry for name, data in events if name.endswith("text.delta") for entry in data["logprobs"]]
    assert [(entry["token"], entry["logprob"]) for entry in deltas] == [
        (entry.token, entry.logprob) for entry in expected.content
    ]
    assert [len(entry["top_logprobs"]) for entry in deltas] == [2] * 16
    assert events[-1][1]["response"]["output"][0]["content"] == response["output"][0]["content"]
    alone = http.post("/v1/responses", json=asked | {"top_logprobs": 0}).json()
    assert alone["output"][0]["content"][0]["logprobs"][0]["top_logprobs"] == []


# ---- streams -------------------------------------------------------------------------------------------------


def test_the_events_of_a_stream(client: openai.OpenAI, http: httpx.Client) -> None:
    # a client that is slower than the model gets several tokens at once
    long = BASE | {"max_output_tokens": 400, "input": "Hello!"}
    whole = client.responses.create(**long)
    answer = http.post("/v1/responses", json=long | {"stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.text)
    names = [name for name, _ in events]
    num_deltas = names.count("response.output_text.delta")
    assert num_deltas > 1
    assert names == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * num_deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        # cut by max_output_tokens
        "response.incomplete",
    ]
    assert [data["type"] for _, data in events] == names
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    created, last = events[0][1]["response"], events[-1][1]["response"]
    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    assert events[1][1]["response"] == created
    assert (last["status"], last["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    item = last["output"][0]
    assert item["status"] == "incomplete"
    assert events[2][1]["item"] == item | {"content": [], "status": "in_progress"}
    assert events[2][1]["output_index"] == 0
    empty = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
    assert events[3][1]["part"] == empty
    assert {data["item_id"] for _, data in events[3:-2]} == {item["id"]}
    assert "".join(data["delta"] for name, data in events if name.endswith("delta")) == whole.output_text
    assert events[-4][1]["text"] == whole.output_text
    assert events[-3][1]["part"] == item["content"][0]
    assert events[-2][1]["item"] == item
    # the same as without a stream, but for what is new each time
    new = {"id": last["id"], "created_at": last["created_at"]}
    expected = whole.to_dict() | new | {"output": [whole.output[0].to_dict() | {"id": item["id"]}]}
    assert last == expected
    assert http.get(f"/v1/responses/{last['id']}").json() == last


def final_of(client: openai.OpenAI, **asked: Any) -> openai.types.responses.Response:
    """The last state of a streamed response; the client's own helper wants one that was not cut off."""
    *_, last = client.responses.create(**asked, stream=True)
    assert last.type in ("response.completed", "response.incomplete")
    response: openai.types.responses.Response = last.response
    return response


def test_the_client_s_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(**BASE, input="Hello!") as stream:
        events = list(stream)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == "".join(deltas)
    assert last.response.output_text == client.responses.create(**BASE, input="Hello!").output_text


async def test_the_asynchronous_client(openai_server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{openai_server.url}/v1", api_key="none", max_retries=0) as client:
        response = await client.responses.create(**BASE, input="Hello!")
        async with client.responses.stream(**BASE, input="Hello!") as stream:
            *_, last = [event async for event in stream]
        assert last.type == "response.incomplete"
        assert last.response.output_text == response.output_text
        assert (await client.responses.retrieve(response.id)).output_text == response.output_text


@pytest.fixture(scope="module")
def patient(patient_server: Server) -> Iterator[openai.OpenAI]:
    """The official client of a server whose requests may be long."""
    with openai.OpenAI(base_url=f"{patient_server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def becomes_idle(server: Server) -> bool:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        return wait_until(lambda: is_idle(http))


def test_who_goes_away_is_not_answered(patient: openai.OpenAI, patient_server: Server) -> None:
    with patient.responses.create(**ENDLESS, stream=True) as stream:
        first: ResponseStreamEvent = next(iter(stream))
        assert first.type == "response.created"
    assert becomes_idle(patient_server)
    with pytest.raises(openai.NotFoundError):
        patient.responses.retrieve(first.response.id)


# ---- what is kept --------------------------------------------------------------------------------------------


def test_a_conversation_goes_on(client: openai.OpenAI) -> None:
    first = client.responses.create(**BASE, input="Hello!", instructions="Be brief.")
    second = client.responses.create(**BASE, input="Who are you?", previous_response_id=first.id)
    said = {"role": "assistant", "content": first.output_text}
    # instructions apply to one response only
    assert second.output_text == chat_text(client, HELLO, said, WHO)
    assert second.previous_response_id == first.id
    third = final_of(client, **BASE, input="Hello!", previous_response_id=second.id)
    said_again = {"role": "assistant", "content": second.output_text}
    assert third.output_text == chat_text(client, HELLO, said, WHO, said_again, HELLO)
    # a conversation may fork
    other = client.responses.create(**BASE, input="Hello!", previous_response_id=first.id, instructions="Shout.")
    assert other.output_text == chat_text(client, {"role": "system", "content": "Shout."}, HELLO, said, HELLO)


def test_what_is_not_kept(client: openai.OpenAI) -> None:
    response = client.responses.create(**BASE, input="Hello!", store=False)
    for ask in (
        lambda: client.responses.retrieve(response.id),
        lambda: client.responses.cancel(response.id),
        lambda: client.responses.create(**BASE, input="Hello!", previous_response_id=response.id),
    ):
        with pytest.raises(openai.NotFoundError) as error:
            ask()
        assert error.value.body == {
            "message": f"Response with id '{response.id}' not found.",
            "type": "invalid_request_error",
            "param": "response_id",
            "code": 404,
        }


def test_a_chosen_id(http: httpx.Client) -> None:
    body = BASE | {"input": "Hello!", "request_id": "resp_mine"}
    assert http.post("/v1/responses", json=body).json()["id"] == "resp_mine"
    again = http.post("/v1/responses", json=body)
    assert again.status_code == 400
    assert again.json()["error"]["message"] == "There is a response with the id 'resp_mine' already."
    assert http.post("/v1/responses", json=body | {"request_id": "x", "store": False}).json()["id"] == "x"


def test_asking_for_a_kept_response(client: openai.OpenAI, http: httpx.Client) -> None:
    response = client.responses.create(**BASE, input="Hello!")
    path = f"/v1/responses/{response.id}"
    for method, query, message, param in [
        ("POST", "/cancel", "Cannot cancel a synchronous response.", "response_id"),
        ("GET", "?stream=true", f"Response with id '{response.id}' has no events", "stream"),
        ("GET", "?stream=zebra", "Input should be a valid boolean", "query.stream"),
        ("GET", "?starting_after=x", "Input should be a valid integer", "query.starting_after"),
        ("GET", "/input_items?limit=101", "less than or equal to 100", "query.limit"),
        ("GET", "/input_items?order=up", "Input should be 'asc' or 'desc'", "query.order"),
        ("GET", "/input_items?after=msg_x", "There is no input item with the id 'msg_x'.", "after"),
    ]:
        answer = http.request(method, path + query)
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == param


def test_input_items(client: openai.OpenAI) -> None:
    first = client.responses.create(**BASE, input="Hello!")
    call = {"type": "function_call", "call_id": "c", "name": "find", "arguments": "{}", "id": "fc_mine"}
    result = {"type": "function_call_output", "call_id": "c", "output": "found"}
    second = client.responses.create(**BASE, input=[call, result, WHO], previous_response_id=first.id)  # type: ignore[list-item]
    pages = client.responses.input_items.list(second.id, order="asc", limit=2)
    assert (len(pages.data), pages.has_more) == (2, True)
    items = [item.to_dict() for item in pages]  # the client asks for the other pages
    assert [(item["type"], item["status"]) for item in items] == [
        ("message", "completed"),
        ("message", "incomplete"),
        ("function_call", "completed"),
        ("function_call_output", "completed"),
        ("message", "completed"),
    ]
    assert items[0]["content"] == [{"type": "input_text", "text": "Hello!"}]
    assert items[1]["id"] == first.output[0].id
    assert items[2]["id"] == "fc_mine"
    assert len({item["id"] for item in items}) == 5
    # the newest come first by default
    listed = client.responses.input_items.list(second.id).to_dict()
    assert (listed["object"], listed["has_more"], listed["data"]) == ("list", False, items[::-1])
    assert (listed["first_id"], listed["last_id"]) == (items[-1]["id"], items[0]["id"])
    # they can be sent again
    again = client.responses.create(**BASE, input=items)  # type: ignore[arg-type]
    assert again.output_text == second.output_text


def test_deleting(client: openai.OpenAI, http: httpx.Client) -> None:
    first = client.responses.create(**BASE, input="Hello!")
    second = client.responses.create(**BASE, input="Who are you?", previous_response_id=first.id)
    answer = http.delete(f"/v1/responses/{first.id}")
    assert (answer.status_code, answer.json()) == (200, {"id": first.id, "object": "response", "deleted": True})
    for ask in (
        lambda: client.responses.delete(first.id),
        lambda: client.responses.retrieve(first.id),
        lambda: client.responses.input_items.list(first.id),
        lambda: client.responses.create(**BASE, input="Hello!", previous_response_id=first.id),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()
    # what goes on from it keeps what was said
    assert client.responses.input_items.list(second.id, order="asc").data[1].id == first.output[0].id  # type: ignore[union-attr]


def test_deleting_what_runs(patient: openai.OpenAI, patient_server: Server) -> None:
    begun = patient.responses.create(**ENDLESS, background=True)
    patient.responses.delete(begun.id)
    assert becomes_idle(patient_server)
    with pytest.raises(openai.NotFoundError):
        patient.responses.retrieve(begun.id)


# ---- in the background ---------------------------------------------------------------------------------------


def test_a_response_in_the_background(client: openai.OpenAI) -> None:
    begun = client.responses.create(**BASE, input="Hello!", background=True)
    assert (begun.status, begun.output, begun.usage, begun.background) == ("queued", [], None, True)
    assert wait_until(lambda: client.responses.retrieve(begun.id).status not in ("queued", "in_progress"))
    ended = client.responses.retrieve(begun.id)
    assert ended.output_text == chat_text(client, HELLO)
    assert ended.status == "incomplete"
    assert ended.usage is not None
    assert ended.usage.output_tokens == 16
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(begun.id)


def test_cancelling(patient: openai.OpenAI, patient_server: Server) -> None:
    begun = patient.responses.create(**ENDLESS, background=True)
    assert wait_until(lambda: patient.responses.retrieve(begun.id).status == "in_progress")
    with pytest.raises(openai.BadRequestError, match="is still in_progress"):
        patient.responses.create(**BASE, input="Hello!", previous_response_id=begun.id)
    cancelled = patient.responses.cancel(begun.id)
    assert (cancelled.status, cancelled.output) == ("cancelled", [])
    assert becomes_idle(patient_server)
    assert patient.responses.retrieve(begun.id).status == "cancelled"


def test_others_pass_what_runs_in_the_background(patient: openai.OpenAI, patient_server: Server) -> None:
    # more than the server can run
    begun = [patient.responses.create(**ENDLESS, background=True) for _ in range(70)]
    try:
        assert chat_text(patient, HELLO)
        statuses = {patient.responses.retrieve(response.id).status for response in begun}
        assert statuses == {"queued", "in_progress"}
    finally:
        for response in begun:
            patient.responses.cancel(response.id)
    assert becomes_idle(patient_server)


def test_a_background_stream_survives_its_listener(client: openai.OpenAI, http: httpx.Client) -> None:
    with client.responses.create(**TICK, background=True, stream=True) as stream:
        heard = [event for event, _ in zip(stream, range(6), strict=False)]
    created = heard[0]
    assert created.type == "response.created"
    response_id = created.response.id
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=5))
    assert [event.sequence_number for event in [*heard, *rest]] == list(range(len(rest) + 6))
    last = rest[-1]
    assert last.type == "response.incomplete"
    assert last.response.status == "incomplete"
    text = "".join(event.delta for event in [*heard, *rest] if event.type == "response.output_text.delta")
    assert text == last.response.output_text
    # all of it again, a part of it, and nothing of it
    path = f"/v1/responses/{response_id}?stream=true"
    again = events_of(http.get(path).text)
    assert [data["sequence_number"] for _, data in again] == list(range(len(rest) + 6))
    assert events_of(http.get(f"{path}&starting_after={len(rest)}").text) == again[-5:]
    assert http.get(f"{path}&starting_after=100000").text == ""
    assert http.get(f"/v1/responses/{response_id}").json() == again[-1][1]["response"]


def test_cancelling_ends_the_stream(patient: openai.OpenAI, patient_server: Server) -> None:
    with patient.responses.create(**ENDLESS, background=True, stream=True) as stream:
        events = iter(stream)
        created = next(events)
        assert created.type == "response.created"
        assert created.response.status == "queued"
        assert next(events).type == "response.in_progress"
        patient.responses.cancel(created.response.id)
        rest = list(events)
    assert not {"response.completed", "response.incomplete"} & {event.type for event in rest}
    assert becomes_idle(patient_server)


# ---- what the text must look like ----------------------------------------------------------------------------


class Fruit(pydantic.BaseModel):
    """A schema that is small enough for an untrained model."""

    model_config = pydantic.ConfigDict(extra="forbid")

    kind: Literal["apple", "plum"]
    ripe: bool


@pytest.fixture
def tool_client(guarded_server: Server) -> Iterator[openai.OpenAI]:
    """A client of a server that reads tool calls."""
    with openai.OpenAI(base_url=f"{guarded_server.url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def formed(tiny_dir: str) -> dict[str, Any]:
    """A request whose text has no spaces between its elements, of which a random model would write many."""
    tokenizer = Tokenizer.from_directory(tiny_dir)
    spaces = [token_id for token_id in range(VOCAB_SIZE) if tokenizer.decode([token_id]).isspace()]
    bias = {str(token_id): -100 for token_id in spaces}
    return BASE | {"max_output_tokens": 100, "input": "A fruit!", "extra_body": {"logit_bias": bias}}


def test_text_of_a_schema(client: openai.OpenAI, formed: dict[str, Any]) -> None:
    response = client.responses.parse(**formed, text_format=Fruit)
    assert isinstance(response.output_parsed, Fruit)
    assert response.status == "completed"
    assert response.text is not None
    shown = response.text.to_dict()
    assert shown["verbosity"] is None
    assert set(shown["format"]) == {"type", "name", "schema", "description", "strict"}  # type: ignore[arg-type]
    with client.responses.stream(**formed, text_format=Fruit) as stream:
        final = stream.get_final_response()
    assert final.output_parsed == response.output_parsed
    assert final.output_text == response.output_text
    in_background = client.responses.create(**formed, text={"format": {"type": "json_object"}}, background=True)
    assert wait_until(lambda: client.responses.retrieve(in_background.id).usage is not None)
    assert client.responses.retrieve(in_background.id).output_text.startswith("{")
    choice = {"structured_outputs": {"choice": ["red", "green"]}}
    chosen = client.responses.create(**BASE, input="A colour!", extra_body=choice)
    assert chosen.output_text in ("red", "green")
    wrong = {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}
    with pytest.raises(openai.BadRequestError):
        client.responses.create(**formed, text={"format": wrong})


def test_calls_that_must_be_made(tool_client: openai.OpenAI, formed: dict[str, Any]) -> None:
    tools = [
        FIND | {"name": name, "parameters": Fruit.model_json_schema(), "strict": True} for name in ("find", "eat")
    ]
    for choice in ({"type": "function", "name": "eat"}, "required"):
        asked: dict[str, Any] = formed | {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
        response = tool_client.responses.create(**asked)
        with tool_client.responses.stream(**asked) as stream:
            final = stream.get_final_response()
        (call,), (streamed,) = response.output, final.output
        assert call.type == streamed.type == "function_call"
        assert (call.name, call.arguments) == (streamed.name, streamed.arguments)
        Fruit.model_validate_json(call.arguments)
        assert call.name == "eat" or choice == "required"
        assert response.tool_choice == choice if isinstance(choice, str) else response.tool_choice.to_dict() == choice


# ---- what is refused -----------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], int, str, str | None]] = [
    ({"model": "nope"}, 404, "The model `nope` does not exist. Valid aliases: tiny, alias.", "model"),
    ({"input": None}, 400, "Input should be a valid string", "body.input"),
    ({"input": []}, 400, "Cannot apply chat template to an empty conversation.", None),
    ({"input": ["x"]}, 400, "The input item at index 0 must be an object, but is of type str.", "input"),
    (
        {"input": [HELLO, {"type": "item_reference", "id": "x"}]},
        400,
        "Unsupported input item type: item_ref",
        "input",
    ),
    ({"input": [{"type": []}]}, 400, "Unsupported input item type: []", "input"),
    ({"input": [HELLO | {"role": "zebra"}]}, 400, "The input item at index 0 has the role 'zebra'", "input"),
    ({"input": [{"role": "user"}]}, 400, "index 0 must have a string or a list of parts as its content", "input"),
    ({"input": [HELLO | {"content": [{"type": "input_file"}]}]}, 400, "Unknown part type: input_file", "input"),
    ({"input": [HELLO | {"content": [{"type": "input_text"}]}]}, 400, "has no text", "input"),
    ({"input": [HELLO | {"content": [{"type": "input_image"}]}]}, 400, "is not a multimodal model", "input"),
    ({"input": [CALLED | {"arguments": None}]}, 400, "index 0 must have a string as its arguments", "input"),
    ({"input": [RETURNED | {"call_id": 1}]}, 400, "index 0 must have a string as its call_id", "input"),
    ({"input": [THOUGHTS | {"content": ["x"]}]}, 400, "index 0 must have a list of objects as its content", "input"),
    ({"input": [THOUGHTS | {"content": [{}]}]}, 400, "index 0 has a part without a text", "input"),
    ({"input": "Hello! " * 600}, 400, "This model's maximum context length is 512 tokens", "input_tokens"),
    ({"max_output_tokens": 0}, 400, "max_tokens must be at least 1, got 0.", "max_tokens"),
    ({"max_output_tokens": 10000}, 400, "max_output_tokens=10000 cannot be greater than", "max_output_tokens"),
    ({"temperature": -1}, 400, "temperature must be non-negative, got -1.0.", "temperature"),
    ({"top_p": 0}, 400, "top_p must be in (0, 1], got 0.0.", "top_p"),
    ({"presence_penalty": 3}, 400, "Input should be less than or equal to 2", "body.presence_penalty"),
    ({"stop": [""]}, 400, "stop cannot contain an empty string.", "stop"),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias contains key(s) that cannot be converted", "logit_bias"),
    ({"cache_salt": ""}, 400, "Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt"),
    ({"include": ["zebra"]}, 400, "Input should be 'code_interpreter_call.outputs'", "body.include.0"),
    ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, 400, "Requested sample logprobs of 21", None),
    ({"top_logprobs": -1}, 400, "Input should be greater than or equal to 0", "body.top_logprobs"),
    ({"metadata": {"a": 1}}, 400, "Input should be a valid string", "body.metadata.a"),
    ({"background": True, "store": False}, 400, "background can only be used when `store` is true", "background"),
    ({"prompt": {"id": "p"}}, 400, "prompt template is not supported", "prompt"),
    ({"conversation": "c"}, 400, "`conversation` is not supported", "conversation"),
    ({"previous_input_messages": []}, 400, "`previous_input_messages` is not supported", "previous_input_messages"),
    ({"tools": [{"type": "web_search"}]}, 400, "Tools of type 'web_search' are not supported", "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "Each of `tools` must have a name.", "tools"),
    ({"tools": [FIND | {"parameters": 3}]}, 400, "The parameters of the tool 'find' must be an object.", "tools"),
    ({"tools": [FIND]}, 400, '"auto" tool choice requires --enable-auto-tool-choice', "tool_choice"),
    ({"tool_choice": "required"}, 400, "Tool choice 'required' must be specified with 'tools'", "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "f"}}, 400, "Tool choice 'function' not found", "tool_choice"),
    ({"tools": [FIND], "tool_choice": {"type": "function"}}, 400, "Tool choice 'function' not found", "tool_choice"),
    ({"tools": [FIND], "tool_choice": {"type": "mcp"}}, 400, "A `tool_choice` of type 'mcp'", "tool_choice"),
    ({"tools": [FIND], "tool_choice": "zebra"}, 400, "`tool_choice` must be 'none', 'auto'", "tool_choice"),
    (
        {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "x"}},
        400,
        "Cannot specify both structured_outputs and text.format",
        "structured_outputs",
    ),
    (
        {"text": {"format": {"type": "json_schema", "name": "x"}}},
        400,
        "`schema` must be given when the format's type is 'json_schema'.",
        "body.text.format",
    ),
]


@pytest.mark.parametrize(("fields", "status", "message", "param"), REFUSED)
def test_what_is_refused(
    http: httpx.Client, fields: dict[str, Any], status: int, message: str, param: str | None
) -> None:
    for stream in (False, True):
        body = BASE | {"input": "Hello!", "stream": stream} | fields
        answer = http.post("/v1/responses", json=body)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert message in error["message"]
        assert error["code"] == status
        assert param is None or error["param"] == param
        # the shape of vLLM 0.6.3 at the same time
        assert answer.json() == {"error": error, "object": "error", **error}
