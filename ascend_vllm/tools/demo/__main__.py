"""`python -m ascend_vllm.tools.demo`: trains the demo model and prints where it is."""

from __future__ import annotations

import argparse
import pathlib
import sys

from ascend_vllm.entrypoints.demo_model import demo_model_path
from ascend_vllm.entrypoints.interrupts import EXIT_INTERRUPTED
from ascend_vllm.logger import init_logger

logger = init_logger("ascend_vllm.tools.demo")


def main() -> None:
    """Trains and writes the model unless it is there."""
    parser = argparse.ArgumentParser(
        prog="python -m ascend_vllm.tools.demo",
        description="Train the small chat model behind --model demo. It takes a minute or two on two cores.",
    )
    parser.add_argument("--output", type=pathlib.Path, default=None, help="directory to write; default: the cache")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and order; default 0")
    parser.add_argument("--force", action="store_true", help="train again even if the directory holds a model")
    args = parser.parse_args()
    output = args.output or demo_model_path()
    if args.force or not (output / "config.json").is_file():
        # late: torch takes seconds to import, and the model may be there
        from ascend_vllm.tools.demo.checkpoint import make_demo_model

        logger.info("Training the demo model into %s (once; a minute or two on two cores)", output)
        make_demo_model(output, seed=args.seed)
    print(output)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        # a server that waits for the model gets the signal of the terminal, too, and reports it
        sys.exit(EXIT_INTERRUPTED)
