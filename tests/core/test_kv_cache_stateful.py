"""Random traffic over a tiny KV cache: blocks have the contents that their readers would have written."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from ascend_vllm.core.kv.manager import NULL_BLOCK, KVCacheManager, NoFreeBlocksError
from ascend_vllm.core.request import Request
from ascend_vllm.types.step import MoveKind
from tests.core.kv_cache_requests import Keys, append, make_request

COPY, SWAP_OUT, SWAP_IN = MoveKind.COPY, MoveKind.SWAP_OUT, MoveKind.SWAP_IN

# action → relative frequency
WEIGHTS = {
    "step": 5,
    "arrive": 3,
    "admit": 1,
    "fork": 2,
    "share": 2,
    "swap_out": 1,
    "swap_in": 2,
    "preempt": 1,
    "end": 2,
    "reset": 1,
}
ACTIONS = [action for action, weight in WEIGHTS.items() for _ in range(weight)]


class KVCacheMachine(RuleBasedStateMachine):
    """Does what a scheduler does, in any order, with a cache that records what was written where.

    Each position of a block has a hash of all tokens and content keys up to it, on which KV depends. Moves are
    carried out when the next step computes, as workers do.
    """

    manager: KVCacheManager

    @initialize(
        num_blocks=st.integers(2, 14),
        block_size=st.sampled_from([1, 2, 4]),
        num_cpu_blocks=st.integers(0, 8),
        caching=st.booleans(),
        window=st.none() | st.integers(1, 9),
    )
    def start(self, num_blocks: int, block_size: int, num_cpu_blocks: int, caching: bool, window: int | None) -> None:
        self.manager = KVCacheManager(
            num_blocks,
            block_size,
            num_cpu_blocks=num_cpu_blocks,
            enable_prefix_caching=caching,
            sliding_window=window,
        )
        self.block_size, self.window = block_size, window
        self.device: list[list[int]] = [[0] * block_size for _ in range(num_blocks)]
        self.cpu: list[list[int]] = [[0] * block_size for _ in range(num_cpu_blocks)]
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.swapped: list[Request] = []
        self.num_made = 0

    def make(self, token_ids: list[int], keys: Keys) -> Request:
        self.num_made += 1
        return make_request(f"r{self.num_made}", token_ids, keys)

    def kv(self, request: Request, end: int) -> list[int]:
        """The expected contents of the first `end` positions: a number for all tokens and keys up to each."""
        values = []
        value = 0
        for position, token_id in enumerate(request.token_ids[:end]):
            keys = tuple(key for key in request.content_keys if key[0] == position)
            value = hash((value, token_id, keys))
            values.append(value)
        return values

    def carry_out_moves(self) -> None:
        stores = {
            COPY: (self.device, self.device),
            SWAP_OUT: (self.device, self.cpu),
            SWAP_IN: (self.cpu, self.device),
        }
        for kind, source, target in self.manager.take_moves():
            stores[MoveKind(kind)][1][target] = list(stores[MoveKind(kind)][0][source])

    def check_contents(self) -> None:
        """Checks that every request finds the KV that its next token attends to."""
        for request in [*self.running, *self.swapped]:
            store, table = (
                (self.device, request.block_ids) if request.block_ids else (self.cpu, request.cpu_block_ids)
            )
            end = request.num_computed_tokens
            values = self.kv(request, end)
            for position in range(0 if self.window is None else max(0, end - self.window + 1), end):
                block, offset = divmod(position, self.block_size)
                assert table[block] != NULL_BLOCK
                assert store[table[block]][offset] == values[position]

    @rule(data=st.data(), actions=st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=8))
    def act(self, data: st.DataObject, actions: list[str]) -> None:
        """One rule for all actions: of several rules Hypothesis omits some during a whole run."""
        for action in actions:
            getattr(self, action)(data)
            self.accounts_balance()

    def arrive(self, data: st.DataObject) -> None:
        """Adds a request; prompts are equal except for at most one token."""
        token_ids = [position % 3 for position in range(data.draw(st.integers(1, 16)))]
        other = data.draw(st.none() | st.integers(0, len(token_ids) - 1))
        if other is not None:
            token_ids[other] = 3
        key = data.draw(st.sampled_from([None, None, None, 0, 3, 8]))
        self.waiting.append(self.make(token_ids, [] if key is None else [(key, "image")]))
        self.admit(data)

    def admit(self, data: st.DataObject) -> None:
        if not self.waiting:
            return
        request = data.draw(st.sampled_from(self.waiting))
        num_reserved = data.draw(st.integers(0, 2))
        manager = self.manager
        shared = manager.find_cached_blocks(request)
        assert manager.find_cached_blocks(request) == shared
        assert len(shared) * self.block_size < request.num_tokens
        num_needed = -(-request.num_tokens // self.block_size)
        num_costly = num_needed - sum(manager.pool.reference_counts[block_id] > 0 for block_id in shared)
        num_free = manager.pool.num_free
        block_ids = manager.allocate_slots(request, request.num_tokens, num_reserved, shared)
        if num_costly + num_reserved > num_free:
            assert (block_ids, request.block_ids, manager.pool.num_free) == (None, [], num_free)
            return
        assert block_ids == request.block_ids
        assert len(block_ids) == num_needed
        assert manager.pool.num_free == num_free - num_costly
        request.num_computed_tokens = len(shared) * self.block_size
        self.waiting.remove(request)
        self.running.append(request)
        self.carry_out_moves()
        self.check_contents()

    def step(self, data: st.DataObject) -> None:
        """Some or all running requests compute some or all tokens that they miss."""
        if not self.running:
            return
        rows = self.running
        cut = data.draw(st.booleans())
        if cut:
            rows = data.draw(st.lists(st.sampled_from(self.running), unique=True, min_size=1))
        scheduled = []
        for request in rows:
            self.manager.free_out_of_window(request)
            start = request.num_computed_tokens
            count = data.draw(st.integers(1, request.num_tokens - start)) if cut else request.num_tokens - start
            if self.manager.allocate_slots(request, start + count) is None:
                continue
            before = list(request.block_ids)
            try:
                replaced = self.manager.make_writable(request, start // self.manager.block_size)
            except NoFreeBlocksError:
                assert self.manager.pool.num_free == 0
                assert request.block_ids == before
                continue
            if replaced is not None:
                before[replaced[0]] = replaced[1]
            assert request.block_ids == before
            scheduled.append((request, count))
        self.carry_out_moves()
        self.check_contents()
        for request, count in scheduled:
            values = self.kv(request, request.num_computed_tokens + count)
            for position in range(request.num_computed_tokens, request.num_computed_tokens + count):
                block, offset = divmod(position, self.block_size)
                self.device[request.block_ids[block]][offset] = values[position]
            request.num_computed_tokens += count
            self.manager.cache_full_blocks(request, min(request.num_computed_tokens, request.num_tokens))
            if request.num_computed_tokens == request.num_tokens:
                append(request, data.draw(st.integers(0, 1)))
        self.check_contents()

    def fork(self, data: st.DataObject) -> None:
        if not self.running:
            return
        parent = data.draw(st.sampled_from(self.running))
        num_computed = max(0, parent.num_computed_tokens - data.draw(st.integers(0, 6)))
        extra = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=6))
        child = self.make([*parent.token_ids[:num_computed], *extra], parent.content_keys)
        if self.manager.fork(child, parent, num_computed, child.num_tokens):
            child.num_computed_tokens = num_computed
            self.running.append(child)
        else:
            assert child.block_ids == []

    def share(self, data: st.DataObject) -> None:
        # as in a beam search: all but the newest token is computed, and nothing is allocated ahead
        beams = [
            request
            for request in self.running
            if request.num_computed_tokens == request.num_tokens - 1
            and len(request.block_ids) <= request.num_computed_tokens // self.block_size + 1
        ]
        if not beams:
            return
        parent = data.draw(st.sampled_from(beams))
        num_computed = parent.num_computed_tokens
        token_id = data.draw(st.integers(0, 1))
        child = self.make([*parent.token_ids[:num_computed], token_id], parent.content_keys)
        self.manager.share_all(child, parent)
        child.num_computed_tokens = num_computed
        self.running.append(child)

    def swap_out(self, data: st.DataObject) -> None:
        if not self.running:
            return
        requests = data.draw(st.lists(st.sampled_from(self.running), unique=True, min_size=1))
        distinct = {block_id for request in requests for block_id in request.block_ids} - {NULL_BLOCK}
        num_free = self.manager.cpu_pool.num_free
        assert self.manager.can_swap_out(requests) == (len(distinct) <= num_free)
        if len(distinct) > num_free:
            return
        tables = [request.block_ids for request in requests]
        self.manager.swap_out(requests)
        assert self.manager.cpu_pool.num_free == num_free - len(distinct)
        for request, table in zip(requests, tables, strict=True):
            assert request.block_ids == []
            assert len(request.cpu_block_ids) == len(table)
            self.running.remove(request)
            self.swapped.append(request)

    def swap_in(self, data: st.DataObject) -> None:
        if not self.swapped:
            return
        num_extra = data.draw(st.integers(0, 2))
        requests = data.draw(st.lists(st.sampled_from(self.swapped), unique=True, min_size=1))
        distinct = {block_id for request in requests for block_id in request.cpu_block_ids} - {NULL_BLOCK}
        num_free = self.manager.pool.num_free
        done = self.manager.swap_in(requests, num_extra)
        assert done == (len(distinct) + num_extra <= num_free)
        assert self.manager.pool.num_free == num_free - len(distinct) * done
        for request in requests if done else []:
            self.swapped.remove(request)
            self.running.append(request)

    def preempt(self, data: st.DataObject) -> None:
        if not self.running:
            return
        request = data.draw(st.sampled_from(self.running))
        self.manager.free(request)
        request.num_computed_tokens = 0
        self.running.remove(request)
        self.waiting.append(request)

    def end(self, data: st.DataObject) -> None:
        if not self.running and not self.swapped:
            return
        request = data.draw(st.sampled_from([*self.running, *self.swapped]))
        self.manager.free(request)
        assert (request.block_ids, request.cpu_block_ids) == ([], [])
        (self.running if request in self.running else self.swapped).remove(request)

    def reset(self, data: st.DataObject) -> None:
        if data.draw(st.integers(0, 2)):
            return
        self.manager.reset_prefix_cache()
        assert len(self.manager.pool.ids_by_hash) == 0

    def accounts_balance(self) -> None:
        assert self.manager.violations([*self.waiting, *self.running, *self.swapped]) == []

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.carry_out_moves()
        self.check_contents()
        for request in [*self.running, *self.swapped]:
            self.manager.free(request)
        assert self.manager.pool.num_free == self.manager.pool.num_blocks
        assert self.manager.cpu_pool.num_free == self.manager.cpu_pool.num_blocks
        assert self.manager.violations([]) == []


TestKVCacheMachine = KVCacheMachine.TestCase
TestKVCacheMachine.settings = settings(
    max_examples=150, stateful_step_count=12, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
