"""Sends the requests of a benchmark and records their outcomes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from tqdm import tqdm

from ascend_vllm import envs
from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.errors import AscendVllmError
from ascend_vllm.tools.bench.arrivals import RateEvent, note_rate, send_times
from ascend_vllm.tools.bench.backends import BACKENDS
from ascend_vllm.tools.bench.datasets import SampleRequest
from ascend_vllm.tools.bench.http_client import HttpClient, HttpError
from ascend_vllm.tools.bench.metrics import Outcome

# errors that fail one request but not the run: no connection, a broken one, an invalid answer
_FAILURES = (OSError, HttpError, asyncio.IncompleteReadError, ValueError)
_READY_POLL_S = 0.5


class BenchError(AscendVllmError):
    """The server cannot be measured, for the reason in the message."""


def make_client(args: argparse.Namespace) -> HttpClient:
    """A client for --base-url, or for --host and --port."""
    headers = {}
    if key := envs.openai_api_key():
        headers["Authorization"] = f"Bearer {key}"
    headers |= args.header or {}
    return HttpClient(base_url(args), headers, verify=not args.insecure)


def base_url(args: argparse.Namespace) -> str:
    """The server's address without a path."""
    return str(args.base_url or f"http://{args.host}:{args.port}")


async def wait_until_reachable(client: HttpClient, url: str, timeout_s: float) -> None:
    """Waits until something listens at the server's address.

    Raises:
        BenchError: nothing did within the time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return await client.check_reachable()
        except OSError as error:
            if time.monotonic() >= deadline:
                raise BenchError(
                    f"No server can be reached at {url} ({error}): start one with `ascend-vllm serve MODEL`, or name "
                    "another with --base-url or --host and --port."
                ) from error
        await asyncio.sleep(_READY_POLL_S)


async def first_model(client: HttpClient) -> tuple[str, str]:
    """The name of the server's first model, and its directory or repository.

    Raises:
        BenchError: the server cannot be reached or has no such list.
    """
    try:
        card = (await client.get_json("/v1/models"))["data"][0]
        return str(card["id"]), str(card.get("root") or card["id"])
    except (*_FAILURES, LookupError) as error:
        raise BenchError(f"The server does not tell its models ({error}); name one with --model.") from error


@dataclasses.dataclass
class Run:
    """The results of a run.

    Attributes:
        outcomes: of the requests, in order.
        duration_s: from the first request to the last answer.
        rate_events: when a growing rate reached the next whole number; empty if it does not grow.
        probe_latencies_s: of the successful probes.
        probes_failed: number of failed probes.
    """

    outcomes: list[Outcome]
    duration_s: float
    rate_events: list[RateEvent]
    probe_latencies_s: list[float]
    probes_failed: int


class LoadGenerator:
    """Sends load to one server.

    Args:
        args: the command line.
        client: for requests to the server.
        model: value of the requests' field `model`.
        tokenizer: counts tokens if answers have no usage; None: they are not counted.
    """

    def __init__(self, args: argparse.Namespace, client: HttpClient, model: str, tokenizer: Tokenizer | None) -> None:
        self._args = args
        self._client = client
        self._model = model
        self._tokenizer = tokenizer
        self._backend = BACKENDS[args.backend]
        # the client puts the path of the base URL, if any, in front
        self._path = args.endpoint or self._backend.path

    async def run(self, requests: Sequence[SampleRequest]) -> Run:
        """Sends all requests at --request-rate, at most --max-concurrency at a time."""
        args = self._args
        gate = asyncio.Semaphore(args.max_concurrency) if args.max_concurrency else contextlib.nullcontext()
        bodies = self._bodies(requests)
        times, rates = send_times(args, len(requests), args.seed)
        events: list[RateEvent] = []
        sent: list[asyncio.Task[tuple[Outcome, list[tuple[float, bytes]]]]] = []
        bar = tqdm(total=len(requests), disable=args.disable_tqdm, file=sys.stderr)
        async with self._probes() as (latencies_s, failures):
            start = time.perf_counter()
            with contextlib.closing(bar):
                for number, (request, body) in enumerate(zip(requests, bodies, strict=True)):
                    if (wait := start + times[number] - time.perf_counter()) > 0:
                        await asyncio.sleep(wait)
                    if args.ramp_up_strategy is not None:
                        note_rate(events, rates[number])
                    task = asyncio.create_task(self._send(gate, request, body, f"{args.request_id_prefix}{number}"))
                    task.add_done_callback(lambda _: bar.update())
                    sent.append(task)
                answers = await asyncio.gather(*sent)
            duration_s = time.perf_counter() - start
        for (outcome, chunks), request in zip(answers, requests, strict=True):
            self._read(outcome, chunks, request)
        return Run([outcome for outcome, _ in answers], duration_s, events, latencies_s, len(failures))

    async def one(self, request: SampleRequest) -> Outcome:
        """Sends a request that is not measured."""
        body = self._bodies([request])[0]
        outcome, chunks = await self._send(contextlib.nullcontext(), request, body, None)
        self._read(outcome, chunks, request)
        return outcome

    async def warm_up(self, request: SampleRequest, count: int) -> None:
        """Sends a request several times, with the concurrency of the run."""
        gate = asyncio.Semaphore(self._args.max_concurrency or count)

        async def one() -> None:
            async with gate:
                await self.one(request)

        await asyncio.gather(*(one() for _ in range(count)))

    async def wait_until_ready(self, request: SampleRequest, timeout_s: float) -> None:
        """Waits until the server answers a request.

        Raises:
            BenchError: it did not within the time.
        """
        deadline = time.monotonic() + timeout_s
        while (outcome := await self.one(request)).error:
            if time.monotonic() > deadline:
                raise BenchError(f"{base_url(self._args)}{self._path} answers no request: {outcome.error}")
            await asyncio.sleep(_READY_POLL_S)

    async def profile(self, what: str) -> None:
        """Starts or stops the server's profiler: `what` is "start" or "stop".

        Raises:
            BenchError: the server has no profiler.
        """
        try:
            await self._client.post(f"/{what}_profile")
        except _FAILURES as error:
            raise BenchError(f"--profile: the server refuses to {what} its profiler: {error}") from error

    def _bodies(self, requests: Sequence[SampleRequest]) -> list[bytes]:
        """The requests' bodies, encoded before the run so as not to slow it down."""
        adapters = self._args.lora_modules
        if not adapters:
            return [self._backend.body(self._args, self._model, request) for request in requests]
        chooser = random.Random(self._args.seed)
        bodies = []
        for number, request in enumerate(requests):
            in_turn = self._args.lora_assignment == "round-robin"
            model = adapters[number % len(adapters)] if in_turn else chooser.choice(adapters)
            bodies.append(self._backend.body(self._args, model, request))
        return bodies

    async def _send(
        self,
        gate: contextlib.AbstractAsyncContextManager[Any],
        request: SampleRequest,
        body: bytes,
        request_id: str | None,
    ) -> tuple[Outcome, list[tuple[float, bytes]]]:
        arrival = time.perf_counter()
        chunks: list[tuple[float, bytes]] = []
        async with gate:
            outcome = Outcome(time.perf_counter(), request.prompt_len)
            outcome.queued_s = outcome.start - arrival
            try:
                headers = {} if request_id is None else {"x-request-id": request_id}
                chunks = await self._client.post(self._path, body, headers)
            except _FAILURES as error:
                outcome.error = f"{type(error).__name__}: {error}"
        return outcome, chunks

    def _read(self, outcome: Outcome, chunks: list[tuple[float, bytes]], request: SampleRequest) -> None:
        if outcome.error:
            return
        try:
            self._backend.read(chunks, outcome, request, self._tokenizer, self._args.ignore_eos)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            outcome.error = f"The answer cannot be read ({type(error).__name__}: {error})."

    @contextlib.asynccontextmanager
    async def _probes(self) -> AsyncIterator[tuple[list[float], list[str]]]:
        """Sends requests for one token at --probe-request-rate during the run, without limit of concurrency."""
        latencies_s: list[float] = []
        failures: list[str] = []
        request = SampleRequest("Hi", 1, 1)

        async def one() -> None:
            outcome = await self.one(request)
            if outcome.error:
                failures.append(outcome.error)
            else:
                latencies_s.append(outcome.latency)

        async def send() -> None:
            async with asyncio.TaskGroup() as group:
                while True:
                    group.create_task(one())
                    await asyncio.sleep(1 / self._args.probe_request_rate)

        sender = asyncio.create_task(send()) if self._args.probe_request_rate > 0 else None
        try:
            yield latencies_s, failures
        finally:
            if sender is not None:
                sender.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await sender
