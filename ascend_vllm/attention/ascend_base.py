"""What the attention backends of Ascend NPUs for keys and values have in common.

Letters: P blocks of the cache, S tokens of a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ascend_vllm import envs
from ascend_vllm.attention.ascend_calls import compressed_mask
from ascend_vllm.attention.ascend_plan import Precision
from ascend_vllm.attention.backend import AttentionBackend, AttentionSpec
from ascend_vllm.config.engine import EngineConfig

# limits of the operators
_MAX_HEADS = 256
_MAX_GROUP = 64
_MAX_KV_WIDTH = 65535
# the guide to high precision says "long" without a number; this is its number for cached prefixes
_LONG_SEQUENCE = 8192


class AscendBackend(AttentionBackend):
    """The last blocks of a cache are spare: the operator that stores keys takes no negative slots.

    Therefore each token that is not to be stored gets a slot of its own there. No row reads them.
    """

    dtypes = (torch.float16, torch.bfloat16)
    block_sizes = (64, 128)

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.precision = Precision(
            decode=envs.use_ifa_high_precision_mode(),
            prefix=envs.use_prefix_high_precision_mode(),
            prompt=envs.use_pfa_high_precision_mode(),
        )
        self._windows: tuple[int, ...] = ()
        # made by `_reserve`: [spare blocks * S] int64, and the compressed mask
        self._spare_slots: torch.Tensor | None = None
        self._mask: torch.Tensor | None = None

    @classmethod
    def _unsupported_heads_reason(cls, spec: AttentionSpec) -> str | None:
        if spec.num_heads > _MAX_HEADS or spec.num_heads // spec.num_kv_heads > _MAX_GROUP:
            return (
                f"{spec.num_heads} query heads on {spec.num_kv_heads} KV heads are more than the operators take: "
                f"{_MAX_HEADS}, and {_MAX_GROUP} on each"
            )
        if spec.num_kv_heads * spec.head_size > _MAX_KV_WIDTH:
            return f"{spec.num_kv_heads} KV heads of {spec.head_size} are wider than {_MAX_KV_WIDTH} elements"
        return None

    def advice(self, config: EngineConfig) -> list[str]:
        needs, has = config.model.high_precision, self.precision
        if needs is None:
            return []
        is_long = config.scheduler.max_model_len > _LONG_SEQUENCE
        caches_prefixes = config.cache.enable_prefix_caching
        kinds = (
            (needs.prompt and not has.prompt, "give wrong results with USE_PFA_HIGH_PRECISION_MODE=0: set it to 1."),
            (
                needs.decode and not has.decode and is_long,
                "may give wrong results on long sequences: set USE_IFA_HIGH_PRECISION_MODE=1.",
            ),
            (
                needs.prefix and not has.prefix and caches_prefixes,
                "may give wrong results with --enable-prefix-caching: set USE_PREFIX_HIGH_PRECISION_MODE=1.",
            ),
        )
        return [f"Models like {needs.model} {advice}" for is_needed, advice in kinds if is_needed]

    def num_spare_blocks(self, max_num_tokens: int) -> int:
        return -(-max_num_tokens // self.block_size)

    def _reserve(
        self, specs: Sequence[AttentionSpec], num_all_blocks: int, num_blocks: int, device: torch.device
    ) -> None:
        """What `bind` does for every cache of P blocks, of which `num_blocks` are not spare."""
        self._windows = tuple(dict.fromkeys(spec.sliding_window for spec in specs if spec.sliding_window is not None))
        self._spare_slots = torch.arange(
            num_blocks * self.block_size, num_all_blocks * self.block_size, device=device
        )
        if self._mask is None:
            self._mask = compressed_mask(device)

    def _stored_slots(self, slots: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Slots without negative ones: only decoding steps have those, and there are spare slots for all of them."""
        if self._spare_slots is None:
            raise RuntimeError("the attention backend has no KV cache: call bind first")
        if num_tokens > self._spare_slots.shape[0]:
            return slots
        return torch.where(slots < 0, self._spare_slots[:num_tokens], slots)
