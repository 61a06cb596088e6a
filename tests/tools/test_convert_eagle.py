"""The converter of EAGLE heads."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from ascend_vllm.errors import ModelLoadError
from ascend_vllm.tools.convert_eagle_ckpt_to_vllm_compatible import convert
from tests.eagle_heads import eagle3_tensors, eagle_tensors, head_config, save_head

HIDDEN, VOCAB = 64, 96


def _save_base(directory: pathlib.Path, *, tied: bool) -> str:
    """A model of two files as far as the converter looks; returns the name of the one with the head."""
    directory.mkdir()
    embedding = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
    save_file({"model.embed_tokens.weight": embedding}, directory / "model-00001-of-00002.safetensors")
    files = {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}
    if not tied:
        save_file({"lm_head.weight": embedding.flip(0)}, directory / "model-00002-of-00002.safetensors")
        files["lm_head.weight"] = "model-00002-of-00002.safetensors"
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return files.get("lm_head.weight", "model-00001-of-00002.safetensors")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("as_bin", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_adds_the_head_of_the_base_model(tmp_path: pathlib.Path, tied: bool, as_bin: bool, bias: bool) -> None:
    """All tensors stay, the LM head comes from the base model, tied or not, and the config says what the head is."""
    base, draft = tmp_path / "base", tmp_path / "draft"
    with_head = _save_base(base, tied=tied)
    tensors = eagle_tensors(HIDDEN, VOCAB, bias=bias)
    config = head_config(HIDDEN, VOCAB)
    weights = save_head(draft, tensors, config, as_bin=as_bin)
    convert(base, draft, with_head, weights)

    converted = load_file(draft / "model.safetensors")
    lm_head = converted.pop("lm_head.weight")
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert torch.equal(lm_head, load_file(base / with_head)[name])
    assert converted.keys() == tensors.keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in tensors.items())
    assert json.loads((draft / "config.json").read_text()) == {
        "model_type": "eagle",
        "architectures": ["EAGLEModel"],
        "bias": bias,
        "eagle_fc_bias": bias,
        "model": {**config, "bias": bias, "eagle_fc_bias": bias},
    }
    assert sorted(path.name for path in draft.iterdir()) == ["config.json", "model.safetensors"]


def test_program_takes_the_four_arguments_of_the_guide(tmp_path: pathlib.Path) -> None:
    """The command of Huawei's guide works; the second time there is nothing left to do."""
    base, draft = tmp_path / "base", tmp_path / "draft"
    with_head = _save_base(base, tied=False)
    weights = save_head(draft, eagle_tensors(HIDDEN, VOCAB, bias=True), head_config(HIDDEN, VOCAB))
    command = [sys.executable, "-m", "ascend_vllm.tools.convert_eagle_ckpt_to_vllm_compatible"]
    command += ["--base-path", str(base), "--draft-path", str(draft)]
    command += ["--base-weight-name", with_head, "--draft-weight-name", weights]
    subprocess.run(command, check=True)
    before = (draft / "config.json").read_bytes()
    subprocess.run(command, check=True)
    assert (draft / "config.json").read_bytes() == before


def test_heads_of_eagle_3_get_an_embedding_and_keep_their_config(tmp_path: pathlib.Path) -> None:
    """They have LM heads of their own, and vLLM reads them without the outer config."""
    base, draft = tmp_path / "base", tmp_path / "draft"
    with_head = _save_base(base, tied=False)
    tensors = eagle3_tensors(HIDDEN, VOCAB, 32)
    config = head_config(HIDDEN, VOCAB, draft_vocab_size=32)
    convert(base, draft, with_head, save_head(draft, tensors, config))
    converted = load_file(draft / "model.safetensors")
    embedding = load_file(base / "model-00001-of-00002.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(converted.pop("embed_tokens.weight"), embedding)
    assert converted.keys() == tensors.keys()
    assert torch.equal(converted["d2t"], tensors["d2t"])
    assert json.loads((draft / "config.json").read_text()) == config


def test_wrong_file_of_the_base_model_names_the_right_one(tmp_path: pathlib.Path) -> None:
    """Whoever names a file without the head is told which file has it, and nothing is changed."""
    base, draft = tmp_path / "base", tmp_path / "draft"
    _save_base(base, tied=False)
    weights = save_head(draft, eagle_tensors(HIDDEN, VOCAB, bias=True), head_config(HIDDEN, VOCAB))
    with pytest.raises(ModelLoadError, match=r"it is in model-00002-of-00002\.safetensors"):
        convert(base, draft, "model-00001-of-00002.safetensors", weights)
    assert (draft / weights).is_file()
    assert json.loads((draft / "config.json").read_text())["model_type"] == "llama"


def test_other_models_are_refused(tmp_path: pathlib.Path) -> None:
    """A checkpoint without `fc` is no EAGLE head."""
    base, draft = tmp_path / "base", tmp_path / "draft"
    with_head = _save_base(base, tied=True)
    tensors = eagle_tensors(HIDDEN, VOCAB, bias=False)
    del tensors["fc.weight"]
    with pytest.raises(ModelLoadError, match="is no EAGLE head"):
        convert(base, draft, with_head, save_head(draft, tensors, head_config(HIDDEN, VOCAB)))
