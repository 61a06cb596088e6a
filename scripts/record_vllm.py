"""Records the real vLLM's answers to the requests of tests/compat, for comparison with ours.

It starts the given vLLM with the model of tests/compat once for each server of tests/compat/servers.py, sends the
requests one after the other, and writes tests/compat/recorded/*.json::

    python scripts/record_vllm.py /opt/vllm/bin/vllm
    python scripts/record_vllm.py /opt/vllm/bin/vllm --only chat errors

On a machine without accelerator that is vLLM's CPU build; with VLLM_CPU_KVCACHE_SPACE=1 it takes little memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import httpx

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from tests.compat.exchange import exchange
from tests.compat.servers import COMMON, MODEL, RECORDED, SERVERS, ServerSpec, make_classifier

_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
_SHARED_FLAGS = ("--host", "127.0.0.1", "--uvicorn-log-level", "warning")


@contextlib.contextmanager
def _vllm(
    command: str, model: pathlib.Path, spec: ServerSpec, port: int, log: pathlib.Path
) -> Iterator[httpx.Client]:
    """Starts vLLM; yields a client of it."""
    arguments = [
        command,
        "serve",
        str(model),
        *COMMON,
        *spec.flags,
        *spec.theirs,
        *_SHARED_FLAGS,
        "--port",
        str(port),
    ]
    with log.open("w") as output:
        process = subprocess.Popen(
            arguments, stdout=output, stderr=subprocess.STDOUT, env=os.environ | _ENVIRONMENT, start_new_session=True
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
                _wait(client, process, log)
                yield client
        finally:
            # also ends the engine's process
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


def _wait(client: httpx.Client, process: subprocess.Popen[bytes], log: pathlib.Path) -> None:
    while process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if client.get("/health").status_code == 200:
                return
        time.sleep(0.5)
    raise SystemExit(f"vLLM ended with {process.returncode}:\n{log.read_text()[-4000:]}")


def _rounded(value: Any) -> Any:
    """Rounds floats to the digits of single precision."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def _write(path: pathlib.Path, version: str, records: dict[str, Any]) -> None:
    """Writes one line per request, so that diffs are readable."""
    lines = [
        f"{json.dumps(name)}: {json.dumps(_rounded(record), ensure_ascii=False, separators=(',', ':'))}"
        for name, record in records.items()
    ]
    text = ",\n".join([f'"vllm": {json.dumps(version)}', *lines])
    # the model's path differs between machines
    text = text.replace(f'"{MODEL}"', '"tests/compat/model"')
    path.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


def _record(client: httpx.Client, spec: ServerSpec, only: list[str]) -> None:
    version = client.get("/version").json()["version"]
    for table, cases in spec.tables.items():
        if only and table not in only:
            continue
        records = {case.name: {"request": case.to_json(), **exchange(client, case)} for case in cases}
        _write(RECORDED / f"{table}.json", version, records)
        print(f"{table}: {len(records)} answers", flush=True)


def main() -> None:
    """Records the tables that the command line names, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("vllm", help="the command of the vLLM to ask")
    parser.add_argument("--only", nargs="+", default=[], help="tables to record")
    parser.add_argument("--port", type=int, default=8731, help="where vLLM listens")
    parser.add_argument("--log", type=pathlib.Path, default=pathlib.Path("vllm.log"), help="vLLM's own output")
    args = parser.parse_args()
    names = [case.name for spec in SERVERS.values() for cases in spec.tables.values() for case in cases]
    if len(set(names)) != len(names):
        raise SystemExit(f"names used twice: {sorted({name for name in names if names.count(name) > 1})}")
    RECORDED.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        classifier = pathlib.Path(scratch) / "classifier"
        make_classifier(classifier)
        for spec in SERVERS.values():
            if args.only and not set(args.only) & spec.tables.keys():
                continue
            with _vllm(args.vllm, classifier if spec.classifier else MODEL, spec, args.port, args.log) as client:
                _record(client, spec, args.only)


if __name__ == "__main__":
    main()
