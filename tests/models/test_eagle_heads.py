"""EAGLE heads against plain PyTorch, in both layouts, and the states that EAGLE-3 heads read of their targets."""

from __future__ import annotations

import pathlib

import pytest
import torch
import transformers

from ascend_vllm.config.arch import EagleConfig
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.models.blocks import CausalLM
from ascend_vllm.models.eagle import DraftHead, Eagle3Head
from ascend_vllm.tools.convert_eagle_ckpt_to_vllm_compatible import convert
from tests.eagle_heads import (
    eagle3_reference,
    eagle3_tensors,
    eagle_reference,
    eagle_tensors,
    head_config,
    save_head,
)
from tests.models.paged_driver import PagedDriver, load, make_model_config, random_tokens
from tests.tiny_models import VOCAB_SIZE, tiny_model

HIDDEN, NUM_DRAFTED, LENGTH = 64, 96, 40
ARCHITECTURES = {1: "EagleLlamaForCausalLM", 3: "Eagle3LlamaForCausalLM"}


def _load_head(directory: pathlib.Path, version: int, target: CausalLM) -> DraftHead:
    head = load(make_model_config(directory, architectures=[ARCHITECTURES[version]]))
    assert isinstance(head, DraftHead)
    head.use_target(target, is_whole=True)
    return head


def _run(head: DraftHead, next_ids: list[int], states: torch.Tensor, chunks: tuple[int, ...]) -> torch.Tensor:
    """[T, H] of two rows that have the same pairs, chunk by chunk; those of the second row."""
    driver = PagedDriver(make_model_config(tiny_model("qwen2")), model=head)
    results, start = [], 0
    for size in chunks:
        part = slice(start, start + size)
        batch = driver.append({3: next_ids[part], 1: next_ids[part]})
        features = head.features(states[part].repeat(2, 1))
        hidden = head.forward(batch, driver.kv_caches, driver.backend, driver.backend.prepare(batch), features)
        results.append(hidden[size:])
        start += size
    return torch.cat(results)


def _target_weight(name: str) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model("qwen2"))
    return model.get_parameter(name).detach()


@pytest.mark.parametrize("chunks", [(LENGTH,), (17, 1, 22)])
@pytest.mark.parametrize(
    ("bias", "embeds", "converted"), [(True, True, False), (False, False, False), (True, False, True)]
)
def test_eagle_equals_reference(
    tmp_path: pathlib.Path, chunks: tuple[int, ...], bias: bool, embeds: bool, converted: bool
) -> None:
    """Predicted features and logits, of SafeAILab's layout and converted, whatever the chunks."""
    tensors = eagle_tensors(HIDDEN, VOCAB_SIZE, bias=bias, embeds=embeds)
    weights = save_head(tmp_path, tensors, head_config(HIDDEN, VOCAB_SIZE))
    if converted:
        convert(pathlib.Path(tiny_model("qwen2")), tmp_path, "model.safetensors", weights)
    head = _load_head(tmp_path, 1, load(make_model_config(tiny_model("qwen2"))))
    next_ids = random_tokens(LENGTH, VOCAB_SIZE, seed=1)
    states = torch.randn(LENGTH, HIDDEN, generator=torch.Generator().manual_seed(2))
    predicted = _run(head, next_ids, states, chunks)
    embedding = tensors["embed_tokens.weight"] if embeds else _target_weight("model.embed_tokens.weight")
    expected = eagle_reference(tensors, embedding, torch.tensor(next_ids), states)
    torch.testing.assert_close(predicted, expected, rtol=1e-4, atol=1e-5)
    logits = head.compute_logits(predicted)
    torch.testing.assert_close(logits, expected @ _target_weight("lm_head.weight").T, rtol=1e-4, atol=1e-4)
    assert torch.equal(head.best_tokens(predicted), logits.argmax(1))


