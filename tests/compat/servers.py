"""The servers that the tables of requests are sent to: vLLM's flags, ours, and the tables of each."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil

import torch
from safetensors.torch import load_file, save_file

from tests.compat import (
    requests_agents,
    requests_chat,
    requests_completions,
    requests_errors,
    requests_pooling,
    requests_routes,
    requests_structured,
)
from tests.compat.requests_common import Case

HERE = pathlib.Path(__file__).resolve().parent
MODEL = HERE / "model"
RECORDED = HERE / "recorded"


@dataclasses.dataclass(frozen=True)
class ServerSpec:
    """One server.

    Attributes:
        flags: of both, beside COMMON.
        theirs: flags of vLLM alone, that make it do what ours does without a flag.
        ours: flags of ours alone.
        tables: name of a recorded file → its requests.
        classifier: serve the weights with a head of classes.
    """

    flags: tuple[str, ...]
    tables: dict[str, list[Case]]
    theirs: tuple[str, ...] = ()
    ours: tuple[str, ...] = ()
    classifier: bool = False


COMMON = ("--served-model-name", "tiny", "tiny2", "--dtype", "float32", "--max-model-len", "320")
# prefix caching is off here unless it is asked for
_THEIRS = ("--enforce-eager", "--no-enable-prefix-caching")
_OURS = ("--kv-cache-memory-bytes", "32M", "--max-num-seqs", "64")

SERVERS: dict[str, ServerSpec] = {
    "tools": ServerSpec(
        flags=("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        theirs=_THEIRS,
        ours=_OURS,
        tables={
            "completions": requests_completions.CASES,
            "chat": requests_chat.CASES,
            "structured": requests_structured.CASES,
            "errors": requests_errors.CASES,
            "routes": requests_routes.CASES,
            "agents": requests_agents.CASES,
        },
    ),
    "plain": ServerSpec(
        flags=(
            *("--api-key", "secret", "--reasoning-parser", "qwen3", "--max-logprobs", "5"),
            *("--return-tokens-as-token-ids", "--enable-force-include-usage", "--trust-request-chat-template"),
            *("--enable-prompt-tokens-details", "--enable-server-load-tracking"),
            *("--override-generation-config", '{"temperature": 0.0}'),
        ),
        theirs=_THEIRS,
        # their key guards fewer routes
        ours=(*_OURS, "--api-key-scope", "inference"),
        tables={"plain": requests_errors.PLAIN_SERVER_CASES},
    ),
    "embedding": ServerSpec(
        flags=("--runner", "pooling"),
        theirs=_THEIRS,
        ours=_OURS,
        tables={"embedding": requests_pooling.EMBEDDING_CASES},
    ),
    "classifier": ServerSpec(
        flags=("--runner", "pooling"),
        theirs=_THEIRS,
        ours=_OURS,
        tables={"classifier": requests_pooling.CLASSIFIER_CASES},
        classifier=True,
    ),
}


def make_shareable(directory: pathlib.Path) -> None:
    """Writes the model with a fourth attention head that adds nothing: what it computes is the same.

    Two workers cannot share three heads. The one KV head serves the four as it serves the three.

    Args:
        directory: to make.
    """
    shutil.copytree(MODEL, directory)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    heads = config["num_attention_heads"]
    head_dim = config["hidden_size"] // heads
    weights = load_file(directory / "model.safetensors")
    for name, tensor in weights.items():
        if ".q_proj." in name:
            padding = tensor.new_zeros(head_dim, *tensor.shape[1:])
            weights[name] = torch.cat([tensor, padding])
        elif ".o_proj." in name:
            weights[name] = torch.cat([tensor, tensor.new_zeros(tensor.shape[0], head_dim)], dim=1)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config |= {"num_attention_heads": heads + 1, "head_dim": head_dim}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")


def make_classifier(directory: pathlib.Path, model: pathlib.Path = MODEL) -> None:
    """Writes the model's weights with a head of three classes, as Qwen2ForSequenceClassification.

    Args:
        directory: to make.
        model: where the weights are.
    """
    shutil.copytree(model, directory)
    weights = load_file(directory / "model.safetensors")
    weights = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    hidden = weights["model.norm.weight"].shape[0]
    # waves: easy to make again everywhere, and no class is the best for every text
    positions = torch.arange(3 * hidden, dtype=torch.float32).reshape(3, hidden)
    weights["score.weight"] = torch.sin(positions * positions / 7).mul_(0.2).bfloat16()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    labels = {0: "calm", 1: "glad", 2: "sad"}
    config |= {
        "architectures": ["Qwen2ForSequenceClassification"],
        "num_labels": 3,
        "id2label": labels,
        "label2id": {name: index for index, name in labels.items()},
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
