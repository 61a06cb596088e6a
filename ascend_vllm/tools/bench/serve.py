"""`ascend-vllm bench serve`: measures a server under load, with vLLM's options, figures and result files."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import math
import pathlib
import uuid
from typing import Any

from ascend_vllm.args import hf_files
from ascend_vllm.args.parser import FlexibleArgumentParser, json_object
from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.errors import ConfigError
from ascend_vllm.tools.bench.arrivals import check_arrivals
from ascend_vllm.tools.bench.backends import BACKENDS
from ascend_vllm.tools.bench.datasets import (
    SampleRequest,
    add_dataset_arguments,
    apply_general_lengths,
    sample_requests,
)
from ascend_vllm.tools.bench.load import (
    BenchError,
    LoadGenerator,
    Run,
    base_url,
    first_model,
    make_client,
    wait_until_reachable,
)
from ascend_vllm.tools.bench.metrics import (
    DETAILS,
    figures,
    parse_goodput,
    parse_metric_names,
    parse_percentiles,
    probe_figures,
    table,
)

DEFAULT_METRICS = "ttft,tpot,itl"
_MAX_ERRORS_SHOWN = 10
# metrics that exist only if requests wait in the client (--max-concurrency)
_OF_THE_QUEUE = ("client_queue_time", "e2el_including_client_queue")


def _key_value(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{word!r} is not KEY=VALUE")
    return name.strip(), value.strip()


def add_arguments(parser: FlexibleArgumentParser) -> None:
    parser.description = "Sends requests to a running server and measures what its clients see."
    _add_server_arguments(parser)
    _add_load_arguments(parser)
    add_dataset_arguments(parser)
    _add_sampling_arguments(parser)
    _add_result_arguments(parser)


def _add_server_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("server").add_argument
    add("--backend", choices=sorted(BACKENDS), default="openai", help="the kind of endpoint (default: %(default)s)")
    add("--base-url", help="the server, for example http://localhost:8000; without it --host and --port")
    add("--host", default="127.0.0.1", help="(default: %(default)s)")
    add("--port", type=int, default=8000, help="(default: %(default)s)")
    add("--endpoint", help="the path; default: the backend's usual one")
    add("--header", type=_key_value, nargs="*", metavar="KEY=VALUE", help="headers of every request")
    add("--insecure", action="store_true", help="do not check the certificate of an https server")
    add("--model", help="the model; default: the first of /v1/models")
    add("--served-model-name", help="the name that requests carry, if it is another")
    add("--lora-modules", nargs="+", metavar="NAME", help="adapters, of which each request asks for one")
    add("--lora-assignment", choices=("random", "round-robin"), default="random", help="(default: %(default)s)")
    add("--tokenizer", help="directory or name of the tokenizer; default: the model's")
    add("--tokenizer-mode", choices=("auto", "hf", "slow"), default="auto", help="(default: %(default)s)")
    add("--trust-remote-code", action="store_true", help="let code that comes with the tokenizer run")
    add("--skip-tokenizer-init", action="store_true", help="do without a tokenizer: random prompts are token ids")
    add("--ready-check-timeout-sec", type=float, default=0, help="wait so long for the server (default: 0, no check)")
    add("--num-warmups", type=int, default=0, help="requests before the measurement (default: 0)")
    add("--profile", action="store_true", help="run the server's profiler meanwhile")


def _add_load_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("load").add_argument
    add("--num-prompts", type=int, default=1000, help="requests (default: %(default)s)")
    add("--request-rate", type=float, default=math.inf, help="requests per second; default: all at once")
    add("--burstiness", type=float, default=1.0, help="below 1 requests come in bursts, above 1 evenly (default: 1)")
    add("--max-concurrency", type=int, help="most requests under way at once; default: no limit")
    add("--ramp-up-strategy", choices=("linear", "exponential"), help="the rate grows during the run")
    add("--ramp-up-start-rps", type=int, help="the rate at its beginning")
    add("--ramp-up-end-rps", type=int, help="the rate at its end")
    add("--probe-request-rate", type=float, default=0.0, help="requests per second for one token, measured apart")
    add("--seed", type=int, default=0, help="of prompts and arrivals (default: 0)")
    add("--disable-tqdm", action="store_true", help="no progress bar")
    add("--request-id-prefix", default=f"bench-{uuid.uuid4().hex[:8]}-", help="of x-request-id headers")


def _add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sampling").add_argument
    add("--ignore-eos", action="store_true", help="answers have the full length; random prompts always do")
    add("--logprobs", type=int, help="log-probabilities per token")
    add("--use-beam-search", action="store_true", help="ask for a beam search")
    add("--temperature", type=float, help="without it the server decides")
    for name in ("top-p", "min-p", "frequency-penalty", "presence-penalty", "repetition-penalty"):
        add(f"--{name}", type=float, help="without it the server decides")
    add("--top-k", type=int, help="without it the server decides")
    add("--extra-body", type=json_object, metavar="JSON", help="further fields of every request")
    add("--chat-template-kwargs", type=json_object, metavar="JSON", help="custom: values for the chat template")


def _add_result_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("result").add_argument
    add("--percentile-metrics", help="of ttft, tpot, itl, e2el, client_queue_time, e2el_including_client_queue")
    add("--metric-percentiles", default="99", help="separated by commas (default: %(default)s)")
    add("--goodput", nargs="+", metavar="NAME:MS", help="limits for ttft, tpot and e2el that good requests keep")
    add("--save-result", action="store_true", help="write the figures to a JSON file")
    add("--save-detailed", action="store_true", help="with those of each request")
    add("--append-result", action="store_true", help="to the end of the file")
    add("--result-dir", help="the file's directory (default: here)")
    add("--result-filename", help="its name; default: made of the label, the rate, the model and the time")
    add("--label", help="begins that name; default: the backend")
    add("--metadata", type=_key_value, nargs="*", metavar="KEY=VALUE", help="noted in the file")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the benchmark: prints the table, saves the file, and returns all figures.

    Raises:
        ConfigError: an option is wrong.
        BenchError: the server cannot be measured.
    """
    import uvloop

    _check(args)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result, lines = runner.run(_measure(args))
    print("\n".join(lines))
    if args.save_result:
        print(f"Saved to {_save(args, result)}")
    return result


