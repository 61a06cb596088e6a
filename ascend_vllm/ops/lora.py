"""Products with LoRA adapters: each row of a step has its own adapter, or none.

An adapter adds `(x Aᵀ) Bᵀ` to what a linear layer makes of x, with a scale that B already has (Hu et al. 2021, LoRA:
Low-Rank Adaptation of Large Language Models). A layer of several matrices has a pair A, B for each: a slice.

Letters: T tokens, L slots for adapters, S slices, K inputs, N outputs of all slices, R the largest rank, a multiple
of 16.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ascend_vllm.ops.native import load_native_library
from ascend_vllm.ops.registry import define_op
from ascend_vllm.platforms.host_memory import weight_memory

# outputs that are stored side by side
PANEL = 16


def padded_rank(rank: int) -> int:
    """R for adapters of at most this rank."""
    return -(-rank // PANEL) * PANEL


def num_panels(widths: Sequence[int]) -> int:
    """Panels of slices with these numbers of outputs, each of which begins with a panel."""
    return sum(-(-width // PANEL) for width in widths)


def pack_a(a: torch.Tensor, target: torch.Tensor) -> None:
    """Stores one slice's A for `lora_shrink`.

    Args:
        a: [rank, K] float, rank at most R.
        target: [R / 16, K, 16]: a slot and a slice of the weights. Rows after the rank become 0.
    """
    rank, inputs = a.shape
    padded = torch.zeros(target.shape[0] * PANEL, inputs, dtype=target.dtype, device=target.device)
    padded[:rank] = a
    target.copy_(padded.view(-1, PANEL, inputs).transpose(1, 2))


def pack_b(b: torch.Tensor, target: torch.Tensor) -> None:
    """Stores one slice's B for `lora_expand`.

    Args:
        b: [N of the slice, rank] float, rank at most R.
        target: [ceil(N / 16), R, 16]: a slot and the slice's panels of the weights. What b does not fill becomes 0.
    """
    outputs, rank = b.shape
    padded = torch.zeros(target.shape[0] * PANEL, target.shape[1], dtype=target.dtype, device=target.device)
    padded[:outputs, :rank] = b
    target.copy_(padded.view(-1, PANEL, target.shape[1]).transpose(1, 2))


# tokens, inputs, widths of slices, largest rank, ranks of the slots, adapters of the tokens by turns
_CASES: tuple[tuple[int, int, tuple[int, ...], int, tuple[int, ...], tuple[int, ...]], ...] = (
    (0, 16, (16,), 16, (8,), (0,)),
    (1, 64, (48,), 16, (16,), (0,)),
    (3, 33, (17, 5, 5), 16, (4, 0, 16), (2, -1, 0)),
    (9, 130, (40, 40), 64, (64, 8, 17), (1, 1, 2, 0, -1)),
    (70, 96, (100,), 32, (32,), (0,)),
    (37, 300, (64, 16, 16), 16, (8, 16, 16, 3), (3, 0, 1, 2, 3, 3, -1)),
)


def _slots(seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x, packed A, packed B, adapters and ranks of a case."""
    tokens, inputs, widths, max_rank, ranks, turns = _CASES[seed]
    generator = torch.Generator().manual_seed(seed)
    max_rank = padded_rank(max_rank)
    packed_a = torch.zeros(len(ranks), len(widths), max_rank // PANEL, inputs, PANEL, dtype=dtype)
    packed_b = torch.zeros(len(ranks), num_panels(widths), max_rank, PANEL, dtype=dtype)
    for slot, rank in enumerate(ranks):
        start = 0
        for index, width in enumerate(widths):
            end = start + num_panels([width])
            pack_a(torch.randn(rank, inputs, generator=generator) / inputs**0.5, packed_a[slot, index])
            pack_b(torch.randn(width, rank, generator=generator) / max(rank, 1) ** 0.5, packed_b[slot, start:end])
            start = end
    adapters = torch.tensor([turns[token % len(turns)] for token in range(tokens)], dtype=torch.int32)
    wide = torch.randn(tokens, 2 * inputs, generator=generator).to(dtype)
    return wide[:, inputs:], packed_a, packed_b, adapters, torch.tensor(ranks, dtype=torch.int32)


def _shrink_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for seed in range(len(_CASES)):
        x, packed_a, _, adapters, _ = _slots(seed, dtype)
        # of the largest rank, since values after a row's rank are undefined
        yield x, packed_a, adapters.clamp(min=0), torch.full((len(packed_a),), packed_a.shape[2] * PANEL).int()


@define_op(inputs=_shrink_inputs, devices=("cpu",), recordable=True)
def lora_shrink(x: torch.Tensor, weights: torch.Tensor, adapters: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
    """Takes each row to the rank of its adapter: x Aᵀ.

    Args:
        x: [T, K] float; rows may be strided.
        weights: [L, S, R / 16, K, 16] float, see `pack_a`.
        adapters: [T] int32, each row's slot; negative: none.
        ranks: [L] int32, rank of the adapter in each slot.

    Returns:
        [T, S, R] float32, undefined for rows without an adapter and after a row's rank.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    results = torch.zeros(len(x), weights.shape[1], weights.shape[2] * PANEL, dtype=wide)
    for slot in range(len(ranks)):
        rows = torch.nonzero(adapters == slot).flatten()
        results[rows] = torch.einsum("tk,spkn->tspn", x[rows].to(wide), weights[slot].to(wide)).flatten(2)
    return results


def _look_up_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    # tokens, entries, rank; the largest one, since values after a row's rank are undefined
    for seed, (tokens, entries, rank) in enumerate([(0, 3, 16), (1, 1, 16), (5, 7, 48), (300, 90, 32)]):
        generator = torch.Generator().manual_seed(seed)
        tables = torch.randn(3, entries, rank, generator=generator).to(dtype)
        indices = torch.randint(entries, (tokens,), generator=generator)
        adapters = torch.randint(3, (tokens,), generator=generator, dtype=torch.int32)
        yield tables, indices, adapters, torch.full((3,), rank, dtype=torch.int32)


@define_op(inputs=_look_up_inputs, tolerance=0.0, devices=("cpu",), recordable=True)
def lora_look_up(
    tables: torch.Tensor, indices: torch.Tensor, adapters: torch.Tensor, ranks: torch.Tensor
) -> torch.Tensor:
    """Finds each token's values of the rank in the table of its adapter, as `lora_shrink` computes them of rows.

    Args:
        tables: [L, K, R] float, K tokens.
        indices: [T] int64, 0 … K-1.
        adapters: [T] int32, each token's slot; negative: none.
        ranks: [L] int32, rank of the adapter in each slot.

    Returns:
        [T, 1, R] float32, undefined for tokens without an adapter and after a token's rank.
    """
    del ranks  # values after them are undefined
    wide = torch.promote_types(tables.dtype, torch.float32)
    return tables[adapters.clamp(min=0).long(), indices][:, None].to(wide)


def _clamp_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    if dtype == torch.float32:
        for count in (0, 1, 40):
            yield torch.randint(9, (count,), generator=torch.Generator().manual_seed(count)), 6


@define_op(inputs=_clamp_inputs, tolerance=0.0, devices=("cpu",), recordable=True)
def lora_clamp_tokens(indices: torch.Tensor, size: int) -> torch.Tensor:
    """Replaces tokens that adapters add to the vocabulary by one that the model has, so that it may look all up.

    Args:
        indices: [T] int64, at least 0.
        size: tokens of the model.

    Returns:
        [T] int64, 0 … size-1.
    """
    return indices.clamp(max=size - 1)


def _put_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    # tokens, vectors of a slot, width
    for seed, (tokens, entries, width) in enumerate([(0, 1, 8), (1, 3, 5), (50, 16, 33)]):
        generator = torch.Generator().manual_seed(seed)
        tables = torch.randn(3, entries, width, generator=generator).to(dtype)
        vectors = torch.randn(tokens, width, generator=generator).to(dtype)
        indices = torch.randint(7 + entries, (tokens,), generator=generator)
        adapters = torch.randint(-1, 3, (tokens,), generator=generator, dtype=torch.int32)
        yield vectors, indices.where(adapters >= 0, indices.clamp(max=6)), adapters, tables, 7


@define_op(inputs=_put_inputs, tolerance=0.0, mutates=("vectors",), devices=("cpu",), recordable=True)
def lora_put_added(
    vectors: torch.Tensor, indices: torch.Tensor, adapters: torch.Tensor, tables: torch.Tensor, size: int
) -> None:
    """Replaces the vectors of tokens that the rows' adapters add to the vocabulary by the adapters' vectors.

    Args:
        vectors: [T, H] float; rows may be strided.
        indices: [T] int64, below size + E; at least `size` only in rows with an adapter.
        adapters: [T] int32, each token's slot; negative: none.
        tables: [L, E, H], dtype of the vectors; vectors of the tokens from `size` on.
        size: tokens of the model.
    """
    is_added = (indices >= size) & (adapters >= 0)
    vectors[is_added] = tables[adapters[is_added].long(), indices[is_added] - size]


def _expand_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for seed, (tokens, _, widths, max_rank, *_) in enumerate(_CASES):
        *_, packed_b, adapters, ranks = _slots(seed, dtype)
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(tokens, len(widths), padded_rank(max_rank), generator=generator)
        wide = torch.randn(tokens, sum(widths) + 5, generator=generator).to(dtype)
        yield wide[:, 2:-3], x, packed_b, adapters, ranks, list(widths)


@define_op(inputs=_expand_inputs, mutates=("y",), devices=("cpu",), recordable=True)
def lora_expand(
    y: torch.Tensor,
    x: torch.Tensor,
    weights: torch.Tensor,
    adapters: torch.Tensor,
    ranks: torch.Tensor,
    widths: list[int],
) -> None:
    """Adds what the adapters make of `lora_shrink`'s result to a layer's result: y += x Bᵀ.

    The products are added in float32 before they are added to y.

    Args:
        y: [T, N] float; rows may be strided.
        x: [T, S, R] float32.
        weights: [L, P, R, 16] float, P panels of 16 outputs, see `pack_b`.
        adapters: [T] int32, each row's slot; rows with a negative one stay as they are.
        ranks: [L] int32.
        widths: outputs of each slice, N together.
    """
    wide = torch.promote_types(y.dtype, torch.float32)
    for slot, rank in enumerate(ranks.tolist()):
        rows = torch.nonzero(adapters == slot).flatten()
        column = panel = 0
        for index, width in enumerate(widths):
            last = panel + num_panels([width])
            weight = weights[slot, panel:last, :rank].to(wide)
            part = torch.einsum("tk,pkn->tpn", x[rows, index, :rank].to(wide), weight)
            columns = slice(column, column + width)
            y[rows, columns] = (y[rows, columns].to(wide) + part.flatten(1)[:, :width]).to(y.dtype)
            column, panel = column + width, last


@dataclasses.dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter's part in one layer, in host memory, as `AdapterSlots.place` copies it.

    Attributes:
        a: of all slices, in the layout and the dtype of the slots.
        b: likewise.
        rank: of the slice with the largest.
    """

    a: torch.Tensor
    b: torch.Tensor
    rank: int


class AdapterSlots(abc.ABC):
    """A layer's memory for adapters, at fixed addresses, and the products with them, in the form of a device.

    Args:
        num_slots: L.
        widths: outputs of each slice, N together.
        inputs: K.
        max_rank: largest rank of an adapter; R is `padded_rank` of it.
        dtype: of the adapters.
        device: of the memory.

    Attributes:
        index_dtype: of `slots` and `order`.
        reads_order: whether the products read `order`.
    """

    index_dtype = torch.int32
    reads_order = False

    def __init__(
        self,
        num_slots: int,
        widths: Sequence[int],
        inputs: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._widths = list(widths)
        self._make_memory(num_slots, inputs, padded_rank(max_rank), dtype, device)

    @abc.abstractmethod
    def _make_memory(
        self, num_slots: int, inputs: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocates the slots, empty; max_rank is R."""

    @abc.abstractmethod
    def pack(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor] | None]) -> PackedAdapter:
        """Arranges an adapter for `place`.

        Args:
            parts: A [rank, K] and B [N of the slice, rank] of each slice, float; None: it stays as it is.
        """

    @abc.abstractmethod
    def place(self, slot: int, adapter: PackedAdapter | None) -> None:
        """Copies an adapter into a slot; None: one that leaves the layer as it is."""

    @abc.abstractmethod
    def shrink(self, x: torch.Tensor, slots: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
        """Takes each row to the rank of its adapter.

        Args:
            x: [T, K]; rows may be strided.
            slots: [T], each row's slot; negative: none.
            order: [T], the rows sorted by slot; None unless `reads_order`.

        Returns:
            [T, S, R] float32, undefined for rows without an adapter and after a row's rank.
        """

    @abc.abstractmethod
    def expand(self, y: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, order: torch.Tensor | None) -> None:
        """Adds what the adapters make of `shrink`'s result x to y [T, N], whose rows may be strided."""


class PanelSlots(AdapterSlots):
    """Adapters in panels of 16 outputs, as `lora_shrink` and `lora_expand` read them.

    Attributes:
        ranks: [L] int32, 0 where a slot's adapter leaves the layer as it is.
    """

    def _make_memory(
        self, num_slots: int, inputs: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        # [L, S, R / 16, K, 16] and [L, P, R, 16]; most pages are allocated when adapters are placed in them
        self._a = weight_memory(self._shape_of_a(num_slots, inputs, max_rank), dtype, device)
        self._b = weight_memory((num_slots, num_panels(self._widths), max_rank, PANEL), dtype, device)
        # those of the first slot now: huge pages hold several slots, and the first adapter would wait for all of them
        for memory in (self._a, self._b):
            memory[0].zero_()
        self.ranks = torch.zeros(num_slots, dtype=torch.int32, device=device)

    def _shape_of_a(self, num_slots: int, inputs: int, max_rank: int) -> tuple[int, ...]:
        return num_slots, len(self._widths), max_rank // PANEL, inputs, PANEL

    def pack(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor] | None]) -> PackedAdapter:
        """See `AdapterSlots.pack`; of R only what the largest rank needs is kept."""
        rank = max((len(part[0]) for part in parts if part is not None), default=0)
        slices, _, inputs, _ = self._a.shape[1:]
        a = torch.zeros(slices, num_panels([rank]), inputs, PANEL, dtype=self._a.dtype)
        b = torch.zeros(self._b.shape[1], padded_rank(rank), PANEL, dtype=self._b.dtype)
        panel = 0
        for index, (width, part) in enumerate(zip(self._widths, parts, strict=True)):
            last = panel + num_panels([width])
            if part is not None:
                pack_a(part[0], a[index])
                pack_b(part[1], b[panel:last])
            panel = last
        return PackedAdapter(a, b, rank)

    def place(self, slot: int, adapter: PackedAdapter | None) -> None:
        self.ranks[slot] = 0 if adapter is None else adapter.rank
        if adapter is not None:
            self._a[slot, :, : adapter.a.shape[1]].copy_(adapter.a)
            self._b[slot, :, : adapter.b.shape[1]].copy_(adapter.b)

    def shrink(self, x: torch.Tensor, slots: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:  # noqa: ARG002
        return lora_shrink(x, self._a, slots, self.ranks)  # type: ignore[no-any-return]

    def expand(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        slots: torch.Tensor,
        order: torch.Tensor | None,  # noqa: ARG002
    ) -> None:
        lora_expand(y, x, self._b, slots, self.ranks, self._widths)


class TableSlots(PanelSlots):
    """Adapters of an embedding of K tokens: a token's values of the rank are looked up, A is stored transposed."""

    def _shape_of_a(self, num_slots: int, inputs: int, max_rank: int) -> tuple[int, ...]:
        return num_slots, inputs, max_rank

    def pack(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor] | None]) -> PackedAdapter:
        """See `AdapterSlots.pack`; there is one part."""
        ((a, b),) = (part for part in parts if part is not None)
        packed = torch.zeros(self._b.shape[1], padded_rank(len(a)), PANEL, dtype=self._b.dtype)
        pack_b(b, packed)
        return PackedAdapter(a.T.to(self._a.dtype).contiguous(), packed, len(a))

    def look_up(self, tokens: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """tokens [T] int64, slots [T] → what `expand` reads."""
        return lora_look_up(self._a, tokens, slots, self.ranks)  # type: ignore[no-any-return]


class AddedVectors:
    """Vectors of tokens that adapters add to the vocabulary, in slots at fixed addresses; on CPU.

    Args:
        num_slots: L.
        most: E, tokens of an adapter.
        width: H.
        dtype: of the model.

    Attributes:
        tables: [L, E, H]; zeros behind the tokens of a slot's adapter.
    """

    def __init__(self, num_slots: int, most: int, width: int, dtype: torch.dtype) -> None:
        self.tables = torch.zeros(num_slots, most, width, dtype=dtype)

    def pack(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor] | None]) -> PackedAdapter:
        """Arranges an adapter's vectors for `place`: one part, of which the first tensor is [n, H]."""
        ((rows, _),) = (part for part in parts if part is not None)
        return PackedAdapter(rows.to(self.tables.dtype), rows[:0], len(rows))

    def place(self, slot: int, adapter: PackedAdapter | None) -> None:
        """Copies an adapter's vectors into a slot; None: it has none."""
        self.tables[slot].zero_()
        if adapter is not None:
            self.tables[slot, : adapter.rank].copy_(adapter.a)


# device type → makes a layer's slots, or an embedding's, with the arguments of `AdapterSlots`
ADAPTER_FORMS: dict[str, Callable[..., AdapterSlots]] = {"cpu": PanelSlots}
TABLE_FORMS: dict[str, type[TableSlots]] = {"cpu": TableSlots}


load_native_library()
