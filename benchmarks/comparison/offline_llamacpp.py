"""llama.cpp in a process that generates one sequence on request; see `compare_offline.py`.

Imports nothing but llama-cpp-python and numpy, so that it runs in an environment of its own.
"""

from __future__ import annotations

import json
import os
import sys

INSTALL = (
    "llama-cpp-python is not installed in this environment: `pip install llama-cpp-python gguf`, and write the model"
    " with `python benchmarks/comparison/write_gguf.py MODEL FILE`."
)


def main() -> None:
    """Reads one JSON object per line: a prompt's token ids and how many tokens to generate; answers with JSON."""
    answers, sys.stdout = sys.stdout, sys.stderr
    settings = json.loads(sys.argv[1])
    try:
        import llama_cpp  # type: ignore[import-not-found]
    except ImportError:
        sys.exit(INSTALL)
    threads = len(os.sched_getaffinity(0))
    llama = llama_cpp.Llama(
        settings["model"],
        n_ctx=settings["max_model_len"],
        n_batch=settings["max_model_len"],
        n_ubatch=settings["max_model_len"],
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )
    context = llama.ctx
    sampler = llama_cpp.llama_sampler_init_greedy()

    def generate(prompts: list[list[int]], output_len: int) -> int:
        (ids,) = prompts
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        for count in range(output_len):
            tokens = (llama_cpp.llama_token * len(ids))(*ids)
            if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, len(ids))):
                sys.exit(f"llama.cpp cannot decode after {count} tokens")
            ids = [llama_cpp.llama_sampler_sample(sampler, context, -1)]
        return output_len

    print(json.dumps({"version": llama_cpp.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps({"tokens": generate(**json.loads(line))}), file=answers, flush=True)


if __name__ == "__main__":
    main()
