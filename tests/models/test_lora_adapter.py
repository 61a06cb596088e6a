"""Adapters as PEFT writes them: what is read, and what is refused with file and reason."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ascend_vllm.errors import ModelLoadError
from ascend_vllm.models.lora_adapter import read_adapter
from tests.lora_adapters import Adapter, write_adapter
from tests.tiny_models import tiny_model

PLAIN = Adapter("plain", rank=8, modules=("q_proj", "down_proj"))
QUERY = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def directory(tmp_path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(write_adapter(tmp_path / "plain", tiny_model("llama"), PLAIN))


def change_config(directory: pathlib.Path, **values: Any) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_tensors(directory: pathlib.Path, **tensors: torch.Tensor | None) -> None:
    path = directory / "adapter_model.safetensors"
    changed = load_file(path) | {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, path)


def refusal(directory: pathlib.Path, max_rank: int = 16) -> str:
    with pytest.raises(ModelLoadError) as caught:
        read_adapter(str(directory), max_rank)
    assert str(directory) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "adapter",
    [
        PLAIN,
        dataclasses.replace(PLAIN, as_torch=True),
        dataclasses.replace(PLAIN, takes_root=True),
        dataclasses.replace(PLAIN, ranks={"q_proj": 3, "layers.1.mlp.down_proj": 16}, alphas={"down_proj": 5.0}),
    ],
    ids=["safetensors", "torch", "rslora", "patterns"],
)
def test_matrices_have_the_scale_in_them(tmp_path: pathlib.Path, adapter: Adapter) -> None:
    directory = write_adapter(tmp_path / "any", tiny_model("llama"), adapter)
    found = read_adapter(directory, 16)
    assert len(found) == 6
    files = pathlib.Path(directory)
    tensors = (
        torch.load(files / "adapter_model.bin", weights_only=True)
        if adapter.as_torch
        else load_file(files / "adapter_model.safetensors")
    )
    for module, matrices in found.items():
        assert len(matrices.a) == adapter.rank_of(module)
        torch.testing.assert_close(matrices.a, tensors[f"base_model.model.{module}.lora_A.weight"])
        b = tensors[f"base_model.model.{module}.lora_B.weight"]
        torch.testing.assert_close(matrices.b, b * adapter.scale_of(module))


def test_unknown_keys_and_copies_of_the_models_weights_are_ignored(directory: pathlib.Path) -> None:
    before = read_adapter(str(directory), 8)
    change_config(directory, some_new_key=5, layers_to_transform=[0], base_model_name_or_path="elsewhere")
    change_tensors(directory, base_model__model__lm_head__base_layer__weight=torch.zeros(2, 2))
    assert read_adapter(str(directory), 8).keys() == before.keys()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
        ({"use_dora": True}, "DoRA is not supported"),
        ({"bias": "all"}, "Adapter bias is not supported"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"r": 0}, "LoRA rank `r` must be a positive integer, got 0"),
        ({"r": 32}, "LoRA rank 32 is greater than max_lora_rank 16"),
        ({"rank_pattern": {"q_proj": 64}}, "LoRA rank 64 is greater than max_lora_rank 16"),
        ({"r": 4}, "has shape [8, 112]; by adapter_config.json its rank is 4"),
        ({"lora_alpha": "many"}, "lora_alpha must be a number, got 'many'"),
        ({"rank_pattern": {"q_proj": None}}, "LoRA rank `rank_pattern.q_proj` must be a positive integer"),
        ({"alpha_pattern": [1]}, "alpha_pattern must be an object"),
    ],
)
def test_refusals_by_the_configuration(directory: pathlib.Path, values: dict[str, Any], words: str) -> None:
    change_config(directory, **values)
    assert words in refusal(directory)


def test_wrong_files_and_tensors(directory: pathlib.Path, tmp_path: pathlib.Path) -> None:
    b = f"base_model__model__{QUERY.replace('.', '__')}__lora_B__weight"
    change_tensors(directory, **{b: None})
    assert f"{QUERY} has no lora_B.weight" in refusal(directory)
    change_tensors(directory, **{b: torch.zeros(64, 8), "base_model__model__lm_head__weight": torch.zeros(2)})
    assert "base_model.model.lm_head.weight is unsupported LoRA weight" in refusal(directory)
    table = {"base_model__model__model__embed_tokens__lora_embedding_A": torch.zeros(8, 384)}
    change_tensors(directory, **{b: torch.zeros(64, 8), "base_model__model__lm_head__weight": None}, **table)
    assert "model.embed_tokens has no lora_embedding_B" in refusal(directory)
    (directory / "new_embeddings.safetensors").write_bytes(b"")
    assert "new_embeddings.safetensors: adapters that add tokens to the vocabulary" in refusal(directory)
    (directory / "new_embeddings.safetensors").unlink()
    (directory / "adapter_model.safetensors").write_bytes(b"short")
    assert "adapter_model.safetensors: the file is damaged" in refusal(directory)
    (directory / "adapter_model.safetensors").unlink()
    assert "doesn't contain tensors" in refusal(directory)
    (directory / "adapter_config.json").write_text("{}")
    assert "Missing required configuration fields" in refusal(directory)
    (tmp_path / "empty").mkdir()
    assert "adapter_config.json" in refusal(tmp_path / "empty")
