"""Tiny pooling checkpoints, and what transformers makes of prompts with them."""

from __future__ import annotations

import functools
import json
import pathlib
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers

from tests.tiny_models import draw_weights, save_tokenizer, tiny_model

# kept until the process ends
_ROOT = tempfile.TemporaryDirectory(prefix="ascend_vllm_pooling_models_")

LABELS = ("cat", "dog", "fox")


@functools.cache
def bare_model(family: str) -> str:
    """Directory of the checkpoint of a family's XModel: the same decoder as `tiny_model`'s, without a head."""
    directory = pathlib.Path(_ROOT.name) / f"{family}-bare"
    transformers.AutoModel.from_pretrained(tiny_model(family), dtype=torch.float32).save_pretrained(directory)
    save_tokenizer(directory)
    return str(directory)


@functools.cache
def classifier(family: str, num_labels: int = 3, **options: Any) -> str:
    """Directory of a checkpoint of a family's XForSequenceClassification; `options` go to its config."""
    name = "-".join([family, str(num_labels), *(f"{key}={value}" for key, value in options.items())])
    directory = pathlib.Path(_ROOT.name) / f"classifier-{name}"
    labels = {index: LABELS[index] for index in range(num_labels)}
    config = transformers.AutoConfig.from_pretrained(
        tiny_model(family), num_labels=num_labels, id2label=labels, **options
    )
    model = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    draw_weights(model, seed=zlib.crc32(name.encode()))
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return str(directory)


def sentence_transformer(
    directory: pathlib.Path, pooling: Mapping[str, Any], *, normalize: bool, family: str = "qwen2"
) -> str:
    """Makes a directory with the files of sentence-transformers around a model's config."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": index, "name": str(index), "path": paths[kind], "type": f"sentence_transformers.models.{kind}"}
        for index, kind in enumerate(kinds)
    ]
    (directory / "1_Pooling").mkdir(parents=True)
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    for file in pathlib.Path(tiny_model(family)).iterdir():
        (directory / file.name).symlink_to(file)
    return str(directory)


@functools.cache
def _reference(directory: str, dtype: str, *, classifies: bool) -> Any:
    kind = transformers.AutoModelForSequenceClassification if classifies else transformers.AutoModel
    return kind.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()


def hidden_states(directory: str, token_ids: Sequence[int], dtype: str = "float32") -> torch.Tensor:
    """[len(token_ids), H] float32: transformers' last hidden states of a prompt, computed in a dtype.

    Do not write to it.
    """
    return _hidden_states(directory, tuple(token_ids), dtype)


# every kind of pooling asks for the same
@functools.lru_cache(128)
@torch.no_grad()
def _hidden_states(directory: str, token_ids: tuple[int, ...], dtype: str) -> torch.Tensor:
    model = _reference(directory, dtype, classifies=False)
    states: torch.Tensor = model(torch.tensor([token_ids])).last_hidden_state[0].float()
    return states


@torch.no_grad()
def scores(directory: str, token_ids: Sequence[int]) -> torch.Tensor:
    """[C] float32: the outputs of transformers' classification head."""
    logits: torch.Tensor = _reference(directory, "float32", classifies=True)(torch.tensor([token_ids])).logits[0]
    return logits


def unit(vectors: torch.Tensor) -> torch.Tensor:
    """Vectors of length 1, along the last dimension."""
    return torch.nn.functional.normalize(vectors, dim=-1)
