"""Sends hidden states from one pipeline stage to the next. Letters: T tokens of a step, H hidden size."""

from __future__ import annotations

from typing import Any

import torch


class StageLink:
    """Connection to the previous and the next stage: messages of a torch process group whose ranks are the stages.

    All stages run the same steps in the same order. Sending overlaps with this stage's next step: a sent tensor is
    kept alive until the next `send`.

    Args:
        group: a process group of torch.distributed, or one of its backends.
        stage: of this worker, from 0.
        width: H.
        dtype: of the hidden states.
        device: of the hidden states.
    """

    def __init__(self, group: Any, stage: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._group = group
        self._stage = stage
        self._width = width
        self._dtype = dtype
        self._device = device
        # the last message and its tensor
        self._sending: tuple[Any, torch.Tensor] | None = None

    def receive(self, num_tokens: int) -> torch.Tensor | None:
        """[T, H] from the previous stage, which the caller may overwrite; None in the first stage."""
        if self._stage == 0:
            return None
        hidden = torch.empty((num_tokens, self._width), dtype=self._dtype, device=self._device)
        self._group.recv([hidden], self._stage - 1, 0).wait()
        return hidden

    def send(self, hidden: torch.Tensor) -> None:
        """Sends a step's hidden states to the next stage, once the previous message has been sent.

        Returns before they have arrived.

        Args:
            hidden: [T, H], contiguous; must not be written to afterwards.
        """
        if self._sending is not None:
            work, _ = self._sending
            work.wait()
        self._sending = self._group.send([hidden], self._stage + 1, 0), hidden
