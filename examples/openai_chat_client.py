"""Chat with a running server by the official client, streaming.

pip install openai
ascend-vllm serve demo                      # in another terminal
python examples/openai_chat_client.py "What does --max-num-seqs do?"
"""

import argparse

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="none", help="needed when the server was started with --api-key")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("question", nargs="?", default="What does --block-size do?")
    args = parser.parse_args()

    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": args.question}],
        max_tokens=args.max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage:
            print(f"\n\n{chunk.usage.prompt_tokens} tokens in, {chunk.usage.completion_tokens} out")


if __name__ == "__main__":
    main()
