"""Answer conversations without a server.

    python examples/offline_chat.py --model /models/Qwen2.5-0.5B-Instruct "Who are you?"

Without --model the small demo model is used; it knows the flags of this project's server.
"""

import argparse

from ascend_vllm import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="directory of a model with a chat template")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("questions", nargs="*", default=["What does --block-size do?", "hello"])
    args = parser.parse_args()

    llm = LLM(model=args.model)
    conversations = [[{"role": "user", "content": question}] for question in args.questions]
    answers = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=args.max_tokens))
    for question, answer in zip(args.questions, answers, strict=True):
        print(f"User: {question}\nAssistant: {answer.outputs[0].text}\n")


if __name__ == "__main__":
    main()
