"""The cache of compiled graphs on disk, which is emptied if they were compiled for another model or other flags."""

from __future__ import annotations

import hashlib
import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

import ascend_vllm
from ascend_vllm.attention.backend import AttentionBackend
from ascend_vllm.config.cache import kv_cache_specs
from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.logger import init_logger

logger = init_logger(__name__)

_FILE = "fingerprint.json"
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.index.json")


def fingerprint(config: EngineConfig, backend: AttentionBackend, versions: Mapping[str, str]) -> dict[str, str]:
    """Everything that compiled graphs depend on, by its name in log messages.

    Args:
        config: of the engine.
        backend: computes attention.
        versions: of the platform's compiler, see `GraphCompiler.versions`.
    """
    model, graphs = config.model, config.graphs
    directory = pathlib.Path(model.model)
    files = sorted({path for pattern in _WEIGHTS for path in directory.glob(pattern)})
    return {
        "model": model.model,
        "config.json": _digest(model.arch),
        "weight files": _digest([(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]),
        "--dtype": model.dtype,
        "--max-model-len": str(model.max_model_len),
        "--block-size": str(config.cache.block_size),
        "KV cache dtype": ", ".join(sorted({spec.dtype for spec in kv_cache_specs(model, config.cache)})),
        "gears": ",".join(map(str, graphs.capture_sizes)),
        "tokens of a row": ",".join(map(str, graphs.query_lens)),
        "--max-seq-len-to-capture": str(graphs.max_seq_len),
        "--tensor-parallel-size": str(config.parallel.tensor_parallel_size),
        "attention": backend.describe(),
        "ascend-vllm": ascend_vllm.__version__,
        "torch": str(torch.__version__),
        **versions,
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()[:16]


class GraphCache:
    """A directory of compiled graphs that all have one fingerprint.

    Args:
        directory: created if needed. All files in it are deleted if the fingerprint differs.
        wanted: `fingerprint` of the graphs to run.
    """

    def __init__(self, directory: pathlib.Path, wanted: Mapping[str, str]) -> None:
        self.directory = directory
        self._wanted = dict(wanted)

    def prepare(self) -> bool:
        """Returns whether the graphs on disk can be used; empties the directory if not."""
        found = self._read()
        if found == self._wanted:
            logger.info("Compiled graphs are taken from %s", self.directory)
            return True
        if found is not None:
            names = [name for name in self._wanted | found if self._wanted.get(name) != found.get(name)]
            differing = "; ".join(f"{name} was {found.get(name)}, is {self._wanted.get(name)}" for name in names)
            logger.info("Compiled graphs in %s are made anew: %s", self.directory, differing)
        else:
            logger.info("Compiled graphs will be kept in %s for the next start", self.directory)
        if self.directory.exists():
            shutil.rmtree(self.directory)
        self.directory.mkdir(parents=True)
        return False

    def keep(self) -> None:
        """Writes the fingerprint, which marks the graphs in the directory as complete."""
        partial = self.directory / f"{_FILE}.partial"
        partial.write_text(json.dumps(self._wanted, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.directory / _FILE)

    def _read(self) -> dict[str, str] | None:
        """Fingerprint of the graphs in the directory; None if there are none, or they are incomplete."""
        try:
            loaded = json.loads((self.directory / _FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return loaded if isinstance(loaded, dict) else None