def _check(args: argparse.Namespace) -> None:
    check_arrivals(args)
    apply_general_lengths(args)
    # report errors before the run, not after it
    parse_goodput(args.goodput)
    parse_percentiles(args.metric_percentiles)
    parse_metric_names(args.percentile_metrics or DEFAULT_METRICS)
    args.header, args.metadata = dict(args.header or ()), dict(args.metadata or ())
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency must be at least 1, got {args.max_concurrency}.")
    if not 0 <= args.probe_request_rate < math.inf:
        raise ConfigError(f"--probe-request-rate must be at least 0, got {args.probe_request_rate}.")
    if args.skip_tokenizer_init and not BACKENDS[args.backend].takes_ids:
        raise ConfigError(f"--backend {args.backend} takes text, which needs a tokenizer; no --skip-tokenizer-init.")
    if args.dataset_name == "random":
        # after random prompts a model may stop at any time, but all answers should have the requested length
        args.ignore_eos = True


def load_tokenizer(name: str, args: argparse.Namespace) -> Tokenizer:
    """Loads the tokenizer of a directory or hub repository.

    Raises:
        ConfigError: there is none.
    """
    try:
        directory = hf_files.find_tokenizer_directory(name, None, None)
    except ConfigError as err:
        raise ConfigError(f"{err} Or leave the tokenizer out with --skip-tokenizer-init.") from err
    return Tokenizer.from_directory(
        directory, slow=args.tokenizer_mode == "slow", trust_remote_code=args.trust_remote_code
    )


