"""LMDeploy's pipeline on this engine: only the import changes.

    python examples/lmdeploy_pipeline.py --model /models/internlm2-chat-7b "Shanghai is"

Without --model the small demo model is used; it knows the flags of this project's server.
"""

import argparse

from ascend_vllm import GenerationConfig, TurbomindEngineConfig, pipeline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="directory of a model")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("questions", nargs="*", default=["What does --block-size do?", "hello"])
    args = parser.parse_args()

    backend_config = TurbomindEngineConfig(max_batch_size=16, cache_max_entry_count=0.2)
    with pipeline(args.model, backend_config=backend_config) as pipe:
        gen_config = GenerationConfig(max_new_tokens=args.max_tokens)
        for question, response in zip(args.questions, pipe(args.questions, gen_config=gen_config), strict=True):
            print(f"User: {question}\nAssistant: {response.text}\n")

        print(f"User: {args.questions[0]}\nAssistant, piece by piece: ", end="")
        messages = [{"role": "user", "content": args.questions[0]}]
        for piece in pipe.stream_infer(messages, gen_config=gen_config):
            print(piece.text, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
