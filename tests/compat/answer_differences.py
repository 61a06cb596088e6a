"""Compares an answer with the recorded one; returns the places where they differ.

A place is a path like ``body.choices.0.text``; in streams ``events.3.choices.0.delta``. What differs in every two
answers (ids, times, fingerprints) is not looked at, and where the tokens were drawn only the shape is.
"""

from __future__ import annotations

import base64
import copy
import re
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np

from tests.compat.streams import merge_events

# values that differ between any two answers; that there is one, and its type, is compared
_UNIQUE = frozenset(
    {"id", "created", "created_at", "completed_at", "system_fingerprint", "item_id", "call_id", "version", "root"}
)
# keys of vLLM 0.32 that belong to features outside of this project's mission (Decision 4 of the contract)
_FOREIGN = frozenset(
    {
        *("service_tier", "routed_experts", "kv_transfer_params", "ec_transfer_params", "metrics", "prompt_text"),
        # of /v1/responses: what the harmony format and tools found at run time have
        *("input_tokens_per_turn", "cached_tokens_per_turn", "output_tokens_per_turn", "tool_output_tokens_per_turn"),
        *("namespace", "async", "caller", "output_schema", "defer_loading", "allowed_callers", "verbosity"),
        *("input_messages", "output_messages"),
        *("created_cache_tokens", "multimodal_tokens"),
    }
)
# keys that answers have here beside vLLM 0.32's: those of 0.6.3 and of AIAK
_OURS = frozenset({"sentence_length", "cum_log_probs", "prompt_logprobs", "tool_calls", "prompt_tokens_details"})
# what vLLM 0.32 adds to the texts of its errors
_APPENDIX = re.compile(r"( \(parameter=\w+(, value=.*)?\))$", re.DOTALL)
_FINDING = re.compile(r"validation errors?:\n.*?'msg': (\"[^\"]*\"|'[^']*')", re.DOTALL)
_LOGPROB_TOLERANCE = 1e-4
# where a string of base64 may hold an embedding
_BASE64 = frozenset({"embedding", "data"})
_TYPES = {
    bool: "bool",
    int: "number",
    float: "number",
    str: "string",
    list: "list",
    dict: "object",
    type(None): "null",
}


def differences(recorded: dict[str, Any], answer: dict[str, Any], sampled: bool = False) -> list[str]:
    """Where an answer differs from the recorded one.

    Args:
        recorded: with ``status``, ``headers`` and one of ``body``, ``text``, ``events``; see `exchange`.
        answer: the same of this server.
        sampled: compare the shape only.

    Returns:
        One text per difference, which begins with its place.
    """
    found = list(_compare("status", recorded["status"], answer["status"]))
    for name in recorded["headers"]:
        sides = (recorded["headers"][name], answer["headers"].get(name))
        if name == "location":
            # the port is another
            sides = tuple(httpx.URL(url or "").path for url in sides)
        found += _compare(f"headers.{name}", *sides)
    kind = next(name for name in ("body", "text", "events") if name in recorded)
    if kind not in answer:
        return [*found, f"{kind}: absent"]
    if kind == "events":
        theirs, ours = (merge_events(copy.deepcopy(side["events"])) for side in (recorded, answer))
        return found + list(_compare_events(theirs, ours, sampled))
    return found + list(_compare(kind, recorded[kind], answer[kind], sampled))


def _compare_events(recorded: list[Any], answer: list[Any], sampled: bool) -> Iterator[str]:
    if len(recorded) != len(answer) and not sampled:
        yield f"events: {len(answer)} instead of {len(recorded)}"
    for index, (theirs, ours) in enumerate(zip(recorded, answer, strict=False)):
        yield from _compare(f"events.{index}.event", theirs[0], ours[0])
        yield from _compare(f"events.{index}", theirs[1], ours[1], sampled)


def _compare(place: str, theirs: Any, ours: Any, sampled: bool = False) -> Iterator[str]:
    key = place.rpartition(".")[2]
    if _TYPES[type(theirs)] != _TYPES[type(ours)]:
        if not (sampled and theirs is None):
            yield f"{place}: {_shown(ours)} instead of {_shown(theirs)}"
    elif isinstance(theirs, dict):
        yield from _compare_objects(place, theirs, ours, sampled)
    elif isinstance(theirs, list):
        if len(theirs) != len(ours) and not sampled:
            yield f"{place}: {len(ours)} items instead of {len(theirs)}: {_shown(ours)} instead of {_shown(theirs)}"
        for index, (left, right) in enumerate(zip(theirs, ours, strict=False)):
            yield from _compare(f"{place}.{index}", left, right, sampled)
    elif sampled or key in _UNIQUE:
        return
    elif isinstance(theirs, float) or isinstance(ours, float):
        if abs(theirs - ours) > _LOGPROB_TOLERANCE:
            yield f"{place}: {ours} instead of {theirs}"
    elif key == "message":
        if not same_message(theirs, ours):
            yield f"{place}: {_shown(ours)} instead of {_shown(theirs)}"
    elif key in _BASE64 and _floats(theirs) is not None:
        yield from _compare(place, _floats(theirs), _floats(ours), sampled)
    elif theirs != ours:
        yield f"{place}: {_shown(ours)} instead of {_shown(theirs)}"


def _compare_objects(place: str, theirs: dict[str, Any], ours: dict[str, Any], sampled: bool) -> Iterator[str]:
    # tokens with their log-probabilities: the tokens are the content
    if sampled and place.rpartition(".")[0].endswith(("top_logprobs", "prompt_logprobs")):
        return
    is_error = place.endswith("error") or ("error" in theirs and "error" in ours)
    if place.endswith("error") and theirs.get("param") is None:
        # naming the field where 0.32 does not is no difference that a client could mind
        theirs = {key: value for key, value in theirs.items() if key != "param"}
        ours = {key: value for key, value in ours.items() if key != "param"}
    for key in theirs.keys() - _FOREIGN:
        if key in ours:
            yield from _compare(f"{place}.{key}", theirs[key], ours[key], sampled)
        elif theirs[key] is not None or key not in _NULL_MAY_BE_ABSENT:
            yield f"{place}.{key}: absent instead of {_shown(theirs[key])}"
    if not is_error:
        for key in ours.keys() - theirs.keys() - _OURS:
            if ours[key] is not None:
                yield f"{place}.{key}: {_shown(ours[key])} instead of absent"


# null in vLLM 0.32 if not requested, and absent here
_NULL_MAY_BE_ABSENT = frozenset({"token_ids", "prompt_token_ids", "content", "strict", "description"})


def same_message(theirs: str, ours: str) -> bool:
    """Whether two error texts have the same meaning.

    What 0.32 appends to its texts is not looked at. Of the findings of a validation the first counts: how many there
    are for a value that may be of several types, and how the value is shown, is a matter of the models behind.
    """
    first, second = (_FINDING.search(text) for text in (theirs, ours))
    if first and second:
        return first[1] == second[1]
    return _APPENDIX.sub("", theirs) == _APPENDIX.sub("", ours)


def _floats(text: str) -> list[float] | None:
    """The numbers of an embedding in base64; None: it is none."""
    try:
        return [float(value) for value in np.frombuffer(base64.b64decode(text, validate=True), "<f4")]
    except ValueError:
        return None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 300 else text[:300] + "…"
