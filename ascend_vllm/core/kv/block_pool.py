"""The KV blocks: which are free, their reference counts, and the hashes of cached ones."""

from __future__ import annotations

import collections
from collections.abc import Sequence


class BlockPool:
    """Blocks 0 … num_blocks-1 with reference counts. Allocating and releasing take O(1) per block.

    A block may be *cached*: entered under the hash of its contents, so that another sequence can find it. It stays
    cached when its last reference is released, until it is allocated again. Free blocks are allocated in this order:

    1. those that are not cached. The one released last comes first: on a CPU its memory is the likeliest to be in
       the processor's cache.
    2. cached ones, the least recently used first. Of one sequence's blocks the last comes first, because a block is
       of use only together with those before it.

    Args:
        num_blocks: may be 0.

    Attributes:
        reference_counts: [num_blocks] sequences that hold each block.
        hashes: [num_blocks] hash under which a block is cached; None: it is not.
        ids_by_hash: cached blocks, free or not, by their hashes.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # free and not cached: a stack, initially with block 0 on top
        self._free = list(range(num_blocks - 1, -1, -1))
        # free and cached, least recently used first. An OrderedDict is a linked list: a plain dict takes
        # time proportional to the entries removed before the first one to find that.
        self._free_cached: collections.OrderedDict[int, None] = collections.OrderedDict()
        self.reference_counts = [0] * num_blocks
        self.hashes: list[bytes | None] = [None] * num_blocks
        self.ids_by_hash: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks without references, cached or not."""
        return len(self._free) + len(self._free_cached)

    @property
    def usage(self) -> float:
        """Fraction of blocks that are not free, 0 … 1."""
        return 1.0 - self.num_free / self.num_blocks if self.num_blocks else 0.0

    def allocate(self, count: int) -> list[int]:
        """Takes free blocks, each with one reference, and uncaches them.

        Raises:
            ValueError: fewer are free, or count is negative; nothing is taken.
        """
        if not 0 <= count <= self.num_free:
            raise ValueError(f"{count} blocks asked for, {self.num_free} are free")
        if count == 0:
            return []
        block_ids = self._free[: -count - 1 : -1]
        del self._free[-count:]
        for _ in range(count - len(block_ids)):
            block_id, _ = self._free_cached.popitem(last=False)
            self._drop_hash(block_id)
            block_ids.append(block_id)
        for block_id in block_ids:
            self.reference_counts[block_id] = 1
        return block_ids

    def retain(self, block_ids: Sequence[int]) -> None:
        """Adds a reference to blocks that are not free, or that are cached.

        Raises:
            ValueError: a block is free and not cached; those before it have got their reference.
        """
        counts = self.reference_counts
        for block_id in block_ids:
            if counts[block_id] == 0:
                if self.hashes[block_id] is None:
                    raise ValueError(f"block {block_id} is free and cannot be shared")
                del self._free_cached[block_id]
            counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drops a reference to each block, and frees those that have none left.

        Raises:
            ValueError: a block is free already; those after it have been released.
        """
        # last block first, so that a sequence's first block is allocated again first, or uncached last
        for block_id in reversed(block_ids):
            count = self.reference_counts[block_id]
            if count == 0:
                raise ValueError(f"block {block_id} is released twice")
            self.reference_counts[block_id] = count - 1
            if count == 1:
                if self.hashes[block_id] is None:
                    self._free.append(block_id)
                else:
                    self._free_cached[block_id] = None

    # ---- contents ------------------------------------------------------------------------------------------

    def find(self, block_hashes: Sequence[bytes]) -> list[int]:
        """Cached blocks of the first hashes, up to one that is not cached. Takes one look-up per block."""
        block_ids = []
        get = self.ids_by_hash.get
        for block_hash in block_hashes:
            block_id = get(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def cache(self, block_id: int, block_hash: bytes) -> None:
        """Enters a block under its contents' hash, unless another block has that hash or this one has another.

        Raises:
            ValueError: the block is free.
        """
        if self.reference_counts[block_id] == 0:
            raise ValueError(f"block {block_id} is free and holds nothing")
        if self.hashes[block_id] is None and block_hash not in self.ids_by_hash:
            self.hashes[block_id] = block_hash
            self.ids_by_hash[block_hash] = block_id

    def uncache(self, block_id: int) -> None:
        """Removes a block that will be written from the prefix cache, if it is there.

        Raises:
            ValueError: the block is free.
        """
        if self.reference_counts[block_id] == 0:
            raise ValueError(f"block {block_id} is free and not written")
        self._drop_hash(block_id)

    def uncache_all(self) -> None:
        """Empties the prefix cache; reference counts do not change."""
        for block_id in self.ids_by_hash.values():
            self.hashes[block_id] = None
        self.ids_by_hash.clear()
        # the most recently used one is on top
        self._free += self._free_cached
        self._free_cached.clear()

    def _drop_hash(self, block_id: int) -> None:
        block_hash = self.hashes[block_id]
        if block_hash is not None:
            del self.ids_by_hash[block_hash]
            self.hashes[block_id] = None

    # ---- audit ---------------------------------------------------------------------------------------------

    def violations(self, owners: Sequence[Sequence[int]]) -> list[str]:
        """Inconsistencies of reference counts, free lists and hashes, a sentence each.

        Args:
            owners: the blocks of each sequence that exists.
        """
        held = [0] * self.num_blocks
        for block_ids in owners:
            for block_id in block_ids:
                held[block_id] += 1
        wrong = [
            f"block {block_id} has {count} references and {held[block_id]} owners"
            for block_id, count in enumerate(self.reference_counts)
            if count != held[block_id]
        ]
        return wrong + self._free_violations() + self._hash_violations()

    def _free_violations(self) -> list[str]:
        wrong = []
        free = [*self._free, *self._free_cached]
        if len(set(free)) != len(free):
            wrong.append("a block is twice in the free list")
        if set(free) != {block_id for block_id, count in enumerate(self.reference_counts) if count == 0}:
            wrong.append("the free list and the reference counts disagree")
        wrong += [
            f"block {block_id} is cached and in the wrong free list"
            for block_id in self._free
            if self.hashes[block_id]
        ]
        wrong += [
            f"block {block_id} is not cached and in the wrong free list"
            for block_id in self._free_cached
            if self.hashes[block_id] is None
        ]
        return wrong

    def _hash_violations(self) -> list[str]:
        by_block = {block_id: block_hash for block_id, block_hash in enumerate(self.hashes) if block_hash is not None}
        if by_block == {block_id: block_hash for block_hash, block_id in self.ids_by_hash.items()}:
            return []
        return ["the table of hashes and the blocks' hashes disagree"]
