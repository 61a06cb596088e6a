"""A LoRA adapter without a server: in one batch the model answers each question with the adapter and without it.

    python examples/offline_lora.py --model /models/Qwen2.5-0.5B-Instruct --adapter /adapters/sql "All customers?"

Without --model and --adapter the small demo model is used, and an adapter of it that is trained within a minute.
"""

import argparse

from ascend_vllm import LLM, SamplingParams
from ascend_vllm.lora.request import LoRARequest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="directory of a model with a chat template")
    parser.add_argument("--adapter", help="directory of a LoRA adapter of the model")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("questions", nargs="*", default=["What does --block-size do?", "hello"])
    args = parser.parse_args()

    directory = args.adapter
    if directory is None:
        from ascend_vllm.tools.demo.adapter import ensure_demo_adapter

        directory = ensure_demo_adapter()
    adapter = LoRARequest("adapter", 1, directory)
    llm = LLM(model=args.model, enable_lora=True, max_lora_rank=64)
    conversations = [[{"role": "user", "content": question}] for question in args.questions for _ in range(2)]
    answers = llm.chat(
        conversations,
        SamplingParams(temperature=0, max_tokens=args.max_tokens),
        # one for each conversation; None: the model as it is
        lora_request=[None, adapter] * len(args.questions),
    )
    texts = [answer.outputs[0].text for answer in answers]
    for question, plain, adapted in zip(args.questions, texts[::2], texts[1::2], strict=True):
        print(f"User: {question}\nModel: {plain}\nAdapter: {adapted}\n")


if __name__ == "__main__":
    main()
