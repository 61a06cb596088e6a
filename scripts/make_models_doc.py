"""Writes docs/models.md from the table below, which has a row for each architecture of models/registry.py."""

from __future__ import annotations

import pathlib
from typing import NamedTuple

from ascend_vllm.models.registry import MODELS

OUTPUT = pathlib.Path(__file__).resolve().parent.parent / "docs" / "models.md"

# tokens of the KV cache that a model has to fit with, and GiB for processes and the largest step
CACHED_TOKENS = 8192
BESIDE_GIB = 2

HEADER = """\
# Models

<!-- Written by scripts/make_models_doc.py; change it there. -->

The architectures that are built in, as `architectures` of config.json names them. Packages can add others, see
[adding_a_model.md](adding_a_model.md). XModel and XForSequenceClassification of an XForCausalLM pool with its layers.

**Compared with**: what the tests hold log-probabilities (float32, within 1e-4) and greedy text to, over prompts of
many lengths, in chunks, while others decode: transformers' own class, or a plain model that is written from the
formulas of the family's repository (`tests/models/old_layouts.py`). The checkpoints are tiny and random.

**CPU** and **NPU**: "yes" is tested; on NPUs that is the simulated runtime. "no" is refused at start.

Activations of Gemma 2, Gemma 3 and GLM-4-0414 exceed float16, which is refused; `--dtype auto` chooses bfloat16.

Which size fits which memory is in [a table below](#what-fits).
"""

WHAT_FITS = f"""
## What fits

The largest model of a family that fits a machine's memory, or that of all devices together, in float16 or bfloat16:
two bytes per parameter, a KV cache of {CACHED_TOKENS:,} tokens and {BESIDE_GIB} GiB for everything else. Workers of
`--tensor-parallel-size` and `--pipeline-parallel-size` share weights and KV cache evenly; of DeepSeek's latents each
worker has all. The last row is what 1,000 tokens more take in the KV cache of the largest model.
"""

FOOTER = """
## Tokenizers that are Python code

The repositories of ChatGLM2, ChatGLM3, GLM-4 (without `-hf`), Qwen 1, Baichuan and InternLM 1 to 3 bring their
tokenizers as code (`auto_map` in tokenizer_config.json). With `--trust-remote-code` that code is used, as
transformers 5 loads it; without it such a repository is refused before anything of it runs. The code needs
`sentencepiece`, or `tiktoken` (Qwen 1, GLM-4): `pip install sentencepiece tiktoken`. Such tokenizers run in
Python, on one thread.

The code must work with transformers 5; if it does not, the error at start names the line. What helps:

- Transformers 5 calls `get_vocab` and others in `super().__init__(...)` of a tokenizer. Code that sets `sp_model`,
  `tokenizer` or `mergeable_ranks` after it (Baichuan 2, InternLM 1, the first versions of ChatGLM2 and Qwen 1) works
  when that call is moved to the end of `__init__`. With that change Baichuan 2 and InternLM 1 were tried, and without
  any ChatGLM3, GLM-4, Qwen 1, Baichuan, InternLM 2 and InternLM 3.
- A repository without code: `glm-4-9b-chat-hf` instead of `glm-4-9b-chat`.
- A tokenizer.json, in a directory of its own for `--tokenizer`; compare some ids with the old tokenizer's. From a
  sentencepiece `tokenizer.model` of Llama's kind (Baichuan, InternLM 1; it lacks the prefix that ChatGLM puts before
  texts, and spaces at the start of a text may differ):

  ```python
  from transformers import LlamaTokenizer
  tokenizer = LlamaTokenizer.from_pretrained("model")
  tokenizer.init_kwargs.pop("auto_map", None)
  tokenizer.save_pretrained("converted")
  ```

  From a `tiktoken.Encoding`, which the tokenizers of Qwen 1 and GLM-4 have as `tokenizer.tokenizer`:
  `convert_tiktoken_to_fast(encoding, "converted")` of `transformers.integrations.tiktoken` (it needs `blobfile`); add
  a tokenizer_config.json with `tokenizer_class` "PreTrainedTokenizerFast" and `eos_token`.
"""

TRANSFORMERS = "transformers"
PLAIN = "plain model"
YES = "yes"
NO_CAPS = "no: soft caps of attention scores"
NO_ALIBI = "7B: yes; 13B: no, ALiBi"


class Row(NamedTuple):
    """An architecture.

    Attributes:
        models: examples.
        reference: what it is compared with.
        npu: whether it runs on NPUs.
        remarks: what differs from the reference or the repository's code.
    """

    models: str
    reference: str
    npu: str = YES
    remarks: str = ""


