"""Complete a few prompts without a server.

    python examples/offline_inference.py --model /models/Qwen2.5-0.5B-Instruct

Without --model the small demo model is used, which is trained on the first run (a minute or two).
"""

import argparse

from ascend_vllm import LLM, SamplingParams

PROMPTS = ["What does --block-size do?", "How do I start the server?", "The KV cache"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="directory of a model")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()

    llm = LLM(model=args.model)
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=args.max_tokens, seed=0)
    for output in llm.generate(PROMPTS, params):
        print(f"Prompt: {output.prompt!r}\nOutput: {output.outputs[0].text!r}\n")


if __name__ == "__main__":
    main()
