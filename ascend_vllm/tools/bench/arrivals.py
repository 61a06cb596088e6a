"""The times at which requests are sent: at a constant or growing rate, evenly or in bursts."""

from __future__ import annotations

import argparse
import datetime
import math

import numpy as np

from ascend_vllm.errors import ConfigError

RateEvent = dict[str, int | str]


def check_arrivals(args: argparse.Namespace) -> None:
    """Checks the options of this module.

    Raises:
        ConfigError: one of them is out of range, or needs another that is missing.
    """
    if not args.request_rate > 0:
        raise ConfigError(f"--request-rate must be above 0, got {args.request_rate}.")
    if not 0 < args.burstiness < math.inf:
        raise ConfigError(f"--burstiness must be above 0, got {args.burstiness}.")
    ends = (args.ramp_up_start_rps, args.ramp_up_end_rps)
    if args.ramp_up_strategy is None:
        if any(end is not None for end in ends):
            raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy.")
        return
    if args.request_rate != math.inf:
        raise ConfigError("--ramp-up-strategy and --request-rate exclude one another.")
    if None in ends:
        raise ConfigError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps.")
    lowest = 1 if args.ramp_up_strategy == "exponential" else 0
    if not lowest <= ends[0] < ends[1]:
        raise ConfigError(
            f"--ramp-up-start-rps must be at least {lowest} and below --ramp-up-end-rps, got {ends[0]}."
        )


def _rate(args: argparse.Namespace, share: float) -> float:
    """Requests per second after this share of them has been sent."""
    if args.ramp_up_strategy is None:
        return float(args.request_rate)
    start, end = args.ramp_up_start_rps, args.ramp_up_end_rps
    if args.ramp_up_strategy == "linear":
        return float(start + (end - start) * share)
    return float(start * (end / start) ** share)


def send_times(args: argparse.Namespace, count: int, seed: int) -> tuple[list[float], list[float]]:
    """When each request is sent, in seconds from the start, and the rate at that time.

    The gaps follow a gamma distribution whose shape is --burstiness; 1 makes the arrivals a Poisson process. At a
    constant rate they are scaled so that the last request is always sent at count / rate.
    """
    chooser = np.random.default_rng(seed)
    rates = np.asarray([_rate(args, i / count) for i in range(count)])
    if args.ramp_up_strategy is None and args.request_rate == math.inf:
        return [0.0] * count, rates.tolist()
    # a ramp may begin at 0 requests per second
    scales = 1 / (np.maximum(rates, 1e-3) * args.burstiness)
    times = np.cumsum(chooser.gamma(args.burstiness, scales))
    if args.ramp_up_strategy is None and times[-1] > 0:
        times *= count / args.request_rate / times[-1]
    return times.tolist(), rates.tolist()


def note_rate(events: list[RateEvent], rate: float) -> None:
    """Adds the whole numbers that a growing rate has reached now, and the time of day."""
    now = datetime.datetime.now().isoformat()
    first = int(events[-1]["rps"]) + 1 if events else int(rate)
    events += [{"rps": rps, "timestamp": now} for rps in range(first, int(rate) + 1)]
