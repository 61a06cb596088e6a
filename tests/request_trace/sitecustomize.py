"""Notes which files of the package run in a process, and when; for tests that put this directory on PYTHONPATH.

The directory that REQUEST_TRACE names steers it: a file ``begin-N`` begins trace N, ``end-N`` has each process write
what it noted as ``N-<pid>.json``: file → seconds of time.monotonic() when its functions were called, those of one
millisecond once, and "model" → when a model was.
"""

import json
import os
import pathlib
import sys
import threading
import time
from types import FrameType
from typing import Any

_PACKAGE = "/ascend_vllm/"
_directory = pathlib.Path(os.environ["REQUEST_TRACE"])
_seen: dict[str, list[float]] = {}
_is_tracing = False


def _note(frame: FrameType, event: str, _argument: Any) -> None:
    if event != "call" or not _is_tracing:
        return
    code = frame.f_code
    _, found, path = code.co_filename.rpartition(_PACKAGE)
    if found and code.co_name != "<module>":
        name = "model" if path.startswith("models/") and code.co_name == "forward" else path
        now, times = time.monotonic(), _seen.setdefault(name, [])
        if not times or now >= times[-1] + 0.001:
            times.append(now)


def _serve() -> None:
    global _is_tracing
    number = 0
    while True:
        if not _is_tracing and (_directory / f"begin-{number}").exists():
            _seen.clear()
            _is_tracing = True
            (_directory / f"begun-{number}-{os.getpid()}").touch()
        elif _is_tracing and (_directory / f"end-{number}").exists():
            _is_tracing = False
            partial = _directory / f"partial-{os.getpid()}"
            partial.write_text(json.dumps(_seen))
            partial.rename(_directory / f"{number}-{os.getpid()}.json")
            number += 1
        time.sleep(0.01)


threading.Thread(target=_serve, daemon=True).start()
threading.setprofile(_note)
sys.setprofile(_note)
