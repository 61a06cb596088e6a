"""Compares this project's server with drafts and without, or with vLLM's with the same n-grams, alternately.

    python scripts/make_random_model.py /tmp/qwen2-0.5b
    python -m ascend_vllm.tools.demo --output /tmp/target --hidden-size 512 --intermediate-size 1536 \\
        --num-layers 12 --num-heads 8 --batch-tokens 2048
    python -m ascend_vllm.tools.demo --output /tmp/draft --hidden-size 384 --intermediate-size 1152 --num-layers 2 \\
        --num-heads 6 --batch-tokens 2048
    ascend-vllm train-eagle --model /tmp/target --data demo --output /tmp/first --num-epochs 9 --batch-tokens 2048
    python examples/offline_own_answers.py --model /tmp/target /tmp/answers.jsonl
    ascend-vllm train-eagle --model /tmp/target --data /tmp/answers.jsonl --initial-head /tmp/first \\
        --output /tmp/head --num-epochs 2 --batch-tokens 2048 --learning-rate 4e-4 --ttt-length 4
    python benchmarks/compare_speculation.py --model /tmp/qwen2-0.5b --target /tmp/target --draft-model /tmp/draft \\
        --head /tmp/head --json result.json
    python benchmarks/compare_speculation.py --model /tmp/qwen2-0.5b --peer vllm --peer-program VLLM/bin/vllm

Each row has a server with drafts; one without, or the peer, is measured in turns with it, with the same prompts and
seeds, new in each round. Readings are output tokens per second.

What drafts cost where they do not pay is a few percent at most, and two starts of one server differ by as much. So
short readings, many rounds and several starts tell it best, by the mean of the ratios of pairs:

    python benchmarks/compare_speculation.py --target /tmp/target --head /tmp/head --concurrencies 1 2 4 8 16 32 \
        --starts 3 --rounds 12 --num-prompts 32

Workloads. "recurring" (rows ngram): a random model's greedy text becomes periodic after some tokens; a prompt is a
random beginning and what the model makes of it, and the answer is its continuation, so that the prompt's text recurs
in the answer: the most that n-grams can gain. "repeated" (rows copy): a conversation in which a question is asked
that was answered in it before, which is what summaries and edited texts look like to n-grams. "questions" (rows draft
and eagle): a question alone. The last two need a model that was trained on the demo model's texts, whose longest
answers are asked for; answers end where the model ends them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import random
import re
import shlex
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

from comparison import machine, report, servers
from comparison.client import Client, LoadError

from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.tools.bench.datasets import SampleRequest, encode
from ascend_vllm.tools.demo.corpus import Fact, build_facts

_SEEDS_PER_ROUND = 1000
# tokens of a prompt of the workload "recurring" that are random
_BEGINNING = 16
# counters of both programs
_DRAFTS, _ACCEPTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"


@dataclasses.dataclass(frozen=True)
class Subject:
    """What prompts are made of.

    Attributes:
        url: of the server without drafts.
        tokenizer: of the model.
        count: prompts.
        input_len: tokens of a prompt, about.
        output_len: most tokens of an answer.
        chooser: draws them.
    """

    url: str
    tokenizer: Tokenizer
    count: int
    input_len: int
    output_len: int
    chooser: random.Random


def recurring(subject: Subject) -> list[SampleRequest]:
    """Random beginnings with the model's continuation, as token ids."""
    ids = range(10, subject.tokenizer.vocab_size - 10)
    beginnings = [subject.chooser.choices(ids, k=_BEGINNING) for _ in range(subject.count)]
    fields = {"model": servers.MODEL_NAME, "prompt": beginnings, "max_tokens": subject.input_len - _BEGINNING}
    fields |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    request = urllib.request.Request(
        f"{subject.url}/v1/completions", json.dumps(fields).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        choices = sorted(json.load(answer)["choices"], key=lambda choice: int(choice["index"]))
    prompts = [beginning + choice["token_ids"] for beginning, choice in zip(beginnings, choices, strict=True)]
    return [SampleRequest(prompt, len(prompt), subject.output_len) for prompt in prompts]


def _conversations(subject: Subject, asked_before: bool) -> list[SampleRequest]:
    """Prompts that end with a question, alone or behind the same one with its answer."""
    facts = sorted(build_facts(), key=lambda fact: len(fact.answer))
    longest = facts[-len(facts) // 4 :]
    chosen = subject.chooser.choices(longest, k=subject.count)
    return [_conversation(subject, fact, asked_before=asked_before) for fact in chosen]


def _conversation(subject: Subject, fact: Fact, *, asked_before: bool) -> SampleRequest:
    choose = subject.chooser.choice
    messages = [{"role": "user", "content": choose(fact.questions)}]
    if asked_before:
        messages.append({"role": "assistant", "content": fact.answer})
        messages.append({"role": "user", "content": choose(fact.questions)})
    text = str(subject.tokenizer.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    return SampleRequest(text, len(encode(subject.tokenizer, text)), subject.output_len)


def repeated(subject: Subject) -> list[SampleRequest]:
    """Questions that were answered before."""
    return _conversations(subject, asked_before=True)


def questions(subject: Subject) -> list[SampleRequest]:
    """Questions alone."""
    return _conversations(subject, asked_before=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(report.Line):
    """One line of the table.

    Attributes:
        option: of the model that is served.
        method: see `_METHODS`.
        prompts: makes the workload.
        concurrency: requests under way at once.
        temperature: of all requests.
    """

    option: str
    method: str
    prompts: Callable[[Subject], list[SampleRequest]]
    concurrency: int
    temperature: float = 0.0


# method → the command line's option with its model, and --speculative-config without that
_METHODS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "ngram": (None, {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}),
    "draft": ("draft_model", {"method": "draft_model"}),
    "eagle": ("head", {"method": "eagle"}),
}
_CONCURRENCIES = (1, 2, 4, 8, 16, 32)
# those of the rows that are measured if none are named
_ALONE, _MANY = 1, 32
# of ours with drafts to ours without, where several requests run at once, so that drafts may not pay
_LEAST_OF_SEVERAL = 0.95


def _rows() -> Iterator[Row]:
    workloads = {
        "ngram": ("model", "ngram", recurring, {0.0: 1.8}),
        "copy": ("target", "ngram", repeated, {0.0: 1.8}),
        "draft": ("target", "draft", questions, {0.0: 1.6, 0.7: 1.3}),
        "eagle": ("target", "eagle", questions, {0.0: 1.8, 0.7: 1.4}),
    }
    for name, (option, method, prompts, targets) in workloads.items():
        for temperature, target in targets.items():
            for concurrency in _CONCURRENCIES:
                yield Row(
                    name=f"{name}-t{temperature:g}-c{concurrency}",
                    title=f"{method}, {prompts.__name__}, temperature {temperature:g}, {concurrency} at once",
                    unit="tokens/s",
                    higher_is_better=True,
                    target_ratio=target if concurrency == _ALONE else _LEAST_OF_SEVERAL,
                    option=option,
                    method=method,
                    prompts=prompts,
                    concurrency=concurrency,
                    temperature=temperature,
                )


ROWS = list(_rows())
_SEEDS = {row.name: index for index, row in enumerate(ROWS)}
# against vLLM with the same n-grams
_VLLM_RATIO = 1.5


class Comparison:
    """Measures rows.

    Args:
        args: the command line.

    Attributes:
        results: of the rows.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._machine = machine.describe()
        self._commands: dict[str, dict[str, str]] = {}
        self.results: list[report.RowResult] = []

    @property
    def peer(self) -> str:
        """The peer's name."""
        return "vllm" if self._args.peer == "vllm" else "without"

    def run(self, rows: list[Row]) -> None:
        """Measures the rows, grouped by the model and the method."""
        for option, method in dict.fromkeys((row.option, row.method) for row in rows):
            chosen = [row for row in rows if (row.option, row.method) == (option, method)]
            measured = [(row, report.RowResult(row)) for row in chosen]
            self.results += [result for _, result in measured]
            for start in range(self._args.starts):
                with contextlib.ExitStack() as stack:
                    running = {
                        side: stack.enter_context(self._server(program, option, f"{option} {method} {side}"))
                        for side, program in self._programs(method).items()
                    }
                    self._measure(running, option, measured, start)

    def _programs(self, method: str) -> dict[str, servers.Program]:
        args = self._args
        option, settings = _METHODS[method]
        settings = settings | {"num_speculative_tokens": args.num_speculative_tokens}
        if option is not None:
            settings |= {"model": getattr(args, option)}
        drafts = ("--speculative-config", json.dumps(settings))
        options = tuple(shlex.split(args.ours_args))
        ours = ("--speculative-config", json.dumps(settings | args.ours_settings))
        programs = {"ours": servers.ours((*options, *ours))}
        if args.peer == "vllm":
            programs["peer"] = servers.vllm(args.peer_program, (*shlex.split(args.peer_args), *drafts), args.tcmalloc)
        else:
            programs["peer"] = dataclasses.replace(servers.ours(options), name="ascend-vllm")
        return programs

    @contextlib.contextmanager
    def _server(self, program: servers.Program, option: str, what: str) -> Iterator[servers.Server]:
        args, model = self._args, getattr(self._args, option)
        flags = ["--dtype", args.dtype, "--max-model-len", str(args.max_model_len)]
        flags += ["--max-num-seqs", str(_MANY), "--kv-cache-memory-bytes", str(args.kv_cache_bytes)]
        flags += ["--no-enable-prefix-caching"]
        self._commands[what] = {"command": program.shown(model, flags)}
        with servers.Server(program, model, flags) as server:
            server.wait_ready(args.start_timeout)
            self._commands[what]["version"] = server.version()
            yield server

    def _measure(
        self,
        running: dict[str, servers.Server],
        option: str,
        measured: list[tuple[Row, report.RowResult]],
        start: int,
    ) -> None:
        tokenizer = Tokenizer.from_directory(getattr(self._args, option))
        first = start * self._args.rounds
        # that of the warm-up is below 0
        for number in (-1 - start, *range(first, first + self._args.rounds)):
            for row, result in measured:
                seed = number * _SEEDS_PER_ROUND + _SEEDS[row.name]
                prompts = row.prompts(self._subject(row, running, tokenizer, seed))
                for side, server in report.in_turns(running.items(), number):
                    if not server.wait_idle():
                        print(f"{side} is busy without requests, which disturbs the readings", flush=True)
                    value, figures = self._read(server, row, tokenizer, prompts, seed)
                    if number >= 0:
                        result.add(side, value, figures)
                        length = f", {figures['acceptance_length']:.2f} tokens a step" if side == "ours" else ""
                        print(f"{row.name:14} {side:5} {value:10.4g} {row.unit}{length}", flush=True)
            report.save(self._args.json, self.content())

    def _subject(self, row: Row, running: dict[str, servers.Server], tokenizer: Tokenizer, seed: int) -> Subject:
        args = self._args
        # vLLM returns token ids in the same fields
        url = running["peer"].url
        count = args.num_prompts
        if row.concurrency > _ALONE:
            count = max(count, args.num_batches * row.concurrency)
        return Subject(url, tokenizer, count, args.input_len, args.output_len, random.Random(seed))

    @staticmethod
    def _read(
        server: servers.Server, row: Row, tokenizer: Tokenizer, prompts: list[SampleRequest], seed: int
    ) -> tuple[float, dict[str, Any]]:
        before = _counters(server.metrics())
        figures: dict[str, Any] = Client(server.url, tokenizer).send(
            prompts,
            concurrency=row.concurrency,
            temperature=row.temperature,
            seed=abs(seed),
            ignore_eos=row.prompts is recurring,
        )
        after = _counters(server.metrics())
        num_drafts, num_accepted = (after[name] - before[name] for name in (_DRAFTS, _ACCEPTED))
        figures |= {"num_drafts": num_drafts, "num_accepted_tokens": num_accepted}
        figures["acceptance_length"] = 1 + num_accepted / num_drafts if num_drafts else 1.0
        figures["mean_output_len"] = figures["total_output_tokens"] / len(prompts)
        return float(figures["output_throughput"]), figures

    def content(self) -> dict[str, Any]:
        """The result for JSON."""
        args = self._args
        sizes = {name: getattr(args, name) for name in ("num_prompts", "num_batches", "input_len", "output_len")}
        return {
            **report.heading("speculation", "compare_speculation.py", args, self._machine),
            "starts": args.starts,
            "rounds": args.rounds,
            "sizes": sizes,
            "peer": self.peer,
            "programs": self._commands,
            "rows": [result.as_dict() for result in self.results if result.readings],
        }


def _counters(metrics: str) -> dict[str, float]:
    """The server's counts of drafts; 0 without any."""
    found = {}
    for name in (_DRAFTS, _ACCEPTED):
        values = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", metrics, re.MULTILINE)
        found[name] = sum(map(float, values))
    return found


def _parse_args() -> argparse.Namespace:
    parser = report.parser_of(__doc__, "after every round")
    add = parser.add_argument
    add("--model", help="directory of the model of the rows ngram, such as scripts/make_random_model.py writes")
    add("--target", help="directory of the model of the other rows, trained on the demo model's texts")
    add("--draft-model", help="directory of a smaller one for the rows draft")
    add("--head", help="directory of an EAGLE head of the target for the rows eagle")
    add("--rows", nargs="+", choices=[row.name for row in ROWS], help="default: those whose models are given")
    add(
        "--concurrencies",
        nargs="+",
        type=int,
        choices=_CONCURRENCIES,
        help=f"of the rows without --rows (default: {_ALONE} {_MANY})",
    )
    add("--rounds", type=int, default=3, help="readings of each row and server (default: %(default)s)")
    add("--starts", type=int, default=1, help="of all servers, with so many rounds each (default: %(default)s)")
    add("--peer", choices=("without", "vllm"), default="without", help="(default: %(default)s)")
    add("--peer-program", help="path of vLLM's command; default: the one that the shell finds")
    add("--peer-args", default="", help="further flags of vLLM, in one word")
    add("--ours-args", default="", help="further flags of both of ours, in one word")
    add(
        "--ours-settings",
        type=json.loads,
        default={},
        metavar="JSON",
        help='further settings of our drafts: {"disable_by_batch_size": 1000}, and there are some whatever they cost',
    )
    add("--tcmalloc", help="path of libtcmalloc for vLLM; default: where systems have it")
    add("--num-speculative-tokens", type=int, default=4, help="most drafts of a row (default: %(default)s)")
    add("--num-prompts", type=int, default=2, help="of a reading, at least (default: %(default)s)")
    add(
        "--num-batches",
        type=int,
        default=1,
        help="with several at once, at least so many prompts for each of them (default: %(default)s)",
    )
    add("--input-len", type=int, default=128, help="tokens of a prompt of the rows ngram (default: %(default)s)")
    add("--output-len", type=int, default=256, help="most tokens of an answer (default: %(default)s)")
    add("--dtype", default="bfloat16", help="(default: %(default)s)")
    add("--max-model-len", type=int, default=1024, help="(default: %(default)s)")
    add("--kv-cache-bytes", type=int, default=2**30, help="of each server (default: %(default)s)")
    add("--start-timeout", type=float, default=900, help="seconds that a server may take (default: %(default)s)")
    args = parser.parse_args()
    chosen = [row for row in ROWS if _is_possible(row, args)]
    if args.rows is not None:
        if missing := [row.name for row in ROWS if row.name in args.rows and row not in chosen]:
            parser.error(f"--rows: name the models of {' '.join(missing)}; vLLM is compared in the rows ngram only")
        chosen = [row for row in chosen if row.name in args.rows]
    else:
        chosen = [row for row in chosen if row.concurrency in (args.concurrencies or (_ALONE, _MANY))]
    if not chosen:
        parser.error("name at least one model: --model, or --target with --draft-model or --head")
    args.rows = chosen
    for name in ("rounds", "starts", "num_speculative_tokens", "num_prompts", "num_batches", "output_len"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.input_len <= _BEGINNING:
        parser.error(f"--input-len must be above {_BEGINNING}, got {args.input_len}")
    return args


def _is_possible(row: Row, args: argparse.Namespace) -> bool:
    """Whether its models are given, and the peer drafts in the same way."""
    options = [row.option, _METHODS[row.method][0]]
    is_given = all(getattr(args, option) is not None for option in options if option is not None)
    return is_given and (args.peer == "without" or row.method == "ngram")


def main() -> None:
    """Measures, prints the table, writes the file."""
    args = _parse_args()
    rows: list[Row] = args.rows
    if args.peer == "vllm":
        rows = [dataclasses.replace(row, target_ratio=_VLLM_RATIO) for row in rows]
    print(machine.one_line(machine.describe()))
    comparison = Comparison(args)
    try:
        comparison.run(rows)
    except (servers.ServerError, LoadError) as error:
        raise SystemExit(str(error)) from error
    print("\n".join(report.lines(comparison.results, comparison.peer)))


if __name__ == "__main__":
    report.run(main)