ROWS = {
    "AquilaForCausalLM": Row("Aquila 7B, Aquila2 7B, 34B", "LlamaForCausalLM, which it equals"),
    "AquilaModel": Row("Aquila 7B", "LlamaForCausalLM, which it equals"),
    "BaiChuanForCausalLM": Row("Baichuan 7B", PLAIN),
    "BaichuanForCausalLM": Row(
        "Baichuan 13B, Baichuan2 7B, 13B",
        PLAIN,
        NO_ALIBI,
        "ALiBi without max_position_embeddings or with layers 5120 wide; the head is normalised if the vocabulary "
        "has 125696 entries",
    ),
    "ChatGLMForConditionalGeneration": Row("ChatGLM2 6B, ChatGLM3 6B", PLAIN, YES, "ChatGLM 1 is refused"),
    "ChatGLMModel": Row("ChatGLM2 6B, ChatGLM3 6B, GLM-4 9B (repositories with code)", PLAIN),
    "DeepseekV2ForCausalLM": Row(
        "DeepSeek-V2-Lite 16B, DeepSeek-V2, V2.5 and Coder-V2 236B",
        TRANSFORMERS,
        YES,
        "latent attention: the KV cache has kv_lora_rank + qk_rope_head_dim numbers of a token in a layer, on every "
        "worker. `norm_topk_prob` is without effect",
    ),
    "DeepseekV3ForCausalLM": Row(
        "DeepSeek-V3, V3.1, R1 671B",
        TRANSFORMERS,
        YES,
        "latent attention as in V2; checkpoints in fp8 keep their 8 bits; the layer that predicts a second token is "
        "not loaded",
    ),
    "FalconForCausalLM": Row("Falcon 7B, 40B, 180B, Falcon2 11B", TRANSFORMERS, YES, "`alibi` is refused"),
    "Gemma2ForCausalLM": Row("Gemma 2 2B, 9B, 27B", TRANSFORMERS, NO_CAPS),
    "Gemma3ForCausalLM": Row("Gemma 3 1B and the text part of others", TRANSFORMERS),
    "GemmaForCausalLM": Row(
        "Gemma 2B, 7B", TRANSFORMERS, YES, "1 is added to weights of norms when they are loaded, in all of Gemma"
    ),
    "Glm4ForCausalLM": Row("GLM-4-0414 9B, 32B, GLM-Z1", TRANSFORMERS),
    "GlmForCausalLM": Row("GLM-4 9B (glm-4-9b-hf)", TRANSFORMERS),
    "GraniteForCausalLM": Row("Granite 3 2B, 8B", TRANSFORMERS),
    "InternLM2ForCausalLM": Row("InternLM2, InternLM2.5 1.8B, 7B, 20B", PLAIN),
    "InternLM3ForCausalLM": Row("InternLM3 8B", TRANSFORMERS),
    "InternLMForCausalLM": Row("InternLM 7B, 20B", PLAIN),
    "LLaMAForCausalLM": Row("the first conversions of Llama", "LlamaForCausalLM, which it equals"),
    "LlamaForCausalLM": Row("Llama 2, 3, 3.1, 3.2, 3.3, Yi, DeepSeek LLM, TinyLlama, Vicuna, SmolLM2", TRANSFORMERS),
    "MiniCPMForCausalLM": Row(
        "MiniCPM 1B, 2B", PLAIN, YES, "mixtures of experts, `sparse_config` and MiniCPM 3 are refused"
    ),
    "MistralForCausalLM": Row("Mistral 7B, Nemo 12B, Small 24B", TRANSFORMERS),
    "MixtralForCausalLM": Row("Mixtral 8x7B, 8x22B", TRANSFORMERS),
    "OPTForCausalLM": Row("OPT 125M to 66B", TRANSFORMERS),
    "Phi3ForCausalLM": Row(
        "Phi-3 mini, medium, Phi-3.5 mini, Phi-4, Phi-4 mini",
        TRANSFORMERS,
        YES,
        "longrope: max_model_len is original_max_position_embeddings unless --max-model-len says more, and chooses "
        "the factors for sequences of any length, as in vLLM",
    ),
    "QWenLMHeadModel": Row(
        "Qwen 1.8B, 7B, 14B, 72B",
        PLAIN,
        YES,
        "`use_logn_attn` and `use_dynamic_ntk` are refused beyond seq_length",
    ),
    "Qwen2ForCausalLM": Row("Qwen1.5, Qwen2, Qwen2.5 0.5B to 72B, QwQ", TRANSFORMERS),
    "Qwen2MoeForCausalLM": Row("Qwen1.5-MoE A2.7B, Qwen2 57B-A14B", TRANSFORMERS),
    "Qwen3ForCausalLM": Row("Qwen3 0.6B to 32B", TRANSFORMERS),
    "Qwen3MoeForCausalLM": Row("Qwen3 30B-A3B, 235B-A22B", TRANSFORMERS),
    "Starcoder2ForCausalLM": Row("StarCoder2 3B, 7B, 15B", TRANSFORMERS),
    "XverseForCausalLM": Row("XVERSE 7B, 13B, 65B", "LlamaForCausalLM, which it equals"),
}


