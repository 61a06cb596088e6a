"""Call the Responses API of a running server with the official client, streaming, and continue the conversation.

pip install openai
ascend-vllm serve demo                      # in another terminal
VLLM_ENABLE_RESPONSES_API_STORE=1 lets the server keep responses, so that the second question needs no repetition
python examples/openai_responses_client.py "What does --max-num-seqs do?"
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
    with client.responses.stream(
        model=model, input=args.question, max_output_tokens=args.max_tokens, temperature=0
    ) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                print(event.delta, end="", flush=True)
            # an answer that is cut off at --max-tokens is incomplete
            elif event.type in ("response.completed", "response.incomplete"):
                response = event.response
    if response.usage:
        print(f"\n\n{response.usage.input_tokens} tokens in, {response.usage.output_tokens} out")

    # the conversation so far, and one more question
    further = client.responses.create(
        model=model,
        input=[
            {"role": "user", "content": args.question},
            {"role": "assistant", "content": response.output_text},
            {"role": "user", "content": "hello"},
        ],
        max_output_tokens=args.max_tokens,
        temperature=0,
    )
    print(f"\nAnd then: {further.output_text}")


if __name__ == "__main__":
    main()
