"""The policies' orders of waiting and running requests, compared with sorted lists."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_vllm.core.request import Request
from ascend_vllm.core.request_queue import QUEUES, PriorityQueue, RequestQueue
from tests.core.memory_executor import make_request


def make(request_id: str, priority: int = 0, arrival_time: float = 0.0) -> Request:
    message = make_request(request_id, 2, message={"priority": priority})
    message.arrival_time = arrival_time
    return Request(message, 100, 0)


def head(queue: RequestQueue) -> Request:
    request = queue.next()
    assert request is not None
    return request


def pop(queue: RequestQueue) -> Request:
    request = head(queue)
    queue.remove(request)
    return request


def ids(queue: RequestQueue) -> str:
    """Empties a queue; returns its requests in order."""
    return "".join(pop(queue).request_id for _ in range(len(queue)))


def fill(queue: RequestQueue, *requests: Request) -> RequestQueue:
    for request in requests:
        queue.add(request)
    return queue


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_equals_leave_in_the_order_they_came(policy: str) -> None:
    queue = fill(QUEUES[policy](), *map(make, "abcd"))
    assert head(queue).request_id == "a"
    assert (len(queue), sorted(request.request_id for request in queue)) == (4, list("abcd"))
    assert ids(queue) == "abcd"


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_an_empty_queue_has_no_next(policy: str) -> None:
    queue = fill(QUEUES[policy](), make("a"))
    queue.remove(head(queue))
    assert (len(queue), list(queue)) == (0, [])
    assert queue.next() is None


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_only_waiting_requests_can_be_removed(policy: str) -> None:
    a, b = make("a"), make("b")
    queue = fill(QUEUES[policy](), a)
    with pytest.raises(KeyError):
        queue.remove(b)
    queue.remove(a)
    with pytest.raises(KeyError):
        queue.remove(a)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_last_put_back_is_the_next(policy: str) -> None:
    queue = fill(QUEUES[policy](), *map(make, "abcd"))
    first, second = pop(queue), pop(queue)
    queue.put_back(second)
    queue.put_back(first)
    assert ids(queue) == "abcd"


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_an_id_may_come_back_after_it_was_removed(policy: str) -> None:
    a, again = make("a"), make("a")
    queue = fill(QUEUES[policy](), a, make("b"))
    queue.remove(a)
    queue.add(again)
    assert len(queue) == 2
    assert pop(queue).request_id == "b"
    assert pop(queue) is again


def test_fcfs_knows_no_priorities() -> None:
    queue = fill(QUEUES["fcfs"](), make("late", 0, 9.0), make("urgent", -5, 1.0))
    assert pop(queue).request_id == "late"
    assert not queue.has_ranks
    assert not queue.outranks(make("urgent", -5), make("idle", 5))
    running: list[Request] = []
    for request in (make("a", 3), make("b", -3)):
        queue.place(request, running)
    assert [request.request_id for request in running] == ["a", "b"]


def test_lowest_value_first_then_earliest_arrival() -> None:
    ranks = {"d": (1, 1.0), "c": (0, 3.0), "b": (0, 2.0), "a": (-1, 9.0), "e": (1, 1.5)}
    queue = fill(PriorityQueue(), *(make(name, *rank) for name, rank in ranks.items()))
    assert ids(queue) == "abcde"


def test_a_preempted_request_stays_behind_those_of_lower_value_and_earlier_arrival() -> None:
    queue = fill(PriorityQueue(), make("urgent", -1), make("early", 0, 1.0), make("late", 0, 3.0))
    queue.put_back(make("preempted", 0, 2.0))
    assert [pop(queue).request_id for _ in range(4)] == ["urgent", "early", "preempted", "late"]


def test_running_requests_are_ordered_by_priority() -> None:
    queue = PriorityQueue()
    running: list[Request] = []
    for request in (make("c", 1, 1.0), make("a", 0, 5.0), make("d", 1, 2.0), make("b", 0, 6.0), make("e", 1, 2.0)):
        queue.place(request, running)
    assert "".join(request.request_id for request in running) == "abcde"


def test_only_a_lower_value_outranks() -> None:
    queue = PriorityQueue()
    assert queue.has_ranks
    assert queue.outranks(make("w", 0, 9.0), make("r", 1, 1.0))
    assert not queue.outranks(make("w", 1, 1.0), make("r", 1, 9.0))
    assert not queue.outranks(make("w", 2), make("r", 1))


class Model:
    """A queue implemented as a list that is sorted for each call."""

    def __init__(self, policy: str) -> None:
        self.by_priority = policy == "priority"
        self.entries: list[tuple[int, Request]] = []
        self.serial = itertools.count(1)

    def add(self, request: Request, sign: int) -> None:
        self.entries.append((sign * next(self.serial), request))

    def order(self) -> list[Request]:
        def rank(entry: tuple[int, Request]) -> tuple[float, ...]:
            serial, request = entry
            return (request.priority, request.arrival_time, serial) if self.by_priority else (serial,)

        return [request for _, request in sorted(self.entries, key=rank)]

    def remove(self, request: Request) -> None:
        self.entries = [entry for entry in self.entries if entry[1] is not request]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "add", "put_back", "pop", "remove"]), st.integers(-1, 1), st.integers(0, 2)
        ),
        max_size=40,
    )
)
def test_equals_a_sorted_list(policy: str, calls: list[tuple[str, int, int]]) -> None:
    queue, model = QUEUES[policy](), Model(policy)
    # few ids, so that removed ones are added again
    free_ids = list("abcdefgh")
    for what, priority, number in calls:
        order = model.order()
        if what in ("add", "put_back") and free_ids:
            request = make(free_ids.pop(number % len(free_ids)), priority, float(number))
            getattr(queue, what)(request)
            model.add(request, 1 if what == "add" else -1)
        elif what in ("pop", "remove") and order:
            request = order[0] if what == "pop" else order[number % len(order)]
            if what == "pop":
                assert pop(queue) is request
            else:
                queue.remove(request)
            model.remove(request)
            free_ids.append(request.request_id)
        order = model.order()
        assert len(queue) == len(order)
        assert set(map(id, queue)) == set(map(id, order))
        if order:
            assert head(queue) is order[0]
    assert [pop(queue) for _ in range(len(queue))] == model.order()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_further_sequences_can_be_passed_over(policy: str) -> None:
    queue = QUEUES[policy]()
    for name in "abc":
        request = make(name)
        request.is_further = name != "c"
        queue.add(request)
    assert head(queue).request_id == "a"
    passing = queue.next(passes_further=True)
    assert passing is not None and passing.request_id == "c"
    queue.remove(passing)
    assert queue.next(passes_further=True) is None
    assert ids(queue) == "ab"
