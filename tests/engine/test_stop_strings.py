"""The search of many stop strings at once, against looking for one after the other."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from ascend_vllm.engine import stop_strings
from ascend_vllm.engine.sequence_state import SequenceState
from ascend_vllm.engine.stop_strings import StopAutomaton, make_stop_search
from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.sampling_params import RequestOutputKind, SamplingParams
from ascend_vllm.types.messages import EngineCoreOutput, FinishReason


def plain_find(stops: Sequence[str], text: str, num_new: int) -> tuple[str, int] | None:
    """The definition: the first string, in their order, that ends in the new text, where it does so first."""
    for stop in stops:
        for end in range(len(text) - num_new + 1, len(text) + 1):
            if end >= len(stop) and text[end - len(stop) : end] == stop:
                return stop, end - len(stop)
    return None


LETTERS = st.text("ab\N{GRINNING FACE}", min_size=1, max_size=6)


@given(st.lists(LETTERS, min_size=1, max_size=20), st.lists(st.tuples(st.text("ab\N{GRINNING FACE}"), st.booleans())))
def test_finds_what_looking_for_each_finds(stops: list[str], pieces: list[tuple[str, bool]]) -> None:
    few, many = stop_strings._OneByOne(stops), stop_strings._AllAtOnce(StopAutomaton(stops))
    text = ""
    for piece, is_search in pieces:
        text += piece
        for search in (few, many):
            if is_search and piece:
                assert search.find(text, len(piece)) == plain_find(stops, text, len(piece))
            else:
                search.push(text, len(piece))


@given(
    st.lists(LETTERS, min_size=1, max_size=stop_strings._FEW),
    st.lists(st.integers(0, 2), max_size=40),
    st.integers(0, 10),
    st.booleans(),
)
def test_sequences_end_alike(
    byte_level: Tokenizer, stops: list[str], letters: list[int], min_tokens: int, include: bool
) -> None:
    """Also with min_tokens, with what is held back, and with the string in the text."""
    ids = [byte_level.encode(letter, add_special_tokens=False) for letter in ("a", "b", " ")]
    # enough strings that never come make the others be looked for at once
    padding = [f"never {number}" for number in range(stop_strings._FEW)]
    found = []
    for listed in (stops, [*stops, *padding]):
        params = SamplingParams(
            stop=listed, min_tokens=min_tokens, max_tokens=100, include_stop_str_in_output=include
        )
        state = SequenceState(0, params, [0], byte_level)
        state._held_back = 0 if include else max(map(len, stops)) - 1
        told = []
        for letter in letters:
            ended = state.update(EngineCoreOutput("r", ids[letter]))
            told += state.make_outputs(RequestOutputKind.DELTA)
            if ended:
                break
        else:
            state.update(EngineCoreOutput("r", [], finish_reason=FinishReason.LENGTH))
            told += state.make_outputs(RequestOutputKind.DELTA)
        found.append((told, state.text, state.token_ids, state.finish_reason, state.stop_reason))
    assert found[0] == found[1]


def test_the_search_is_shared_by_sequences_and_freed_with_them() -> None:
    stops = [f"stop {number}" for number in range(100)]
    one, other = make_stop_search(stops), make_stop_search(list(stops))
    assert isinstance(one, stop_strings._AllAtOnce)
    assert isinstance(other, stop_strings._AllAtOnce)
    assert one._automaton is other._automaton
    assert tuple(stops) in stop_strings._automata
    del one, other
    assert tuple(stops) not in stop_strings._automata


def test_as_many_strings_as_allowed_cost_no_more_than_a_few() -> None:
    """300,000 strings, each looked for in every piece of text, kept the other requests waiting for 47 s.

    Here are the longest ones that a server takes, in a text that always begins one of them anew.
    """
    few = make_stop_search([f"{number}x" for number in range(stop_strings._FEW)])
    many = make_stop_search([f"{number:04d}" + "a" * 59 + "x" for number in range(1000)] + ["a" * 1000 + "x"])
    pieces = ["0123", "aaaa"] * 5000
    seconds = []
    for search in (few, many):
        text, start = "", time.thread_time()
        for piece in pieces:
            text += piece
            assert search.find(text, len(piece)) is None
        seconds.append(time.thread_time() - start)
    # it took 100 times as long as a few when each was looked for
    assert seconds[1] < 20 * seconds[0]
