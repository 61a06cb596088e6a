"""Compare texts by their embeddings, without a server.

    python examples/offline_embedding.py --model /models/Qwen3-Embedding-0.6B "How do I sleep?"

Any generation model gives embeddings, too, if not as good ones; without --model the small demo model does.
"""

import argparse

from ascend_vllm import LLM

TEXTS = ["--block-size sets the tokens of a block", "--port sets the port of the server", "The weather is fine"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="directory of a model")
    parser.add_argument("question", nargs="?", default="How large are the blocks?")
    args = parser.parse_args()

    llm = LLM(model=args.model, runner="pooling", convert="embed")
    (output,) = llm.embed(args.question)
    print(f"Question: {args.question}\nNumbers of its embedding: {len(output.outputs.embedding)}")
    for text, scored in zip(TEXTS, llm.score(args.question, TEXTS), strict=True):
        print(f"{scored.outputs.score:+.4f}  {text}")


if __name__ == "__main__":
    main()
