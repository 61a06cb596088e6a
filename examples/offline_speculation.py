"""Speculative decoding without a server: drafts by n-grams, and how many of them were right.

    python examples/offline_speculation.py --model /models/Qwen2.5-0.5B-Instruct

The answer is the one without drafts, token for token. Without --model the small demo model is used.
"""

import argparse

from ascend_vllm import LLM, SamplingParams

TEXT = "The fox runs through the wood. The dog runs through the wood. The fox"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="directory of a model")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()

    llm = LLM(
        model=args.model,
        speculative_config={"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3},
    )
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    (output,) = llm.generate([TEXT], params)
    answer = output.outputs[0]
    print(f"Prompt: {TEXT!r}\nOutput: {answer.text!r}")
    print(f"Tokens: {len(answer.token_ids)}, of {answer.num_drafts} drafts {answer.num_accepted_drafts} were right.")


if __name__ == "__main__":
    main()
