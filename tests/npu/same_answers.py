"""Whether two servers that compute in float16, in another order, gave the same answer over HTTP."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.compat.exchange import exchange
from tests.compat.requests_common import Case
from tests.compat.streams import merge_events
from tests.server import Server

# of a log-probability; float16 has 11 bits, the demo model's logits reach 20, and sums are added up in another order
TOLERANCE = 0.03
# of a logit: brings a token to the front where two are as good as the same. Float16 has steps of 1/64 between 16 and
# 32, and each of the two logits may be off by one.
PUSH = 0.04
# of the sum over an answer's tokens, of which those that tell the sum have few
SUM_TOLERANCE = 0.1
# so many of the 2048 tokens may lie within TOLERANCE of another that is far from the best
RANK_TOLERANCE = 16
_DRAWN_ANEW = frozenset({"id", "created", "created_at", "completed_at", "item_id", "call_id"})


def differences(cpu: dict[str, Any], npu: dict[str, Any]) -> list[str]:
    """Where two answers of `exchange` differ, beyond what is drawn anew for each and the rounding of numbers."""
    for answer in (cpu, npu):
        if "events" in answer:
            answer["events"] = merge_events(answer["events"])
    return list(_compare("", cpu, npu))


def _compare(place: str, cpu: Any, npu: Any) -> Iterator[str]:
    key = place.rpartition(".")[2]
    if key in _DRAWN_ANEW:
        return
    if key in ("top_logprobs", "prompt_logprobs") and isinstance(cpu, list) and isinstance(npu, list):
        yield from _compare_candidates(place, cpu, npu)
    elif isinstance(cpu, dict) and isinstance(npu, dict):
        # the last chunk of a stream says null for what the others leave out
        for name in cpu | npu:
            yield from _compare(f"{place}.{name}", cpu.get(name), npu.get(name))
    elif isinstance(cpu, list) and isinstance(npu, list) and len(cpu) == len(npu):
        for number, (left, right) in enumerate(zip(cpu, npu, strict=True)):
            yield from _compare(f"{place}.{number}", left, right)
    elif not _is_close(key, cpu, npu):
        yield f"{place}: {npu!r} instead of {cpu!r}"


def _is_close(key: str, cpu: Any, npu: Any) -> bool:
    if isinstance(cpu, float) and isinstance(npu, float):
        return abs(cpu - npu) <= (SUM_TOLERANCE if key == "cum_log_probs" else TOLERANCE)
    if key == "rank":
        # of the two best only the other can take the place
        return bool(abs(cpu - npu) <= (1 if 1 in (cpu, npu) else RANK_TOLERANCE))
    return bool(cpu == npu)


def _compare_candidates(place: str, cpu: list[Any], npu: list[Any]) -> Iterator[str]:
    """The likeliest tokens, position by position or, in chats, at one position.

    Two that are equally likely may stand in another order, or the last of a list be another one.
    """
    if _is_listed_in_order(cpu):
        cpu, npu = ([{_name(entry): entry["logprob"] for entry in side}] for side in (cpu, npu))
    if len(cpu) != len(npu):
        yield f"{place}: {len(npu)} positions instead of {len(cpu)}"
    for number, (left, right) in enumerate(zip(cpu, npu, strict=False)):
        if left is None or right is None:
            yield from _compare(f"{place}.{number}", left, right)
            continue
        for token in left.keys() | right.keys():
            if _distance(left, right, token) > TOLERANCE:
                yield f"{place}.{number}.{token}: {right.get(token)} instead of {left.get(token)}"
            elif token in left and token in right:
                yield from _compare(f"{place}.{number}.{token}", left[token], right[token])


def _is_listed_in_order(entries: list[Any]) -> bool:
    return bool(entries) and isinstance(entries[0], dict) and entries[0].keys() == {"token", "logprob", "bytes"}


def _distance(left: dict[str, Any], right: dict[str, Any], token: str) -> float:
    """Between a token's log-probabilities; one that is not listed is no likelier than the last that is."""
    if token in left and token in right:
        return abs(_logprob(left[token]) - _logprob(right[token]))
    other, found = (left, right[token]) if token in right else (right, left[token])
    return _logprob(found) - min(map(_logprob, other.values()))


