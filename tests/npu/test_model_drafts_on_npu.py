"""Draft models and EAGLE heads on simulated NPUs: eager and beside captured graphs, with one device and with two."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from ascend_vllm.config.graphs import GraphMode
from ascend_vllm.tools.convert_eagle_ckpt_to_vllm_compatible import convert
from tests.eagle_heads import eagle3_tensors, eagle_tensors, head_config, save_head
from tests.npu.test_drafts_on_npu import NUM_DRAFTS, make_config, make_requests
from tests.tiny_models import VOCAB_SIZE, tiny_model
from tests.worker.drafting import Answer, generate

HIDDEN, NUM_DRAFTED = 64, 96
# of one layer: where there are more, float16 rounds sums of several tokens and of one differently too often
TARGET = "qwen2-64-shallow"
# heads as wide as NPUs have them
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "torch_dtype": "float16"}
LAYERS = {"eagle_aux_hidden_state_layer_ids": [0, 0, 0]}


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Name → method and model: the target itself, whose drafts are right, and heads with random weights."""
    root = tmp_path_factory.mktemp("heads")
    tensors = {name: tensor.half() for name, tensor in eagle_tensors(HIDDEN, VOCAB_SIZE, bias=True).items()}
    for name in ("eagle", "converted"):
        save_head(root / name, tensors, head_config(HIDDEN, VOCAB_SIZE, **HEADS))
    convert(pathlib.Path(tiny_model(TARGET, "float16")), root / "converted", "model.safetensors", "pytorch_model.bin")
    tensors = eagle3_tensors(HIDDEN, VOCAB_SIZE, NUM_DRAFTED)
    tensors = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    config = head_config(HIDDEN, VOCAB_SIZE, draft_vocab_size=NUM_DRAFTED, eagle_config=LAYERS, **HEADS)
    save_head(root / "eagle3", tensors, config)
    return {
        "itself": {"method": "draft_model", "model": tiny_model(TARGET, "float16")},
        "eagle": {"method": "eagle", "model": str(root / "eagle")},
        "converted": {"method": "eagle", "model": str(root / "converted")},
        "eagle3": {"method": "eagle3", "model": str(root / "eagle3")},
    }


def _answers(draft: dict[str, str] | None, **options: Any) -> dict[str, Answer]:
    # a larger batch than any: all rows have drafts, whatever they cost
    settings = draft and draft | {"num_speculative_tokens": NUM_DRAFTS, "disable_by_batch_size": 100}
    # as the flags make it
    config = make_config(None, TARGET, speculative_config=settings, **options)
    expected = GraphMode.EAGER if options.get("enforce_eager") else GraphMode.CAPTURED
    assert config.graphs.mode == expected
    assert config.graphs.query_lens == (
        (1,) if draft is None or options.get("enforce_eager") else (1, 1 + NUM_DRAFTS)
    )
    return generate(config, make_requests())


@pytest.fixture(scope="module")
def plain() -> dict[str, Answer]:
    """Answers without drafts, by one device."""
    return _answers(None, enforce_eager=True)


def _check(found: dict[str, Answer], plain: dict[str, Answer], *, are_right: bool) -> None:
    for name, answer in plain.items():
        assert found[name].token_ids == answer.token_ids, name
        if are_right:
            assert found[name].num_outputs <= len(answer.token_ids) / 2


# what makes expandable segments has tests of its own
@pytest.fixture(autouse=True)
def _ordinary_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:False")


@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("name", ["itself", "eagle", "eagle3"])
def test_answers_are_those_without_drafts(
    drafts: dict[str, dict[str, str]], plain: dict[str, Answer], name: str, *, enforce_eager: bool
) -> None:
    found = _answers(drafts[name], enforce_eager=enforce_eager)
    _check(found, plain, are_right=name == "itself")


@pytest.mark.parametrize("name", ["itself", "converted"])
def test_two_devices_have_a_draft_model_on_the_first(
    drafts: dict[str, dict[str, str]], plain: dict[str, Answer], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An EAGLE head needs embedding and LM head of its own then, as converted ones have."""
    monkeypatch.setenv("HCCL_IF_IP", "127.0.0.1")
    monkeypatch.setenv("HCCL_BUFFSIZE", "64")
    _check(_answers(drafts[name], tensor_parallel_size=2), plain, are_right=name == "itself")
