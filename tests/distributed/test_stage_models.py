"""Models in pipeline stages: together they compute the same as one model, each with its own weights only."""

from __future__ import annotations

import pathlib
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ascend_vllm.config.model import LoadConfig, ModelConfig
from ascend_vllm.distributed.parallel_context import ParallelContext, layers_of_stages
from ascend_vllm.errors import ConfigError, ModelLoadError
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.models.blocks import CausalLM
from ascend_vllm.models.llama import LlamaForCausalLM
from ascend_vllm.models.loader import load_model
from ascend_vllm.models.registry import MODELS, resolve_model_class
from tests.models.paged_driver import ModelInStages, PagedDriver, make_model_config
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import make_prompt

# tied and untied; several files; positions and projections of OPT; a window in some layers only
MODELS_IN_STAGES = ("odd", "llama-sharded", "qwen2-window", "opt", "opt-post-norm", "llama-bin")


def _load(directory: str, dtype: torch.dtype, stage: int, num_stages: int, **options: Any) -> CausalLM:
    parallel = ParallelContext(pp_rank=stage, pp_size=num_stages)
    context = BuildContext(dtype, torch.device("cpu"), parallel)
    config = make_model_config(directory, str(dtype).removeprefix("torch."))
    return load_model(config, LoadConfig(use_tqdm=False, **options), context)


def _slots(config: ModelConfig, stage: int, num_stages: int) -> list[str]:
    """Names of a stage's tensors."""
    context = BuildContext(torch.float32, torch.device("cpu"), ParallelContext(pp_rank=stage, pp_size=num_stages))
    model = resolve_model_class(config.architecture)(config, context)
    return [slot.name for layer in model.layers() for slot in layer.slots()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS_IN_STAGES)
def test_stages_compute_what_one_model_computes(name: str, dtype: torch.dtype, odd_model: str) -> None:
    """Bitwise: stages send the sum that the next norm would have computed."""
    directory = odd_model if name == "odd" else tiny_model(name)
    config = make_model_config(directory, str(dtype).removeprefix("torch."))
    whole = _load(directory, dtype, 0, 1)
    stages = [_load(directory, dtype, stage, config.num_layers) for stage in range(config.num_layers)]
    prompts = {0: make_prompt(37, seed=1), 1: make_prompt(5, seed=2)}

    def run(model: CausalLM) -> list[torch.Tensor]:
        driver = PagedDriver(config, model=model)
        first = driver.step(prompts)
        second = driver.step({row: [int(logprobs[-1].argmax())] for row, logprobs in first.items()})
        return [*first.values(), *second.values()]

    for result, expected in zip(run(ModelInStages(stages)), run(whole), strict=True):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("name", MODELS_IN_STAGES)
def test_every_tensor_is_in_one_stage(name: str, odd_model: str) -> None:
    """Except for a tied table, which the first and the last stage need."""
    config = make_model_config(odd_model if name == "odd" else tiny_model(name))
    size = config.num_layers
    names = [name for stage in range(size) for name in _slots(config, stage, size)]
    whole = _slots(config, 0, 1)
    assert set(names) == set(whole)
    twice = [name for name in whole if names.count(name) > 1]
    is_tied = "lm_head.weight" not in whole
    assert len(twice) == is_tied
    assert all(name.endswith(".embed_tokens.weight") for name in twice)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "expected"),
    [
        (4, 2, (2, 2)),
        (5, 2, (3, 2)),
        (6, 4, (1, 2, 2, 1)),
        (7, 4, (2, 2, 2, 1)),
        (28, 3, (9, 10, 9)),
        (61, 4, (15, 15, 16, 15)),
        (5, 1, (5,)),
    ],
)
def test_layers_are_parted_as_vllm_does(num_layers: int, num_stages: int, expected: tuple[int, ...]) -> None:
    """The numbers are those of vLLM 0.32's get_pp_indices."""
    assert layers_of_stages(num_layers, num_stages) == expected
    own = [ParallelContext(pp_rank=rank, pp_size=num_stages).layers(num_layers) for rank in range(num_stages)]
    assert [index for layers in own for index in layers] == list(range(num_layers))


def test_the_parts_may_be_given() -> None:
    contexts = [ParallelContext(pp_rank=rank, pp_size=3, stage_layers=(1, 4, 2)) for rank in range(3)]
    assert [context.layers(7) for context in contexts] == [range(1), range(1, 5), range(5, 7)]


def test_a_model_that_knows_no_stages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Whole(LlamaForCausalLM):
        supports_pp = False

    monkeypatch.setitem(MODELS, "LlamaForCausalLM", Whole)
    with pytest.raises(ConfigError, match=r"^Pipeline parallelism is not supported for this model\. .*Whole"):
        _load(tiny_model("llama"), torch.float32, 0, 2)
    _load(tiny_model("llama"), torch.float32, 0, 1)


def test_the_stage_of_a_layer_knows_its_tensors(tmp_path: pathlib.Path) -> None:
    """No tensor is left out by all stages."""
    directory = tmp_path / "model"
    shutil.copytree(tiny_model("qwen3"), directory)
    file = directory / "model.safetensors"
    save_file(load_file(file) | {"model.layers.0.mlp.extra.weight": torch.zeros(2)}, file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"tensor model\.layers\.0\.mlp\.extra\.weight is not part of Qwen3"):
        _load(str(directory), torch.float32, 0, 2)
    _load(str(directory), torch.float32, 1, 2)
