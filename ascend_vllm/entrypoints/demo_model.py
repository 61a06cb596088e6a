"""The demo model: a small chat model that answers questions about this server.

No model needs to be downloaded to try ascend-vllm: `--model demo` trains this one on first use (a minute or two
on two cores) and keeps it in the cache directory. `python -m ascend_vllm.tools.demo` does the same by hand. So does
`--speculative-config '{"method":"eagle"}'` with its EAGLE head, whose training by hand is `ascend-vllm train-eagle`.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import ascend_vllm
from ascend_vllm import envs
from ascend_vllm.errors import ModelLoadError

if TYPE_CHECKING:
    from ascend_vllm.args.engine_args import EngineArgs

DEMO_MODEL_NAME = "demo"
_PACKAGE = pathlib.Path(ascend_vllm.__file__).parent
# sources that the model depends on: the trainer and its texts
_SOURCES = (
    *(f"tools/demo/{name}.py" for name in ("checkpoint", "corpus", "training")),
    *("tools/demo/*.md", "args/tables/*.py", "envs.py"),
)
# and what its EAGLE head depends on besides
_HEAD_SOURCES = ("tools/train_eagle/*.py",)
# drafts of a row where --speculative-config does not say how many
_NUM_DRAFTS = 3


def demo_model_path() -> pathlib.Path:
    """Where the demo model of this version of the package is, or will be.

    The name holds a hash of all that the model is made from, so that a changed flag table or trainer makes a
    new model and an old one is never served for it.
    """
    return envs.cache_root() / f"demo-{_digest(_SOURCES)}"


def demo_head_path() -> pathlib.Path:
    """Where the demo model's EAGLE head is, or will be; as `demo_model_path`."""
    return envs.cache_root() / f"demo-eagle-{_digest((*_SOURCES, *_HEAD_SOURCES))}"


def _digest(patterns: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for pattern in patterns:
        for path in sorted(_PACKAGE.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def ensure_demo_model() -> str:
    """Trains the demo model unless this version's is in the cache.

    Training runs in a process of its own, so that the caller never imports torch; its progress bar shows on
    stderr. Callers at the same time wait for one another.

    Returns:
        The directory, in Hugging Face layout.

    Raises:
        ModelLoadError: training failed; its own message is on stderr.
    """
    path = demo_model_path()
    return _ensure(path, "the demo model", ("ascend_vllm.tools.demo", "--output", str(path)))


def ensure_demo_head() -> str:
    """Trains the demo model's EAGLE head unless this version's is in the cache; as `ensure_demo_model`."""
    path, model = demo_head_path(), ensure_demo_model()
    words = ("ascend_vllm.entrypoints.cli", "train-eagle", "--model", model, "--data", "demo", "--output", str(path))
    return _ensure(path, "the demo model's EAGLE head", words)


def _ensure(path: pathlib.Path, what: str, words: Sequence[str]) -> str:
    """Runs the program that makes a directory unless it is there; `words`: its module and arguments."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (path / "config.json").is_file():
            # threads that spin while they wait for one another take ten times as long on a busy machine
            environment = envs.everything() | {"OMP_WAIT_POLICY": "PASSIVE"}
            command = [sys.executable, "-m", *words]
            done = subprocess.run(command, check=False, stdout=subprocess.DEVNULL, env=environment)
            if done.returncode != 0:
                raise ModelLoadError(f"training {what} failed with exit code {done.returncode}")
    return str(path)


def is_demo(args: EngineArgs) -> bool:
    """Whether the arguments name the demo model; a directory of that name comes first."""
    return args.model == DEMO_MODEL_NAME and not pathlib.Path(DEMO_MODEL_NAME).is_dir()


def with_demo_model(args: EngineArgs) -> EngineArgs:
    """The arguments; if they name the demo model, with its directory, which is made if it is missing.

    If they ask for EAGLE without naming a head, they get the directory of the demo model's own in the same way.

    Raises:
        ModelLoadError: training failed.
    """
    if not is_demo(args):
        return args
    directory = ensure_demo_model()
    settings = args.speculative_config
    if settings is not None and settings.get("method") == "eagle" and "model" not in settings:
        usual = {"num_speculative_tokens": _NUM_DRAFTS, "model": ensure_demo_head()}
        args = dataclasses.replace(args, speculative_config=usual | settings)
    return args.with_model_directory(directory)
