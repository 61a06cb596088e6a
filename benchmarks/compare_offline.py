"""Compares this project's `LLM` with OpenVINO GenAI or llama.cpp in static batches on one machine, alternately.

    pip install openvino-genai optimum-intel nncf
    alias export="optimum-cli export openvino --task text-generation-with-past --model /tmp/qwen2-0.5b"
    export --weight-format fp16 /tmp/ov-fp16
    export --weight-format int8 /tmp/ov-int8
    export --weight-format int4 --group-size 128 --ratio 1.0 --sym /tmp/ov-int4
    python benchmarks/compare_offline.py --model /tmp/qwen2-0.5b --peer-model /tmp/ov-fp16 --json bf16.json
    python benchmarks/compare_offline.py --model /tmp/qwen2-0.5b --weights int8 --peer-model /tmp/ov-int8
    python scripts/make_random_model.py /tmp/qwen2-0.5b-w4 --weights w4a16
    python benchmarks/compare_offline.py --model /tmp/qwen2-0.5b-w4 --weights int4 --peer-model /tmp/ov-int4

    pip install llama-cpp-python gguf
    python benchmarks/comparison/write_gguf.py /tmp/qwen2-0.5b /tmp/q4_0.gguf
    python benchmarks/compare_offline.py --model /tmp/qwen2-0.5b-w4 --weights int4 --peer llama.cpp \\
        --peer-model /tmp/q4_0.gguf --batch-sizes 1
    python benchmarks/compare_offline.py --model /tmp/qwen2-0.5b --peer none --batch-sizes 1 --rounds 1

Each side is a process that keeps its model loaded; only one computes at a time, on the same token ids.
A batch is generated twice: in full, and only its first token. "whole" is tokens per second of the full run,
"decode" the other tokens over the difference in time. The peer may be in another environment (--peer-python).

With rounded weights the LM head has 8 bits on both sides (6 in llama.cpp if its rows are multiples of 256 wide).
OpenVINO rounds activations to 8 bits in groups of 32, if it is not told otherwise: it does here with
--int8-activations, as ours does then. llama.cpp always rounds them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from comparison import machine, report
from comparison.limits import ModelFacts
from comparison.peaks import Peaks, Reading, median_reading

from ascend_vllm.tools.bench.datasets import PromptMaker

_HERE = pathlib.Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Weights:
    """How the weights are kept.

    Attributes:
        target_ratio: lower bound of the ratio to the peer.
        settings: of our `LLM`.
        head_bytes: of a weight of the output layer.
        matrix_bytes: of the other matrices' weights; None: as in the checkpoint.
    """

    target_ratio: float
    settings: Mapping[str, Any]
    head_bytes: int
    matrix_bytes: int | None = None

    def facts(self, model: ModelFacts) -> ModelFacts:
        """The facts of a model whose LM head, tied or not, the checkpoint has in 16 bits."""
        num_bytes = model.weight_bytes + (self.head_bytes - 2) * model.head_elements
        if self.matrix_bytes is not None:
            num_bytes += (self.matrix_bytes - 2) * model.matrix_elements
        return dataclasses.replace(model, weight_bytes=num_bytes)


WEIGHTS = {
    "bf16": Weights(1.2, {}, 2),
    "int8": Weights(1.1, {"quantization": "weight_only_int8", "quantize_lm_head": True}, 1, 1),
    # the checkpoint has them in 4 bits
    "int4": Weights(1.1, {"quantize_lm_head": True}, 1),
}


class Worker:
    """A process that generates batches; a context manager.

    Args:
        name: for messages.
        python: path of the interpreter.
        script: file name in benchmarks/comparison.
        settings: for its model, sent as JSON.

    Raises:
        SystemExit: it exited before it was ready, after printing the reason.
    """

    def __init__(self, name: str, python: str, script: str, settings: Mapping[str, Any]) -> None:
        self.name = name
        command = [python, str(_HERE / "comparison" / script), json.dumps(settings)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self.version = str(self._answer()["version"])
        except BaseException:
            self.close()
            raise

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with code {self._process.wait()}.")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def seconds(self, prompts: Sequence[Sequence[int]], output_len: int) -> float:
        """Seconds to generate a batch.

        Raises:
            SystemExit: the process exited, or generated another number of tokens.
        """
        assert self._process.stdin is not None
        request = json.dumps({"prompts": prompts, "output_len": output_len})
        start = time.perf_counter()
        print(request, file=self._process.stdin, flush=True)
        tokens = self._answer()["tokens"]
        taken = time.perf_counter() - start
        if tokens != len(prompts) * output_len:
            raise SystemExit(f"{self.name} generated {tokens} tokens instead of {len(prompts) * output_len}.")
        return taken

    def close(self) -> None:
        """Ends the process."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _start_ours(args: argparse.Namespace) -> Worker:
    settings = {
        "model": args.model,
        "dtype": "bfloat16",
        "max_model_len": args.input_len + args.output_len,
        "kv_cache_memory_bytes": args.kv_cache_bytes,
        "max_num_seqs": max(args.batch_sizes),
        **_our_settings(args),
    }
    return Worker("ascend-vllm", sys.executable, "offline_ours.py", settings)


