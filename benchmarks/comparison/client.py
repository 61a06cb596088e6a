"""The client of both servers: the load generator of `ascend-vllm bench serve`."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import math
import statistics
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import uvloop

from ascend_vllm.args.parser import FlexibleArgumentParser
from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.tools.bench.datasets import SampleRequest, apply_general_lengths, sample_requests
from ascend_vllm.tools.bench.http_client import HttpClient, HttpError
from ascend_vllm.tools.bench.load import LoadGenerator, Run, make_client
from ascend_vllm.tools.bench.metrics import Outcome, figures
from ascend_vllm.tools.bench.serve import add_arguments
from comparison.servers import MODEL_NAME

_METRICS = ("ttft", "tpot", "itl", "e2el")
_PERCENTILES = (50.0, 90.0, 99.0)
_T = TypeVar("_T")


class LoadError(Exception):
    """A request failed, so that there is nothing to compare."""


@dataclasses.dataclass(frozen=True)
class Gaps:
    """Seconds between tokens of streams.

    Attributes:
        usual: while there was nothing else.
        asked: while the model itself was asked for a token.
        loading: while an adapter was loaded.
        first_use: while it was asked for its first token.
    """

    usual: list[float]
    asked: list[float]
    loading: list[float]
    first_use: list[float]

    def pause_s(self) -> float:
        """By how much adapters have lengthened a gap, at most."""
        return max(max(self.loading) - statistics.median(self.usual), max(self.first_use) - max(self.asked))


class Client:
    """Sends load to one server.

    Args:
        url: the server's address.
        tokenizer: of the model.
        model_name: the model's name on the server.
    """

    def __init__(self, url: str, tokenizer: Tokenizer, model_name: str = MODEL_NAME) -> None:
        self._url = url
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._parser = FlexibleArgumentParser()
        add_arguments(self._parser)

    def load(
        self,
        *,
        seed: int,
        num_prompts: int,
        concurrency: int | None,
        input_len: int,
        output_len: int,
        prefix_len: int = 0,
        range_ratio: float = 0.0,
        rate: float | None = None,
        adapters: Sequence[str] = (),
    ) -> dict[str, float]:
        """Sends random prompts. The same seed makes the same prompts, and sends them at the same times.

        Args:
            seed: of the prompts.
            num_prompts: how many.
            concurrency: requests running at a time: the next one is sent when one is answered. None: no limit.
            input_len: tokens of a prompt behind the common prefix.
            output_len: tokens to generate, ignoring end-of-sequence tokens.
            prefix_len: tokens that all prompts share.
            range_ratio: by how much of itself each of the two lengths may be smaller or larger, below 1.
            rate: requests per second, which arrive as a Poisson process; None: as soon as they may.
            adapters: names of LoRA adapters that the requests ask for by turns; empty: the model as it is.

        Returns:
            the figures of `ascend-vllm bench serve`.

        Raises:
            LoadError: a request failed.
        """
        args = self._arguments(seed, num_prompts, concurrency, input_len, output_len, prefix_len)
        args.random_range_ratio = str(range_ratio)
        args.request_rate = math.inf if rate is None else rate
        args.lora_modules, args.lora_assignment = list(adapters), "round-robin"
        return self._figures(args, sample_requests(args, self._tokenizer, seed))

    def send(
        self, requests: Sequence[SampleRequest], *, concurrency: int, temperature: float, seed: int, ignore_eos: bool
    ) -> dict[str, float]:
        """Sends given prompts.

        Args:
            requests: the prompts.
            concurrency: as of `load`.
            temperature: of all requests.
            seed: of their draws.
            ignore_eos: answers go on behind end-of-sequence tokens.

        Returns:
            As `load`.

        Raises:
            LoadError: a request failed.
        """
        args = self._arguments(seed, len(requests), concurrency, 1, 1, 0)
        args.temperature, args.ignore_eos, args.extra_body = temperature, ignore_eos, {"seed": seed, "top_p": 1.0}
        return self._figures(args, requests)

    def _figures(self, args: argparse.Namespace, requests: Sequence[SampleRequest]) -> dict[str, float]:
        async def send() -> Run:
            client = make_client(args)
            try:
                return await LoadGenerator(args, client, self._model_name, self._tokenizer).run(requests)
            finally:
                client.close()

        run = _run(send())
        _check(run.outcomes)
        found = figures(run.outcomes, run.duration_s, metrics=_METRICS, percentiles=_PERCENTILES, goodput={})
        return {name: value for name, value in found.items() if isinstance(value, int | float)}

    def mixed(
        self, *, seed: int, streams: int, input_len: int, output_len: int, long_len: int, long_prompts: int
    ) -> tuple[list[float], list[float]]:
        """Streams answers and sends long prompts meanwhile, the next ones after the first tokens of those before.

        Args:
            seed: of the prompts.
            streams: how many answers are streamed.
            input_len: tokens of their prompts.
            output_len: tokens of these answers.
            long_len: tokens of the prompts that arrive until all of the answers are complete.
            long_prompts: how many of them are sent at a time.

        Returns:
            seconds between tokens of the streams, and seconds to first tokens of the long prompts.

        Raises:
            LoadError: a request failed, or no answer was streamed in chunks.
        """
        args = self._arguments(seed, streams, streams, input_len, output_len, 0)
        requests = sample_requests(args, self._tokenizer, seed)
        longer = self._arguments(seed, 64, 1, long_len, 1, 0)
        # other prompts than those of any row's load
        prompts = sample_requests(longer, self._tokenizer, seed + 500_000)

        async def send() -> tuple[Run, list[Outcome]]:
            client = make_client(args)
            try:
                generator = LoadGenerator(args, client, self._model_name, self._tokenizer)
                streaming = asyncio.create_task(generator.run(requests))
                return await _until_done(streaming, generator, prompts, long_prompts)
            finally:
                client.close()

        run, arrived = _run(send())
        _check([*run.outcomes, *arrived])
        gaps = [gap for outcome in run.outcomes for gap in outcome.itls]
        if not gaps:
            raise LoadError("Each answer came as a whole, so there are no gaps to see; ask for more tokens.")
        return gaps, [outcome.ttft for outcome in arrived]

    def loading(
        self, *, seed: int, streams: int, input_len: int, output_len: int, adapters: Mapping[str, str], apart_s: float
    ) -> Gaps:
        """Streams answers of the model as it is; meanwhile loads adapters, and asks each of them for a token.

        A token takes a step of its own, loaded adapter or not: so the model itself is asked for one in front of each
        adapter. An answer that ends before everything is loaded is streamed again.

        Args:
            seed: of the prompts.
            streams: how many answers are streamed.
            input_len: tokens of their prompts.
            output_len: tokens of these answers.
            adapters: directories of the adapters by the names that they get; unloaded again at the end.
            apart_s: seconds between them, so that there are gaps without loading, too.

        Raises:
            LoadError: a request failed, or there are no gaps.
        """
        args = self._arguments(seed, streams, streams, input_len, output_len, 0)
        requests = sample_requests(args, self._tokenizer, seed)

        async def stream(generator: LoadGenerator, number: int, loaded: asyncio.Event) -> list[Outcome]:
            # not all at once: what is done while all answers end or begin lengthens no gap
            await asyncio.sleep(apart_s * number / streams)
            outcomes: list[Outcome] = []
            while not loaded.is_set():
                outcomes.append(await generator.one(requests[number]))
            return outcomes

        async def send() -> tuple[list[Outcome], list[tuple[str, float, float]]]:
            client, loaded = make_client(args), asyncio.Event()
            spans: list[tuple[str, float, float]] = []

            async def post(kind: str, path: str, **body: Any) -> None:
                start = time.perf_counter()
                await _post(client, path, **body)
                spans.append((kind, start, time.perf_counter()))

            try:
                generator = LoadGenerator(args, client, self._model_name, self._tokenizer)
                streaming = asyncio.gather(*(stream(generator, number, loaded) for number in range(streams)))
                await asyncio.sleep(apart_s)
                # answered once the streams' prompts are computed
                await post("begin", "/v1/completions", model=self._model_name, prompt=[1], max_tokens=1)
                for name, directory in adapters.items():
                    await asyncio.sleep(apart_s)
                    await post("asked", "/v1/completions", model=self._model_name, prompt=[1], max_tokens=1)
                    await asyncio.sleep(apart_s)
                    await post("loading", "/v1/load_lora_adapter", lora_name=name, lora_path=directory)
                    await post("first_use", "/v1/completions", model=name, prompt=[1], max_tokens=1)
                await asyncio.sleep(apart_s)
                loaded.set()
                outcomes = list(itertools.chain.from_iterable(await streaming))
                for name in adapters:
                    await _post(client, "/v1/unload_lora_adapter", lora_name=name)
                return outcomes, spans
            finally:
                client.close()

        outcomes, spans = _run(send())
        _check(outcomes)
        (_, _, begin), *spans = spans
        gaps = Gaps([], [], [], [])
        for outcome in outcomes:
            for before, after in itertools.pairwise(moment for moment in outcome.moments if moment > begin):
                kinds = {kind for kind, start, end in spans if before < end and after > start}
                for kind in kinds or {"usual"}:
                    getattr(gaps, kind).append(after - before)
        if not all((gaps.usual, gaps.asked, gaps.loading, gaps.first_use)):
            raise LoadError("There are no gaps between tokens to see; ask for more tokens.")
        return gaps

    def _arguments(
        self, seed: int, num_prompts: int, concurrency: int | None, input_len: int, output_len: int, prefix_len: int
    ) -> argparse.Namespace:
        """Arguments of `ascend-vllm bench serve`."""
        words = ["--base-url", self._url, "--ignore-eos", "--temperature", "0", "--disable-tqdm"]
        words += ["--seed", str(seed), "--num-prompts", str(num_prompts)]
        words += [] if concurrency is None else ["--max-concurrency", str(concurrency)]
        words += ["--input-len", str(input_len), "--output-len", str(output_len)]
        words += ["--random-prefix-len", str(prefix_len)]
        args = self._parser.parse_args(words)
        apply_general_lengths(args)
        return args


async def _post(client: HttpClient, path: str, **body: Any) -> None:
    """Sends a request whose answer does not matter.

    Raises:
        LoadError: the server refused it.
    """
    try:
        await client.post(path, json.dumps(body).encode())
    except HttpError as error:
        raise LoadError(f"{path}: {error}") from error


async def _until_done(
    streaming: asyncio.Task[Run], generator: LoadGenerator, prompts: list[SampleRequest], at_a_time: int
) -> tuple[Run, list[Outcome]]:
    """Sends some prompts after others while the streams run."""
    arrived: list[Outcome] = []
    following = itertools.cycle(prompts)
    while not streaming.done():
        some = itertools.islice(following, at_a_time)
        arrived += await asyncio.gather(*(generator.one(prompt) for prompt in some))
    return await streaming, arrived


def _run(coroutine: Coroutine[Any, Any, _T]) -> _T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


def _check(outcomes: list[Outcome]) -> None:
    errors = [outcome.error for outcome in outcomes if outcome.error]
    if errors:
        raise LoadError(f"{len(errors)} of {len(outcomes)} requests failed: {errors[0]}")
