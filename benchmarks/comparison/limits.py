"""The shortest possible time of a model's work, from the machine's bandwidth and peak performance."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import struct
import time
from collections.abc import Iterator
from typing import Any

from comparison.peaks import Peaks, Reading

_CHUNK_BYTES = 16 << 20
_FLOATS = ("F32", "F16", "BF16")


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """The sizes that determine a model's work.

    Attributes:
        weight_bytes: bytes of weights that every decoding step reads.
        resident_bytes: bytes of all weights in memory, those of dtypes for numbers at two bytes each.
        matrix_elements: elements of the matrices that every token is multiplied with.
        head_elements: elements of the output layer, which only sampled tokens are multiplied with.
        attention_width: query heads times their size, or the mean size of keys and values, over all layers.
        kv_bytes_per_token: bytes of a token in the KV cache, two per value.
        expert_bytes: bytes of all experts of a mixture.
        expert_elements: their elements.
        chosen_share: the share of a layer's experts that a token is multiplied with.
        decode_width: the attention width of decoding steps with latent attention, whose heads read latents; 0: the
            same as in prompts.
        file_bytes: bytes of all weights in the files.
    """

    weight_bytes: int
    resident_bytes: int
    matrix_elements: int
    head_elements: int
    attention_width: int
    kv_bytes_per_token: int
    expert_bytes: int = 0
    expert_elements: int = 0
    chosen_share: float = 0.0
    decode_width: int = 0
    file_bytes: int = 0

    @classmethod
    def of(cls, model_dir: str) -> ModelFacts:
        """Reads them from a directory with config.json and safetensors files.

        Raises:
            FileNotFoundError: one of them is missing.
        """
        config = json.loads((pathlib.Path(model_dir) / "config.json").read_text())
        entries = _tensor_entries(model_dir)
        sizes = {name: _unpacked(name, entry) for name, entry in entries.items()}
        num_bytes = {name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in entries.items()}
        resident = {
            name: 2 * math.prod(sizes[name]) if entry["dtype"] in _FLOATS else num_bytes[name]
            for name, entry in entries.items()
        }
        embedding = math.prod(next(shape for name, shape in sizes.items() if "embed_tokens" in name))
        head = [math.prod(shape) for name, shape in sizes.items() if name.endswith("lm_head.weight")]
        matrices = sum(
            math.prod(shape) for name, shape in sizes.items() if len(shape) == 2 and not name.endswith("_scale")
        )
        # a step reads one row per sequence of an embedding that is not also the output layer
        skipped = ("embed_tokens.weight",) if head else ()
        experts = [name for name in sizes if ".experts." in name]
        expert_bytes = sum(num_bytes[name] for name in experts)
        expert_elements = sum(math.prod(sizes[name]) for name in experts)
        counts = ("num_experts", "num_local_experts", "n_routed_experts")
        num_experts = next((config[name] for name in counts if config.get(name)), 0)
        layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
        head_size = config.get("head_dim") or config["hidden_size"] // heads
        kv_width, decode_width = 2 * head_size * (config.get("num_key_value_heads") or heads), 0
        if rank := config.get("kv_lora_rank"):
            kv_width = rank + config["qk_rope_head_dim"]
            head_size = (config["qk_nope_head_dim"] + config["qk_rope_head_dim"] + config["v_head_dim"]) // 2
            decode_width = layers * heads * (kv_width + rank) // 2
        return cls(
            weight_bytes=sum(size for name, size in num_bytes.items() if not name.endswith(skipped)) - expert_bytes,
            resident_bytes=sum(resident.values()),
            matrix_elements=matrices - embedding - sum(head) - expert_elements,
            head_elements=head[0] if head else embedding,
            attention_width=layers * heads * head_size,
            kv_bytes_per_token=2 * layers * kv_width,
            expert_bytes=expert_bytes,
            expert_elements=expert_elements,
            chosen_share=config["num_experts_per_tok"] / num_experts if expert_bytes else 0.0,
            decode_width=decode_width,
            file_bytes=sum(num_bytes.values()),
        )

    def read_bytes(self, tokens: int) -> float:
        """Bytes of weights that a step of `tokens` tokens reads, if they choose their experts independently."""
        return self.weight_bytes + self.expert_bytes * (1 - (1 - self.chosen_share) ** tokens)

    @property
    def token_elements(self) -> float:
        """Elements of the matrices that a token is multiplied with."""
        return self.matrix_elements + self.expert_elements * self.chosen_share

    def _seconds(self, num_bytes: float, flops: float, limits: Reading) -> float:
        return max(num_bytes / (limits.bandwidth_gb_s * 1e9), flops / (limits.peak_gflop_s * 1e9))

    def prefill_s(self, limits: Reading, prompts: int, tokens: int, cached: int = 0) -> float:
        """Seconds for prompts of `tokens` tokens each, `cached` of them cached; one token is sampled."""
        new = tokens - cached
        # a token attends to itself and to all before it: two products for each
        pairs = new * cached + new * (new + 1) / 2
        flops = prompts * (2 * self.token_elements * new + 2 * self.head_elements + 4 * pairs * self.attention_width)
        return self._seconds(self.read_bytes(prompts * new), flops, limits)

    def step_s(self, limits: Reading, sequences: int, context: float) -> float:
        """Seconds for a decoding step of `sequences` sequences with `context` tokens each."""
        num_bytes = self.read_bytes(sequences) + sequences * context * self.kv_bytes_per_token
        width = self.decode_width or self.attention_width
        flops = 2 * (self.token_elements + self.head_elements) + 4 * context * width
        return self._seconds(num_bytes, sequences * flops, limits)

    def output_tok_s(
        self, limits: Reading, sequences: int, input_len: int, output_len: int, cached: int = 0
    ) -> float:
        """Most generated tokens per second, including prefill, with a constant number of running sequences.

        Args:
            limits: of the machine.
            sequences: running at a time.
            input_len: tokens of a prompt.
            output_len: tokens generated for it.
            cached: tokens of the prompt in the prefix cache.
        """
        prefill = self.prefill_s(limits, sequences, input_len, cached)
        steps = (output_len - 1) * self.step_s(limits, sequences, input_len + output_len / 2)
        return sequences * output_len / (prefill + steps)


def _unpacked(name: str, entry: dict[str, Any]) -> list[int]:
    """A tensor's shape; of 4-bit weights that are packed in 32-bit words: that of the weights."""
    *rows, width = entry["shape"] or [1]
    return [*rows, width * 8 if name.endswith("weight_packed") else width]


