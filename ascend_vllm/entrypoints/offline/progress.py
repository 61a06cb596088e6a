"""The progress bar of offline generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tqdm

from ascend_vllm.outputs import RequestOutput

# True, False, or a factory of progress bars with tqdm's arguments
UseTqdm = bool | Callable[..., Any]


class Progress:
    """The progress bar, which also estimates the speed in tokens per second.

    Args:
        total: number of prompts.
        use_tqdm: whether there is a bar, or what makes it.
    """

    def __init__(self, total: int, use_tqdm: UseTqdm) -> None:
        self._num_input = 0
        self._num_output = 0
        self._bar: Any = None
        if use_tqdm:
            make = use_tqdm if callable(use_tqdm) else tqdm.tqdm
            self._bar = make(
                total=total, desc="Processed prompts", dynamic_ncols=True, postfix=_describe_speed(0.0, 0.0)
            )

    def count(self, output: RequestOutput) -> None:
        if self._bar is None:
            return
        self._num_input += len(output.prompt_token_ids)
        self._num_output += sum(len(sequence.token_ids) for sequence in output.outputs)
        elapsed = max(self._bar.format_dict["elapsed"], 1e-6)
        self._bar.postfix = _describe_speed(self._num_input / elapsed, self._num_output / elapsed)
        self._bar.update(1)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _describe_speed(num_input: float, num_output: float) -> str:
    return f"est. speed input: {num_input:.2f} toks/s, output: {num_output:.2f} toks/s"