@pytest.mark.parametrize("chunks", [(LENGTH,), (17, 1, 22)])
def test_eagle3_equals_reference(tmp_path: pathlib.Path, chunks: tuple[int, ...]) -> None:
    """What feeds the next draft, and logits of the tokens that the head drafts; all others are impossible."""
    tensors = eagle3_tensors(HIDDEN, VOCAB_SIZE, NUM_DRAFTED)
    save_head(tmp_path, tensors, head_config(HIDDEN, VOCAB_SIZE, draft_vocab_size=NUM_DRAFTED))
    head = _load_head(tmp_path, 3, load(make_model_config(tiny_model("qwen2"))))
    next_ids = random_tokens(LENGTH, VOCAB_SIZE, seed=1)
    states = torch.randn(LENGTH, 4 * HIDDEN, generator=torch.Generator().manual_seed(2))
    predicted = _run(head, next_ids, states, chunks)
    embedding = _target_weight("model.embed_tokens.weight")
    expected, drafted = eagle3_reference(tensors, embedding, torch.tensor(next_ids), states[:, HIDDEN:])
    torch.testing.assert_close(predicted, expected, rtol=1e-4, atol=1e-5)
    logits = head.compute_logits(predicted)
    tokens = tensors["t2d"].nonzero()[:, 0]
    torch.testing.assert_close(logits[:, tokens], drafted, rtol=1e-4, atol=1e-4)
    assert int((logits == -torch.inf).sum()) == LENGTH * (VOCAB_SIZE - NUM_DRAFTED)
    assert torch.equal(head.best_tokens(predicted), tokens[drafted.argmax(1)])


def test_reported_states_are_the_inputs_of_layers() -> None:
    """They equal transformers' hidden states, and logits stay what they are."""
    directory = tiny_model("qwen2")
    prompt = random_tokens(LENGTH, VOCAB_SIZE, seed=3)
    plain = PagedDriver(make_model_config(directory)).step({0: prompt})[0]
    driver = PagedDriver(make_model_config(directory))
    driver.model.report_states([2, 1, 1])
    hidden = driver.hidden(driver.append({0: prompt}))
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    with torch.inference_mode():
        states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[-1][0], states[2][0], states[1][0], states[1][0]], 1)
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(driver.model.compute_logits(hidden).log_softmax(-1), plain)


def test_layers_that_are_read() -> None:
    """As SafeAILab's heads are trained: inputs of the third, the middle and the third last layer."""
    head = object.__new__(Eagle3Head)
    head._eagle = EagleConfig(draft_vocab_size=8, target_hidden_size=8)
    assert head.reported_layers(32) == (2, 16, 29)
    assert head.reported_layers(2) == (1, 1, 0)
    head._eagle = EagleConfig(draft_vocab_size=8, target_hidden_size=8, target_layers=(1, 5, 9))
    assert head.reported_layers(12) == (1, 5, 9)
    with pytest.raises(ModelLoadError, match="of a model that has 9"):
        head.reported_layers(9)


def test_divided_models_need_converted_heads(tmp_path: pathlib.Path) -> None:
    """A rank of several has only parts of the embedding and the LM head."""
    target = load(make_model_config(tiny_model("qwen2")))
    weights = save_head(tmp_path, eagle_tensors(HIDDEN, VOCAB_SIZE, bias=True), head_config(HIDDEN, VOCAB_SIZE))
    head = _load_head(tmp_path, 1, target)
    with pytest.raises(ModelLoadError, match="convert the head"):
        head.use_target(target, is_whole=False)
    convert(pathlib.Path(tiny_model("qwen2")), tmp_path, "model.safetensors", weights)
    _load_head(tmp_path, 1, target).use_target(target, is_whole=False)


def test_unknown_kinds_of_heads_are_refused(tmp_path: pathlib.Path) -> None:
    """EAGLE-3.1 heads compute something else."""
    save_head(tmp_path, eagle3_tensors(HIDDEN, VOCAB_SIZE, 96), head_config(HIDDEN, VOCAB_SIZE, fc_norm=True))
    with pytest.raises(ModelLoadError, match="fc_norm"):
        make_model_config(tmp_path, architectures=[ARCHITECTURES[3]])
