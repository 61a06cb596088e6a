"""The demo model: a small chat model that answers questions about this server.

No model needs to be downloaded to try ascend-vllm: `--model demo` trains this one on first use (a minute or two
on two cores) and keeps it in the cache directory. `python -m ascend_vllm.tools.demo` does the same by hand.
"""

from __future__ import annotations

import fcntl
import hashlib
import pathlib
import subprocess
import sys

import ascend_vllm
from ascend_vllm import envs
from ascend_vllm.errors import ModelLoadError

DEMO_MODEL_NAME = "demo"
_PACKAGE = pathlib.Path(ascend_vllm.__file__).parent
# sources that the model depends on: the trainer and its texts
_SOURCES = ("tools/demo/*.py", "tools/demo/*.md", "args/tables/*.py", "envs.py")


def demo_model_path() -> pathlib.Path:
    """Where the demo model of this version of the package is, or will be.

    The name holds a hash of all that the model is made from, so that a changed flag table or trainer makes a
    new model and an old one is never served for it.
    """
    digest = hashlib.sha256()
    for pattern in _SOURCES:
        for path in sorted(_PACKAGE.glob(pattern)):
            digest.update(path.read_bytes())
    return envs.cache_root() / f"demo-{digest.hexdigest()[:12]}"


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
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (path / "config.json").is_file():
            command = [sys.executable, "-m", "ascend_vllm.tools.demo", "--output", str(path)]
            # threads that spin while they wait for one another take ten times as long on a busy machine
            environment = envs.everything() | {"OMP_WAIT_POLICY": "PASSIVE"}
            done = subprocess.run(command, check=False, stdout=subprocess.DEVNULL, env=environment)
            if done.returncode != 0:
                raise ModelLoadError(f"training the demo model failed with exit code {done.returncode}")
    return str(path)
