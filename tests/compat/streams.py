"""Normalises streams for comparison: consecutive deltas of text, arguments or reasoning are merged.

How many tokens an event carries is a matter of time - both servers send together what a client has not read yet -
and so is the order in which the choices of a request move on. What is left is compared: which kinds of events there
are, in which order, with which contents.
"""

from __future__ import annotations

from typing import Any


def merge_events(events: list[list[Any]]) -> list[list[Any]]:
    """The events of a stream with consecutive deltas merged.

    Args:
        events: ``[name or None, data]`` in the order in which they came.

    Returns:
        The same form; the choices of a request one after the other.
    """
    if any(isinstance(data, dict) and "choices" in data for _, data in events):
        return _merge_chunks(events)
    return _merge_deltas(events)


def _merge_chunks(events: list[list[Any]]) -> list[list[Any]]:
    """Chunks of completions and chats."""
    choices: dict[int, list[dict[str, Any]]] = {}
    rest = []
    for name, data in events:
        if not isinstance(data, dict) or not data.get("choices"):
            rest.append([name, data])
            continue
        # several choices in a chunk would be lost on the way
        assert len(data["choices"]) == 1, data
        chunks = choices.setdefault(data["choices"][0]["index"], [])
        if not (chunks and _merge_chunk(chunks[-1], data)):
            chunks.append(data)
    return [[None, chunk] for index in sorted(choices) for chunk in choices[index]] + rest


def _kind(choice: dict[str, Any]) -> str | None:
    """The kind of a chunk's delta; None: it has only a finish reason."""
    if "text" in choice:
        return "text"
    delta = {key: value for key, value in choice["delta"].items() if value is not None}
    if "role" in delta:
        return "role"
    if "tool_calls" in delta:
        return f"call {delta['tool_calls'][0]['index']}"
    return next(iter(delta), None)


def _merge_chunk(earlier: dict[str, Any], later: dict[str, Any]) -> bool:
    """Put a chunk's contents behind an earlier one's; False: they are of different kinds."""
    first, second = earlier["choices"][0], later["choices"][0]
    if _kind(second) not in (None, _kind(first)) or _kind(first) == "role":
        return False
    earlier |= {key: value for key, value in later.items() if key != "choices" and value is not None}
    if "text" in second:
        first["text"] += second["text"]
    else:
        _merge_delta(first["delta"], second["delta"])
    first["logprobs"] = _joined(first.get("logprobs"), second.get("logprobs"))
    first["token_ids"] = _joined(first.get("token_ids"), second.get("token_ids"))
    for key in second.keys() - {"index", "text", "delta", "logprobs", "token_ids"}:
        first[key] = first.get(key) if second[key] is None else second[key]
    return True


def _merge_delta(first: dict[str, Any], second: dict[str, Any]) -> None:
    for key, value in second.items():
        if key == "tool_calls":
            function = first["tool_calls"][0]["function"]
            function["arguments"] = function.get("arguments", "") + value[0]["function"].get("arguments", "")
        elif isinstance(value, str):
            first[key] = (first.get(key) or "") + value


def _joined(first: Any, second: Any) -> Any:
    """Lists, or objects of lists, one behind the other."""
    if first is None or second is None:
        return second if first is None else first
    if isinstance(first, list):
        return first + second
    return {key: _joined(first[key], second[key]) for key in first}


def _merge_deltas(events: list[list[Any]]) -> list[list[Any]]:
    """Merges named events with a ``delta`` of the same item."""
    merged: list[list[Any]] = []
    for name, data in events:
        if (
            merged
            and isinstance(data, dict)
            and merged[-1][0] == name
            and "delta" in data
            and "delta" in merged[-1][1]
        ):
            _append_delta(merged[-1][1], data)
        else:
            merged.append([name, data])
    for number, (_, data) in enumerate(merged):
        if isinstance(data, dict) and "sequence_number" in data:
            data["sequence_number"] = number
    return merged


def _append_delta(earlier: dict[str, Any], later: dict[str, Any]) -> None:
    if isinstance(later["delta"], str):
        earlier["delta"] += later["delta"]
        if "logprobs" in later:
            earlier["logprobs"] = _joined(earlier.get("logprobs"), later["logprobs"])
        return
    for key, value in later["delta"].items():
        if key != "type" and isinstance(value, str):
            earlier["delta"][key] = earlier["delta"].get(key, "") + value
