"""Finds the strings that end a text, in time that does not depend on how many there are."""

from __future__ import annotations

import asyncio
import weakref
from array import array
from collections.abc import Sequence
from typing import TypeAlias

# up to this many are searched one by one with str.find, which is faster than an automaton in Python
_FEW = 4
# from this many characters on, the automaton is built off the event loop
_LONG = 1024

# above every code point
_CODES = 0x110000
_NONE = -1


class _OneByOne:
    """Searches the growing text of one sequence for a few stop strings, the request's."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops

    def push(self, text: str, num_new: int) -> None:
        """Skips new characters, in which no stop string may end; `find` needs no state here.

        Args:
            text: all of it.
            num_new: characters that were added since the last call.
        """

    def find(self, text: str, num_new: int) -> tuple[str, int] | None:
        """The first stop string, in the request's order, that ends in the new characters, and where it begins.

        If it occurs several times, the first occurrence. Arguments as in `push`.
        """
        for stop in self._stops:
            start = text.find(stop, max(0, len(text) - num_new - len(stop) + 1))
            if start >= 0:
                return stop, start
        return None


class StopAutomaton:
    """Many strings as one automaton (Aho and Corasick, "Efficient string matching", 1975).

    Its states are the strings' prefixes, numbered so that most continue with the next number; a table holds only the
    branches. A search's state is the longest prefix that the text ends with.

    Args:
        stops: none of them empty; each character takes about a dozen bytes.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        # [states] the character that leads to the next number; _NONE: none does
        self._next_code = array("i", [_NONE])
        # state × _CODES + character → state, where it is not the next number
        self._branches: dict[int, int] = {}
        # [states] the first of the strings, by number, that ends here
        self._best = array("i", [len(stops)])
        for number, stop in enumerate(stops):
            self._add(stop, number)
        # [states] the longest shorter prefix that this one ends with
        self._fallback = self._make_fallbacks()

    def search(self, state: int, text: str) -> tuple[int, tuple[str, int] | None]:
        """Searches the next part of a text.

        Args:
            state: 0 at the beginning of a text.
            text: the next part.

        Returns:
            The new state; the first string, in their order, that ends in `text`, and the offset of its end in `text`;
            None: none does.
        """
        next_code, branches, fallback, best = self._next_code, self._branches, self._fallback, self._best
        found, found_end = len(self._stops), 0
        for end, code in enumerate(map(ord, text), 1):
            while True:
                if next_code[state] == code:
                    state += 1
                    break
                branch = branches.get(state * _CODES + code)
                if branch is not None:
                    state = branch
                    break
                if state == 0:
                    break
                state = fallback[state]
            if best[state] < found:
                found, found_end = best[state], end
        return state, None if found == len(self._stops) else (self._stops[found], found_end)

    def _add(self, stop: str, number: int) -> None:
        state = 0
        for code in map(ord, stop):
            if self._next_code[state] == code:
                state += 1
                continue
            key = state * _CODES + code
            branch = self._branches.get(key)
            if branch is None:
                branch = len(self._next_code)
                if branch == state + 1:
                    self._next_code[state] = code
                else:
                    self._branches[key] = branch
                self._next_code.append(_NONE)
                self._best.append(len(self._stops))
            state = branch
        self._best[state] = min(self._best[state], number)

    def _make_fallbacks(self) -> array[int]:
        """Computes `_fallback`, shorter prefixes first, since longer ones fall back to them."""
        fallback = array("i", bytes(4 * len(self._next_code)))
        branches: dict[int, list[tuple[int, int]]] = {}
        for key, child in self._branches.items():
            branches.setdefault(key // _CODES, []).append((key % _CODES, child))
        states = [0]
        for state in states:
            children = branches.get(state, [])
            if self._next_code[state] != _NONE:
                children = [*children, (self._next_code[state], state + 1)]
            for code, child in children:
                target = self._step(fallback, fallback[state], code) if state else 0
                fallback[child] = target
                self._best[child] = min(self._best[child], self._best[target])
                states.append(child)
        return fallback

    def _step(self, fallback: array[int], state: int, code: int) -> int:
        while True:
            if self._next_code[state] == code:
                return state + 1
            branch = self._branches.get(state * _CODES + code)
            if branch is not None:
                return branch
            if state == 0:
                return 0
            state = fallback[state]


class _AllAtOnce:
    """The same search of many strings."""

    def __init__(self, automaton: StopAutomaton) -> None:
        self._automaton = automaton
        self._state = 0

    def push(self, text: str, num_new: int) -> None:
        self.find(text, num_new)

    def find(self, text: str, num_new: int) -> tuple[str, int] | None:
        begin = len(text) - num_new
        self._state, found = self._automaton.search(self._state, text[begin:])
        return None if found is None else (found[0], begin + found[1] - len(found[0]))


StopSearch: TypeAlias = _OneByOne | _AllAtOnce

# shared, since the sequences and prompts of a request, and requests of one client, have the same strings
_automata: weakref.WeakValueDictionary[tuple[str, ...], StopAutomaton] = weakref.WeakValueDictionary()


def make_stop_search(stops: Sequence[str]) -> StopSearch:
    """The search of a new sequence; an automaton is shared as long as one of its searches exists.

    Args:
        stops: of the request, none of them empty.
    """
    if len(stops) <= _FEW:
        return _OneByOne(stops)
    return _AllAtOnce(_automaton(tuple(stops)))


async def prepare_stop_search(stops: Sequence[str]) -> StopAutomaton | None:
    """Builds the automaton for `make_stop_search`, in a thread if it is large; the caller keeps it alive."""
    if len(stops) <= _FEW:
        return None
    key = tuple(stops)
    known = _automata.get(key)
    if known is not None or sum(map(len, key)) <= _LONG:
        return known or _automaton(key)
    return await asyncio.to_thread(_automaton, key)


def _automaton(stops: tuple[str, ...]) -> StopAutomaton:
    automaton = _automata.get(stops)
    if automaton is None:
        automaton = _automata[stops] = StopAutomaton(stops)
    return automaton
