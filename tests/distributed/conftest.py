"""A checkpoint that is awkward to share."""

from __future__ import annotations

import pathlib

import pytest
import torch
import transformers

from tests.tiny_models import draw_weights, save_tokenizer

# no number of ranks divides it, and it is more than the tokenizer has
ODD_VOCAB_SIZE = 397


@pytest.fixture(scope="session")
def odd_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a model with 4 heads, 2 KV heads and a tied head over 397 tokens."""
    directory: pathlib.Path = tmp_path_factory.mktemp("models") / "odd"
    config = transformers.Qwen2Config(
        vocab_size=ODD_VOCAB_SIZE,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=112,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw_weights(model, seed=7)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return str(directory)
