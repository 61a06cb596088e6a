"""The model's section of the configuration, and how weights are loaded."""

from __future__ import annotations

from typing import Any

import msgspec

from ascend_vllm.config.arch import ArchConfig
from ascend_vllm.pooling_params import PoolingTask

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class PoolerConfig(msgspec.Struct, frozen=True):
    """What a pooling model makes of its hidden states.

    Attributes:
        task: the one thing that the engine serves, see pooling_params.py.
        convert: "embed": hidden states are the result; "classify": the outputs of the head "score" are.
        seq_pooling_type: the hidden states that stand for a prompt: "LAST", "CLS" (the first) or "MEAN".
        use_activation: whether results are normalised, or made probabilities, unless a request says otherwise.
        activation: of a head's outputs: "softmax", "sigmoid" or "identity".
        dimensions: entries of an embedding that are returned unless a request says otherwise; None: all.
        is_matryoshka: the first entries of an embedding are good by themselves.
        matryoshka_dimensions: how many of them; None: any number.
        labels: of the head's outputs, by index.
    """

    task: PoolingTask
    convert: str
    seq_pooling_type: str = "LAST"
    use_activation: bool = True
    activation: str = "softmax"
    dimensions: int | None = None
    is_matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] | None = None
    labels: tuple[str, ...] = ()

    @property
    def supported_tasks(self) -> tuple[PoolingTask, PoolingTask]:
        """What the model can serve, one of them at a time."""
        if self.convert == "embed":
            return "token_embed", "embed"
        return "token_classify", "classify"

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether more than the last token's hidden state is read."""
        return self.task.startswith("token_") or self.seq_pooling_type != "LAST"


class HighPrecision(msgspec.Struct, frozen=True):
    """What a published model needs on Ascend NPUs, where its results are wrong without, always or now and then.

    Attributes:
        model: its name.
        prompt: attention of prompts in high precision.
        decode: that of decoding, for long sequences.
        prefix: that of prompts behind a cached prefix.
    """

    model: str
    prompt: bool = False
    decode: bool = False
    prefix: bool = False


# Architecture, hidden size, layers: later models of the same shape count as the same. Known from Huawei's guide to
# serving with vLLM on Ascend.
_HIGH_PRECISION = {
    ("Qwen2ForCausalLM", 3584, 28): HighPrecision("Qwen2-7B", prompt=True, decode=True, prefix=True),
    ("Qwen2MoeForCausalLM", 3584, 28): HighPrecision("Qwen2-57B", prompt=True, decode=True),
    ("Qwen2ForCausalLM", 8192, 80): HighPrecision("Qwen2-72B", decode=True, prefix=True),
}


class ModelConfig(msgspec.Struct, frozen=True):
    """What model is served.

    Attributes:
        model: directory of the weights.
        served_model_names: names requests may use; responses carry the first.
        tokenizer: directory of the tokenizer.
        tokenizer_mode: "auto" or "slow".
        tokenizer_extension_path: of the user's file that supplies the tokenizer; None: there is none.
        skip_tokenizer_init: requests must carry token ids, and get none decoded.
        trust_remote_code: run code from the model's directory.
        architecture: the class name in config.json that the registry knows, e.g. "Qwen2ForCausalLM".
        arch: what config.json says of the model; overrides of the command line (--rope-scaling, --rope-theta,
            --hf-overrides) are applied.
        generation_config: sampling defaults and eos ids of generation_config.json; {} without one.
        dtype: "float32", "float16" or "bfloat16": the resolved type of weights and activations.
        max_model_len: most tokens of a sequence.
        seed: of random draws that no request seeds.
        max_logprobs: most log-probabilities a request may ask for.
        logprobs_mode: "raw_logprobs", "processed_logprobs", or logits in their place: "raw_logits",
            "processed_logits".
        enforce_eager: no captured graphs.
        enable_sleep_mode: the engine may give its memory back for a while.
        pooler: set: the model pools prompts, it does not generate.
        num_added_tokens: entries of the vocabulary behind the model's own, for tokens that LoRA adapters add.
        source: `--model` as typed: a directory, or a repository on the Hugging Face hub; "": not known.
    """

    model: str
    served_model_names: tuple[str, ...]
    tokenizer: str
    architecture: str
    arch: ArchConfig
    generation_config: dict[str, Any]
    dtype: str
    max_model_len: int
    tokenizer_mode: str = "auto"
    tokenizer_extension_path: str | None = None
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    seed: int = 0
    max_logprobs: int = 20
    logprobs_mode: str = "raw_logprobs"
    enforce_eager: bool = False
    pooler: PoolerConfig | None = None
    enable_sleep_mode: bool = False
    source: str = ""
    num_added_tokens: int = 0

    @property
    def eos_token_ids(self) -> tuple[int, ...] | None:
        """Tokens that end a text, by generation_config.json or else config.json; None: neither names one."""
        declared = self.generation_config.get("eos_token_id")
        if declared is None:
            return self.arch.eos_token_ids
        return tuple(declared) if isinstance(declared, list | tuple) else (declared,)

    @property
    def high_precision(self) -> HighPrecision | None:
        """The attention that must be computed in high precision on Ascend NPUs; None: no need is known."""
        return _HIGH_PRECISION.get((self.architecture, self.hidden_size, self.num_layers))

    @property
    def vocab_size(self) -> int:
        """Tokens that may be sampled: rows of the embedding, and tokens of adapters."""
        return self.arch.vocab_size + self.num_added_tokens

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.arch.hidden_size

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.arch.layers)


class LoadConfig(msgspec.Struct, frozen=True):
    """How weights are found and read.

    Attributes:
        load_format: "auto", "safetensors", "pt", "npcache" or "dummy" (random weights from the seed).
        ignore_patterns: globs of weight files to leave out.
        use_tqdm: show a progress bar over the files.
        quantize_lm_head: the LM head's weight is rounded to 8 bits, if the checkpoint has it unquantized.
        cpu_int8_activations: products with weights in 4 or 8 bits round their inputs to 8 bits.
    """

    load_format: str = "auto"
    ignore_patterns: tuple[str, ...] = ("original/**/*",)
    use_tqdm: bool = True
    quantize_lm_head: bool = False
    cpu_int8_activations: bool = False