def _our_settings(args: argparse.Namespace) -> dict[str, Any]:
    rounded = {"cpu_int8_activations": True} if args.int8_activations else {}
    return {**WEIGHTS[args.weights].settings, **rounded}


def _start_peer(args: argparse.Namespace) -> Worker:
    if args.peer == "llama.cpp":
        settings = {"model": args.peer_model, "max_model_len": args.input_len + args.output_len}
        return Worker("llama.cpp", args.peer_python, "offline_llamacpp.py", settings)
    settings = {"model": args.peer_model, **_openvino_settings(args)}
    return Worker("OpenVINO GenAI", args.peer_python, "offline_openvino.py", settings)


def _openvino_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Properties of its CPU plug-in and its pipeline."""
    settings = {"INFERENCE_PRECISION_HINT": "bf16", "ATTENTION_BACKEND": args.attention_backend}
    if args.weights != "bf16":
        settings["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = "32" if args.int8_activations else "0"
    return settings


def _lines(batch: int, weights: str) -> tuple[report.RowResult, report.RowResult]:
    """The two rows of a batch size."""
    limit, target = "bandwidth and peak", WEIGHTS[weights].target_ratio
    of = "" if weights == "bf16" else f", {weights}"
    decode = report.Line(f"decode{batch}", f"decode only, batch {batch}{of}", "tok/s", True, target, limit)
    whole = report.Line(f"whole{batch}", f"whole run, batch {batch}{of}", "tok/s", True, target, limit)
    return report.RowResult(decode), report.RowResult(whole)


class Comparison:
    """Measures both workers.

    Args:
        args: the command line.
        workers: "ours" and, if there is one, "peer".
        peaks: measures the machine's limits.
    """

    def __init__(self, args: argparse.Namespace, workers: Mapping[str, Worker], peaks: Peaks) -> None:
        self._args = args
        self._workers = workers
        self._peaks = peaks
        self._facts = WEIGHTS[args.weights].facts(ModelFacts.of(args.model))
        config = json.loads((pathlib.Path(args.model) / "config.json").read_text())
        self._vocab_size = int(config["vocab_size"])
        self._machine = machine.describe()
        self.results: list[report.RowResult] = []

    def run(self) -> None:
        """Measures all batch sizes."""
        rows = {batch: _lines(batch, self._args.weights) for batch in self._args.batch_sizes}
        self.results = [result for pair in rows.values() for result in pair]
        for number in range(self._args.rounds):
            for batch, (decode, whole) in rows.items():
                self._round(number, batch, decode, whole)
                report.save(self._args.json, self.content())

    def _round(self, number: int, batch: int, decode: report.RowResult, whole: report.RowResult) -> None:
        args = self._args
        # new prompts in every round, so that none is cached
        maker = PromptMaker(None, self._vocab_size, random.Random(f"{number} {batch}"))
        prompts, others = ([maker.ids(args.input_len) for _ in range(batch)] for _ in range(2))
        limits = [self._peaks.read()]
        for side, worker in self._workers.items():
            if number == 0:
                worker.seconds(others, 2)
            first_s = worker.seconds(others, 1)
            whole_s = worker.seconds(prompts, args.output_len)
            limits.append(self._peaks.read())
            figures = {"first_token_s": first_s, "whole_s": whole_s}
            # with other load on the machine, the shorter run may take longer
            decode_s = max(whole_s - first_s, 1e-9)
            decode.add(side, batch * (args.output_len - 1) / decode_s, figures)
            whole.add(side, batch * args.output_len / whole_s, figures)
            for result in (decode, whole):
                value = result.readings[side][-1]
                print(f"{result.row.name:9} {worker.name:15} {value:8.4g} {result.row.unit}", flush=True)
        self._note_limits(batch, decode, whole, limits)

    def _note_limits(
        self, batch: int, decode: report.RowResult, whole: report.RowResult, limits: list[Reading]
    ) -> None:
        args, reading = self._args, median_reading(limits)
        step_s = self._facts.step_s(reading, batch, args.input_len + args.output_len / 2)
        decode.allowed.append(batch / step_s)
        whole.allowed.append(self._facts.output_tok_s(reading, batch, args.input_len, args.output_len))
        for result in (decode, whole):
            result.limits += limits

    def content(self) -> dict[str, Any]:
        """The result for JSON."""
        args = self._args
        settings = {"dtype": "bfloat16", **_our_settings(args)}
        shown = {
            "ours": f"ascend_vllm.LLM({args.model!r}{_words(settings)})",
            "peer": _shown_peer(args),
        }
        return {
            **report.heading("offline", "compare_offline.py", args, self._machine),
            "rounds": args.rounds,
            "sizes": {"input_len": args.input_len, "output_len": args.output_len},
            "programs": {
                side: {"name": worker.name, "version": worker.version, "commands": {"main": shown[side]}}
                for side, worker in self._workers.items()
            },
            "rows": [result.as_dict() for result in self.results if result.readings],
        }


def _words(settings: Mapping[str, Any]) -> str:
    """Keyword arguments, as in a call."""
    return "".join(f", {name}={value!r}" for name, value in settings.items())


def _shown_peer(args: argparse.Namespace) -> str:
    """The peer's call, for the result."""
    name = pathlib.Path(args.peer_model or "").name
    if args.peer == "llama.cpp":
        return f"llama_cpp.Llama({name!r})"
    return f"openvino_genai.LLMPipeline({name!r}, 'CPU'{_words(_openvino_settings(args))})"


