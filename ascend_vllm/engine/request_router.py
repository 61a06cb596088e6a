"""Which engine core a request goes to."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

from ascend_vllm.types.messages import EngineCoreRequest, SchedulerStats

# A prompt's first so many blocks are looked at; the rest of a longer one hardly changes where it should go.
_MAX_PREFIX_BLOCKS = 256
# hashes that are remembered of an engine whose size is not known yet, and of one with more blocks than that
_MAX_HASHES = 1 << 16
# what a whole prompt in an engine's cache is worth: so many sequences, or this share of those of the idlest engine
_PREFIX_WORTH = 4.0
_PREFIX_WORTH_SHARE = 0.25


class _Engine:
    """What is known of one engine.

    Attributes:
        num_sequences: of requests that were sent to it and have not ended.
        penalty: sequences that its queue counts for in addition, because its KV cache is nearly full.
        capacity: most hashes that are remembered: of the blocks that its cache can hold.
    """

    def __init__(self) -> None:
        self.num_sequences = 0
        self.penalty = 0.0
        self.capacity = _MAX_HASHES
        # of the prompts' blocks that it was given, the one used longest ago first
        self._prefixes: collections.OrderedDict[int, None] = collections.OrderedDict()

    @property
    def load(self) -> float:
        return self.num_sequences + self.penalty

    def count_known(self, hashes: Sequence[int]) -> int:
        """How many of a prompt's blocks, from the first on, it was given before."""
        for index, prefix_hash in enumerate(hashes):
            if prefix_hash not in self._prefixes:
                return index
        return len(hashes)

    def remember(self, hashes: Sequence[int]) -> None:
        # the first block last: without it the others are of no use, so that it must go after them
        for prefix_hash in reversed(hashes):
            self._prefixes[prefix_hash] = None
            self._prefixes.move_to_end(prefix_hash)
        while len(self._prefixes) > self.capacity:
            self._prefixes.popitem(last=False)

    def forget(self) -> None:
        self._prefixes.clear()


class RequestRouter:
    """Chooses the engine core of each request, and knows which one has it.

    The least loaded engine gets it. The load is the number of sequences that were sent to the engine and have not
    ended; a beam search counts as many as its width. An engine whose queue waits for KV blocks drains slowly: beyond
    half a full cache each waiting sequence counts more, up to four times with a full one (vLLM's weight). Among
    equals they take turns.

    With prefix caching an engine that lately got the same first blocks of the prompt counts as less loaded: by four
    sequences, or a quarter of the least load if that is more, times the share of the prompt's full blocks that it
    got. So requests with one beginning meet in one engine until it is clearly more loaded than another; from then on
    both have the beginning, and the load alone decides between them.

    The sequences of one request always go where the first of them is.

    Args:
        num_engines: engine cores.
        block_size: tokens of a KV block.
        by_prefix: engines have prefix caches.

    Example::

        router = RequestRouter(2, block_size=32, by_prefix=True)
        engine = router.route(request)
        ...
        router.release(request.request_id)
    """

    def __init__(self, num_engines: int, block_size: int, *, by_prefix: bool) -> None:
        self._engines = [_Engine() for _ in range(num_engines)]
        self._block_size = block_size
        # one engine needs no choice
        self._by_prefix = by_prefix and num_engines > 1
        # request id → its engine and the number of its sequences
        self._routes: dict[str, tuple[int, int]] = {}
        # the engine that is first among equals
        self._turn = 0

    def set_capacities(self, num_blocks: Iterable[int]) -> None:
        """Says how many KV blocks each engine has, which limits what it can remember of prompts."""
        for engine, count in zip(self._engines, num_blocks, strict=True):
            engine.capacity = min(count, _MAX_HASHES)

    def route(self, request: EngineCoreRequest) -> int:
        """The number of the engine that is to get a request; it has it from now on."""
        width = 1 if request.beam_search is None else request.beam_search.width
        # the first sequence is known as long as another one of its request is still to be sent
        parent = self._routes.get(request.parent_id) if request.parent_id is not None else None
        number = self._choose(request) if parent is None else parent[0]
        self._routes[request.request_id] = number, width
        self._engines[number].num_sequences += width
        return number

    def release(self, request_id: str) -> None:
        """Takes notice of a request's end; that of an unknown one is ignored."""
        number, width = self._routes.pop(request_id, (0, 0))
        self._engines[number].num_sequences -= width

    def is_idle(self, number: int) -> bool:
        """Whether an engine has no request."""
        return self._engines[number].num_sequences == 0

    def take_stats(self, number: int, stats: SchedulerStats) -> None:
        """Takes the state of an engine's scheduler after a step."""
        pressure = max(0.0, stats.kv_cache_usage - 0.5)
        self._engines[number].penalty = stats.num_waiting * 6.0 * pressure

    def forget_prefixes(self) -> None:
        """Takes notice that the engines' prefix caches are empty."""
        for engine in self._engines:
            engine.forget()

    def _choose(self, request: EngineCoreRequest) -> int:
        count = len(self._engines)
        if count == 1:
            return 0
        hashes = self._hash_prefixes(request) if self._by_prefix else []
        loads = [0.0 if self.is_idle(number) else engine.load for number, engine in enumerate(self._engines)]
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
        """A hash for each of the prompt's first full blocks, of it and all before it.

        Two contents with one hash would only be sent to the same engine, so that Python's own hash is good enough.
        """
        token_ids, size = request.prompt_token_ids, self._block_size
        parent = hash(tuple(map(tuple, request.content_keys)))
        hashes = []
        for end in range(size, min(len(token_ids), size * _MAX_PREFIX_BLOCKS) + 1, size):
            parent = hash((parent, *token_ids[end - size : end]))
            hashes.append(parent)
        return hashes
