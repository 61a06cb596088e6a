"""Which part of a model a worker holds: the one place of shard arithmetic."""

from __future__ import annotations

import dataclasses

from ascend_vllm.errors import ConfigError

# rows of a rank's part of a vocabulary come in multiples of this, which matrix units like
_VOCABULARY_MULTIPLE = 16


@dataclasses.dataclass(frozen=True)
class Shard:
    """A range of one dimension of a tensor.

    Attributes:
        start: first index.
        size: number of indices.
    """

    start: int
    size: int


@dataclasses.dataclass(frozen=True)
class ParallelContext:
    """Place of a worker in its tensor-parallel group.

    Attributes:
        tp_rank: 0 … tp_size-1.
        tp_size: workers that share each layer.
    """

    tp_rank: int = 0
    tp_size: int = 1

    def shard(self, total: int, what: str) -> Shard:
        """The part of a dimension this rank holds when every rank holds an equal part.

        Args:
            total: the whole dimension.
            what: its name, for the error.

        Raises:
            ConfigError: the dimension does not divide evenly.

        Example:
            >>> ParallelContext(tp_rank=1, tp_size=2).shard(8, "attention heads")
            Shard(start=4, size=4)
        """
        if total % self.tp_size:
            raise ConfigError(f"--tensor-parallel-size {self.tp_size} does not divide the model's {total} {what}")
        size = total // self.tp_size
        return Shard(self.tp_rank * size, size)

    def shard_or_replicate(self, total: int, what: str) -> Shard:
        """As `shard`, but where there are fewer units than ranks, neighbouring ranks hold the same unit.

        KV heads are shared this way: 2 heads on 4 ranks lie as 0, 0, 1, 1.

        Raises:
            ConfigError: neither number divides the other.
        """
        if total >= self.tp_size:
            return self.shard(total, what)
        if self.tp_size % total:
            raise ConfigError(f"the model's {total} {what} do not divide --tensor-parallel-size {self.tp_size}")
        return Shard(self.tp_rank * total // self.tp_size, 1)

    def padded_part(self, total: int) -> int:
        """Entries of every rank's part of a vocabulary, those included that only the last ranks lack.

        Example:
            >>> ParallelContext(tp_rank=1, tp_size=2).padded_part(50257)
            25136
        """
        part = -(-total // self.tp_size)
        rounded = -(-part // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
        # a tiny vocabulary must not leave the last rank with nothing
        return rounded if self.tp_size > 1 and rounded * (self.tp_size - 1) < total else part

    def shard_vocabulary(self, total: int) -> Shard:
        """The entries of a vocabulary that this rank holds: `padded_part` of them, the last rank what is left.

        Example:
            >>> ParallelContext(tp_rank=1, tp_size=2).shard_vocabulary(50257)
            Shard(start=25136, size=25121)

        Raises:
            ConfigError: there are fewer entries than the ranks need.
        """
        part = self.padded_part(total)
        if part * (self.tp_size - 1) >= total:
            raise ConfigError(f"--tensor-parallel-size {self.tp_size} is too much for a vocabulary of {total}")
        start = self.tp_rank * part
        return Shard(start, min(part, total - start))
