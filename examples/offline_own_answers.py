"""Write down a model's own answers, the best texts to train its EAGLE head on.

    python examples/offline_own_answers.py --model /models/Qwen2.5-0.5B-Instruct --questions asked.txt answers.jsonl
    ascend-vllm train-eagle --model /models/Qwen2.5-0.5B-Instruct --data answers.jsonl --output head

Without --model the small demo model is used, without --questions those that it was trained on.
"""

import argparse
import json
import pathlib

from ascend_vllm import LLM, SamplingParams
from ascend_vllm.tools.demo.corpus import build_facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="directory of a model with a chat template")
    parser.add_argument("--questions", type=pathlib.Path, help="text file with a question in each line")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.7], help="an answer with each")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("output", type=pathlib.Path, help=".jsonl file to write")
    args = parser.parse_args()

    if args.questions is None:
        questions = [question for fact in build_facts() for question in fact.questions]
    else:
        questions = args.questions.read_text().splitlines()
    llm = LLM(model=args.model)
    conversations = [[{"role": "user", "content": question}] for question in questions]
    with args.output.open("w") as output:
        for temperature in args.temperature:
            params = SamplingParams(temperature=temperature, max_tokens=args.max_tokens, seed=0)
            answers = llm.chat(conversations, params)
            for conversation, answer in zip(conversations, answers, strict=True):
                reply = {"role": "assistant", "content": answer.outputs[0].text}
                output.write(json.dumps({"messages": [*conversation, reply]}) + "\n")
    print(f"{len(questions) * len(args.temperature)} answers are in {args.output}.")


if __name__ == "__main__":
    main()
