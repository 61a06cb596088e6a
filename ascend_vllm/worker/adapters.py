"""The adapters of a worker: read and packed by a thread beside the steps, and copied into the layers' slots."""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Iterator

import torch

from ascend_vllm.config.arch import ArchConfig
from ascend_vllm.config.lora import LoRAConfig
from ascend_vllm.layers.lora import ModelAdapters
from ascend_vllm.model_files import one_line
from ascend_vllm.models.blocks import CausalLM
from ascend_vllm.models.lora_adapter import AdapterLimits, read_adapter
from ascend_vllm.ops.lora import PackedAdapter
from ascend_vllm.platforms.host import lower_priority

_Packed = list[PackedAdapter | None]

# of the thread that reads adapters, added to the process's: steps come first
_NICENESS = 10
# While steps are computed, that thread rests so many times as long as it has computed. Niceness does not keep it
# from a step's cores: threads of a step that wait for one another let others run.
_REST = 3.0


class WorkerAdapters:
    """Loaded adapters by the core's numbers, and the slots of the model's layers.

    Args:
        model: built with `LoRAScheme`.
        config: limits.
        arch: of the model.
    """

    def __init__(self, model: CausalLM, config: LoRAConfig, arch: ArchConfig) -> None:
        self._limits = AdapterLimits(
            config.max_rank, arch.vocab_size, config.max_added_tokens, arch.tie_word_embeddings
        )
        self._layers = ModelAdapters(model, model.ignored_weights)
        self._loaded: dict[int, concurrent.futures.Future[_Packed]] = {}
        self._placed: dict[int, _Packed] = {}
        # whether a step is being computed
        self._is_computing = False
        # one at a time: steps need the cores
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "adapters", lower_priority, (_NICENESS,))

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Around each step: adapters are read more slowly within."""
        self._is_computing = True
        try:
            yield
        finally:
            self._is_computing = False

    def load(self, number: int, path: str) -> None:
        """Begins to load an adapter."""
        self._loaded[number] = self._thread.submit(self._read, path)

    def state(self, number: int) -> str | None:
        """ "" if an adapter is loaded, the reason if it cannot be, None as long as it is being loaded."""
        future = self._loaded[number]
        if not future.done():
            return None
        error = future.exception()
        # of any kind: files of an adapter must not end the engine
        return "" if error is None else one_line(error)

    def drop(self, number: int) -> None:
        """Forgets an adapter, loaded or not; slots keep what they have."""
        self._loaded.pop(number).cancel()

    def place(self, slot: int, number: int) -> None:
        """Copies a loaded adapter into a slot that no row uses."""
        self._placed[slot] = self._loaded[number].result()
        with _one_thread():
            self._layers.place(slot, self._placed[slot])

    def use(self, model: CausalLM) -> None:
        """Places all adapters in a model whose weights have been loaded again."""
        self._layers = ModelAdapters(model, model.ignored_weights)
        for slot, adapter in self._placed.items():
            self._layers.place(slot, adapter)

    def shutdown(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _read(self, path: str) -> _Packed:
        packed: _Packed = []
        since = time.thread_time()

        def rest() -> None:
            nonlocal since
            if self._is_computing:
                time.sleep(_REST * (time.thread_time() - since))
            since = time.thread_time()

        with _one_thread():
            for part in self._layers.pack(read_adapter(path, self._limits, rest), path):
                packed.append(part)
                rest()
        return packed


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Within it the calling thread copies alone.

    Several threads would take far longer for the small copies of an adapter: they would wait for those that compute
    the steps, and these for them.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
