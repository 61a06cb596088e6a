"""What an interrupted training goes on from: a file beside what is trained, until that is complete."""

from __future__ import annotations

import pathlib
import time
from typing import Any

import torch

from ascend_vllm.errors import ConfigError
from ascend_vllm.model_files import one_line


class TrainingProgress:
    """Keeps the state of one training.

    Args:
        path: of the file.
        settings: what the training depends on; another training does not go on from it.
        interval_s: seconds between two states that are kept.
    """

    def __init__(self, path: pathlib.Path, settings: str, interval_s: float = 60.0) -> None:
        self._path = path
        self._settings = settings
        self._interval_s = interval_s
        self._last = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether the last state is so old that another should be kept."""
        return time.monotonic() - self._last > self._interval_s

    def save(self, state: dict[str, Any]) -> None:
        """Keeps a state, all or nothing."""
        scratch = self._path.with_name(f".{self._path.name}.partial")
        torch.save({"settings": self._settings, "state": state}, scratch)
        scratch.replace(self._path)
        self._last = time.monotonic()

    def load(self, device: torch.device) -> dict[str, Any] | None:
        """The state that was kept, with its tensors on a device; None: there is none.

        Raises:
            ConfigError: it cannot be read, or is of another training.
        """
        if not self._path.is_file():
            return None
        try:
            kept: dict[str, Any] = torch.load(self._path, map_location=device, weights_only=True)
        # a broken pickle can raise anything
        except Exception as error:
            raise ConfigError(f"{self._path} cannot be read: {one_line(error)}; remove it to train anew.") from error
        if kept["settings"] != self._settings:
            raise ConfigError(
                f"{self._path} is of a training with another model, other data or options: repeat them to go on, or "
                "remove it to train anew."
            )
        state: dict[str, Any] = kept["state"]
        return state

    def remove(self) -> None:
        """Called when the training is complete."""
        self._path.unlink(missing_ok=True)
