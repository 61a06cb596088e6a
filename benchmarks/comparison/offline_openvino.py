"""OpenVINO GenAI's pipeline in a process that generates batches on request; see `compare_offline.py`.

Imports nothing but OpenVINO and numpy, so that it runs in an environment of its own.
"""

from __future__ import annotations

import json
import sys

INSTALL = (
    "OpenVINO GenAI is not installed in this environment: `pip install openvino-genai optimum-intel`, and convert"
    " the model with `optimum-cli export openvino --model MODEL --task text-generation-with-past"
    " --weight-format fp16 DIR`."
)


def main() -> None:
    """Reads one JSON object per line: the token ids of a batch and how many tokens to generate; answers with JSON."""
    answers, sys.stdout = sys.stdout, sys.stderr
    settings = json.loads(sys.argv[1])
    try:
        import numpy as np
        import openvino  # type: ignore[import-not-found]
        import openvino_genai  # type: ignore[import-not-found]
    except ImportError:
        sys.exit(INSTALL)
    pipeline = openvino_genai.LLMPipeline(settings.pop("model"), "CPU", **settings)

    def generate(prompts: list[list[int]], output_len: int) -> int:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = output_len
        config.ignore_eos = True
        config.do_sample = False
        ids = np.asarray(prompts, dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        return sum(len(tokens) for tokens in pipeline.generate(inputs, config).tokens)

    print(json.dumps({"version": openvino_genai.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps({"tokens": generate(**json.loads(line))}), file=answers, flush=True)


if __name__ == "__main__":
    main()
