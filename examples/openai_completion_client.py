"""Complete several prompts in one request, with log-probabilities and a field of vLLM's own.

pip install openai
ascend-vllm serve demo                      # in another terminal
python examples/openai_completion_client.py
"""

import argparse

from openai import OpenAI

PROMPTS = ["What does --port do?", "The KV cache"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="none", help="needed when the server was started with --api-key")
    args = parser.parse_args()

    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    completion = client.completions.create(
        model=client.models.list().data[0].id,
        prompt=PROMPTS,
        max_tokens=24,
        temperature=0.7,
        seed=1,
        logprobs=1,
        extra_body={"top_k": 20, "min_tokens": 4},
    )
    for prompt, choice in zip(PROMPTS, completion.choices, strict=True):
        logprobs = choice.logprobs.token_logprobs if choice.logprobs else None
        print(f"Prompt: {prompt!r}\nOutput: {choice.text!r} ({choice.finish_reason})")
        print("Log-probabilities:", [round(value, 2) for value in logprobs or [] if value is not None], "\n")


if __name__ == "__main__":
    main()
