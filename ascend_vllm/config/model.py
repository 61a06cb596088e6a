"""The model's section of the configuration, and how weights are loaded."""

from __future__ import annotations

from typing import Any

import msgspec


class ModelConfig(msgspec.Struct, frozen=True):
    """What model is served.

    Attributes:
        model: directory of the weights.
        served_model_names: names requests may use; responses carry the first.
        tokenizer: directory of the tokenizer.
        tokenizer_mode: "auto" or "slow".
        skip_tokenizer_init: requests must carry token ids, and get none decoded.
        trust_remote_code: run code from the model's directory.
        architecture: the class name in config.json that the registry knows, e.g. "Qwen2ForCausalLM".
        hf_config: config.json as transformers normalises it (its text part), plain values only; overrides of
            the command line (--rope-scaling, --rope-theta, --hf-overrides) are applied.
        generation_config: sampling defaults and eos ids of generation_config.json; {} without one.
        dtype: "float32", "float16" or "bfloat16": the resolved type of weights and activations.
        max_model_len: most tokens of a sequence.
        seed: of random draws that no request seeds.
        max_logprobs: most log-probabilities a request may ask for.
        logprobs_mode: "raw_logprobs" or "processed_logprobs".
        enforce_eager: no captured graphs.
    """

    model: str
    served_model_names: tuple[str, ...]
    tokenizer: str
    architecture: str
    hf_config: dict[str, Any]
    generation_config: dict[str, Any]
    dtype: str
    max_model_len: int
    tokenizer_mode: str = "auto"
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    seed: int = 0
    max_logprobs: int = 20
    logprobs_mode: str = "raw_logprobs"
    enforce_eager: bool = False

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return int(self.hf_config["vocab_size"])

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return int(self.hf_config["hidden_size"])

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return int(self.hf_config["num_hidden_layers"])

    @property
    def num_heads(self) -> int:
        """Number of query heads."""
        return int(self.hf_config["num_attention_heads"])

    @property
    def num_kv_heads(self) -> int:
        """Number of KV heads; fewer than query heads under grouped-query attention."""
        return int(self.hf_config.get("num_key_value_heads") or self.num_heads)

    @property
    def head_size(self) -> int:
        """Width of a head; some configs name it, for others it is hidden_size / num_heads."""
        return int(self.hf_config.get("head_dim") or self.hidden_size // self.num_heads)


class LoadConfig(msgspec.Struct, frozen=True):
    """How weights are found and read.

    Attributes:
        load_format: "auto", "safetensors", "pt" or "dummy" (random weights from the seed).
        ignore_patterns: globs of weight files to leave out.
        use_tqdm: show a progress bar over the files.
    """

    load_format: str = "auto"
    ignore_patterns: tuple[str, ...] = ("original/**/*",)
    use_tqdm: bool = True
