"""The script that writes random-weight models writes what a server can serve."""

from __future__ import annotations

import pathlib
import runpy
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.paged_driver import PagedDriver, TransformersModel, make_model_config

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "make_random_model.py"
SIZES = ["--vocab-size", "2000", "--hidden-size", "64", "--intermediate-size", "96", "--num-hidden-layers", "2"]


def _run(monkeypatch: pytest.MonkeyPatch, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *args])
    runpy.run_path(str(SCRIPT), run_name="__main__")


EXPERTS = ["--num-experts", "8", "--num-experts-per-tok", "2", "--moe-intermediate-size", "48"]
EXPERTS += ["--shared-expert-intermediate-size", "64"]


LATENT = ["--kv-lora-rank", "32", "--qk-nope-head-dim", "16", "--qk-rope-head-dim", "8", "--v-head-dim", "24"]
LATENT += ["--first-k-dense-replace", "1", "--n-shared-experts", "2", "--no-tie-word-embeddings"]


@pytest.mark.parametrize("flags", [[], ["--no-tie-word-embeddings"], EXPERTS, EXPERTS + LATENT])
def test_model_and_tokenizer_load(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> None:
    directory = str(tmp_path / "model")
    _run(monkeypatch, directory, "--preset", "tiny-5m", *SIZES, *flags)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    assert len(tokenizer) == 2000
    text = "Hello world, what does --block-size do? 你好\n"
    token_ids = tokenizer.encode(text)
    assert tokenizer.decode(token_ids) == text
    assert len(token_ids) < len(text)
    assert transformers.GenerationConfig.from_pretrained(directory).eos_token_id == tokenizer.eos_token_id
    result = PagedDriver(make_model_config(directory)).step({0: token_ids})[0]
    assert result.sub(TransformersModel(directory).log_probs(token_ids)).abs().max() < 1e-4


def _widened(tensors: dict[str, torch.Tensor], stem: str) -> torch.Tensor:
    """The weight [N, K] that the tensors of a quantized matrix mean."""
    scales = tensors[f"{stem}.weight_scale"].float()
    if f"{stem}.weight" in tensors:
        return tensors[f"{stem}.weight"].float() * scales
    words = tensors[f"{stem}.weight_packed"]
    codes = (words[:, :, None] >> 4 * torch.arange(8) & 15).flatten(1) - 8
    assert codes.shape == tuple(tensors[f"{stem}.weight_shape"])
    return codes * scales.repeat_interleave(128, 1)


@pytest.mark.parametrize(("weights", "accuracy"), [("w8a8", 0.03), ("w4a16", 1e-4)])
@pytest.mark.parametrize("experts", [False, True])
def test_quantized_weights(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, weights: str, accuracy: float, experts: bool
) -> None:
    """They are those of the unquantized model, rounded; inputs of W8A8 are rounded too."""
    sizes = [*SIZES[:2], "--hidden-size", "128", "--intermediate-size", "256", "--num-hidden-layers", "1"]
    sizes += [*EXPERTS[:-4], "--moe-intermediate-size", "128", *EXPERTS[-2:-1], "256"] if experts else []
    plain, rounded = tmp_path / "plain", tmp_path / "rounded"
    _run(monkeypatch, str(plain), "--preset", "tiny-5m", *sizes)
    _run(monkeypatch, str(rounded), "--preset", "tiny-5m", *sizes, "--weights", weights)
    meant, tensors = load_file(plain / "model.safetensors"), load_file(rounded / "model.safetensors")
    # half a step as a share of the largest weight; scales in bfloat16 are off by some percent of it
    half_step = {"w8a8": 1 / 254, "w4a16": 1.06 / 15}[weights]
    stems = [name.removesuffix(".weight") for name in meant if "_proj.weight" in name]
    assert len(stems) == 4 + 3 * (9 if experts else 1)
    for stem in stems:
        widened, weight = _widened(tensors, stem), meant[f"{stem}.weight"].float()
        assert (widened - weight).abs().max() <= weight.abs().max() * half_step * 1.001
        meant[f"{stem}.weight"] = widened
    save_file({name: weight.float() for name, weight in meant.items()}, plain / "model.safetensors")
    ids = [5, 17, 300, 1999, 42]
    result = PagedDriver(make_model_config(str(rounded))).step({0: ids})[0]
    assert result.sub(TransformersModel(str(plain)).log_probs(ids)).abs().max() < accuracy


def test_weights_follow_the_seed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seed in (("first", "1"), ("again", "1"), ("other", "2")):
        _run(monkeypatch, str(tmp_path / name), "--preset", "tiny-5m", *SIZES, "--seed", seed)
    first, again, other = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "again", "other")
    )
    assert first == again
    assert first != other


def test_impossible_sizes_are_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"--vocab-size 100 is not in 259"):
        _run(monkeypatch, str(tmp_path), "--vocab-size", "100")
    with pytest.raises(SystemExit, match="--hidden-size"):
        _run(monkeypatch, str(tmp_path), "--hidden-size", "100")
    with pytest.raises(SystemExit, match="w4a16: matrices must have a multiple of 128 inputs, and one has 64"):
        _run(monkeypatch, str(tmp_path), "--preset", "tiny-5m", *SIZES, "--weights", "w4a16")
