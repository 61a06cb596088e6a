"""--load-format npcache: the tensors of a .bin checkpoint, kept as numpy arrays beside it from the first load on.

The arrays can be mapped, where old .bin files must be read and unpickled as a whole. The layout is vLLM's: a
directory `np` with an array per tensor, named like it, and `weight_names.json`, which is written last.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from ascend_vllm.errors import ModelLoadError
from ascend_vllm.logger import init_logger
from ascend_vllm.models.checkpoint import WeightFile

logger = init_logger(__name__)

_FOLDER = "np"
_NAMES_FILE = "weight_names.json"


class NumpyCache(WeightFile):
    """The cache of a model directory.

    Args:
        path: the directory `np`.

    Raises:
        ModelLoadError: an array is missing or damaged.
    """

    format_name = "npcache"

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__(path)
        try:
            names: list[str] = json.loads((path / _NAMES_FILE).read_text(encoding="utf-8"))
            self._arrays = {name: np.load(self._file(name), mmap_mode="r") for name in names}
        except (OSError, ValueError, EOFError, TypeError) as error:
            raise ModelLoadError(
                f"{path}: the cache of arrays is damaged or incomplete ({error}); remove it, and it is made again."
            ) from error
        for name, array in self._arrays.items():
            if not np.issubdtype(array.dtype, np.floating):
                self.odd_dtypes[name] = str(array.dtype)
            self.shapes[name] = array.shape

    def _file(self, name: str) -> pathlib.Path:
        if pathlib.PurePath(name).name != name:
            raise ValueError(f"{name!r} is not the name of a file")
        return self.path / name

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See `WeightFile.tensors`."""
        for name in names:
            # copied: torch takes no array that cannot be written to
            yield name, torch.from_numpy(np.array(self._arrays.pop(name)))


def open_np_cache(directory: pathlib.Path, files: Sequence[WeightFile]) -> NumpyCache:
    """The cache of a model directory, made first if there is none.

    Args:
        directory: of the model.
        files: its .bin files.

    Raises:
        ModelLoadError: the cache cannot be written, or is damaged.
    """
    folder = directory / _FOLDER
    if not (folder / _NAMES_FILE).is_file():
        _make(folder, files)
    return NumpyCache(folder)


def _make(folder: pathlib.Path, files: Sequence[WeightFile]) -> None:
    """Writes the arrays to a directory of another name, which becomes the cache when it is complete."""
    logger.info("Writing the tensors of %d files to %s", len(files), folder)
    try:
        with tempfile.TemporaryDirectory(prefix=".np-", dir=folder.parent) as name:
            growing = pathlib.Path(name) / _FOLDER
            growing.mkdir()
            names = []
            for file in files:
                for tensor_name, tensor in file.tensors(list(file.shapes)):
                    # numpy has no bfloat16; float32 holds every value of it
                    plain = tensor.float() if tensor.dtype is torch.bfloat16 else tensor
                    with (growing / tensor_name).open("wb") as target:
                        np.save(target, plain.numpy())
                    names.append(tensor_name)
            (growing / _NAMES_FILE).write_text(json.dumps(names), encoding="utf-8")
            # what an interrupted writer of another program left there
            shutil.rmtree(folder, ignore_errors=True)
            growing.rename(folder)
    except OSError as error:
        raise ModelLoadError(f"{folder}: the cache of arrays cannot be written: {error.strerror}") from error
