"""Which KV blocks a request gets."""

from __future__ import annotations

from collections.abc import Iterable

from ascend_vllm.core.block_pool import BlockPool
from ascend_vllm.core.request import Request

# Share of the blocks that admission leaves free for the growth of running requests (vLLM 0.6.3's value).
_WATERMARK = 0.01


class KVCacheManager:
    """Gives requests the blocks for their tokens.

    Args:
        num_blocks: blocks of the cache.
        block_size: tokens of a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.watermark_blocks = int(_WATERMARK * num_blocks)

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache."""
        return self.pool.num_blocks

    @property
    def num_tokens(self) -> int:
        """Tokens the whole cache holds."""
        return self.pool.num_blocks * self.block_size

    @property
    def usage(self) -> float:
        """Fraction of blocks in use, 0 … 1."""
        return self.pool.usage

    def allocate_slots(self, request: Request, num_tokens: int, num_reserved_blocks: int = 0) -> list[int] | None:
        """Gives a request the blocks that its first `num_tokens` tokens need beyond those it has.

        Args:
            request: its `block_ids` grow.
            num_tokens: tokens to have room for, from the sequence's start.
            num_reserved_blocks: blocks that must stay free.

        Returns:
            The new blocks, none if it has enough; None if too few are free, and then nothing has changed.
        """
        num_missing = -(-num_tokens // self.block_size) - len(request.block_ids)
        if num_missing <= 0:
            return []
        if num_missing + num_reserved_blocks > self.pool.num_free:
            return None
        block_ids = self.pool.allocate(num_missing)
        request.block_ids += block_ids
        return block_ids

    def free(self, request: Request) -> None:
        """Takes all blocks of a request back; one that has none is fine."""
        block_ids, request.block_ids = request.block_ids, []
        self.pool.release(block_ids)

    def violations(self, requests: Iterable[Request]) -> list[str]:
        """What is wrong with the accounts, as sentences, given all requests that exist."""
        requests = list(requests)
        wrong = self.pool.violations([request.block_ids for request in requests])
        wrong += [
            f"request {request.request_id} has {request.num_computed_tokens} computed tokens "
            f"in {len(request.block_ids)} blocks of {self.block_size}"
            for request in requests
            if request.num_computed_tokens > len(request.block_ids) * self.block_size
        ]
        return wrong
