"""`python -m ascend_vllm.tools.demo`: trains the demo model, or a larger one on its texts, and prints where it is."""

from __future__ import annotations

import argparse
import pathlib
import sys

from ascend_vllm.entrypoints.demo_model import demo_model_path
from ascend_vllm.entrypoints.interrupts import EXIT_INTERRUPTED
from ascend_vllm.errors import AscendVllmError
from ascend_vllm.logger import init_logger

logger = init_logger(__name__.removesuffix(".__main__"))

# field of `DemoShape` or `TrainingPlan` → what it is; the default is the demo model's
_SIZES = {
    "vocab_size": "entries of the vocabulary, at most",
    "hidden_size": "width of the model",
    "intermediate_size": "width inside the MLPs",
    "num_layers": "decoder layers",
    "num_heads": "query heads, which share the width",
    "num_kv_heads": "heads of keys and values",
}
_PLAN = {
    "num_steps": "optimiser steps",
    "batch_tokens": "padded tokens of a step, at most",
    "warmup_steps": "steps in which the learning rate grows",
    "seed": "of weights and order",
}


def main() -> None:
    """Trains and writes the model unless it is there."""
    parser = argparse.ArgumentParser(
        prog="python -m ascend_vllm.tools.demo",
        description="Train the small chat model behind --model demo, which takes a minute or two on two cores, or "
        "one of another size on the same texts. An interrupted training goes on when it is called again.",
    )
    parser.add_argument("--output", type=pathlib.Path, default=None, help="directory to write; default: the cache")
    parser.add_argument("--force", action="store_true", help="train again even if the directory holds a model")
    for name, text in (_SIZES | _PLAN).items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=None, metavar="N", help=f"{text}; default: the demo model's")
    args = parser.parse_args()
    given = {name: value for name in (*_SIZES, *_PLAN) if (value := getattr(args, name)) is not None}
    if given and args.output is None:
        parser.error("--output: name a directory, since the demo model itself has no other sizes")
    output = args.output or demo_model_path()
    if args.force or not (output / "config.json").is_file():
        # late: torch takes seconds to import, and the model may be there
        from ascend_vllm.tools.demo.checkpoint import make_demo_model
        from ascend_vllm.tools.demo.training import DemoShape, TrainingPlan

        shape = DemoShape(**{name: value for name, value in given.items() if name in _SIZES})
        plan = TrainingPlan(**{name: value for name, value in given.items() if name in _PLAN})
        logger.info("Training a model into %s (once; a minute or two on two cores for the demo model)", output)
        make_demo_model(output, shape=shape, plan=plan)
    print(output)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        # a server that waits for the model gets the signal of the terminal, too, and reports it
        sys.exit(EXIT_INTERRUPTED)
    except AscendVllmError as error:
        sys.exit(f"error: {error}")
