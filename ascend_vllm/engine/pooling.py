"""Pooling requests: parameter checks, results, and pairs of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from ascend_vllm.config.model import ModelConfig, PoolerConfig
from ascend_vllm.engine.metrics import FinishedSequence
from ascend_vllm.errors import RequestError
from ascend_vllm.outputs import CompletionOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
from ascend_vllm.pooling_params import PoolingParams
from ascend_vllm.sampling_params import RequestOutputKind, SamplingParams
from ascend_vllm.types.messages import EngineCoreOutput, FinishReason

T = TypeVar("T")

# sampling parameters of pooling requests, which the scheduler treats as requests for one token
POOLED = SamplingParams(
    temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
)


def resolve_pooling_params(params: PoolingParams, model: ModelConfig) -> PoolingParams:
    """The parameters as the core needs them, with the defaults of the model's pooler.

    Args:
        params: the caller's; not changed.
        model: the engine's model.

    Raises:
        RequestError: the model has no pooler, or its pooler does not support the parameters.
    """
    pooler = model.pooler
    if pooler is None:
        raise RequestError("This model generates text and does not pool: pooling needs --runner pooling.", "task")
    check_task(params.task, pooler)
    dimensions = pooler.dimensions if params.dimensions is None else params.dimensions
    if dimensions is not None:
        _check_dimensions(dimensions, pooler, model)
    if params.skip_reading_prefix_cache is False and pooler.needs_whole_prompt:
        raise RequestError(
            "skip_reading_prefix_cache cannot be false: the pooler reads every token of the prompt.",
            "skip_reading_prefix_cache",
        )
    return msgspec.structs.replace(
        params,
        use_activation=pooler.use_activation if params.use_activation is None else params.use_activation,
        dimensions=dimensions,
        task=pooler.task,
        skip_reading_prefix_cache=bool(params.skip_reading_prefix_cache) or pooler.needs_whole_prompt,
    )


def check_task(task: str | None, pooler: PoolerConfig) -> None:
    """Refuses a task that the engine does not serve; None stands for the one it serves.

    Raises:
        RequestError: the engine does not serve it.
    """
    if task is None or task == pooler.task:
        return
    if task == "score":
        raise RequestError("`score` task was removed; use `classify` instead.", "task")
    if task not in pooler.supported_tasks:
        raise RequestError(f"Unsupported task: {task!r} Supported tasks: {list(pooler.supported_tasks)}", "task")
    raise RequestError(f"Try switching the model's pooling_task via --pooler-config.task {task}.", "task")


def _check_dimensions(dimensions: int, pooler: PoolerConfig, model: ModelConfig) -> None:
    name = model.served_model_names[0]
    if pooler.task != "embed":
        raise RequestError("dimensions is currently not supported", "dimensions")
    if not pooler.is_matryoshka:
        raise RequestError(
            f"Model {name!r} does not support Matryoshka embeddings; dimensions must be unset (received "
            f"dimensions={dimensions}).",
            "dimensions",
        )
    if not 1 <= dimensions <= model.hidden_size:
        raise RequestError(
            f"Model {name!r} only supports dimensions in range [1, {model.hidden_size}], got {dimensions}.",
            "dimensions",
        )
    known = pooler.matryoshka_dimensions
    if known is not None and dimensions not in known:
        raise RequestError(
            f"Model {name!r} only supports Matryoshka dimensions {list(known)}, got {dimensions}.", "dimensions"
        )


class PoolingState:
    """The result of a pooling request; the counterpart of a `SequenceState`.

    Attributes:
        data: float32, [D] of the prompt or [P, D] of each of its tokens; None before the end, and after an abort.
        finish_reason: None while it runs.
        last_token_time: seconds of time.monotonic() at its end.
        num_tokens: always 0: nothing is generated.
    """

    num_tokens = 0

    def __init__(self) -> None:
        self.data: npt.NDArray[np.float32] | None = None
        self.finish_reason: FinishReason | None = None
        self.last_token_time: float | None = None

    def update(self, output: EngineCoreOutput) -> bool:
        """Stores the result.

        Returns:
            False: no stop string ends a pooling request.
        """
        if output.pooled is not None:
            self.data = np.frombuffer(output.pooled.data, np.float32).reshape(output.pooled.shape)
        self.finish_reason = output.finish_reason
        return False

    def end(self, reason: FinishReason) -> None:
        self.finish_reason = reason

    def make_outputs(self, _kind: RequestOutputKind) -> list[CompletionOutput]:
        return []

    def summaries(self) -> list[FinishedSequence]:
        """Its entry in the metrics, at its end."""
        return [FinishedSequence(str(self.finish_reason), 0)]


def pooling_output(output: RequestOutput) -> PoolingRequestOutput[PoolingOutput]:
    """The result of a pooling request, from its single output.

    Raises:
        RequestError: the request was aborted.
    """
    if output.pooled is None:
        raise RequestError("The request was aborted before its prompt was pooled.")
    return PoolingRequestOutput(
        output.request_id,
        PoolingOutput(output.pooled),
        output.prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens,
    )


def is_cross_encoder(pooler: PoolerConfig) -> bool:
    """Whether the model scores both texts in one prompt; otherwise their embeddings are compared."""
    return pooler.convert == "classify" and len(pooler.labels) == 1


def pair_up(first: Sequence[T], second: Sequence[T]) -> list[tuple[T, T]]:
    """Pairs of two lists: 1:1, N:N or 1:N.

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
    """Cosine similarity of two embeddings [D], −1 … 1.

    For token embeddings [P, D] and [Q, D] it is the sum over the first text's tokens of the largest cosine with a
    token of the second's (ColBERT's late interaction, https://arxiv.org/abs/2004.12832, equation 3).
    """
    first, second = _unit(first), _unit(second)
    if first.ndim == 1:
        return float(first @ second)
    return float((first @ second.T).max(axis=1).sum())


def _unit(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    result: npt.NDArray[np.float32] = vectors / np.maximum(lengths, np.float32(1e-12))
    return result
