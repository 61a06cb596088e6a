"""Chained hashes of the contents of KV blocks, for the prefix cache.

The keys and values of a token depend on all tokens before it, so a block's hash covers its own tokens and, through
the previous block's hash, all tokens before them. Equal hashes mean equal contents.

    hash of block i = BLAKE2b-128(hash of block i-1 ‖ token ids ‖ content keys of block i)

The first two parts have fixed lengths (16 bytes, block_size int32 numbers) and each content key carries its length,
so different contents never make the same input; finding two inputs with the same 128-bit hash is not feasible.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from hashlib import blake2b

_DIGEST_BYTES = 16
# in place of the hash of the block before the first
_ROOT = bytes(_DIGEST_BYTES)
_TOKEN_BYTES = 4


def extend_block_hashes(
    block_hashes: list[bytes],
    num_blocks: int,
    token_ids: Sequence[int],
    content_keys: Sequence[tuple[int, str]],
    block_size: int,
) -> None:
    """Appends missing hashes to a sequence's list; those in it are not checked.

    A content key changes the hash of its block and, through the chain, of all that follow; blocks before it can be
    shared. The order of the keys does not matter.

    Args:
        block_hashes: of the sequence's first blocks, 16 bytes each; grows to `num_blocks` entries.
        num_blocks: number of hashes wanted.
        token_ids: of the sequence, 0 … 2**31-1; at least num_blocks * block_size of them.
        content_keys: what besides tokens determines the contents: (first position that it affects, key).
        block_size: tokens of a block.

    Raises:
        ValueError: there are too few tokens; nothing is appended.

    Example:
        >>> hashes: list[bytes] = []
        >>> extend_block_hashes(hashes, 2, [1, 2, 3, 4, 5], [], 2)
        >>> [len(block_hash) for block_hash in hashes]
        [16, 16]
    """
    first = len(block_hashes)
    if num_blocks <= first:
        return
    if num_blocks * block_size > len(token_ids):
        raise ValueError(f"{len(token_ids)} tokens do not fill {num_blocks} blocks of {block_size}")
    data = array("i", token_ids[first * block_size : num_blocks * block_size]).tobytes()
    suffixes = _key_suffixes(content_keys, block_size, first) if content_keys else {}
    size = _TOKEN_BYTES * block_size
    parent = block_hashes[-1] if block_hashes else _ROOT
    # about a microsecond per block; the chain cannot be computed in parallel
    for index in range(num_blocks - first):
        content = parent + data[index * size : (index + 1) * size]
        if suffixes:
            content += suffixes.get(first + index, b"")
        parent = blake2b(content, digest_size=_DIGEST_BYTES).digest()
        block_hashes.append(parent)


def _key_suffixes(content_keys: Sequence[tuple[int, str]], block_size: int, first: int) -> dict[int, bytes]:
    """Block index → what its keys add to the hash's input, from block `first` on: (offset, length, key) each."""
    suffixes: dict[int, bytes] = {}
    for position, key in sorted(content_keys):
        block, offset = divmod(position, block_size)
        if block >= first:
            # a client's salt may hold half a surrogate pair
            data = key.encode("utf-8", "surrogatepass")
            suffixes[block] = suffixes.get(block, b"") + struct.pack("<II", offset, len(data)) + data
    return suffixes
