"""Engines on real workers whose requests draft tokens: a row kind and a connector that tests alone have."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import shutil
import threading
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.core.connectors import Connector
from ascend_vllm.core.engine_core import EngineCore
from ascend_vllm.core.request import Request, RowKind
from ascend_vllm.errors import RequestError
from ascend_vllm.executor.base import create_executor
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.messages import EngineCoreRequest, TokenLogprobs
from tests.tiny_models import tiny_root


class Drafting(RowKind):
    """Drafts what the request's text is known to be, but for each fifth token; some steps have no drafts.

    Args:
        text: prompt and answer.
        num_drafts: of a step, if it has any.
        is_steady: all steps have so many, as far as the text goes.
    """

    may_run_ahead = False

    def __init__(self, text: Sequence[int], num_drafts: int, *, is_steady: bool) -> None:
        self._text = text
        self._num_drafts = num_drafts
        self._is_steady = is_steady

    def tokens_wanted(self, row: Request, most: int) -> int:
        if not self._is_steady and row.num_tokens % 7 == 0:
            return 1
        return min(1 + self._num_drafts, most)

    def drafts(self, row: Request, count: int) -> list[int]:
        drafts = list(self._text[row.num_tokens : row.num_tokens + count])
        drafts += [1] * (count - len(drafts))
        return [3 if (row.num_tokens + place) % 5 == 0 else token_id for place, token_id in enumerate(drafts)]


class Drafts(Connector):
    """Makes requests whose text it knows draft tokens.

    Args:
        texts: request id → prompt and answer.
        num_drafts: see `Drafting`.
        is_steady: see `Drafting`.
    """

    # all requests have one
    field = "request_id"

    def __init__(self, texts: Mapping[str, Sequence[int]], num_drafts: int, *, is_steady: bool) -> None:
        self._texts = texts
        self._num_drafts = num_drafts
        self._is_steady = is_steady

    def attach(self, wake: threading.Event) -> None:
        pass

    def begin(self, request: Request) -> bool:
        if request.request_id in self._texts:
            text = self._texts[request.request_id]
            request.kind = Drafting(text, self._num_drafts, is_steady=self._is_steady)
        return True

    def take_ready(self) -> list[tuple[Request, RequestError | None]]:
        return []

    def remove(self, request: Request) -> None:
        raise AssertionError(f"{request} does not wait here")

    def close(self) -> None:
        pass


@dataclasses.dataclass
class Answer:
    """What a request got, in how many outputs."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    num_outputs: int = 0


@dataclasses.dataclass
class Asked:
    """A request."""

    prompt: list[int]
    params: SamplingParams


def generate(
    config: EngineConfig,
    requests: Mapping[str, Asked],
    connectors: Sequence[Connector] = (),
) -> dict[str, Answer]:
    """Answers of an engine to some requests at once."""
    core = EngineCore(config, create_executor(config), connectors=connectors)
    try:
        for name, asked in requests.items():
            core.add_request(EngineCoreRequest(name, asked.prompt, asked.params, 2, arrival_time=0.0))
        answers = {name: Answer() for name in requests}
        while core.has_unfinished():
            for output in core.step().outputs:
                assert output.error is None
                answer = answers[output.request_id]
                answer.token_ids += output.new_token_ids
                answer.logprobs += output.new_logprobs or []
                answer.num_outputs += 1
            assert core.audit()["violations"] == []
        assert core.audit()["num_free_blocks"] == core.num_blocks
        return answers
    finally:
        core.shutdown()


def texts_of(requests: Mapping[str, Asked], answers: Mapping[str, Answer]) -> dict[str, list[int]]:
    """Prompts and answers."""
    return {name: [*requests[name].prompt, *answer.token_ids] for name, answer in answers.items()}


@functools.cache
def noisy_copy(model: str, size: float = 0.03) -> str:
    """A draft model that is right most of the time: a model whose matrices are a little off.

    Args:
        model: its directory.
        size: standard deviation of the noise, in those of the matrices.
    """
    directory = tiny_root() / f"noisy-{pathlib.Path(model).parent.name}-{pathlib.Path(model).name}-{size}"
    shutil.copytree(model, directory)
    generator = torch.Generator().manual_seed(3)
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            tensors[name] = tensor + size * tensor.std() * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return str(directory)


def make_prompts(count: int, vocab_size: int = 384) -> list[list[int]]:
    """Of different lengths, some longer than a block."""
    return [np.random.default_rng(seed).integers(3, vocab_size, 4 + 6 * seed).tolist() for seed in range(count)]
