"""The choice of an engine core for each request."""

from __future__ import annotations

import itertools

from ascend_vllm.engine.request_router import RequestRouter
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.messages import BeamSearchSpec, EngineCoreRequest, SchedulerStats

BLOCK_SIZE = 4
_serial = itertools.count()


def make_request(token_ids: list[int] | None = None, **fields: object) -> EngineCoreRequest:
    """A request of its own id; without tokens one whose prompt nobody else has."""
    serial = next(_serial)
    prompt = [10_000 + serial] * 9 if token_ids is None else token_ids
    return EngineCoreRequest(f"r{serial}", prompt, SamplingParams(), None, 0.0, **fields)


def make_router(num_engines: int = 2, *, by_prefix: bool = False) -> RequestRouter:
    return RequestRouter(num_engines, BLOCK_SIZE, by_prefix=by_prefix)


def test_the_least_loaded_gets_it_and_equals_take_turns() -> None:
    router = make_router(3)
    requests = [make_request() for _ in range(9)]
    chosen = [router.route(request) for request in requests]
    assert [chosen.count(number) for number in range(3)] == [3, 3, 3]
    ended = [request for request, number in zip(requests, chosen, strict=True) if number == 1]
    for request in ended:
        router.release(request.request_id)
        router.release(request.request_id)
    assert [engine.num_sequences for engine in router._engines] == [3, 0, 3]
    assert [router.route(make_request()) for _ in range(3)] == [1, 1, 1]
    # one at a time, each of them to another engine
    router = make_router(3)
    turns = []
    for _ in range(3):
        request = make_request()
        turns.append(router.route(request))
        router.release(request.request_id)
    assert sorted(turns) == [0, 1, 2]


def test_sequences_of_a_request_stay_together() -> None:
    router = make_router()
    first = make_request()
    number = router.route(first)
    assert [router.route(make_request(parent_id=first.request_id)) for _ in range(4)] == [number] * 4
    # they count as five, as a search of width five does in the other engine
    assert router.route(make_request(beam_search=BeamSearchSpec(5, 1))) == 1 - number
    assert sorted(router.route(make_request()) for _ in range(2)) == [0, 1]


def test_a_queue_that_waits_for_blocks_counts_more() -> None:
    router = make_router()
    for _ in range(8):
        router.route(make_request())
    router.take_stats(0, SchedulerStats(2, 2, kv_cache_usage=0.5, num_preemptions=0))
    assert sorted(router.route(make_request()) for _ in range(2)) == [0, 1]
    # two that wait count for six more with a full cache
    router.take_stats(0, SchedulerStats(2, 2, kv_cache_usage=1.0, num_preemptions=0))
    assert [router.route(make_request()) for _ in range(6)] == [1] * 6
    assert {router.route(make_request()), router.route(make_request())} == {0, 1}


class Loads:
    """Adds load to given engines, in addition to the requests that the router places.

    Args:
        router: of two engines that have nothing.
    """

    def __init__(self, router: RequestRouter) -> None:
        self._router = router
        # one request in each engine, whose further sequences must follow it
        anchors = [make_request([1]) for _ in range(2)]
        self._anchors = {router.route(anchor): anchor for anchor in anchors}
        self._further: list[EngineCoreRequest] = []

    def put(self, number: int, count: int) -> None:
        for _ in range(count):
            request = make_request([1], parent_id=self._anchors[number].request_id)
            assert self._router.route(request) == number
            self._further.append(request)

    def clear(self) -> None:
        for request in self._further:
            self._router.release(request.request_id)
        self._further.clear()

    def place(self, prompt: list[int], **fields: object) -> int:
        """Where a request would go."""
        request = make_request(prompt, **fields)
        number = self._router.route(request)
        self._router.release(request.request_id)
        return number


PREFIX = list(range(1, 17))


def test_the_same_beginning_goes_to_the_same_engine_until_it_is_clearly_more_loaded() -> None:
    router = make_router(by_prefix=True)
    loads = Loads(router)
    home = loads.place([*PREFIX, 90])
    loads.put(home, 3)
    # four full blocks, all of them known: worth four sequences
    assert [loads.place([*PREFIX, last]) for last in (91, 92)] == [home] * 2
    # others do not know it, and go where there is room
    assert loads.place([5] * 17) == 1 - home
    loads.put(home, 2)
    assert loads.place([*PREFIX, 93]) == 1 - home
    # now both have it, and the load decides
    assert loads.place([*PREFIX, 94]) == 1 - home
    loads.put(1 - home, 6)
    assert loads.place([*PREFIX, 95]) == home
    # where there is much to do, a quarter of that is not much
    loads.clear()
    router.forget_prefixes()
    home = loads.place([*PREFIX, 90])
    loads.put(home, 48)
    loads.put(1 - home, 39)
    assert loads.place([*PREFIX, 96]) == home
    loads.put(home, 2)
    assert loads.place([*PREFIX, 97]) == 1 - home


def test_a_longer_known_part_wins() -> None:
    loads = Loads(make_router(by_prefix=True))
    first = loads.place([*PREFIX[:8], 50])
    loads.put(first, 5)
    second = loads.place([*PREFIX, 51])
    assert second == 1 - first
    # two blocks of four are worth two sequences less than four
    loads.clear()
    loads.put(second, 1)
    assert loads.place([*PREFIX, 52]) == second
    # and only full blocks count
    assert loads.place(PREFIX[:3]) == first


def test_what_an_engine_has_is_forgotten() -> None:
    router = make_router(by_prefix=True)
    loads = Loads(router)
    router.set_capacities([4, 4])

    def settle() -> int:
        loads.clear()
        router.forget_prefixes()
        home = loads.place([*PREFIX, 5])
        loads.put(home, 2)
        return home

    home = settle()
    assert loads.place([*PREFIX, 7]) == home
    router.forget_prefixes()
    assert loads.place([*PREFIX, 7]) == 1 - home
    # another salt makes other blocks
    home = settle()
    assert loads.place([*PREFIX, 7], content_keys=[(0, "salt:a")]) == 1 - home
    # it can hold four blocks: the beginning stays the longest
    home = settle()
    loads.put(1 - home, 6)
    assert loads.place([5] * 9) == home
    loads.clear()
    loads.put(home, 1)
    assert loads.place([*PREFIX[:8], 7]) == home
    loads.put(home, 3)
    assert loads.place([*PREFIX, 7]) == 1 - home
    home = settle()
    loads.put(1 - home, 6)
    assert loads.place([5] * 17) == home
    loads.clear()
    loads.put(home, 1)
    assert loads.place([*PREFIX, 7]) == 1 - home


def test_without_caches_beginnings_do_not_matter() -> None:
    router = make_router()
    assert sorted(router.route(make_request([1] * 20)) for _ in range(2)) == [0, 1]
    # nor where there is no choice
    alone = RequestRouter(1, BLOCK_SIZE, by_prefix=True)
    assert {alone.route(make_request()) for _ in range(3)} == {0}