def _parse_args() -> argparse.Namespace:
    parser = report.parser_of(__doc__, "after every round of a batch size")
    add = parser.add_argument
    add("--model", required=True, help="directory of the model")
    add("--batch-sizes", type=int, nargs="+", default=[1, 8, 32], help="(default: 1 8 32)")
    add("--input-len", type=int, default=128, help="tokens of a prompt (default: %(default)s)")
    add("--output-len", type=int, default=64, help="tokens to generate (default: %(default)s)")
    add("--rounds", type=int, default=3, help="readings of each row (default: %(default)s)")
    add("--weights", choices=WEIGHTS, default="bf16", help="of both; int4 is a W4A16 --model (default: %(default)s)")
    add("--int8-activations", action="store_true", help="both round the inputs of rounded weights to 8 bits")
    add("--peer", choices=("openvino", "llama.cpp", "none"), default="openvino", help="(default: %(default)s)")
    add("--peer-model", help="the model as the peer reads it: OpenVINO's directory, or llama.cpp's file")
    add("--peer-python", default=sys.executable, help="the interpreter that has the peer; default: this one")
    add("--attention-backend", choices=("SDPA", "PA"), default="SDPA", help="OpenVINO's (default: %(default)s)")
    add("--kv-cache-bytes", type=int, default=2**30, help="of ours (default: %(default)s)")
    add("--gib", type=float, default=1.0, help="read in a measurement of the bandwidth, in GiB")
    args = parser.parse_args()
    for name in ("input_len", "rounds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.output_len < 2:
        parser.error(f"--output-len must be at least 2, a first token and a decoded one, got {args.output_len}")
    _check_weights(parser, args)
    return args


def _check_weights(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.peer == "openvino" and not os.path.isdir(args.peer_model or ""):  # noqa: PTH112 - may be None
        parser.error("--peer-model: name the directory of the converted model, or measure alone with --peer none")
    if args.peer == "llama.cpp" and not os.path.isfile(args.peer_model or ""):  # noqa: PTH113 - may be None
        parser.error("--peer-model: name the GGUF file that comparison/write_gguf.py makes of the model")
    if args.peer == "llama.cpp" and args.batch_sizes != [1]:
        parser.error("--peer llama.cpp: it generates one sequence at a time here; add --batch-sizes 1")
    if args.int8_activations and args.weights == "bf16":
        parser.error("--int8-activations: only inputs of rounded weights are rounded; add --weights int8 or int4")


def main() -> None:
    """Measures, prints the table, writes the file."""
    args = _parse_args()
    print(machine.one_line(machine.describe()))
    with contextlib.ExitStack() as stack:
        workers = {"ours": stack.enter_context(_start_ours(args))}
        if args.peer != "none":
            workers["peer"] = stack.enter_context(_start_peer(args))
        comparison = Comparison(args, workers, stack.enter_context(Peaks(args.gib)))
        comparison.run()
    print("\n".join(report.lines(comparison.results, workers["peer"].name if "peer" in workers else None)))


if __name__ == "__main__":
    report.run(main)
