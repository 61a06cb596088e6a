"""The least time that a machine needs for a model's work, from its bandwidth and its peak."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import time

from bandwidth import weight_bytes
from safetensors import safe_open

from comparison.peaks import Reading

_CHUNK_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """What decides a model's work.

    Attributes:
        weight_bytes: that a decoding step reads.
        resident_bytes: of all weights, each once.
        matrix_elements: elements of the matrices that every token is multiplied with.
        head_elements: elements of the output layer, which only sampled tokens are multiplied with.
        attention_width: query heads times their size, over all layers.
        kv_bytes_per_token: bytes of a token's keys and values, in the cache's two bytes per value.
    """

    weight_bytes: int
    resident_bytes: int
    matrix_elements: int
    head_elements: int
    attention_width: int
    kv_bytes_per_token: int

    @classmethod
    def of(cls, model_dir: str) -> ModelFacts:
        """Facts of a directory with config.json and safetensors files.

        Raises:
            FileNotFoundError: one of them is missing.
        """
        config = json.loads((pathlib.Path(model_dir) / "config.json").read_text())
        sizes = _shapes(model_dir)
        embedding = math.prod(next(shape for name, shape in sizes.items() if "embed_tokens" in name))
        head = [math.prod(shape) for name, shape in sizes.items() if name.endswith("lm_head.weight")]
        matrices = sum(math.prod(shape) for shape in sizes.values() if len(shape) == 2)
        layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
        head_size = config.get("head_dim") or config["hidden_size"] // heads
        kv_heads = config.get("num_key_value_heads") or heads
        return cls(
            weight_bytes=weight_bytes(model_dir),
            resident_bytes=sum(2 * math.prod(shape) for shape in sizes.values()),
            matrix_elements=matrices - embedding - sum(head),
            head_elements=head[0] if head else embedding,
            attention_width=layers * heads * head_size,
            kv_bytes_per_token=2 * 2 * layers * kv_heads * head_size,
        )

    def _seconds(self, num_bytes: float, flops: float, limits: Reading) -> float:
        return max(num_bytes / (limits.bandwidth_gb_s * 1e9), flops / (limits.peak_gflop_s * 1e9))

    def prefill_s(self, limits: Reading, prompts: int, tokens: int, cached: int = 0) -> float:
        """Seconds for prompts of so many tokens each, the first of them computed before; one token is sampled."""
        new = tokens - cached
        # a token attends to itself and to all before it: two products for each
        pairs = new * cached + new * (new + 1) / 2
        flops = prompts * (2 * self.matrix_elements * new + 2 * self.head_elements + 4 * pairs * self.attention_width)
        return self._seconds(self.weight_bytes, flops, limits)

    def step_s(self, limits: Reading, sequences: int, context: float) -> float:
        """Seconds for a decoding step of so many sequences, each with so many tokens before it."""
        num_bytes = self.weight_bytes + sequences * context * self.kv_bytes_per_token
        flops = 2 * (self.matrix_elements + self.head_elements) + 4 * context * self.attention_width
        return self._seconds(num_bytes, sequences * flops, limits)

    def output_tok_s(
        self, limits: Reading, sequences: int, input_len: int, output_len: int, cached: int = 0
    ) -> float:
        """Generated tokens per second at most, prompts included, if so many are always under way.

        Args:
            limits: of the machine.
            sequences: under way at once.
            input_len: tokens of a prompt.
            output_len: tokens generated for it.
            cached: tokens of the prompt that were computed before.
        """
        prefill = self.prefill_s(limits, sequences, input_len, cached)
        steps = (output_len - 1) * self.step_s(limits, sequences, input_len + output_len / 2)
        return sequences * output_len / (prefill + steps)


def _shapes(model_dir: str) -> dict[str, tuple[int, ...]]:
    files = sorted(pathlib.Path(model_dir).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {model_dir}")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return shapes


def file_read_s(model_dir: str) -> float:
    """Seconds to read the weights' files from beginning to end, once they are in the system's file cache."""
    files = sorted(pathlib.Path(model_dir).glob("*.safetensors"))
    buffer = bytearray(_CHUNK_BYTES)
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        for file in files:
            with file.open("rb", buffering=0) as stream:
                while stream.readinto(buffer):
                    pass
        seconds = time.perf_counter() - start
    return seconds
