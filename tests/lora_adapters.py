"""LoRA adapters with random weights, written as PEFT writes them, and the models that PEFT makes of them.

from tests.lora_adapters import Adapter, adapted, write_adapter

adapter = Adapter("sql", rank=8, modules=("q_proj", "v_proj"))
directory = write_adapter(tmp_path / "sql", tiny_model("llama"), adapter)
model = adapted(tiny_model("llama"), directory)      # transformers
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import warnings
import zlib
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
VOCABULARY = ("embed_tokens", "lm_head")


@dataclasses.dataclass(frozen=True)
class Adapter:
    """What an adapter is like.

    Attributes:
        name: of the adapter, from which its weights are drawn.
        rank: of all matrices that `ranks` does not name.
        alpha: scale times rank.
        modules: last parts of the changed layers' names.
        layers: numbers of the changed layers of the model; None: all.
        takes_root: rsLoRA, whose scale is alpha by the root of the rank.
        ranks: `rank_pattern`.
        alphas: `alpha_pattern`.
        as_torch: written as `adapter_model.bin`.
        added: tokens that it adds to the vocabulary.
        as_copies: their vectors are at the end of copies of the embedding and the head, as PEFT writes them, and not
            in `new_embeddings.safetensors`.
    """

    name: str
    rank: int = 8
    alpha: float = 16
    modules: tuple[str, ...] = ALL_LINEAR
    layers: tuple[int, ...] | None = None
    takes_root: bool = False
    ranks: dict[str, int] = dataclasses.field(default_factory=dict)
    alphas: dict[str, float] = dataclasses.field(default_factory=dict)
    as_torch: bool = False
    added: int = 0
    as_copies: bool = False

    def rank_of(self, module: str) -> int:
        """The rank of a module's matrices."""
        return next((rank for suffix, rank in self.ranks.items() if module.endswith(suffix)), self.rank)

    def scale_of(self, module: str) -> float:
        """What a module's product is multiplied by."""
        alpha = next((alpha for suffix, alpha in self.alphas.items() if module.endswith(suffix)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.takes_root else rank)

    def config(self) -> dict[str, Any]:
        """The contents of adapter_config.json."""
        return {
            "peft_type": "LORA",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": list(self.modules),
            "bias": "none",
            "use_rslora": self.takes_root,
            "rank_pattern": self.ranks,
            "alpha_pattern": self.alphas,
            "init_lora_weights": True,
            "lora_dropout": 0.1,
            "task_type": "CAUSAL_LM",
        }


def write_adapter(directory: pathlib.Path, model: str, adapter: Adapter, size: float = 0.5) -> str:
    """Writes an adapter for a model; `size` is about how much its products change results by."""
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps(adapter.config()))
    generator = torch.Generator().manual_seed(zlib.crc32(adapter.name.encode()))
    tensors = {}
    for module, weight in _weights(model, adapter):
        is_table = module.endswith("embed_tokens")
        # an embedding's inputs are the tokens
        rank, (outputs, inputs) = adapter.rank_of(module), weight.T.shape if is_table else weight.shape
        inputs, outputs = inputs + is_table * adapter.added, outputs + module.endswith("lm_head") * adapter.added
        ending = "lora_embedding_{}" if is_table else "lora_{}.weight"
        for matrix, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            drawn = torch.randn(*shape, generator=generator) / math.sqrt(shape[1])
            factor = (
                1.0 if matrix == "A" else size * weight.std().item() * math.sqrt(inputs) / adapter.scale_of(module)
            )
            tensors[f"base_model.model.{module}.{ending.format(matrix)}"] = drawn * factor
    if adapter.added:
        _write_added(directory, model, adapter, tensors, generator)
    if adapter.as_torch:
        torch.save(tensors, directory / "adapter_model.bin")
    else:
        save_file(tensors, directory / "adapter_model.safetensors")
    return str(directory)


def _write_added(
    directory: pathlib.Path,
    model: str,
    adapter: Adapter,
    tensors: dict[str, torch.Tensor],
    generator: torch.Generator,
) -> None:
    """Vectors of added tokens: those of the head are large enough to be chosen at times."""
    weights = load_file(pathlib.Path(model) / "model.safetensors")
    is_tied = "lm_head.weight" not in weights
    found = {}
    for name, of_file in (("model.embed_tokens", "input_embeddings"), ("lm_head", "output_embeddings")):
        table = weights.get(f"{name}.weight", weights["model.embed_tokens.weight"]).float()
        rows = torch.randn(adapter.added, table.shape[1], generator=generator) * 1.5 * table.std()
        if name == "lm_head" and is_tied:
            continue
        found[of_file] = rows
        if adapter.as_copies:
            copy = "base_layer.weight" if name.rpartition(".")[2] in adapter.modules else "weight"
            tensors[f"base_model.model.{name}.{copy}"] = torch.cat([table, rows])
    if not adapter.as_copies:
        save_file(found, directory / "new_embeddings.safetensors")


def _resize(whole: Any, directory: pathlib.Path) -> None:
    """Gives a model of transformers the tokens that an adapter adds."""
    stored = load_file(directory / "adapter_model.safetensors")
    size = whole.config.vocab_size
    if (directory / "new_embeddings.safetensors").exists():
        rows = load_file(directory / "new_embeddings.safetensors")
    else:
        rows = {}
        for name, of_file in (("embed_tokens", "input_embeddings"), ("lm_head", "output_embeddings")):
            for ending in ("weight", "base_layer.weight"):
                copy = next((tensor for key, tensor in stored.items() if key.endswith(f"{name}.{ending}")), None)
                if copy is not None and len(copy) > size:
                    rows[of_file] = copy[size:]
    if rows:
        whole.resize_token_embeddings(size + len(rows["input_embeddings"]), mean_resizing=False)
        whole.get_input_embeddings().weight.data[size:] = rows["input_embeddings"]
        if "output_embeddings" in rows:
            whole.get_output_embeddings().weight.data[size:] = rows["output_embeddings"]


def adapted(model: str, directory: str | None) -> Any:
    """transformers' model in float32 with an adapter that PEFT has merged; None: without one.

    In a model with a tied head PEFT would merge an adapter of the embedding into the head as well: there it adds the
    adapter's products step by step.
    """
    whole = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    if directory is None:
        return whole
    if (pathlib.Path(directory) / "adapter_model.safetensors").exists():
        _resize(whole, pathlib.Path(directory))
    with warnings.catch_warnings():
        # of copies of embeddings and of weights that are tied
        warnings.simplefilter("ignore")
        import peft  # it takes seconds

        found = peft.PeftModel.from_pretrained(whole, directory).eval()
        return found if whole.config.tie_word_embeddings else found.merge_and_unload()


def _weights(model: str, adapter: Adapter) -> list[tuple[str, torch.Tensor]]:
    """Names and weights of the modules that an adapter changes."""
    weights = load_file(pathlib.Path(model) / "model.safetensors")
    # of a tied head
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    found = []
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        parts = module.split(".")
        is_chosen = adapter.layers is None or (parts[1:2] == ["layers"] and int(parts[2]) in adapter.layers)
        if parts[-1] in adapter.modules and is_chosen:
            found.append((module, weight.float()))
    return found
