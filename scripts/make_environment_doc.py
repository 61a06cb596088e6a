"""Writes docs/environment.md from the functions in ascend_vllm/envs.py."""

from __future__ import annotations

import inspect
import pathlib
from collections.abc import Iterator

from ascend_vllm import envs

OUTPUT = pathlib.Path(__file__).resolve().parent.parent / "docs" / "environment.md"

HEADER = """\
# Environment variables

<!-- Written by scripts/make_environment_doc.py from ascend_vllm/envs.py; change it there. -->

`ascend_vllm/envs.py` is the only place that reads the environment. Flags are the ordinary way to configure a server;
these variables have vLLM's names and meaning.

| variable | meaning |
|---|---|
"""

OTHERS = """
## vLLM's variables that are not read

They may be set; nothing changes.

| variable | why |
|---|---|
| `VLLM_NO_USAGE_STATS`, `DO_NOT_TRACK` | nothing is ever reported to anybody |
| `VLLM_CONFIG_ROOT` | nothing is kept there |
| `VLLM_RPC_TIMEOUT` | a call waits for the engine's answer or death; `VLLM_ENGINE_ITERATION_TIMEOUT_S` bounds both |
| `VLLM_WORKER_MULTIPROC_METHOD` | one worker lives in the engine's process, several in programs of their own |
| `VLLM_ALLOW_DEPRECATED_BLOCK_MANAGER_V1` | there is only one block manager |
| `VLLM_TRACE_FUNCTION` | use a debugger or the profiler |
| `PROMETHEUS_MULTIPROC_DIR` | the API servers keep their metrics in memory, and one adds up those of all |

## Variables of features that are still to come

| variable | feature |
|---|---|
| `VLLM_IMAGE_FETCH_TIMEOUT`, `VLLM_AUDIO_FETCH_TIMEOUT` | images and sound in prompts |
"""


def variables() -> Iterator[tuple[str, str]]:
    """Each variable, with the docstring of the function that reads it."""
    for name, function in inspect.getmembers(envs, inspect.isfunction):
        if function.__module__ != envs.__name__ or name.startswith("_"):
            continue
        if inspect.signature(function).return_annotation in ("None", "dict[str, str]"):
            continue  # it sets variables, or reads all of them
        text = " ".join((inspect.getdoc(function) or "").split())
        variable, colon, meaning = text.partition(": ")
        if not colon or not variable.startswith("`"):
            raise SystemExit(f"envs.{name}: the docstring must begin with `VARIABLE`: and its meaning")
        yield variable, meaning


def render() -> str:
    """The whole page."""
    rows = [f"| {variable} | {meaning.replace('|', chr(92) + '|')} |\n" for variable, meaning in sorted(variables())]
    return HEADER + "".join(rows) + OTHERS


if __name__ == "__main__":
    OUTPUT.write_text(render(), encoding="utf-8")
