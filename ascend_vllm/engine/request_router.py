"""Chooses an engine core for each request."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

from ascend_vllm.engine.api_group import Count, SharedCounts
from ascend_vllm.types.messages import EngineCoreRequest, SchedulerStats

# only this many blocks of a prompt are hashed; a longer shared prefix would hardly change the choice
_MAX_PREFIX_BLOCKS = 256
# upper limit of hashes kept per engine, also used while the number of its KV blocks is unknown
_MAX_HASHES = 1 << 16
# load reduction for a fully cached prompt: so many sequences, or this share of the least engine's load if larger
_PREFIX_WORTH = 4.0
_PREFIX_WORTH_SHARE = 0.25


class _Engine:
    """The router's state of one engine.

    Attributes:
        num_sequences: unfinished sequences that were sent to it.
        penalty: sequences added to its load because requests wait and its KV cache is nearly full.
        capacity: most hashes that are kept: one for each KV block.
    """

    def __init__(self) -> None:
        self.num_sequences = 0
        self.penalty = 0.0
        self.capacity = _MAX_HASHES
        # hashes of the prompt blocks sent to it, least recently used first
        self._prefixes: collections.OrderedDict[int, None] = collections.OrderedDict()

    def load(self, num_others: int) -> float:
        """The load, with so many sequences of other API servers."""
        total = self.num_sequences + num_others
        return total + self.penalty if total else 0.0

    def count_known(self, hashes: Sequence[int]) -> int:
        """Length in blocks of the longest prefix that was sent to it before."""
        for index, prefix_hash in enumerate(hashes):
            if prefix_hash not in self._prefixes:
                return index
        return len(hashes)

    def remember(self, hashes: Sequence[int]) -> None:
        # in reverse, so that a prompt's first block is evicted last: the others are useless without it
        for prefix_hash in reversed(hashes):
            self._prefixes[prefix_hash] = None
            self._prefixes.move_to_end(prefix_hash)
        while len(self._prefixes) > self.capacity:
            self._prefixes.popitem(last=False)

    def forget(self) -> None:
        self._prefixes.clear()


class RequestRouter:
    """Chooses the engine core of each request, and records the choice.

    The least loaded engine is chosen, round-robin among equals. The load is the number of unfinished sequences that
    were sent to the engine; a beam search counts its width. An engine whose queue waits for KV blocks drains slowly:
    above half a full cache each waiting sequence counts more, up to four times with a full one (vLLM's weight).

    With prefix caching an engine that was recently sent a prefix of the prompt counts as less loaded: by four
    sequences, or a quarter of the least load if that is more, times the prefix's share of the prompt's full blocks.
    So requests with a common prefix go to one engine until it is clearly more loaded than another; from then on both
    have the prefix, and the load alone decides between them.

    All sequences of a request go to the same engine.

    Args:
        num_engines: engine cores.
        block_size: tokens of a KV block.
        by_prefix: engines have prefix caches.
        counts: of all API-server processes, so that the load includes what the others sent; each knows only the
            prefixes that it sent itself. None: there is one process.

    Example::

        router = RequestRouter(2, block_size=32, by_prefix=True)
        engine = router.route(request)
        ...
        router.release(request.request_id)
    """

    def __init__(
        self, num_engines: int, block_size: int, *, by_prefix: bool, counts: SharedCounts | None = None
    ) -> None:
        self._engines = [_Engine() for _ in range(num_engines)]
        self._block_size = block_size
        self._by_prefix = by_prefix
        self._counts = counts
        # request id → its engine and the number of its sequences
        self._routes: dict[str, tuple[int, int]] = {}
        # where round-robin among equals begins
        self._turn = 0

    def set_capacities(self, num_blocks: Iterable[int]) -> None:
        """Sets each engine's number of KV blocks, which limits the hashes kept for it."""
        for engine, count in zip(self._engines, num_blocks, strict=True):
            engine.capacity = min(count, _MAX_HASHES)

    def route(self, request: EngineCoreRequest) -> int:
        """Assigns a request to an engine, and returns the engine's rank."""
        width = 1 if request.beam_search is None else request.beam_search.width
        # a request's first sequence is not released before the others are routed
        parent = self._routes.get(request.parent_id) if request.parent_id is not None else None
        number = self._choose(request) if parent is None else parent[0]
        self._routes[request.request_id] = number, width
        self._change(number, width)
        return number

    def release(self, request_id: str) -> None:
        """Removes a request that has ended; unknown ids are ignored."""
        number, width = self._routes.pop(request_id, (0, 0))
        self._change(number, -width)

    def take_stats(self, number: int, stats: SchedulerStats) -> None:
        """Updates an engine's penalty from its scheduler's state after a step."""
        pressure = max(0.0, stats.kv_cache_usage - 0.5)
        self._engines[number].penalty = stats.num_waiting * 6.0 * pressure

    def forget_prefixes(self) -> None:
        """Clears the hashes, after the engines' prefix caches were cleared."""
        for engine in self._engines:
            engine.forget()

    def _change(self, number: int, width: int) -> None:
        engine = self._engines[number]
        engine.num_sequences += width
        if self._counts is not None:
            self._counts.publish(Count.ROUTED, engine.num_sequences, number)

    def _load(self, number: int) -> float:
        others = 0 if self._counts is None else self._counts.of_others(Count.ROUTED, number)
        return self._engines[number].load(others)

    def _choose(self, request: EngineCoreRequest) -> int:
        count = len(self._engines)
        hashes = self._hash_prefixes(request) if self._by_prefix else []
        loads = [self._load(number) for number in range(count)]
        worth = max(_PREFIX_WORTH, _PREFIX_WORTH_SHARE * min(loads)) / max(1, len(hashes))
        scores = [
            load - worth * engine.count_known(hashes) for load, engine in zip(loads, self._engines, strict=True)
        ]
        order = ((self._turn + offset) % count for offset in range(count))
        chosen = min(order, key=scores.__getitem__)
        self._turn = (self._turn + 1) % count
        self._engines[chosen].remember(hashes)
        return chosen

    def _hash_prefixes(self, request: EngineCoreRequest) -> list[int]:
        """Chained hashes of the prompt's first full blocks.

        A collision only affects the choice of an engine, so Python's own hash suffices.
        """
        token_ids, size = request.prompt_token_ids, self._block_size
        parent = hash(tuple(map(tuple, request.content_keys)))
        hashes = []
        for end in range(size, min(len(token_ids), size * _MAX_PREFIX_BLOCKS) + 1, size):
            parent = hash((parent, *token_ids[end - size : end]))
            hashes.append(parent)
        return hashes
