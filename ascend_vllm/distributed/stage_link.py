"""How hidden states go from one pipeline stage to the next. Letters: T tokens of a step, H hidden."""

from __future__ import annotations

import abc
from typing import Any

import torch


class StageLink(abc.ABC):
    """The way to the stages beside this worker's own. Every stage takes the same steps in the same order."""

    @abc.abstractmethod
    def receive(self, num_tokens: int) -> torch.Tensor | None:
        """[T, H] of a step that the stage before has computed, the receiver's to change; None in the first stage."""

    @abc.abstractmethod
    def send(self, hidden: torch.Tensor) -> None:
        """Gives the next stage a step's states; returns before they have arrived.

        Args:
            hidden: [T, H], contiguous; nobody may write to it any more.
        """


class NoOtherStages(StageLink):
    """The link of a worker that holds all layers."""

    def receive(self, num_tokens: int) -> None:
        """Nothing: tokens begin here."""
        del num_tokens

    def send(self, hidden: torch.Tensor) -> None:
        """Never called: logits end here.

        Raises:
            RuntimeError: always.
        """
        del hidden
        raise RuntimeError("there is no next stage")


class GroupStageLink(StageLink):
    """Messages of a process group of torch, whose ranks are the stages.

    A message is on its way while this stage computes its next step: what has been sent is kept until then.

    Args:
        group: of torch.distributed, or one of its backends.
        stage: of this worker, 0 … one less than there are.
        width: H.
        dtype: of the hidden states.
        device: where they are.
    """

    def __init__(self, group: Any, stage: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._group = group
        self._stage = stage
        self._width = width
        self._dtype = dtype
        self._device = device
        # the last message and its contents
        self._sending: tuple[Any, torch.Tensor] | None = None

    def receive(self, num_tokens: int) -> torch.Tensor | None:
        """See `StageLink.receive`."""
        if self._stage == 0:
            return None
        hidden = torch.empty((num_tokens, self._width), dtype=self._dtype, device=self._device)
        self._group.recv([hidden], self._stage - 1, 0).wait()
        return hidden

    def send(self, hidden: torch.Tensor) -> None:
        """See `StageLink.send`; waits until the message before has gone."""
        if self._sending is not None:
            work, _ = self._sending
            work.wait()
        self._sending = self._group.send([hidden], self._stage + 1, 0), hidden
