"""The script that writes random-weight models writes what a server can serve."""

from __future__ import annotations

import pathlib
import runpy
import sys

import pytest
import transformers

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