async def _measure(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    client = make_client(args)
    model_name, model_id = args.served_model_name or args.model, args.model
    if args.model is None:
        if args.backend == "generate":
            model_name = model_id = args.served_model_name or "model"
            if args.tokenizer is None:
                raise ConfigError("--backend generate does not tell its model; name it with --model or --tokenizer.")
        else:
            await wait_until_reachable(client, base_url(args), args.ready_check_timeout_sec)
            found_name, model_id = await first_model(client)
            model_name = args.served_model_name or found_name
            print(f"Model {model_name} of {model_id}")
    tokenizer_id = args.tokenizer or model_id
    tokenizer = None if args.skip_tokenizer_init else load_tokenizer(tokenizer_id, args)
    await wait_until_reachable(client, base_url(args), args.ready_check_timeout_sec)
    requests = sample_requests(args, tokenizer, args.seed)
    generator = LoadGenerator(args, client, model_name, tokenizer)
    try:
        run = await _load(args, generator, requests)
    finally:
        client.close()
    return _report(args, run, str(model_id), str(tokenizer_id))


async def _load(args: argparse.Namespace, generator: LoadGenerator, requests: list[SampleRequest]) -> Run:
    if args.ready_check_timeout_sec > 0:
        await generator.wait_until_ready(requests[0], args.ready_check_timeout_sec)
    if args.num_warmups > 0:
        await generator.warm_up(requests[0], args.num_warmups)
    if args.profile:
        await generator.profile("start")
    print(f"Sending {len(requests)} requests to {base_url(args)}")
    run = await generator.run(requests)
    if args.profile:
        await generator.profile("stop")
    return run


def _report(args: argparse.Namespace, run: Run, model_id: str, tokenizer_id: str) -> tuple[dict[str, Any], list[str]]:
    """The content of the result file and the lines of the table."""
    metrics = parse_metric_names(args.percentile_metrics or DEFAULT_METRICS)
    if args.max_concurrency is None:
        metrics = [name for name in metrics if name not in _OF_THE_QUEUE]
    percentiles = parse_percentiles(args.metric_percentiles)
    # JSON has no infinity
    rate = args.request_rate if args.request_rate < math.inf else "inf"
    result: dict[str, Any] = {
        "date": datetime.datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.label,
        "model_id": model_id,
        "tokenizer_id": tokenizer_id,
        "num_prompts": args.num_prompts,
        **args.metadata,
        "request_rate": rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
    }
    if args.ramp_up_strategy is not None:
        result |= {name: getattr(args, name) for name in ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")}
    result |= figures(
        run.outcomes,
        run.duration_s,
        metrics=metrics,
        percentiles=percentiles,
        goodput=parse_goodput(args.goodput),
    )
    if args.probe_request_rate > 0:
        result |= probe_figures(run.probe_latencies_s, run.probes_failed)
    if run.rate_events:
        result["rps_change_events"] = run.rate_events
    errors = [outcome.error for outcome in run.outcomes if outcome.error][:_MAX_ERRORS_SHOWN]
    lines = [f"Error {number}: {error}" for number, error in enumerate(errors)]
    return result, lines + list(table(result, metrics, percentiles, args.request_rate))


def _save(args: argparse.Namespace, result: dict[str, Any]) -> pathlib.Path:
    kept = result if args.save_detailed else {name: value for name, value in result.items() if name not in DETAILS}
    name = args.result_filename
    if name is None:
        concurrency = "" if args.max_concurrency is None else f"-concurrency{args.max_concurrency}"
        model = result["model_id"].rstrip("/").split("/")[-1]
        name = f"{args.label or args.backend}-{args.request_rate}qps{concurrency}-{model}-{result['date']}.json"
    path: pathlib.Path = pathlib.Path(args.result_dir or ".") / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if args.append_result else "w", encoding="utf-8") as file:
            if file.tell():
                file.write("\n")
            json.dump(kept, file)
    except OSError as err:
        raise BenchError(f"The result cannot be written to {path}: {err.strerror}.") from err
    return path
