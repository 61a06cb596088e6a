"""Attention of one sequence in float64, and as a plain implementation in the inputs' own dtype has it.

Tensors are (heads, rows, head size) and (key heads, keys, head size) on the host; `hidden` is (rows, keys), true
where a row must not look.
"""

import torch
from torch import Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    hidden: Tensor | None = None,
    sink: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """The output (heads, rows, value size) and the log sum of exponentials (heads, rows), computed in `dtype`."""
    group = query.shape[0] // key.shape[0]
    q, k, v = (t.to(dtype) for t in (query, key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)))
    scores = (q @ k.transpose(1, 2)) * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    if sink is not None:
        column = sink.to(dtype)[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, column], -1)
    weights = torch.softmax(scores, -1)[..., : key.shape[1]]
    return weights @ v, torch.logsumexp(scores, -1)


def causal(rows: int, keys: int, window: int | None = None) -> Tensor:
    """Masks later keys (the last row attends to the last key) and keys more than `window` tokens back."""
    row = torch.arange(rows)[:, None] + keys - rows
    key = torch.arange(keys)[None, :]
    hidden = key > row
    return hidden if window is None else hidden | (key < row - window)


def close(actual: Tensor, exact: Tensor, plain: Tensor) -> None:
    """The error is at most twice that of a plain implementation in the tensors' dtype."""
    assert torch.isfinite(actual).all()
    error = (actual.double() - exact).abs().max().item()
    bound = 2 * (plain.double() - exact).abs().max().item()
    assert error <= bound, f"error {error:.3g}, a plain implementation has {bound / 2:.3g}"


class Sequences:
    """Ragged sequences: random queries, keys and values, with what a kernel should make of them.

    `query`, `key` and `value` are packed, (tokens, heads, head size), on the host.
    """

    def __init__(
        self,
        query_lengths: list[int],
        kv_lengths: list[int],
        heads: tuple[int, int],
        head_size: int,
        dtype: torch.dtype,
        value_size: int | None = None,
        rope_size: int = 0,
    ) -> None:
        torch.manual_seed(sum(query_lengths) * 31 + head_size)
        self.query_lengths, self.kv_lengths = query_lengths, kv_lengths
        self.heads, self.kv_heads = heads
        self.rope_size = rope_size
        self.scale = (head_size + rope_size) ** -0.5
        self.dtype = dtype
        self.query = torch.randn(sum(query_lengths), self.heads, head_size + rope_size).to(dtype)
        self.key = torch.randn(sum(kv_lengths), self.kv_heads, head_size + rope_size).to(dtype)
        self.value = torch.randn(sum(kv_lengths), self.kv_heads, value_size or head_size).to(dtype)

    @property
    def query_ends(self) -> list[int]:
        return torch.tensor(self.query_lengths).cumsum(0).tolist()

    @property
    def kv_ends(self) -> list[int]:
        return torch.tensor(self.kv_lengths).cumsum(0).tolist()

    def expected(
        self,
        dtype: torch.dtype = torch.float64,
        window: int | None = None,
        full: bool = False,
        sink: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Packed output (tokens, heads, value size) and log sums (tokens, heads)."""
        outs, sums = [], []
        parts = (
            t.split(n)
            for t, n in ((self.query, self.query_lengths), (self.key, self.kv_lengths), (self.value, self.kv_lengths))
        )
        for query, key, value in zip(*parts, strict=True):
            hidden = None if full else causal(len(query), len(key), window)
            out, lse = attention(
                query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), self.scale, hidden, sink, dtype
            )
            outs.append(out.transpose(0, 1))
            sums.append(lse.T)
        return torch.cat(outs), torch.cat(sums)

    def check(
        self, actual: Tensor, window: int | None = None, full: bool = False, sink: Tensor | None = None
    ) -> None:
        """`actual` is packed like `query`."""
        exact = self.expected(window=window, full=full, sink=sink)[0]
        close(actual.cpu(), exact, self.expected(self.dtype, window, full, sink)[0])

    def paged(self, block_size: int, form: str = "BBH") -> tuple[Tensor, Tensor, Tensor]:
        """Key and value caches on the host, and the block table; blocks are in random order, unused ones NaN.

        Forms: "BBH" (blocks, block size, N * D), "BNBD" (blocks, N, block size, D), "NZ" the fractal one.
        """
        counts = [-(-length // block_size) for length in self.kv_lengths]
        order = torch.randperm(sum(counts) + 3)
        table = torch.zeros(len(counts), max([*counts, 1]), dtype=torch.int32)
        caches = []
        for rows in (self.key, self.value):
            blocks = torch.full((len(order), block_size, *rows.shape[1:]), float("nan"), dtype=self.dtype)
            used = 0
            for i, (part, count) in enumerate(zip(rows.split(self.kv_lengths), counts, strict=True)):
                ids = order[used : used + count]
                table[i, :count] = ids
                own = torch.full((count * block_size, *rows.shape[1:]), float("nan"), dtype=self.dtype)
                own[: len(part)] = part
                blocks[ids] = own.view(count, block_size, *rows.shape[1:])
                used += count
            caches.append(_arranged(blocks, form))
        return caches[0], caches[1], table


def _arranged(blocks: Tensor, form: str) -> Tensor:
    count, block_size, heads, size = blocks.shape
    if form == "BBH":
        return blocks.reshape(count, block_size, heads * size)
    if form == "BNBD":
        return blocks.transpose(1, 2).contiguous()
    return blocks.view(count, block_size, heads, size // 16, 16).permute(0, 2, 3, 1, 4).contiguous()
