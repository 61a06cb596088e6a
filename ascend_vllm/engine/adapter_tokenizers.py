"""Tokenizers of LoRA adapters that have one of their own, with tokens that they add to the vocabulary."""

from __future__ import annotations

import asyncio
import collections
import pathlib
import threading

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.logger import init_logger
from ascend_vllm.lora.request import LoRARequest

logger = init_logger(__name__)

# one of which every tokenizer's directory has
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


class AdapterTokenizers:
    """The tokenizer of each adapter: the one in its directory, or the model's if there is none or it is the same.

    Args:
        config: of the engine.
        tokenizer: the model's; None under --skip-tokenizer-init.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._slow = config.model.tokenizer_mode == "slow"
        self._most = 0 if config.lora is None else config.lora.max_cpu_loras
        # least recently used first; not those that have the model's
        self._own: collections.OrderedDict[tuple[str, int, str], Tokenizer | None] = collections.OrderedDict()
        self._lock = threading.Lock()

    def of(self, lora: LoRARequest | None) -> Tokenizer | None:
        """The tokenizer of an adapter's requests, which may have to be loaded; None: of the model's."""
        if lora is None or self._tokenizer is None:
            return self._tokenizer
        with self._lock:
            if lora.key not in self._own:
                self._own[lora.key] = self._load(lora, self._tokenizer)
                if len(self._own) > self._most:
                    self._own.popitem(last=False)
            self._own.move_to_end(lora.key)
            return self._own[lora.key] or self._tokenizer

    async def load(self, lora: LoRARequest | None) -> Tokenizer | None:
        """As `of`; loads off the event loop."""
        if lora is None or lora.key in self._own:
            return self.of(lora)
        return await asyncio.to_thread(self.of, lora)

    def _load(self, lora: LoRARequest, models: Tokenizer) -> Tokenizer | None:
        folder = pathlib.Path(lora.lora_path)
        if not any((folder / name).is_file() for name in _FILES):
            return None
        try:
            own = Tokenizer.from_directory(str(folder), slow=self._slow)
        except ModelLoadError as error:
            logger.warning("LoRA adapter %r has the model's tokenizer, its own cannot be read: %s", lora.name, error)
            return None
        is_same = own.hf.get_vocab() == models.hf.get_vocab() and own.eos_token_id == models.eos_token_id
        if is_same and own.chat_template in (None, models.chat_template):
            return None
        logger.info("LoRA adapter %r has a tokenizer of its own, with %d tokens", lora.name, own.vocab_size)
        return own
