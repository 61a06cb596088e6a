"""The command `ascend-vllm train-eagle`."""

from __future__ import annotations

import argparse
import os
import pathlib

from ascend_vllm.args.parser import FlexibleArgumentParser
from ascend_vllm.entrypoints.demo_model import DEMO_MODEL_NAME, ensure_demo_model
from ascend_vllm.errors import ConfigError


def add_arguments(parser: FlexibleArgumentParser) -> None:
    parser.description = (
        "Trains an EAGLE head, which drafts tokens for a model in speculative decoding. The model runs as it is "
        "served; texts that resemble its answers are best. An interrupted training goes on when it is called again."
    )
    parser.add_argument("--model", required=True, help="directory of the model, or demo")
    parser.add_argument(
        "--data",
        required=True,
        help=".jsonl, .json or .txt file, or a directory of them, or demo: objects with messages, conversations "
        "(ShareGPT), prompt and completion, or text",
    )
    parser.add_argument("--output", type=pathlib.Path, required=True, help="directory for the head")
    parser.add_argument(
        "--initial-head", default=None, help="directory of a head that is trained further; default: random weights"
    )
    parser.add_argument(
        "--ttt-length",
        type=int,
        default=1,
        help="passes of a step, of which all but the first read the head's own predictions, as drafts do that follow "
        "drafts; default: %(default)s",
    )
    parser.add_argument("--num-epochs", type=int, default=4, help="passes over the data; default: %(default)s")
    parser.add_argument("--num-steps", type=int, default=None, help="most steps; default: as the passes need")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens of a step; default: %(default)s")
    parser.add_argument("--max-length", type=int, default=2048, help="tokens of a text; default: %(default)s")
    parser.add_argument("--learning-rate", type=float, default=None, help="default: by the model's width")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and noise; default: %(default)s")
    parser.add_argument("--device", default="auto", help="as of serve; default: %(default)s")
    parser.add_argument("--dtype", default="auto", help="of the model, as of serve; default: %(default)s")
    parser.add_argument("--trust-remote-code", action="store_true", help="as of serve")


def run(namespace: argparse.Namespace) -> int:
    """Trains and writes the head.

    Raises:
        ConfigError: an option is wrong.
        ModelLoadError: the model cannot be loaded.
    """
    for name in ("num_epochs", "num_steps", "batch_tokens", "max_length", "ttt_length"):
        value = getattr(namespace, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}.")
    model = ensure_demo_model() if namespace.model == DEMO_MODEL_NAME else namespace.model
    # late: torch and transformers take seconds to import
    import torch
    import transformers

    from ascend_vllm.tools.train_eagle.data import read_samples
    from ascend_vllm.tools.train_eagle.states import StateReader
    from ascend_vllm.tools.train_eagle.training import Trainer, TrainingPlan

    plan = TrainingPlan(
        num_epochs=namespace.num_epochs,
        num_steps=namespace.num_steps,
        batch_tokens=max(namespace.batch_tokens, namespace.max_length),
        max_length=namespace.max_length,
        learning_rate=namespace.learning_rate,
        seed=namespace.seed,
        initial_head=namespace.initial_head,
        ttt_length=namespace.ttt_length,
    )
    reader = StateReader(
        model,
        device=namespace.device,
        dtype=namespace.dtype,
        trust_remote_code=namespace.trust_remote_code,
        max_length=plan.max_length,
        batch_tokens=plan.batch_tokens,
        batch_size=plan.batch_size,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(model, trust_remote_code=namespace.trust_remote_code)
    samples = read_samples(namespace.data, tokenizer, plan.max_length)
    # a worker leaves the processors to its own kernels
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    trainer = Trainer(reader, samples, plan, namespace.output)
    try:
        trainer.run()
    except KeyboardInterrupt:
        trainer.save_progress()
        raise
    print(namespace.output)
    return 0
