"""Which KV blocks a request gets, which it shares with others, and where they are.

Blocks are shared in three ways: a request finds its first blocks in the prefix cache, forks another request with the
same prompt, or is a beam that continues another beam. Only blocks with a reference count of 1 are written (copy on
write): full blocks are never written again, and a partial one is copied first, by `fork` or `make_writable`.

Copies are recorded as moves, which the workers carry out in that order at the start of the next step. So whatever is
copied or shared must have been computed by steps handed out *before* that one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ascend_vllm.core.kv.block_hash import extend_block_hashes
from ascend_vllm.core.kv.block_pool import BlockPool
from ascend_vllm.core.request import Request
from ascend_vllm.types.step import MoveKind

# stands in a block table for a block that left the sliding window and was freed
NULL_BLOCK = -1

# Share of the blocks that admission leaves free for the growth of running requests (vLLM 0.6.3's value).
_WATERMARK = 0.01


class NoFreeBlocksError(RuntimeError):
    """A shared block must be copied before it is written, and no block is free for the copy."""


class KVCacheManager:
    """Gives requests the blocks for their tokens.

    Args:
        num_blocks: blocks of the cache.
        block_size: tokens of a block.
        num_cpu_blocks: blocks of the pool in CPU memory for swapped requests.
        enable_prefix_caching: full blocks can be found by their contents, also after they have been freed.
        sliding_window: tokens that a token attends to, itself included; None: all. Older blocks can be freed.

    Attributes:
        pool: the blocks of the cache.
        cpu_pool: those in CPU memory.
        num_prefix_queries: tokens looked up in the prefix cache, since the start.
        num_prefix_hits: those of them that were found.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_cpu_blocks: int = 0,
        enable_prefix_caching: bool = False,
        sliding_window: int | None = None,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self.cpu_pool = BlockPool(num_cpu_blocks)
        self.watermark_blocks = int(_WATERMARK * num_blocks)
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self.sliding_window = sliding_window
        self._moves: list[tuple[int, int, int]] = []

    @property
    def num_tokens(self) -> int:
        """Tokens for which the whole cache has room."""
        return self.pool.num_blocks * self.block_size

    # ---- allocating and freeing ----------------------------------------------------------------------------

    def allocate_slots(
        self, request: Request, num_tokens: int, num_reserved_blocks: int = 0, shared: Sequence[int] = ()
    ) -> list[int] | None:
        """Allocates the blocks that a request's first `num_tokens` tokens need beyond those it has.

        Args:
            request: its `block_ids` grow.
            num_tokens: tokens to have room for, from the sequence's start.
            num_reserved_blocks: blocks that must stay free.
            shared: result of `find_cached_blocks` for a request without blocks: its first blocks from now on.

        Returns:
            The new blocks, shared ones included; [] if it has enough; None if too few are free: then nothing has
            changed.

        Raises:
            ValueError: `shared` is given for a request that has blocks.
        """
        if shared:
            return self._allocate_behind(request, num_tokens, num_reserved_blocks, shared)
        num_missing = -(-num_tokens // self.block_size) - len(request.block_ids)
        if num_missing <= 0:
            return []
        if num_missing + num_reserved_blocks > self.pool.num_free:
            return None
        block_ids = self.pool.allocate(num_missing)
        request.block_ids += block_ids
        return block_ids

    def _allocate_behind(
        self, request: Request, num_tokens: int, num_reserved_blocks: int, shared: Sequence[int]
    ) -> list[int] | None:
        """`allocate_slots` with cached blocks before the new ones."""
        _check_holds_nothing(request)
        pool = self.pool
        num_missing = max(0, -(-num_tokens // self.block_size) - len(shared))
        # cached blocks without references are counted as free
        num_taken = num_missing + sum(pool.reference_counts[block_id] == 0 for block_id in shared)
        if num_taken + num_reserved_blocks > pool.num_free:
            return None
        pool.retain(shared)
        request.block_ids = [*shared, *pool.allocate(num_missing)]
        request.num_cached_blocks = len(shared)
        return request.block_ids.copy()

    def free(self, request: Request) -> None:
        """Frees all blocks of a request, on the device or in CPU memory, if it has any.

        Those in the prefix cache can be found until they are allocated again.
        """
        block_ids, request.block_ids = request.block_ids, []
        self.pool.release(self._held(block_ids))
        if request.cpu_block_ids:
            block_ids, request.cpu_block_ids = request.cpu_block_ids, []
            self.cpu_pool.release(self._held(block_ids))
        request.num_cached_blocks = 0

    def free_out_of_window(self, request: Request) -> None:
        """Frees the blocks that no token from position `num_computed_tokens` on attends to.

        NULL_BLOCK replaces them. Call it before the step's tokens are added to `num_computed_tokens`: they attend to
        earlier positions than the tokens after them.
        """
        window = self.sliding_window
        if window is None:
            return
        # the oldest position attended to is num_computed_tokens - window + 1
        end = (request.num_computed_tokens - window + 1) // self.block_size
        block_ids = request.block_ids
        # freed blocks come first in the table: if the last one in question is freed, all of them are
        if end <= 0 or not block_ids or block_ids[min(end, len(block_ids)) - 1] == NULL_BLOCK:
            return
        end = min(end, len(block_ids))
        first = _num_null(block_ids, end)
        self.pool.release(block_ids[first:end])
        block_ids[first:end] = [NULL_BLOCK] * (end - first)

    # ---- the prefix cache ----------------------------------------------------------------------------------

    def find_cached_blocks(self, request: Request) -> list[int]:
        """The longest chain of cached full blocks with a request's first tokens.

        At least one token is left to compute, since its logits are sampled from. Only the request's list of hashes
        is changed: called again, it costs one look-up per block found.
        """
        if not self.enable_prefix_caching:
            return []
        num_blocks = (request.num_tokens - 1) // self.block_size
        self._extend_hashes(request, num_blocks)
        return self.pool.find(request.block_hashes[:num_blocks])

    def cache_full_blocks(self, request: Request, num_tokens: int) -> None:
        """Enters the blocks that the first `num_tokens` tokens fill into the prefix cache.

        Args:
            request: whose blocks they are.
            num_tokens: tokens that are known and whose KV is computed, by the step being made at the latest: the
                request must not be preempted out of that step afterwards.
        """
        num_full = num_tokens // self.block_size
        first = request.num_cached_blocks
        if num_full <= first or not self.enable_prefix_caching:
            return
        self._extend_hashes(request, num_full)
        for index in range(first, num_full):
            block_id = request.block_ids[index]
            if block_id != NULL_BLOCK:
                self.pool.cache(block_id, request.block_hashes[index])
        request.num_cached_blocks = num_full

    def count_lookup(self, num_tokens: int, num_hit_tokens: int) -> None:
        """Counts the tokens looked up at an admission, and those that were found."""
        self.num_prefix_queries += num_tokens
        self.num_prefix_hits += num_hit_tokens

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache. Blocks in use stay in use, but cannot be found any more."""
        self.pool.uncache_all()

    def _extend_hashes(self, request: Request, num_blocks: int) -> None:
        if len(request.block_hashes) < num_blocks:
            extend_block_hashes(
                request.block_hashes, num_blocks, request.token_ids, request.content_keys, self.block_size
            )

    # ---- copy-on-write -------------------------------------------------------------------------------------

    def can_fork(self, parent: Request, num_computed: int) -> bool:
        """Whether a request still has all KV that a token at position `num_computed` attends to."""
        block_ids = parent.block_ids
        if num_computed > len(block_ids) * self.block_size:
            return False
        window = self.sliding_window
        if window is None or num_computed == 0:
            return True
        oldest = max(0, num_computed - window + 1) // self.block_size
        return oldest >= len(block_ids) or block_ids[oldest] != NULL_BLOCK

    def fork(
        self, request: Request, parent: Request, num_computed: int, num_tokens: int, num_reserved_blocks: int = 0
    ) -> bool:
        """Gives a request without blocks those of another one with the same first tokens.

        Full blocks are shared; a partial last one is copied. Steps already handed out must compute the parent's KV
        of these tokens.

        Args:
            request: its `block_ids` are set; the caller sets `num_computed_tokens`.
            parent: whose blocks are shared.
            num_computed: tokens whose KV to share.
            num_tokens: tokens to have room for, from the sequence's start.
            num_reserved_blocks: blocks that must stay free.

        Returns:
            False if too few blocks are free or the parent does not have that KV (any more): then nothing has changed.

        Raises:
            ValueError: the request holds blocks.
        """
        _check_holds_nothing(request)
        num_full, num_partial = divmod(num_computed, self.block_size)
        num_new = max(-(-num_tokens // self.block_size), num_full + (num_partial > 0)) - num_full
        if num_new + num_reserved_blocks > self.pool.num_free or not self.can_fork(parent, num_computed):
            return False
        shared = parent.block_ids[:num_full]
        self.pool.retain(self._held(shared))
        new = self.pool.allocate(num_new)
        if num_partial:
            self._moves.append((MoveKind.COPY, parent.block_ids[num_full], new[0]))
        request.block_ids = shared + new
        _take_hashes(request, parent, num_full)
        return True

    def share_all(self, request: Request, parent: Request) -> None:
        """Shares all blocks of a request, a partial last one too, with a request that has none.

        `make_writable` must be called before either of them writes.

        Raises:
            ValueError: the request holds blocks.
        """
        _check_holds_nothing(request)
        self.pool.retain(self._held(parent.block_ids))
        request.block_ids = parent.block_ids.copy()
        _take_hashes(request, parent, len(parent.block_ids))

    def make_writable(self, request: Request, index: int) -> tuple[int, int] | None:
        """Replaces a shared block by a copy that only this request holds (copy on write).

        Args:
            request: about to write the block.
            index: in `block_ids`; if the request has no block there yet, there is nothing to do.

        Returns:
            (index, new block) of a replaced block, whose contents the next step copies; None if it was not shared.

        Raises:
            NoFreeBlocksError: none is free for the copy; nothing has changed.
        """
        if index >= len(request.block_ids):
            return None
        pool = self.pool
        block_id = request.block_ids[index]
        if block_id == NULL_BLOCK:
            return None
        if pool.reference_counts[block_id] == 1:
            if self.pool.hashes[block_id] is not None:
                # a former sharer has filled and cached it
                self.pool.uncache(block_id)
                request.num_cached_blocks = min(request.num_cached_blocks, index)
            return None
        if pool.num_free == 0:
            raise NoFreeBlocksError(
                f"request {request.request_id} shares block {block_id} and none is free for a copy"
            )
        new_id = pool.allocate(1)[0]
        self._moves.append((MoveKind.COPY, block_id, new_id))
        pool.release((block_id,))
        request.block_ids[index] = new_id
        request.num_cached_blocks = min(request.num_cached_blocks, index)
        return index, new_id

    def take_moves(self) -> list[tuple[int, int, int]]:
        """The moves since the last call, which precede the next step, in order: (MoveKind, source, target)."""
        moves, self._moves = self._moves, []
        return moves

    # ---- swapping ------------------------------------------------------------------------------------------

    def can_swap_out(self, requests: Sequence[Request]) -> bool:
        """Whether the CPU pool has room for all blocks of these requests, each counted once."""
        return len(self._distinct([request.block_ids for request in requests])) <= self.cpu_pool.num_free

    def swap_out(self, requests: Sequence[Request]) -> None:
        """Moves requests to CPU memory together: blocks they share are copied once and stay shared.

        `cpu_block_ids` replace their `block_ids`. Their cached blocks on the device can still be found.

        Raises:
            ValueError: too few CPU blocks are free, or a request is swapped out already; nothing has changed.
        """
        if any(request.cpu_block_ids for request in requests):
            raise ValueError("a request is swapped out already")
        tables = [request.block_ids for request in requests]
        for request, table in zip(requests, self._move(MoveKind.SWAP_OUT, tables), strict=True):
            request.block_ids, request.cpu_block_ids = [], table

    def swap_in(self, requests: Sequence[Request], num_extra_blocks: int) -> bool:
        """Moves requests back to the device together; shared blocks stay shared.

        The blocks are not in the prefix cache; `cache_full_blocks` will enter them again.

        Args:
            requests: swapped ones.
            num_extra_blocks: blocks that must stay free.

        Returns:
            False if too few are free: then nothing has changed.

        Raises:
            ValueError: a request holds blocks on the device.
        """
        if any(request.block_ids for request in requests):
            raise ValueError("a request is on the device already")
        tables = [request.cpu_block_ids for request in requests]
        if len(self._distinct(tables)) + num_extra_blocks > self.pool.num_free:
            return False
        for request, table in zip(requests, self._move(MoveKind.SWAP_IN, tables), strict=True):
            request.block_ids, request.cpu_block_ids = table, []
            request.num_cached_blocks = 0
        return True

    def _move(self, kind: MoveKind, tables: Sequence[Sequence[int]]) -> list[list[int]]:
        """Moves blocks to the other pool, each once; returns the tables with the blocks there.

        Raises:
            ValueError: too few are free there; nothing has changed.
        """
        source, target = (self.pool, self.cpu_pool) if kind is MoveKind.SWAP_OUT else (self.cpu_pool, self.pool)
        distinct = self._distinct(tables)
        moved = dict(zip(distinct, target.allocate(len(distinct)), strict=True))
        self._moves += [(kind, block_id, new_id) for block_id, new_id in moved.items()]
        new_tables = []
        for table in tables:
            held = self._held(table)
            new_held = [moved[block_id] for block_id in held]
            target.retain(new_held)
            source.release(held)
            new_tables.append([NULL_BLOCK] * (len(table) - len(held)) + new_held)
        # the reference that allocate() gave
        target.release(list(moved.values()))
        return new_tables

    def _distinct(self, tables: Iterable[Sequence[int]]) -> list[int]:
        """The blocks of all tables without repetitions, in the order of their first occurrence."""
        return list(dict.fromkeys(block_id for table in tables for block_id in self._held(table)))

    def _held(self, block_ids: Sequence[int]) -> Sequence[int]:
        """A block table without its NULL_BLOCKs, which come first."""
        return block_ids if self.sliding_window is None else block_ids[_num_null(block_ids, len(block_ids)) :]

    # ---- audit ---------------------------------------------------------------------------------------------

    def violations(self, requests: Iterable[Request], *, copies_pending: bool = True) -> list[str]:
        """Inconsistencies of blocks, tables and hashes, a sentence each.

        Args:
            requests: all that have blocks, and any others.
            copies_pending: whether the partial block that its owners write next may be shared, since
                `make_writable` has not been called yet. False: no block that will be written may be shared.
        """
        requests = list(requests)
        wrong = self.pool.violations([_without_null(request.block_ids) for request in requests])
        on_cpu = self.cpu_pool.violations([_without_null(request.cpu_block_ids) for request in requests])
        wrong += [f"CPU pool: {sentence}" for sentence in on_cpu]
        for request in requests:
            wrong += self._table_violations(request)
            wrong += self._writing_violations(request, copies_pending)
            if self.enable_prefix_caching:
                wrong += self._hash_violations(request)
        return wrong

    def _table_violations(self, request: Request) -> list[str]:
        """Every computed token that can still be attended to has a block."""
        who = f"request {request.request_id}"
        wrong = []
        if request.block_ids and request.cpu_block_ids:
            wrong.append(f"{who} holds blocks both on the device and in CPU memory")
        table = request.block_ids or request.cpu_block_ids
        if request.num_computed_tokens > len(table) * self.block_size:
            computed = request.num_computed_tokens
            wrong.append(f"{who} has {computed} computed tokens in {len(table)} blocks of {self.block_size}")
        num_null = len(table) - len(_without_null(table))
        if num_null != _num_null(table, len(table)):
            wrong.append(f"{who} has given back a block behind one that it holds")
        window = self.sliding_window
        num_invisible = 0 if window is None else max(0, request.num_computed_tokens - window + 1)
        if num_null * self.block_size > num_invisible:
            wrong.append(f"{who} has given back {num_null} blocks of which it still sees some")
        return wrong

    def _writing_violations(self, request: Request, copies_pending: bool) -> list[str]:
        """Partial blocks are neither shared nor cached."""
        wrong = []
        num_full = min(request.num_computed_tokens, request.num_tokens) // self.block_size
        next_index = request.num_computed_tokens // self.block_size if copies_pending else -1
        for index, block_id in enumerate(request.block_ids[num_full:], num_full):
            if block_id == NULL_BLOCK:
                continue
            what = f"block {block_id}, which request {request.request_id} writes, is"
            if self.pool.hashes[block_id] is not None:
                wrong.append(f"{what} in the prefix cache")
            if self.pool.reference_counts[block_id] > 1 and index != next_index:
                wrong.append(f"{what} shared")
        return wrong

    def _hash_violations(self, request: Request) -> list[str]:
        """Cached blocks have the hash of their owner's tokens, which is computed here from scratch."""
        hashes: list[bytes] = []
        num_full = min(len(request.block_ids), request.num_tokens // self.block_size)
        extend_block_hashes(hashes, num_full, request.token_ids, request.content_keys, self.block_size)
        wrong = [
            f"block {block_id} is cached under another hash than that of request {request.request_id}'s tokens"
            for block_id, block_hash in zip(request.block_ids, hashes, strict=False)
            if block_id != NULL_BLOCK and self.pool.hashes[block_id] not in (None, block_hash)
        ]
        if request.block_hashes[:num_full] != hashes[: len(request.block_hashes)]:
            wrong.append(f"request {request.request_id} has hashes of other tokens than its own")
        return wrong


def _check_holds_nothing(request: Request) -> None:
    if request.block_ids or request.cpu_block_ids:
        raise ValueError(f"request {request.request_id} holds blocks and cannot share others")


def _take_hashes(request: Request, parent: Request, max_blocks: int) -> None:
    """Copies the hashes of the parent's cached blocks; behind these the two may have different tokens."""
    num_cached = min(parent.num_cached_blocks, max_blocks)
    request.num_cached_blocks = num_cached
    request.block_hashes = parent.block_hashes[:num_cached]


def _num_null(block_ids: Sequence[int], end: int) -> int:
    """Number of NULL_BLOCKs among the first `end`; they come first. Takes O(blocks that are none)."""
    first = end
    while first > 0 and block_ids[first - 1] != NULL_BLOCK:
        first -= 1
    return first


def _without_null(block_ids: Sequence[int]) -> list[int]:
    return [block_id for block_id in block_ids if block_id != NULL_BLOCK]
