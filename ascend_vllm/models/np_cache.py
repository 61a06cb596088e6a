"""--load-format npcache: the first load saves the tensors of a .bin checkpoint as numpy arrays beside it.

The arrays can be mapped, whereas old .bin files must be read and unpickled as a whole. The layout is vLLM's: a
directory `np` with an array per tensor, named like it, and `weight_names.json`, which is written last.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ascend_vllm.errors import ModelLoadError
from ascend_vllm.logger import init_logger
from ascend_vllm.model_files import check_file, one_line, read_json, shown
from ascend_vllm.models.checkpoint import WeightFile

logger = init_logger(__name__)

_FOLDER = "np"
_NAMES_FILE = "weight_names.json"

# dtypes of arrays → dtypes of tensors
_FLOATS = {np.dtype(name): getattr(torch, name) for name in ("float16", "float32", "float64")}
_INTEGERS = {np.dtype(name): getattr(torch, name) for name in ("uint8", "int8", "int16", "int32", "int64")}
# limit of most file systems
_MAX_NAME_BYTES = 255


def is_file_name(name: str) -> bool:
    """Whether a file in a directory can have this name."""
    is_plain = pathlib.PurePath(name).name == name and name not in ("", "..")
    return is_plain and name.isprintable() and len(name.encode()) <= _MAX_NAME_BYTES


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
            names = read_json(path / _NAMES_FILE, list)
        except ModelLoadError as error:
            raise self.corrupt(error) from error
        self._arrays = {name: self._open(name) for name in names}
        if len(self._arrays) < len(names):
            raise self.corrupt(f"{_NAMES_FILE} has a name twice")
        for name, array in self._arrays.items():
            dtype = _FLOATS.get(array.dtype) or _INTEGERS.get(array.dtype)
            if dtype is not None:
                self.dtypes[name] = dtype
            if array.dtype not in _FLOATS:
                self.odd_dtypes[name] = str(array.dtype)
            self.shapes[name] = array.shape

    def corrupt(self, why: object) -> ModelLoadError:
        return ModelLoadError(
            f"{self.path}: the cache of arrays is damaged or incomplete ({one_line(why)}); remove it, and it is made "
            "again."
        )

    def _open(self, name: Any) -> npt.NDArray[Any]:
        """A mapped array."""
        if not isinstance(name, str) or not is_file_name(name):
            raise self.corrupt(f"{shown(name)} is not the name of a file")
        try:
            check_file(self.path / name)
            return np.lib.format.open_memmap(self.path / name, mode="r")
        except ModelLoadError as error:
            raise self.corrupt(error) from error
        # a broken header can raise anything
        except Exception as error:
            raise self.corrupt(f"{name}: {one_line(error)}") from error

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            # copied, since torch does not support read-only arrays
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
    """Writes the arrays to a temporary directory, which is renamed to the cache when it is complete."""
    logger.info("Writing the tensors of %d files to %s", len(files), folder)
    try:
        with tempfile.TemporaryDirectory(prefix=".np-", dir=folder.parent) as name:
            growing = pathlib.Path(name) / _FOLDER
            growing.mkdir()
            names = []
            for file in files:
                for tensor_name, tensor in file.tensors(list(file.shapes)):
                    if not is_file_name(tensor_name) or tensor_name == _NAMES_FILE:
                        raise ModelLoadError(
                            f"{file.path}: tensor {shown(tensor_name)} cannot be a file of this name"
                        )
                    if tensor_name in file.odd_dtypes and tensor.dtype not in _INTEGERS.values():
                        raise ModelLoadError(
                            f"{file.path}: tensor {tensor_name} has dtype {file.odd_dtypes[tensor_name]}, which is "
                            "not supported"
                        )
                    # numpy has no bfloat16; float32 represents all its values
                    plain = tensor.float() if tensor.dtype is torch.bfloat16 else tensor
                    with (growing / tensor_name).open("wb") as target:
                        np.save(target, plain.numpy())
                    names.append(tensor_name)
            (growing / _NAMES_FILE).write_text(json.dumps(names), encoding="utf-8")
            # files of an interrupted writer of another program
            shutil.rmtree(folder, ignore_errors=True)
            growing.rename(folder)
    except OSError as error:
        raise ModelLoadError(f"{folder}: the cache of arrays cannot be written: {error.strerror}") from error
