"""All layouts of checkpoints, and clear errors for malformed ones."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ascend_vllm.config.model import LoadConfig
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.models import checkpoint as checkpoint_module
from ascend_vllm.models import loader, registry
from ascend_vllm.models.direct_reader import DirectReader
from ascend_vllm.models.loader import load_model
from tests.models.paged_driver import PagedDriver, load, make_model_config, random_tokens
from tests.tiny_models import VOCAB_SIZE, tiny_model

PROMPT = random_tokens(20, VOCAB_SIZE, seed=1)
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


def _log_probs(directory: str, load_format: str = "auto") -> torch.Tensor:
    config = make_model_config(directory)
    return PagedDriver(config, model=load(config, load_format)).step({0: PROMPT})[0]


@pytest.fixture
def checkpoint(tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of the tiny Llama that a test may damage."""
    return _copy("llama", tmp_path)


def _copy(name: str, tmp_path: pathlib.Path) -> pathlib.Path:
    directory = tmp_path / name
    shutil.copytree(tiny_model(name), directory)
    return directory


def _rewrite(directory: pathlib.Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Adds, replaces or (None) removes tensors of model.safetensors."""
    weights: dict[str, Any] = load_file(directory / "model.safetensors") | changes
    save_file({name: value for name, value in weights.items() if value is not None}, directory / "model.safetensors")


def _refused(directory: pathlib.Path, *parts: str, load_format: str = "auto", **overrides: Any) -> None:
    """Checks that loading fails with a one-line error that has all parts."""
    with pytest.raises(ModelLoadError) as caught:
        load(make_model_config(directory, **overrides), load_format)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


# ---- arrangements ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-sharded", "llama-bin", "llama-bin-sharded"])
def test_all_arrangements_of_files_give_the_same_model(name: str) -> None:
    torch.testing.assert_close(_log_probs(tiny_model(name)), _log_probs(tiny_model("llama")), rtol=0, atol=0)


def test_safetensors_are_preferred_and_a_format_can_be_forced(checkpoint: pathlib.Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    weights["model.norm.weight"] *= 2
    torch.save(weights, checkpoint / "pytorch_model.bin")
    torch.save({"lr": 0.1}, checkpoint / "optimizer.bin")
    original = _log_probs(tiny_model("llama"))
    assert torch.equal(_log_probs(str(checkpoint)), original)
    assert torch.equal(_log_probs(str(checkpoint), "safetensors"), original)
    assert not torch.equal(_log_probs(str(checkpoint), "pt"), original)


def test_pt_before_zip_archives_loads(checkpoint: pathlib.Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    torch.save(weights, checkpoint / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(_log_probs(str(checkpoint)), _log_probs(tiny_model("llama")))


def test_files_of_any_name_load_without_an_index(checkpoint: pathlib.Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    names = sorted(weights)
    save_file({name: weights[name] for name in names[::2]}, checkpoint / "first.safetensors")
    save_file({name: weights[name] for name in names[1::2]}, checkpoint / "second.safetensors")
    assert torch.equal(_log_probs(str(checkpoint)), _log_probs(tiny_model("llama")))


def test_files_too_large_for_the_file_cache_are_read_past_it(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny_model("qwen2")
    mapped = _log_probs(directory)
    made = []

    class Counted(DirectReader):
        def __init__(self, *args: Any) -> None:
            made.append(self)
            super().__init__(*args)

    monkeypatch.setattr(checkpoint_module, "DirectReader", Counted)
    assert torch.equal(_log_probs(directory), mapped)
    assert not made
    size = sum(path.stat().st_size for path in pathlib.Path(directory).glob("*.safetensors"))
    monkeypatch.setattr(loader, "available_memory_bytes", lambda: 2 * size)
    assert torch.equal(_log_probs(directory), mapped)
    assert made


def test_ignore_patterns_leave_files_out(checkpoint: pathlib.Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "weights.safetensors")
    shutil.copy(checkpoint / "weights.safetensors", checkpoint / "weights-copy.safetensors")
    _refused(checkpoint, "weights-copy.safetensors", "as well")
    context = BuildContext(torch.float32, torch.device("cpu"))
    load_config = LoadConfig(ignore_patterns=("*-copy.*",), use_tqdm=False)
    config = make_model_config(checkpoint)
    driver = PagedDriver(config, model=load_model(config, load_config, context))
    assert torch.equal(driver.step({0: PROMPT})[0], _log_probs(tiny_model("llama")))


def test_progress_bar_counts_shards(capfd: pytest.CaptureFixture[str]) -> None:
    context = BuildContext(torch.float32, torch.device("cpu"))
    load_model(make_model_config(tiny_model("llama-sharded")), LoadConfig(), context)
    printed = capfd.readouterr().err
    assert "Loading safetensors checkpoint shards: 100%" in printed
    assert "3/3" in printed


def test_dummy_weights_need_no_files_and_follow_the_seed(tmp_path: pathlib.Path) -> None:
    config = make_model_config(tiny_model("qwen2"))

    def run(seed: int) -> torch.Tensor:
        fields = {name: getattr(config, name) for name in config.__struct_fields__}
        dummy = type(config)(**(fields | {"model": str(tmp_path / "nowhere"), "seed": seed}))
        return PagedDriver(dummy, model=load(dummy, "dummy")).step({0: PROMPT})[0]

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    assert run(1).isfinite().all()


def test_weights_are_counted() -> None:
    directory = tiny_model("llama")
    files = load_file(pathlib.Path(directory) / "model.safetensors")
    model = load(make_model_config(directory))
    assert model.num_weights == sum(tensor.numel() for tensor in files.values()) > 1000


def test_loaded_forms_are_freed() -> None:
    """After loading, a linear layer has only its packed weight, and no slot keeps another copy alive."""
    model = load(make_model_config(tiny_model("llama")))
    assert all(not layer.slots() for layer in model.layers() if type(layer).__name__.endswith("Linear"))


# ---- tensors that need not fit -----------------------------------------------------------------------------


def test_harmless_extra_tensors_are_ignored(checkpoint: pathlib.Path) -> None:
    _rewrite(checkpoint, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert torch.equal(_log_probs(str(checkpoint)), _log_probs(tiny_model("llama")))


def test_a_second_copy_of_a_tied_embedding_is_ignored(tmp_path: pathlib.Path) -> None:
    directory = _copy("qwen2-tied", tmp_path)
    _rewrite(directory, {"lm_head.weight": torch.zeros(VOCAB_SIZE, 64)})
    assert torch.equal(_log_probs(str(directory)), _log_probs(tiny_model("qwen2-tied")))


def test_opt_checkpoints_of_the_bare_decoder_load(tmp_path: pathlib.Path) -> None:
    directory = _copy("opt", tmp_path)
    weights = load_file(directory / "model.safetensors")
    renamed = {name.removeprefix("model."): value for name, value in weights.items()}
    save_file(renamed | {"decoder.version": torch.ones(1)}, directory / "model.safetensors")
    assert torch.equal(_log_probs(str(directory)), _log_probs(tiny_model("opt")))


# ---- errors ------------------------------------------------------------------------------------------------


def test_unsupported_architecture_lists_the_supported(checkpoint: pathlib.Path) -> None:
    _refused(checkpoint, "'MambaForCausalLM'", *registry.MODELS, architectures=["MambaForCausalLM"])


def test_no_directory(checkpoint: pathlib.Path) -> None:
    config = make_model_config(checkpoint)
    shutil.rmtree(checkpoint)
    with pytest.raises(ModelLoadError, match=re.escape(str(checkpoint))):
        load(config)


@pytest.mark.parametrize(("load_format", "wanted"), [("auto", "*.bin"), ("safetensors", "*.safetensors")])
def test_no_weight_files(checkpoint: pathlib.Path, load_format: str, wanted: str) -> None:
    (checkpoint / "model.safetensors").unlink()
    _refused(checkpoint, str(checkpoint), "no weight files", wanted, load_format=load_format)
    (checkpoint / "q4.gguf").write_bytes(b"GGUF")
    _refused(checkpoint, wanted, "GGUF files are for llama.cpp", load_format=load_format)


def test_arrays_are_kept_beside_the_checkpoint(tmp_path: pathlib.Path) -> None:
    directory = _copy("llama-bin-sharded", tmp_path)
    expected = _log_probs(tiny_model("llama"))
    torch.testing.assert_close(_log_probs(str(directory), "npcache"), expected, rtol=0, atol=0)
    names = json.loads((directory / "np" / "weight_names.json").read_text())
    assert np.load(directory / "np" / "model.norm.weight").shape == (64,)
    assert len(names) == len(set(names)) == len(list((directory / "np").iterdir())) - 1
    # from now on only the arrays are read
    with (directory / "np" / "model.norm.weight").open("wb") as file:
        np.save(file, np.zeros(64, np.float32))
    assert not _log_probs(str(directory), "npcache").equal(expected)
    (directory / "np" / names[0]).write_bytes(b"none")
    _refused(directory, "np: the cache of arrays is damaged or incomplete", load_format="npcache")
    # an incomplete cache is made again
    (directory / "np" / "weight_names.json").unlink()
    torch.testing.assert_close(_log_probs(str(directory), "npcache"), expected, rtol=0, atol=0)
    assert not list(directory.glob(".np-*"))
    (directory / "np" / "weight_names.json").write_text('["../config.json"]')
    _refused(directory, "'../config.json' is not the name of a file", load_format="npcache")


def test_arrays_of_bfloat16(tmp_path: pathlib.Path) -> None:
    directory = _copy("llama", tmp_path)
    weights = {name: tensor.bfloat16() for name, tensor in load_file(directory / "model.safetensors").items()}
    (directory / "model.safetensors").unlink()
    torch.save(weights, directory / "pytorch_model.bin")
    from_bin = _log_probs(str(directory), "pt")
    torch.testing.assert_close(_log_probs(str(directory), "npcache"), from_bin, rtol=0, atol=0)


def test_unknown_load_format(checkpoint: pathlib.Path) -> None:
    _refused(checkpoint, "'tensorizer'", "safetensors", load_format="tensorizer")


@pytest.mark.parametrize("name", ["llama-sharded", "llama-bin-sharded"])
def test_file_of_the_index_is_missing(tmp_path: pathlib.Path, name: str) -> None:
    directory = _copy(name, tmp_path)
    shard = next(directory.glob("*-00002-of-00003.*"))
    shard.unlink()
    _refused(directory, str(shard), "index.json", "missing")


def test_missing_tensor(checkpoint: pathlib.Path) -> None:
    _rewrite(checkpoint, {K_PROJ: None})
    _refused(checkpoint, "model.safetensors", K_PROJ, "[32, 64]", "missing")


def test_untied_head_must_be_there(tmp_path: pathlib.Path) -> None:
    directory = _copy("qwen2-tied", tmp_path)
    _refused(directory, "lm_head.weight", "missing", tie_word_embeddings=False)


def test_unexpected_tensor(checkpoint: pathlib.Path) -> None:
    _rewrite(checkpoint, {"model.layers.0.mlp.router.weight": torch.ones(2, 2)})
    _refused(checkpoint, "model.safetensors", "model.layers.0.mlp.router.weight", "LlamaForCausalLM")


def test_wrong_shape_names_both_shapes(checkpoint: pathlib.Path) -> None:
    _rewrite(checkpoint, {K_PROJ: torch.ones(48, 64)})
    _refused(checkpoint, "model.safetensors", K_PROJ, "[48, 64]", "[32, 64]")


def test_integer_weights_are_refused(checkpoint: pathlib.Path) -> None:
    _rewrite(checkpoint, {K_PROJ: torch.ones(32, 64, dtype=torch.int8)})
    _refused(checkpoint, "model.safetensors", K_PROJ, "I8")


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({"hidden_act": "relu6"}, ("hidden_act", "'relu6'", "silu")),
        ({"quantization_config": {"quant_method": "awq"}}, ("quantization_config",)),
        ({"num_key_value_heads": 3}, ("4 attention heads", "3 KV heads")),
        ({"rope_parameters": {"rope_type": "proportional"}}, ("'proportional'", "yarn")),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, ("low_freq_factor", "high_freq_factor")),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ("per layer type",)),
    ],
)
def test_unsupported_config(checkpoint: pathlib.Path, overrides: dict[str, Any], parts: tuple[str, ...]) -> None:
    _refused(checkpoint, "config.json", *parts, **overrides)


def test_config_that_lacks_a_field(checkpoint: pathlib.Path) -> None:
    config = make_model_config(checkpoint)
    for field, name in (("intermediate_size", "intermediate_size"), ("norm_eps", "rms_norm_eps")):
        arch = msgspec.structs.replace(config.arch, **{field: None})
        with pytest.raises(ModelLoadError, match=rf"config\.json lacks '{name}'"):
            load(msgspec.structs.replace(config, arch=arch))


def test_opt_is_as_long_as_its_positions(tmp_path: pathlib.Path) -> None:
    directory = _copy("opt", tmp_path)
    with pytest.raises(ModelLoadError, match="600 exceeds the 512 learned positions"):
        load(make_model_config(directory, max_model_len=600))
    _refused(directory, "activation_function", "'swiglu'", activation_function="swiglu")


def test_qwen_layers_of_another_kind_are_refused(tmp_path: pathlib.Path) -> None:
    directory = _copy("qwen2-window", tmp_path)
    _refused(directory, "'linear_attention'", layer_types=["linear_attention"] * 3)


# ---- plug-ins ----------------------------------------------------------------------------------------------

PLUGIN = """
from ascend_vllm.models.llama import LlamaForCausalLM

class DoubledForCausalLM(LlamaForCausalLM):
    def compute_logits(self, hidden):
        return super().compute_logits(hidden) * 2
"""


def test_an_installed_package_adds_an_architecture(
    tmp_path: pathlib.Path, checkpoint: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "doubled_plugin.py").write_text(PLUGIN)
    info = tmp_path / "doubled_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: doubled-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[ascend_vllm.models]\n"
        "DoubledForCausalLM = doubled_plugin:DoubledForCausalLM\n"
        "LostForCausalLM = doubled_plugin:LostForCausalLM\n"
        "WrongForCausalLM = pathlib:Path\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "DoubledForCausalLM" in registry.ModelRegistry.get_supported_archs()
    doubled = make_model_config(checkpoint, architectures=["DoubledForCausalLM"])
    expected = (_log_probs(str(checkpoint)) * 2).log_softmax(-1)
    torch.testing.assert_close(PagedDriver(doubled).step({0: PROMPT})[0], expected, rtol=0, atol=1e-5)
    _refused(checkpoint, "LostForCausalLM", "cannot import", architectures=["LostForCausalLM"])
    _refused(checkpoint, "WrongForCausalLM", "no CausalLM", architectures=["WrongForCausalLM"])
    sys.modules.pop("doubled_plugin")