def shapes_of(model_dir: str) -> dict[str, list[int]]:
    """The shapes of all tensors in the safetensors files, by their names."""
    return {name: entry["shape"] for name, entry in _tensor_entries(model_dir).items()}


def _tensor_entries(model_dir: str) -> dict[str, dict[str, Any]]:
    """The entries of all tensors in the headers of the safetensors files."""
    files = _weight_files(model_dir)
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {model_dir}")
    entries: dict[str, dict[str, Any]] = {}
    for file in files:
        with file.open("rb") as stream:
            (head_bytes,) = struct.unpack("<Q", stream.read(8))
            entries |= json.loads(stream.read(head_bytes))
    entries.pop("__metadata__", None)
    return entries


@contextlib.contextmanager
def beside_memory_limit(model_dir: str | None, gib: float = 1.0) -> Iterator[None]:
    """Prints, after the block, the decoding steps of one sequence per second that memory bandwidth allows.

    Other load changes the bandwidth: the better of a measurement before and one after is the limit.

    Args:
        model_dir: the model's directory; None: nothing is measured or printed.
        gib: read in a measurement, in GiB.
    """
    if model_dir is None:
        yield
        return
    bandwidths = [_bandwidth_gb_s(gib)]
    yield
    bandwidths.append(_bandwidth_gb_s(gib))
    num_bytes = ModelFacts.of(model_dir).read_bytes(1)
    steps_per_s = max(bandwidths) * 1e9 / num_bytes
    print(
        f"memory-bandwidth limit: {max(bandwidths):.1f} GB/s read / {num_bytes / 1e6:.0f} MB of weights = "
        f"{steps_per_s:.1f} decode steps/s ({1e3 / steps_per_s:.1f} ms each)"
    )


def _bandwidth_gb_s(gib: float) -> float:
    with Peaks(gib) as peaks:
        return peaks.read().bandwidth_gb_s


def forget_files(model_dir: str) -> None:
    """Has the system drop the weight files from its file cache."""
    for file in _weight_files(model_dir):
        with file.open("rb") as stream:
            # what is not written yet cannot be dropped
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _weight_files(model_dir: str) -> list[pathlib.Path]:
    return sorted(pathlib.Path(model_dir).glob("*.safetensors"))


def file_read_s(model_dir: str, is_cold: bool = False) -> float:
    """Seconds to read all weight files: from the system's file cache, or from the disk if `is_cold`."""
    files = _weight_files(model_dir)
    buffer = bytearray(_CHUNK_BYTES)
    seconds = 0.0
    for _ in range(1 if is_cold else 2):
        if is_cold:
            forget_files(model_dir)
        start = time.perf_counter()
        for file in files:
            with file.open("rb", buffering=0) as stream:
                while stream.readinto(buffer):
                    pass
        seconds = time.perf_counter() - start
    return seconds
