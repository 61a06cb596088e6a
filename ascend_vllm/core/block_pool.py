"""The KV blocks that exist: which are free, and how many sequences hold each of the others."""

from __future__ import annotations

from collections.abc import Sequence


class BlockPool:
    """Blocks 0 … num_blocks-1 with reference counts. Taking and giving back cost O(1) a block.

    The block given back last is taken first: on a CPU its memory is the likeliest to be in a cache.

    Args:
        num_blocks: how many there are; 0 is legal and leaves nothing to take.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # a stack; block 0 lies on top at first
        self._free = list(range(num_blocks - 1, -1, -1))
        # [num_blocks] sequences that hold a block
        self._reference_counts = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Fraction of blocks held, 0 … 1."""
        return 1.0 - len(self._free) / self.num_blocks if self.num_blocks else 0.0

    def allocate(self, count: int) -> list[int]:
        """Takes free blocks, each with one reference.

        Raises:
            ValueError: fewer are free, or count is negative; nothing is taken.
        """
        if not 0 <= count <= len(self._free):
            raise ValueError(f"{count} blocks asked for, {len(self._free)} are free")
        if count == 0:
            return []
        block_ids = self._free[: -count - 1 : -1]
        del self._free[-count:]
        for block_id in block_ids:
            self._reference_counts[block_id] = 1
        return block_ids

    def retain(self, block_ids: Sequence[int]) -> None:
        """Adds a reference to blocks that someone holds.

        Raises:
            ValueError: a block is free; the ones before it have their reference.
        """
        for block_id in block_ids:
            if self._reference_counts[block_id] == 0:
                raise ValueError(f"block {block_id} is free and cannot be shared")
            self._reference_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drops a reference to each block; those without any are free. An empty sequence is fine.

        Raises:
            ValueError: a block is free already; the ones before it are released.
        """
        # last block first, so that a sequence's first block is the next to be taken
        for block_id in reversed(block_ids):
            count = self._reference_counts[block_id]
            if count == 0:
                raise ValueError(f"block {block_id} is released twice")
            self._reference_counts[block_id] = count - 1
            if count == 1:
                self._free.append(block_id)

    def violations(self, owners: Sequence[Sequence[int]]) -> list[str]:
        """What is wrong with the accounts, as sentences; none if all is well.

        Args:
            owners: the blocks of each sequence that exists.
        """
        held = [0] * self.num_blocks
        for block_ids in owners:
            for block_id in block_ids:
                held[block_id] += 1
        wrong = [
            f"block {block_id} has {count} references and {held[block_id]} owners"
            for block_id, count in enumerate(self._reference_counts)
            if count != held[block_id]
        ]
        free = set(self._free)
        if len(free) != len(self._free):
            wrong.append("a block is twice in the free list")
        if free != {block_id for block_id, count in enumerate(self._reference_counts) if count == 0}:
            wrong.append("the free list and the reference counts disagree")
        return wrong
