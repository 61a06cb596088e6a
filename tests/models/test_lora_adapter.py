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
from ascend_vllm.models.lora_adapter import AdapterLimits, read_adapter
from tests.lora_adapters import VOCABULARY, Adapter, write_adapter
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


def limits(max_rank: int = 16, added: int = 0, is_tied: bool = False) -> AdapterLimits:
    return AdapterLimits(max_rank, 384, added, is_tied)


def refusal(directory: pathlib.Path, added: int = 0) -> str:
    with pytest.raises(ModelLoadError) as caught:
        read_adapter(str(directory), limits(added=added))
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
    found = read_adapter(directory, limits())
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
    before = read_adapter(str(directory), limits(8))
    change_config(directory, some_new_key=5, layers_to_transform=[0], base_model_name_or_path="elsewhere")
    change_tensors(directory, base_model__model__lm_head__base_layer__weight=torch.zeros(2, 2))
    assert read_adapter(str(directory), limits(8)).keys() == before.keys()


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
    (directory / "adapter_model.safetensors").write_bytes(b"short")
    assert "adapter_model.safetensors: the file is damaged" in refusal(directory)
    (directory / "adapter_model.safetensors").unlink()
    assert "doesn't contain tensors" in refusal(directory)
    (directory / "adapter_config.json").write_text("{}")
    assert "Missing required configuration fields" in refusal(directory)
    (tmp_path / "empty").mkdir()
    assert "adapter_config.json" in refusal(tmp_path / "empty")


@pytest.mark.parametrize("as_copies", [False, True])
def test_vectors_of_added_tokens(tmp_path: pathlib.Path, as_copies: bool) -> None:
    """They come with what the matrices of embedding and head add to them, and these have the model's own tokens."""
    model = tiny_model("llama")
    adapter = Adapter("words", rank=4, modules=("q_proj", *VOCABULARY), added=3, as_copies=as_copies)
    directory = pathlib.Path(write_adapter(tmp_path / "words", model, adapter))
    found = read_adapter(str(directory), limits(added=3))
    tensors = load_file(directory / "adapter_model.safetensors")
    if as_copies:
        names = {"input_embeddings": "model.embed_tokens", "output_embeddings": "lm_head"}
        stored = {name: tensors[f"base_model.model.{copy}.base_layer.weight"][384:] for name, copy in names.items()}
    else:
        stored = load_file(directory / "new_embeddings.safetensors")
    table = [tensors[f"base_model.model.model.embed_tokens.lora_embedding_{matrix}"] for matrix in "AB"]
    head = [tensors[f"base_model.model.lm_head.lora_{matrix}.weight"] for matrix in "AB"]
    scale = adapter.scale_of("lm_head")
    for name, added in (
        ("input_embeddings", scale * (table[1] @ table[0][:, 384:]).T),
        ("output_embeddings", scale * head[1][384:] @ head[0]),
    ):
        torch.testing.assert_close(found[name].a, stored[name] + added)
    assert (found["model.embed_tokens"].a.shape[1], len(found["lm_head"].b)) == (384, 384)


def test_wrong_vectors_of_added_tokens(directory: pathlib.Path) -> None:
    path = directory / "new_embeddings.safetensors"
    save_file({"output_embeddings": torch.zeros(2, 64)}, path)
    assert "new_embeddings.safetensors has no input_embeddings" in refusal(directory, 8)
    save_file({"input_embeddings": torch.zeros(2, 64)}, path)
    assert "need a vector each in the embedding and in the head" in refusal(directory, 8)
    # a tied head has the embedding's
    found = read_adapter(str(directory), limits(added=2, is_tied=True))
    assert found["output_embeddings"].a is found["input_embeddings"].a
    save_file({"input_embeddings": torch.zeros(9, 64), "output_embeddings": torch.zeros(9, 64)}, path)
    assert "the adapter adds 9 tokens to the vocabulary, 8 are possible (--lora-extra-vocab-size" in refusal(
        directory, 8
    )
    assert "the adapter adds 9 tokens to the vocabulary, 0 are possible" in refusal(directory)
    path.write_bytes(b"short")
    assert "new_embeddings.safetensors: the file is damaged" in refusal(directory, 8)
