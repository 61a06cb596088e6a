"""docs/adding_a_model.md, followed to the letter: its package serves a checkpoint that nothing else here can load."""

from __future__ import annotations

import json
import pathlib
import re
import sys
import tomllib

import pytest
import torch
from safetensors.torch import load_file, save_file

from ascend_vllm.errors import ModelLoadError
from tests.models.paged_driver import PagedDriver, make_model_config, random_tokens
from tests.tiny_models import VOCAB_SIZE, tiny_model

PAGE = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "adding_a_model.md").read_text()


@pytest.fixture
def package(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs the package of the page: its files are named in their first lines, its entry points in TOML."""
    files = re.findall(r"```python\n# (my_package/\w+\.py)\n(.*?)```", PAGE, re.DOTALL)
    assert [name for name, _ in files] == ["my_package/arch.py", "my_package/model.py"]
    root = tmp_path / "site"
    for name, text in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (declared,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    info = root / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    groups = tomllib.loads(declared)["project"]["entry-points"]
    (info / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in points.items())
            for group, points in groups.items()
        )
    )
    monkeypatch.syspath_prepend(str(root))
    for module in ("my_package", "my_package.arch", "my_package.model"):
        monkeypatch.delitem(sys.modules, module, raising=False)


@pytest.fixture
def checkpoint(tmp_path: pathlib.Path) -> pathlib.Path:
    """A tiny Qwen2 under another name, with other names of tensors."""
    source, directory = pathlib.Path(tiny_model("qwen2")), tmp_path / "checkpoint"
    directory.mkdir()
    config = json.loads((source / "config.json").read_text())
    config |= {"architectures": ["MyForCausalLM"], "logit_shift": 3.0}
    (directory / "config.json").write_text(json.dumps(config))
    weights = load_file(source / "model.safetensors")
    renamed = {name.replace("model.layers.", "transformer.h."): tensor for name, tensor in weights.items()}
    save_file(renamed, directory / "model.safetensors")
    return directory


@pytest.mark.usefixtures("package")
def test_the_package_of_the_page_serves_its_model(checkpoint: pathlib.Path) -> None:
    prompt = random_tokens(40, VOCAB_SIZE, seed=1)
    driver = PagedDriver(make_model_config(checkpoint))
    assert type(driver.model).__module__ == "my_package.model"
    results = driver.step({0: prompt})[0]
    torch.testing.assert_close(results, PagedDriver(make_model_config(tiny_model("qwen2"))).step({0: prompt})[0])
    assert driver.model.compute_logits(torch.zeros(1, 64)).unique().tolist() == [3.0]


def test_without_the_package_the_model_is_refused(checkpoint: pathlib.Path) -> None:
    with pytest.raises(ModelLoadError, match="architecture 'MyForCausalLM'"):
        PagedDriver(make_model_config(checkpoint))
