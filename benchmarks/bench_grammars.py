"""Measures how long requests wait for their grammars, and how long compiling blocks other work.

    python benchmarks/bench_grammars.py --tokenizer /models/Qwen2-0.5B [--count 20] [--grammar FILE] [--json FILE]

Typical schemas, each with different names, are compiled one after the other, and --grammar after
them; meanwhile a loop measures its own delays. It prints milliseconds from a request to its
grammar, the longest delay of the loop, and the memory of the process and its children.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import statistics
import time
from typing import Any

import psutil

from ascend_vllm.config.arch import ArchConfig
from ascend_vllm.config.model import ModelConfig
from ascend_vllm.config.structured import StructuredOutputsConfig
from ascend_vllm.core.connectors import Connectors
from ascend_vllm.core.request import Request
from ascend_vllm.core.structured.manager import StructuredOutputManager
from ascend_vllm.core.structured.vocabulary import Vocabulary
from ascend_vllm.errors import RequestError
from ascend_vllm.hf_tokenizer import load_hf_tokenizer
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.structured_outputs import StructuredOutputsParams
from ascend_vllm.types.messages import EngineCoreRequest


def schema(number: int) -> dict[str, Any]:
    """An ordinary schema, unique by its number."""
    text = {"type": "string"}
    address = {"type": "object", "properties": {f"street{number}": text, "zip": text}, "required": ["zip"]}
    properties = {
        f"name{number}": text,
        f"age{number}": {"type": "integer"},
        "tags": {"type": "array", "items": text},
        "kind": {"enum": [f"a{number}", "b", "c"]},
        "address": address,
    }
    return {"type": "object", "properties": properties, "required": [f"name{number}"]}


def memory_mib() -> int:
    """Memory of this process and its children, in MiB."""
    total = 0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total >> 20


def compile_one(grammars: Connectors, name: str, **fields: Any) -> dict[str, Any]:
    """Compiles a constraint and returns the measurements."""
    params = StructuredOutputsParams(**fields)
    message = EngineCoreRequest(name, [1], SamplingParams(structured_outputs=params), None, time.time())
    request = Request(message, 4096, 0)
    pause_s, peak = 0.0, 0
    error: RequestError | None = None
    started = last = time.perf_counter()
    is_ready = grammars.begin(request)
    while not is_ready:
        grammars.wait(0.001)
        for _, failure in grammars.take_ready():
            is_ready, error = True, failure
        now = time.perf_counter()
        pause_s, last = max(pause_s, now - last), now
        if now - started > 0.5:
            peak = max(peak, memory_mib())
    taken = time.perf_counter() - started
    return {
        "ms": round(taken * 1e3, 1),
        "longest_pause_ms": round(pause_s * 1e3, 1),
        "peak_mib": max(peak, memory_mib()),
        "error": str(error) if error else None,
    }


def main() -> None:
    """Measures, and prints the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--count", type=int, default=20, help="ordinary schemas")
    parser.add_argument("--regex", default="[0-9]{3}-(yes|no) %d")
    parser.add_argument("--grammar", type=pathlib.Path, help="file with a grammar that is compiled at last")
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    args = parser.parse_args()
    tokenizer = load_hf_tokenizer(args.tokenizer)
    vocabulary = Vocabulary.from_tokenizer(tokenizer, len(tokenizer), [tokenizer.eos_token_id or 0])
    sizes = dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads"), 1)
    arch = ArchConfig.from_hf({"vocab_size": vocabulary.size} | sizes)
    model = ModelConfig(args.tokenizer, ("",), args.tokenizer, "", arch, {}, "float32", 4096)
    grammars = Connectors([StructuredOutputManager(StructuredOutputsConfig(), model, lambda: vocabulary)])
    figures: dict[str, Any] = {"tokens": vocabulary.size, "first": compile_one(grammars, "first", json=schema(0))}
    for kind in ("json", "regex"):
        times = []
        for number in range(1, args.count + 1):
            fields = {"json": schema(number)} if kind == "json" else {"regex": args.regex % number}
            times.append(compile_one(grammars, f"{kind}{number}", **fields)["ms"])
        figures[kind] = {"median_ms": statistics.median(times), "worst_ms": max(times)}
    figures["memory_mib"] = memory_mib()
    if args.grammar is not None:
        with contextlib.suppress(RequestError):
            figures["grammar"] = compile_one(grammars, "grammar", grammar=args.grammar.read_text())
    grammars.close()
    print(json.dumps(figures, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
