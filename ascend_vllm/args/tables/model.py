"""Flags that say which model is served and how it is loaded."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from ascend_vllm.args.fields import flag
from ascend_vllm.config import quantization

QUANTIZATIONS = (
    "aqlm",
    "awq",
    "deepspeedfp",
    "tpu_int8",
    "fp8",
    "fbgemm_fp8",
    "modelopt",
    "marlin",
    "gguf",
    "gptq_marlin_24",
    "gptq_marlin",
    "awq_marlin",
    "gptq",
    "compressed-tensors",
    "bitsandbytes",
    "qqq",
    "experts_int8",
    "neuron_quant",
    "ipex",
    "smoothquant",
    "smooth_quant",
    "weight_only_int8",
    "int8_per_channel_weight_only",
    "ascend",
    "None",
)


@dataclasses.dataclass
class ModelArgs:
    """Which model, which tokenizer, and changes to their configuration."""

    SECTION: ClassVar[str] = "Model and tokenizer"

    model: str = flag(
        "facebook/opt-125m",
        "The model to serve: a directory in Hugging Face layout, the name of a model on the Hugging Face hub, "
        "or the word demo for the small chat model that this server trains itself.",
        example="--model /models/Qwen2.5-0.5B-Instruct",
    )
    served_model_name: str | list[str] | None = flag(
        None,
        "The names that requests may put in their model field; answers carry the first one. "
        "Without it the name is the value of --model as you typed it.",
        kind="str",
        many=True,
        example="--served-model-name qwen qwen-small",
    )
    tokenizer: str | None = flag(
        None,
        "The directory or hub name of the tokenizer, if it is not the one that comes with the model.",
        example="--tokenizer /models/my-tokenizer",
    )
    tokenizer_mode: str = flag(
        "auto",
        "Which kind of tokenizer is used: auto takes the fast one when the model has it, slow takes the one "
        "written in Python.",
        choices=("auto", "slow", "mistral"),
        unsupported="the mistral tokenizer format is not available; use auto with the model's tokenizer.json",
        allowed=("slow",),
        example="--tokenizer-mode slow",
    )
    skip_tokenizer_init: bool = flag(
        False, "Starts without a tokenizer. Requests must then bring token ids, and the answers are token ids too."
    )
    revision: str | None = flag(
        None,
        "Which version of a model on the Hugging Face hub to use: a branch, a tag or a commit. "
        "It cannot be combined with a local directory.",
        example="--revision main",
    )
    code_revision: str | None = flag(
        None,
        "Which version of a hub model's own Python code to use.",
        unsupported="a model's code is taken from the same revision as its weights; use --revision for both",
    )
    tokenizer_revision: str | None = flag(
        None, "Which version of a tokenizer on the Hugging Face hub to use: a branch, a tag or a commit."
    )
    trust_remote_code: bool = flag(
        False, "Lets Python code that comes with the model run on this machine. Use it only for models you trust."
    )
    dtype: str = flag(
        "auto",
        "The number format of weights and activations. With auto the checkpoint's own format is kept, except that a "
        "float32 checkpoint is run in bfloat16; give float32 to keep full precision.",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
        example="--dtype bfloat16",
    )
    max_model_len: int | str | None = flag(
        None,
        "The longest sequence the server handles, prompt and answer together, in tokens. "
        "Without it the model's config.json decides; 4k means 4000, 4K means 4096, and auto takes as much as "
        "fits in the KV cache.",
        kind="length",
        example="--max-model-len 4096",
    )
    disable_sliding_window: bool = flag(
        False, "Turns the sliding attention window of the model off and limits sequences to the size of that window."
    )
    rope_scaling: dict[str, Any] | None = flag(
        None,
        "Changes how the model stretches its rotary positions, as a JSON object; it replaces what config.json says.",
        example='--rope-scaling \'{"rope_type":"dynamic","factor":2.0}\'',
    )
    rope_theta: float | None = flag(
        None,
        "Changes the base of the model's rotary positions; it is mostly used together with --rope-scaling.",
        example="--rope-theta 1000000",
    )
    hf_overrides: dict[str, Any] | None = flag(
        None,
        "Replaces values of the model's config.json, as a JSON object, without editing the file.",
        example="--hf-overrides '{\"max_position_embeddings\": 8192}'",
    )
    generation_config: str = flag(
        "auto",
        "Where sampling defaults come from: auto reads the model's generation_config.json, vllm uses the server's "
        "own defaults, and a directory names another place to read that file from.",
        example="--generation-config vllm",
    )
    override_generation_config: dict[str, Any] | None = flag(
        None,
        "Sets sampling defaults as a JSON object; they win over generation_config.json, and requests win over them.",
        example="--override-generation-config '{\"temperature\": 0.2}'",
    )
    seed: int = flag(
        0,
        "The seed of random draws for requests that bring no seed of their own. "
        "The same seed gives the same answers when the server is started again.",
        example="--seed 42",
    )
    max_logprobs: int = flag(
        20,
        "The largest number of log-probabilities per token that a request may ask for.",
        example="--max-logprobs 50",
    )
    logprobs_mode: str = flag(
        "raw_logprobs",
        "Whether log-probabilities are taken before penalties and temperature (raw_logprobs) or after them "
        "(processed_logprobs); raw_logits and processed_logits give the logits in their place.",
        choices=("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"),
        example="--logprobs-mode processed_logprobs",
    )
    enforce_eager: bool = flag(
        False,
        "Computes every decoding step operator by operator. Otherwise NPUs replay captured graphs, and CPUs replay "
        "what they have recorded.",
    )
    runner: str = flag(
        "auto",
        "What the model is used for: generate means writing text, pooling means embeddings, classes and scores. With "
        "auto the model's own kind decides.",
        choices=("auto", "generate", "pooling", "draft"),
        unsupported="a draft model is named beside the model that it drafts for: --speculative-model",
        allowed=("generate", "pooling"),
        example="--runner pooling",
    )
    convert: str = flag(
        "auto",
        "Turns a model into one for embeddings (embed) or, if it has a classification head, for classes and scores "
        "(classify).",
        choices=("auto", "none", "embed", "classify", "reward"),
        unsupported="reward models are not available in this version",
        allowed=("none", "embed", "classify"),
        example="--convert embed",
    )
    task: str = flag(
        "auto",
        "The older way to say what the model is used for: generate, embed, classify or score.",
        choices=("auto", "generate", "embedding", "embed", "classify", "score", "reward", "transcription"),
        unsupported="reward and speech models are not available in this version",
        allowed=("generate", "embedding", "embed", "classify", "score"),
        example="--task embed",
    )
    pooler_config: dict[str, Any] | None = flag(
        None,
        "How a pooling model makes one vector of a text, as a JSON object: task, pooling_type (LAST, MEAN, CLS or "
        "ALL), use_activation and dimensions. Without it the model's own files decide, and failing that the last "
        "token's vector is taken and normalised.",
        example='--pooler-config \'{"pooling_type": "MEAN"}\'',
    )
    override_pooler_config: dict[str, Any] | None = flag(None, "The older name of --pooler-config.")
    model_impl: str = flag(
        "auto",
        "Which implementation of the model runs: the server's own one (auto or vllm) or the one in transformers.",
        choices=("auto", "vllm", "transformers", "terratorch"),
        unsupported="models always run on this project's own implementation",
        allowed=("vllm",),
    )
    enable_prompt_embeds: bool = flag(
        False,
        "Accepts prompts given as embedding vectors instead of text.",
        unsupported="prompts are text or token ids in this version",
    )
    tokenizer_extension_path: str | None = flag(
        None,
        "A Python file vllm_extension.py, or its directory, with a class VllmExtension that supplies a tokenizer of "
        "your own by its methods get_tokenizer(tokenizer_path) and text_to_tokens(tokenizer, text).",
        example="--tokenizer-extension-path ./vllm_extension.py",
    )


@dataclasses.dataclass
class LoadArgs:
    """Where weights are found and in which form."""

    SECTION: ClassVar[str] = "Loading weights"

    load_format: str = flag(
        "auto",
        "The form of the weight files: auto prefers safetensors and falls back to PyTorch .bin files (pt); npcache "
        "keeps those as arrays that load faster; dummy makes random weights from the seed and needs no files.",
        choices=(
            "auto",
            "pt",
            "safetensors",
            "npcache",
            "dummy",
            "tensorizer",
            "sharded_state",
            "gguf",
            "bitsandbytes",
            "mistral",
        ),
        unsupported="weights are read from safetensors or PyTorch .bin files",
        allowed=("pt", "safetensors", "npcache", "dummy"),
        example="--load-format dummy",
    )
    config_format: str = flag(
        "auto",
        "The form of the model's configuration: auto and hf read config.json.",
        choices=("auto", "hf", "mistral"),
        unsupported="mistral's own params.json is not read; convert the model to Hugging Face layout",
        allowed=("hf",),
    )
    download_dir: str | None = flag(
        None,
        "Where models from the Hugging Face hub are kept on disk; without it the hub's usual cache is used.",
        example="--download-dir /data/models",
    )
    ignore_patterns: str | list[str] = flag(
        [],
        "Weight files to leave out, as file patterns; it may be given several times. "
        "Without it files under original/ are left out.",
        kind="str",
        repeat=True,
        example="--ignore-patterns 'consolidated*'",
    )
    model_loader_extra_config: str | None = flag(
        None,
        "More options for the chosen --load-format, as JSON.",
        unsupported="none of the available load formats has further options",
    )
    use_tqdm_on_load: bool = flag(
        True,
        "Shows a progress bar while the weights are loaded.",
        example="--no-use-tqdm-on-load",
    )
    quantization: str | None = flag(
        None,
        "How the weights are quantised, for example awq or smoothquant. Without it the model's files decide.",
        choices=QUANTIZATIONS,
        short=("-q",),
        unsupported="weights in this format are not read; serve the unquantised checkpoint",
        allowed=tuple(quantization.SCHEMES),
        entry_points=quantization.ENTRY_POINT_GROUP,
    )
    quantize_lm_head: bool = flag(
        False,
        "Rounds the weight of the LM head to 8 bits while it is loaded, whatever the format of the other layers. It "
        "is a large part of what small models read for each token.",
        example="--quantization weight_only_int8 --quantize-lm-head",
    )
    cpu_int8_activations: bool = flag(
        False,
        "On CPUs, products with weights of 4 or 8 bits round their inputs to 8 bits, with a scale for each 32 of "
        "them. Less exact, and faster for several requests and for prompts on processors without AMX.",
        example="--quantization awq --cpu-int8-activations",
    )
    quantization_param_path: str | None = flag(
        None,
        "A JSON file with the scales of an 8-bit KV cache, one for each layer. A file that does not fit the model is "
        "an error.",
        example="--kv-cache-dtype fp8 --quantization-param-path kv_cache_scales.json",
    )
    qlora_adapter_name_or_path: str | None = flag(
        None,
        "The name or directory of a QLoRA adapter to load on top of a quantised model.",
        kind="str",
        unsupported="adapters are not available in this version",
    )
