"""Which part of a model a worker holds: all shard arithmetic."""

from __future__ import annotations

import dataclasses

from ascend_vllm.errors import ConfigError

# a rank's shard of a vocabulary is padded to a multiple of this, for matrix units
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


def layers_of_stages(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Number of layers of each pipeline stage, as vLLM chooses it.

    Remaining layers go to the stages before the last one, from the end: the last also computes the LM head, the first
    holds the embedding.

    Example:
        >>> layers_of_stages(7, 4)
        (2, 2, 2, 1)
        >>> layers_of_stages(6, 4)
        (1, 2, 2, 1)
    """
    each, left = divmod(num_layers, num_stages)
    return tuple(each + (2 <= num_stages - stage <= left + 1) for stage in range(num_stages))


@dataclasses.dataclass(frozen=True)
class ParallelContext:
    """Ranks of a worker in its tensor-parallel group and its pipeline.

    Attributes:
        tp_rank: 0 … tp_size-1.
        tp_size: workers that share each layer.
        pp_rank: its stage, 0 … pp_size-1.
        pp_size: number of pipeline stages.
        stage_layers: [pp_size] layers of each stage; empty: those of `layers_of_stages`.
        expert_parallel: the workers of a stage have some whole experts each, not a part of every one.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    stage_layers: tuple[int, ...] = ()
    expert_parallel: bool = False

    @property
    def rank(self) -> int:
        """Global rank; ranks of a stage are consecutive."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def world_size(self) -> int:
        """Number of all workers."""
        return self.tp_size * self.pp_size

    @property
    def is_first_stage(self) -> bool:
        """Whether this stage embeds the tokens."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this stage computes the logits."""
        return self.pp_rank == self.pp_size - 1

    def layers(self, num_layers: int) -> range:
        """Indices of this stage's layers.

        Example:
            >>> ParallelContext(pp_rank=1, pp_size=2).layers(5)
            range(3, 5)
        """
        counts = self.stage_layers or layers_of_stages(num_layers, self.pp_size)
        start = sum(counts[: self.pp_rank])
        return range(start, start + counts[self.pp_rank])

    def shard(self, total: int, what: str) -> Shard:
        """This rank's part of a dimension that is split evenly.

        Args:
            total: size of the dimension.
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

    def share(self, total: int) -> Shard:
        """This rank's part of a dimension that need not divide evenly.

        Example:
            >>> ParallelContext(tp_rank=1, tp_size=2).share(7)
            Shard(start=3, size=4)
        """
        start, end = (total * rank // self.tp_size for rank in (self.tp_rank, self.tp_rank + 1))
        return Shard(start, end - start)

    def shard_or_replicate(self, total: int, what: str) -> Shard:
        """As `shard`, but with fewer units than ranks consecutive ranks hold the same unit.

        For KV heads: 2 heads on 4 ranks are held as 0, 0, 1, 1.

        Raises:
            ConfigError: neither number divides the other.
        """
        if total >= self.tp_size:
            return self.shard(total, what)
        if self.tp_size % total:
            raise ConfigError(f"the model's {total} {what} do not divide --tensor-parallel-size {self.tp_size}")
        return Shard(self.tp_rank * total // self.tp_size, 1)

    def experts(self, total: int) -> Shard:
        """This rank's experts; if they do not divide evenly, the first ranks have one more, as in vLLM.

        Raises:
            ConfigError: there are fewer experts than ranks.

        Example:
            >>> ParallelContext(tp_rank=1, tp_size=2, expert_parallel=True).experts(7)
            Shard(start=4, size=3)
        """
        if not self.expert_parallel:
            return Shard(0, total)
        if total < self.tp_size:
            raise ConfigError(
                f"--enable-expert-parallel with --tensor-parallel-size {self.tp_size} is too much for {total} experts"
            )
        each, left = divmod(total, self.tp_size)
        return Shard(self.tp_rank * each + min(self.tp_rank, left), each + (self.tp_rank < left))

    def inside_of_experts(self, width: int) -> Shard:
        """This rank's part of the width inside each of its experts.

        Raises:
            ConfigError: the width does not divide evenly.
        """
        return Shard(0, width) if self.expert_parallel else self.shard(width, "width of experts")

    def padded_part(self, total: int) -> int:
        """Size of every rank's shard of a vocabulary, with the padding of the last rank.

        Example:
            >>> ParallelContext(tp_rank=1, tp_size=2).padded_part(50257)
            25136
        """
        part = -(-total // self.tp_size)
        rounded = -(-part // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
        # rounding up must not leave the last rank empty
        return rounded if self.tp_size > 1 and rounded * (self.tp_size - 1) < total else part

    def shard_vocabulary(self, total: int) -> Shard:
        """This rank's shard of a vocabulary: `padded_part` entries, on the last rank those that are left.

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
