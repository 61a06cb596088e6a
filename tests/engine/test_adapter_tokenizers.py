"""Which tokenizer the requests of an adapter have: its own, if its directory has another one than the model's."""

from __future__ import annotations

import asyncio
import logging
import pathlib

import msgspec
import pytest
import transformers

from ascend_vllm.config.lora import LoRAConfig
from ascend_vllm.engine.adapter_tokenizers import AdapterTokenizers
from ascend_vllm.engine.input_processor import InputProcessor
from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.errors import RequestError
from ascend_vllm.lora.request import LoRARequest
from ascend_vllm.sampling_params import SamplingParams
from tests.engine.engine_for_tests import make_config
from tests.tiny_models import tiny_model

CONFIG = msgspec.structs.replace(make_config(vocab_size=384), lora=LoRAConfig(1, 16, 2, max_added_tokens=256))


@pytest.fixture(scope="module")
def model() -> Tokenizer:
    return Tokenizer.from_directory(tiny_model("llama"))


def adapter(directory: pathlib.Path, name: str, *tokens: str, template: str | None = None) -> LoRARequest:
    """An adapter whose tokenizer is the model's with further tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model("llama"))
    tokenizer.add_tokens(list(tokens))
    tokenizer.chat_template = template or tokenizer.chat_template
    tokenizer.save_pretrained(directory / name)
    return LoRARequest(name, 1, str(directory / name))


def test_it_is_the_adapters_own_if_it_differs(model: Tokenizer, tmp_path: pathlib.Path) -> None:
    tokenizers = AdapterTokenizers(CONFIG, model)
    (tmp_path / "without").mkdir()
    assert tokenizers.of(None) is tokenizers.of(LoRARequest("without", 1, str(tmp_path / "without"))) is model
    assert tokenizers.of(adapter(tmp_path, "same")) is model
    words = adapter(tmp_path, "words", "<one>", "<two>")
    own = asyncio.run(tokenizers.load(words))
    assert own is not None and own is tokenizers.of(words)
    assert own.encode("<two>", add_special_tokens=False) == [385]
    other = tokenizers.of(adapter(tmp_path, "template", template="{{ messages[0].content }}!"))
    assert other is not None and other.chat_template == "{{ messages[0].content }}!"
    # --max-cpu-loras 2: the least recently used one has been dropped
    assert tokenizers.of(words) is own
    assert tokenizers.of(adapter(tmp_path, "third", "<x>")) is not model
    assert AdapterTokenizers(CONFIG, None).of(words) is None


def test_a_broken_one_is_left_out(
    model: Tokenizer, tmp_path: pathlib.Path, package_log: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with package_log.at_level(logging.WARNING):
        assert AdapterTokenizers(CONFIG, model).of(LoRARequest("odd", 1, str(tmp_path))) is model
    assert "LoRA adapter 'odd' has the model's tokenizer, its own cannot be read" in package_log.text


def test_requests_of_an_adapter_have_its_tokens(model: Tokenizer, tmp_path: pathlib.Path) -> None:
    config = msgspec.structs.replace(
        CONFIG, model=msgspec.structs.replace(CONFIG.model, num_added_tokens=256, max_model_len=64)
    )
    processor, lora = InputProcessor(config, model), adapter(tmp_path, "words", "<one>")
    request = processor.process("a", "<one>", SamplingParams(bad_words=["<one>"]), lora=lora)
    assert 384 in request.prompt_token_ids
    assert request.tokenizer is processor.tokenizers.of(lora)
    assert [384] in request.core_requests[0].bad_words
    plain = processor.process("b", "<one>", SamplingParams())
    assert max(plain.prompt_token_ids) < 384 and plain.tokenizer is model
    for params, words in (
        (SamplingParams(logit_bias={384: 1.0}), "out-of-vocab"),
        (SamplingParams(allowed_token_ids=[384]), "out-of-vocab"),
        (SamplingParams(), "Token id 384 is out of vocabulary"),
    ):
        with pytest.raises(RequestError, match=words):
            processor.process("c", {"prompt_token_ids": [384]}, params)
        processor.process("d", {"prompt_token_ids": [384]}, params, lora=lora)
    with pytest.raises(RequestError, match="Token id 640 is out of vocabulary"):
        processor.process("e", {"prompt_token_ids": [640]}, SamplingParams(), lora=lora)