def _logprob(entry: Any) -> float:
    return float(entry["logprob"] if isinstance(entry, dict) else entry)


def _name(entry: dict[str, Any]) -> str:
    return f"{entry['token']} {entry['bytes']}"


@dataclasses.dataclass(frozen=True)
class Side:
    """A server, and a client of it."""

    server: Server
    client: httpx.Client

    def answer(self, case: Case) -> dict[str, Any]:
        """The server's answer to a request, see `exchange`, without headers."""
        answer = exchange(self.client, case)
        del answer["headers"]
        return answer


@dataclasses.dataclass(frozen=True)
class Pair:
    """The same model on the CPU and on the NPU."""

    cpu: Side
    npu: Side

    def answers(self, case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
        """The answers of both servers to simultaneous requests; the CPU's first."""
        with ThreadPoolExecutor(1) as pool:
            npu = pool.submit(self.npu.answer, case)
            return self.cpu.answer(case), npu.result()


def is_tie(pair: Pair, case: Case) -> bool:
    """Whether the answers part where two tokens are equally good to the rounding of float16.

    A push of PUSH to its logit must then make each server take the token that the other took. What it is after
    penalties and constraints counts, since the push is part of the request.
    """
    case = _with_token_ids(pair.cpu, case)
    texts = [_token_ids(answer) for answer in pair.answers(case)]
    goals: list[dict[str, float]] = [{}, {}]
    ends = []
    for cpu, npu in zip(*texts, strict=True):
        splits = [place for place, (left, right) in enumerate(zip(cpu, npu, strict=False)) if left != right]
        ends.append(splits[0] + 1 if splits else min(len(cpu), len(npu)))
        if splits:
            goals[0][str(cpu[splits[0]])] = PUSH
            goals[1][str(npu[splits[0]])] = PUSH
    if not goals[0]:
        return False
    pushed = [
        _token_ids(side.answer(_pushed(case, goal)))
        for side, goal in zip((pair.cpu, pair.npu), reversed(goals), strict=True)
    ]
    return all(
        ours[:end] == theirs[:end]
        for one_pushed, other in zip(pushed, reversed(texts), strict=True)
        for ours, theirs, end in zip(one_pushed, other, ends, strict=True)
    )


def _with_token_ids(cpu: Side, case: Case) -> Case:
    """The request, or one to complete the same prompt, whose answer tells the ids of its tokens."""
    told = {"return_token_ids": True, "stream": False}
    if "completions" in case.path:
        body = {name: value for name, value in case.body.items() if name != "stream_options"}
        return dataclasses.replace(case, body=body | told)
    cpu.answer(case)
    prompt = re.findall(r"prompt_token_ids: \[([\d, ]+)\]", cpu.server.log)[-1]
    length = case.body.get("max_output_tokens", case.body.get("max_tokens"))
    body = {"prompt": [int(number) for number in prompt.split(",")], "max_tokens": length, "temperature": 0}
    wanted = case.body.get("text", {}).get("format", {"type": "text"})
    if wanted["type"] != "text":
        schema = {name: value for name, value in wanted.items() if name != "type"}
        body["response_format"] = {"type": wanted["type"]} | ({"json_schema": schema} if schema else {})
    return Case(case.name, "/v1/completions", body | told)


def _pushed(case: Case, goal: dict[str, float]) -> Case:
    bias = dict(case.body.get("logit_bias") or {})
    for token, push in goal.items():
        bias[token] = bias.get(token, 0) + push
    return dataclasses.replace(case, body=case.body | {"logit_bias": bias})


def _token_ids(answer: dict[str, Any]) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["body"]["choices"]]
