"""Scores of pairs of texts: what HTTP and offline pooling share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ascend_vllm.config.model import PoolerConfig
from ascend_vllm.errors import RequestError

T = TypeVar("T")


def is_cross_encoder(pooler: PoolerConfig) -> bool:
    """Whether a head of one output reads both texts at once; otherwise their embeddings are compared."""
    return pooler.convert == "classify" and len(pooler.labels) == 1


def pair_up(first: Sequence[T], second: Sequence[T]) -> list[tuple[T, T]]:
    """The pairs that two lists stand for: one with each of the other list, or one by one.

    Raises:
        RequestError: they are of different lengths, or empty.
    """
    if len(first) > 1 and len(first) != len(second):
        raise RequestError("Input lengths must be either 1:1, 1:N or N:N")
    if not first:
        raise RequestError("At least one text element must be given")
    if not second:
        raise RequestError("At least one text_pair element must be given")
    return list(zip(first if len(first) > 1 else [first[0]] * len(second), second, strict=True))


def similarity(first: npt.NDArray[np.float32], second: npt.NDArray[np.float32]) -> float:
    """How alike two embeddings are: their cosine, −1 … 1.

    Of embeddings of every token, [P, D] and [Q, D], it is the sum over the first text's tokens of the largest cosine
    with one of the second's (ColBERT's late interaction, https://arxiv.org/abs/2004.12832, equation 3).
    """
    first, second = _unit(first), _unit(second)
    if first.ndim == 1:
        return float(first @ second)
    return float((first @ second.T).max(axis=1).sum())


def _unit(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    result: npt.NDArray[np.float32] = vectors / np.maximum(lengths, np.float32(1e-12))
    return result
