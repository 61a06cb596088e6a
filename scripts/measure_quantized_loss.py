"""Prints what quantization costs the demo model: loss on texts that it was not trained with.

    python scripts/measure_quantized_loss.py [NAME=DIRECTORY …]

Texts are conversations that the training did not draw, of which the answers count, and pages of docs. Further rows
are quantized checkpoints of the demo model. Activations are in float32, so that rows differ by what a format rounds.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from ascend_vllm import LLM, SamplingParams
from ascend_vllm.entrypoints.demo_model import ensure_demo_model
from ascend_vllm.tools.demo.corpus import build_conversations

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
PAGES = ("architecture.md", "adding_an_op.md", "clients.md")
NUM_CONVERSATIONS = 150
CHUNK_TOKENS = 256
MAX_CHUNKS = 40
ONLINE: dict[str, dict[str, Any]] = {
    "not quantized": {},
    "`weight_only_int8`": {"quantization": "weight_only_int8"},
    "`weight_only_int8`, `--quantize-lm-head`": {"quantization": "weight_only_int8", "quantize_lm_head": True},
    "`fp8`": {"quantization": "fp8"},
}

# token ids, and the first one that counts
Text = tuple[list[int], int]


def conversations(tokenizer: Any) -> list[Text]:
    """Conversations that are not those of the training."""
    seen = set(build_conversations(0))
    unseen = [conversation for conversation in build_conversations(1) if conversation not in seen]
    texts: list[Text] = []
    for conversation in unseen[:: max(1, len(unseen) // NUM_CONVERSATIONS)]:
        *context, answer = conversation.turns
        messages = [{"role": turn.role, "content": turn.text} for turn in context]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer.encode(prompt)
        texts.append((ids + tokenizer.encode(answer.text) + [tokenizer.eos_token_id], len(ids)))
    return texts


def pages(tokenizer: Any) -> list[Text]:
    """Pages of docs in chunks."""
    chunks: list[Text] = []
    for page in PAGES:
        ids = tokenizer.encode((DOCS / page).read_text())
        chunks += [(ids[start : start + CHUNK_TOKENS], 1) for start in range(0, len(ids), CHUNK_TOKENS)]
    return [chunk for chunk in chunks if len(chunk[0]) == CHUNK_TOKENS][:MAX_CHUNKS]


def loss(llm: LLM, texts: Sequence[Text]) -> float:
    """Mean negative log-probability of the tokens that count."""
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids, _ in texts], sampling, use_tqdm=False)
    found: list[float] = []
    for (ids, first), output in zip(texts, outputs, strict=True):
        assert output.prompt_logprobs is not None
        for token, logprobs in list(zip(ids, output.prompt_logprobs, strict=True))[first:]:
            assert logprobs is not None
            found.append(-logprobs[token].logprob)
    return sum(found) / len(found)


def main() -> None:
    model = ensure_demo_model()
    rows: dict[str, dict[str, Any]] = {name: {"model": model} | options for name, options in ONLINE.items()}
    rows |= {name: {"model": directory} for name, _, directory in (item.partition("=") for item in sys.argv[1:])}
    texts: list[list[Text]] = []
    before: tuple[float, ...] | None = None
    print("| weights | loss of answers | loss of pages |\n|---|---|---|")
    for name, options in rows.items():
        llm = LLM(dtype="float32", max_model_len=1024, kv_cache_memory_bytes="64M", **options)
        # those of the first row for all
        tokenizer = llm.get_tokenizer()
        texts = texts or [conversations(tokenizer), pages(tokenizer)]
        found = tuple(loss(llm, some) for some in texts)
        llm.shutdown()
        before = before or found
        cells = [f"{value:.4f} ({100 * (value / old - 1):+.2f}%)" for value, old in zip(found, before, strict=True)]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