class Size(NamedTuple):
    """A model of a family.

    Attributes:
        name: short for it.
        parameters: in billions.
        kv_bytes: of a token in all layers, with two bytes per number.
    """

    name: str
    parameters: float
    kv_bytes: int

    @property
    def num_bytes(self) -> float:
        """Memory that it needs."""
        return 2e9 * self.parameters + CACHED_TOKENS * self.kv_bytes + BESIDE_GIB * 2**30


def _kv_bytes(layers: int, kv_heads: int, head_size: int) -> int:
    return 2 * 2 * layers * kv_heads * head_size


def _latent_bytes(layers: int) -> int:
    return 2 * layers * (512 + 64)


# family → its models, the smallest first; parameters as published, layers and heads of config.json
SIZES = {
    "Qwen2.5": [
        Size("0.5B", 0.49, _kv_bytes(24, 2, 64)),
        Size("1.5B", 1.54, _kv_bytes(28, 2, 128)),
        Size("3B", 3.09, _kv_bytes(36, 2, 128)),
        Size("7B", 7.62, _kv_bytes(28, 4, 128)),
        Size("14B", 14.8, _kv_bytes(48, 8, 128)),
        Size("32B", 32.8, _kv_bytes(64, 8, 128)),
        Size("72B", 72.7, _kv_bytes(80, 8, 128)),
    ],
    "Llama 3": [
        Size("3.2 1B", 1.24, _kv_bytes(16, 8, 64)),
        Size("3.2 3B", 3.21, _kv_bytes(28, 8, 128)),
        Size("3.1 8B", 8.03, _kv_bytes(32, 8, 128)),
        Size("3.1 70B", 70.6, _kv_bytes(80, 8, 128)),
        Size("3.1 405B", 406.0, _kv_bytes(126, 8, 128)),
    ],
    "Mistral, Mixtral": [
        Size("7B", 7.25, _kv_bytes(32, 8, 128)),
        Size("Nemo 12B", 12.2, _kv_bytes(40, 8, 128)),
        Size("8x7B", 46.7, _kv_bytes(32, 8, 128)),
        Size("8x22B", 141.0, _kv_bytes(56, 8, 128)),
    ],
    "Qwen's mixtures": [
        Size("1.5-MoE A2.7B", 14.3, _kv_bytes(24, 16, 128)),
        Size("3 30B-A3B", 30.5, _kv_bytes(48, 4, 128)),
        Size("2 57B-A14B", 57.4, _kv_bytes(28, 4, 128)),
        Size("3 235B-A22B", 235.0, _kv_bytes(94, 4, 128)),
    ],
    "DeepSeek": [
        Size("V2-Lite 16B", 15.7, _latent_bytes(27)),
        Size("V2 236B", 236.0, _latent_bytes(60)),
        Size("V3 671B", 671.0, _latent_bytes(61)),
    ],
    "GLM-4": [Size("9B", 9.4, _kv_bytes(40, 2, 128)), Size("0414 32B", 32.6, _kv_bytes(61, 2, 128))],
}
MEMORIES_GIB = (8, 16, 24, 32, 64, 128, 192, 256, 512, 1024, 1536)


def _what_fits() -> list[str]:
    """Lines of the table of sizes."""
    head = " | ".join(SIZES)
    lines = [f"\n| memory | {head} |\n|---|{'---|' * len(SIZES)}\n"]
    for memory in MEMORIES_GIB:
        largest = [
            next((size.name for size in reversed(sizes) if size.num_bytes <= memory * 2**30), "")
            for sizes in SIZES.values()
        ]
        lines.append(f"| {memory} GiB | {' | '.join(largest)} |\n")
    more = [f"{sizes[-1].kv_bytes * 1000 / 1e6:.0f} MB" for sizes in SIZES.values()]
    return [*lines, f"| 1,000 tokens more | {' | '.join(more)} |\n"]


def render() -> str:
    """The whole page.

    Raises:
        ValueError: the table and the registry have other architectures.
    """
    if ROWS.keys() != MODELS.keys():
        raise ValueError(f"the table and the registry differ: {sorted(ROWS.keys() ^ MODELS.keys())}")
    parts = [HEADER, "\n| architecture | models | compared with | CPU | NPU | remarks |\n|---|---|---|---|---|---|\n"]
    for name in sorted(ROWS, key=str.lower):
        row = ROWS[name]
        parts.append(f"| `{name}` | {row.models} | {row.reference} | yes | {row.npu} | {row.remarks} |\n")
    return "".join([*parts, WHAT_FITS, *_what_fits(), FOOTER])


if __name__ == "__main__":
    OUTPUT.write_text(render(), encoding="utf-8")
