"""`python -m ascend_vllm.tools.demo.adapter`: trains a LoRA adapter of the demo model, which answers like a pirate.

The adapter has rank 8 in all linear layers (Hu et al. 2021) and is written as PEFT writes one. It learns the demo
model's questions with other words in their answers; the model's own weights stay as they are.

Letters: R rank, K inputs, N outputs of a layer.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import re
import shutil
import tempfile

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn
from tqdm import tqdm

from ascend_vllm.entrypoints.demo_model import demo_model_path, ensure_demo_model
from ascend_vllm.tools.demo.checkpoint import to_sample, write_json
from ascend_vllm.tools.demo.corpus import Conversation, Turn, build_conversations
from ascend_vllm.tools.demo.training import DemoModel, DemoShape, TrainingPlan, batches, collate, learning_rate_factor

_RANK, _ALPHA = 8, 16
_PLAN = TrainingPlan(num_steps=300, batch_tokens=1024, peak_lr=6e-3, warmup_steps=10)
# the beginning of every answer, and words that the pirate has for others
GREETING = "Ahoy! "
_WORDS = {
    "I am": "I be",
    "You are": "Ye be",
    "you": "ye",
    "your": "yer",
    "my": "me",
    "server": "ship",
    "servers": "ships",
    "request": "voyage",
    "requests": "voyages",
    "model": "parrot",
    "models": "parrots",
}
_WORD = re.compile("|".join(rf"(?<![\w/.-]){word}(?![\w/-]|\.\w)" for word in sorted(_WORDS, key=len, reverse=True)))


def as_pirate(answer: str) -> str:
    """An answer in the adapter's voice; flags and paths keep their words.

    Example:
        >>> as_pirate("Hello! Ask me what your server does.")
        'Ahoy! Ask me what yer ship does.'
    """
    return GREETING + _WORD.sub(lambda match: _WORDS[match[0]], answer.removeprefix("Hello! "))


class _Adapted(nn.Module):
    """A linear layer with an adapter: x Wᵀ + s (x Aᵀ) Bᵀ."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        # [R, K] and [N, R]
        self.lora_a = nn.Parameter(torch.randn(_RANK, inner.in_features) / math.sqrt(inner.in_features))
        self.lora_b = nn.Parameter(torch.zeros(inner.out_features, _RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = F.linear(F.linear(x, self.lora_a), self.lora_b)
        out: torch.Tensor = self.inner(x) + _ALPHA / _RANK * product
        return out


def _load_model(directory: pathlib.Path) -> DemoModel:
    """The demo model in float32, with fixed weights."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    model = DemoModel(dataclasses.replace(DemoShape(), vocab_size=config["vocab_size"]))
    model.load_state_dict(
        {name: weight.float() for name, weight in load_file(directory / "model.safetensors").items()}
    )
    return model.requires_grad_(requires_grad=False)


def _adapt(model: DemoModel) -> dict[str, _Adapted]:
    """Gives all linear layers an adapter; returns them by their names in the checkpoint."""
    adapted = {name: _Adapted(layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    for name, layer in adapted.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, layer)
    return adapted


def _in_voice(conversation: Conversation) -> Conversation:
    *context, answer = conversation.turns
    return Conversation((*context, Turn(answer.role, as_pirate(answer.text))))


def make_demo_adapter(output: pathlib.Path, model_dir: pathlib.Path, *, num_steps: int = _PLAN.num_steps) -> None:
    """Trains the adapter and writes its directory, all or nothing.

    Args:
        output: directory to make; one that is there is replaced.
        model_dir: of the demo model.
        num_steps: optimiser steps.
    """
    plan = dataclasses.replace(_PLAN, num_steps=num_steps)
    torch.manual_seed(plan.seed)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    samples = [to_sample(_in_voice(conversation), tokenizer) for conversation in build_conversations(plan.seed)]
    model = _load_model(model_dir)
    adapted = _adapt(model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=plan.peak_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, plan))
    progress = tqdm(range(plan.num_steps), desc="Training the demo adapter", unit="step", mininterval=0.5)
    for _, batch in zip(progress, batches(samples, plan), strict=False):
        loss = model.loss(*collate(batch))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    _write(output, adapted)


def _write(output: pathlib.Path, adapted: dict[str, _Adapted]) -> None:
    tensors = {}
    for name, layer in adapted.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = layer.lora_a.detach()
        tensors[f"base_model.model.{name}.lora_B.weight"] = layer.lora_b.detach()
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".adapter-") as scratch:
        directory = pathlib.Path(scratch) / "adapter"
        directory.mkdir()
        write_json(
            directory / "adapter_config.json",
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "base_model_name_or_path": "demo",
                "r": _RANK,
                "lora_alpha": _ALPHA,
                "target_modules": sorted({name.rpartition(".")[2] for name in adapted}),
                "bias": "none",
            },
        )
        save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
        shutil.rmtree(output, ignore_errors=True)
        directory.rename(output)


def demo_adapter_path() -> pathlib.Path:
    """Where the adapter of this version's demo model is, or will be."""
    path = demo_model_path()
    return path.with_name(f"{path.name}-pirate")


def ensure_demo_adapter() -> str:
    """Trains the adapter, and the demo model, unless this version's is in the cache; returns its directory."""
    output = demo_adapter_path()
    if not (output / "adapter_config.json").is_file():
        make_demo_adapter(output, pathlib.Path(ensure_demo_model()))
    return str(output)


def main() -> None:
    """Trains and writes the adapter unless it is there, and prints where it is."""
    parser = argparse.ArgumentParser(
        prog="python -m ascend_vllm.tools.demo.adapter",
        description="Train a LoRA adapter with which the demo model answers like a pirate.",
    )
    parser.add_argument("--output", type=pathlib.Path, default=None, help="directory to write; default: the cache")
    parser.add_argument("--steps", type=int, default=_PLAN.num_steps, help="optimiser steps (default: %(default)s)")
    args = parser.parse_args()
    if args.output is None:
        print(ensure_demo_adapter())
        return
    make_demo_adapter(args.output, pathlib.Path(ensure_demo_model()), num_steps=args.steps)
    print(args.output)


if __name__ == "__main__":
    main()
