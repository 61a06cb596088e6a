"""The model's section of the configuration, and how weights are loaded."""

from __future__ import annotations

from typing import Any

import msgspec

from ascend_vllm.pooling_params import PoolingTask

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

# decoders with three matrices in an MLP
_GATED = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})

# ends of names of architectures that share their decoder with XForCausalLM
_HEADLESS = ("ForSequenceClassification", "Model")


def decoder_architecture(architecture: str) -> str:
    """The architecture that generates with the same decoder: Qwen2Model and its like become Qwen2ForCausalLM."""
    for end in _HEADLESS:
        if architecture.endswith(end):
            return f"{architecture.removesuffix(end)}ForCausalLM"
    return architecture


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
        hf_config: config.json as transformers normalises it (its text part), plain values only; overrides of
            the command line (--rope-scaling, --rope-theta, --hf-overrides) are applied.
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
    tokenizer_extension_path: str | None = None
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    seed: int = 0
    max_logprobs: int = 20
    logprobs_mode: str = "raw_logprobs"
    enforce_eager: bool = False
    pooler: PoolerConfig | None = None
    enable_sleep_mode: bool = False

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

    @property
    def num_parameters(self) -> int:
        """How many weights the model has at least, by config.json; 0 if its architecture is another package's."""
        decoder, hidden = decoder_architecture(self.architecture), self.hidden_size
        if decoder in _GATED:
            attention = 2 * hidden * self.head_size * (self.num_heads + self.num_kv_heads)
            layer = attention + 3 * hidden * int(self.hf_config["intermediate_size"])
            return self.vocab_size * hidden + self.num_layers * layer
        if decoder == "OPTForCausalLM":
            layer = 4 * hidden * hidden + 2 * hidden * int(self.hf_config["ffn_dim"])
            width = int(self.hf_config.get("word_embed_proj_dim") or hidden)
            positions = int(self.hf_config["max_position_embeddings"]) * hidden
            return self.vocab_size * width + positions + self.num_layers * layer
        return 0

    @property
    def size_in_words(self) -> str:
        """The numbers that `num_parameters` follows from, and what it is, for messages."""
        names = ("num_hidden_layers", "hidden_size", "intermediate_size", "ffn_dim", "vocab_size")
        declared = ", ".join(f"{name} {self.hf_config[name]}" for name in names if name in self.hf_config)
        return f"{self.model}/config.json: {declared} mean {self.num_parameters} parameters or more"


class LoadConfig(msgspec.Struct, frozen=True):
    """How weights are found and read.

    Attributes:
        load_format: "auto", "safetensors", "pt", "npcache" or "dummy" (random weights from the seed).
        ignore_patterns: globs of weight files to leave out.
        use_tqdm: show a progress bar over the files.
    """

    load_format: str = "auto"
    ignore_patterns: tuple[str, ...] = ("original/**/*",)
    use_tqdm: bool = True
