"""This project's `LLM` in a process that generates batches on request; see `compare_offline.py`."""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    """Reads one JSON object per line: the token ids of a batch and how many tokens to generate; answers with JSON."""
    # output of the library must not mix with the answers
    answers, sys.stdout = sys.stdout, sys.stderr
    settings = json.loads(sys.argv[1])

    import ascend_vllm
    from ascend_vllm.entrypoints.offline.llm import LLM
    from ascend_vllm.sampling_params import SamplingParams

    llm = LLM(**settings)

    def generate(prompts: list[list[int]], output_len: int) -> int:
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output_len, detokenize=False)
        inputs: Any = [{"prompt_token_ids": ids} for ids in prompts]
        return sum(len(one.outputs[0].token_ids) for one in llm.generate(inputs, params, use_tqdm=False))

    print(json.dumps({"version": ascend_vllm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps({"tokens": generate(**json.loads(line))}), file=answers, flush=True)


if __name__ == "__main__":
    main()
