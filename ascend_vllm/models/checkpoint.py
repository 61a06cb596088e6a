"""Weight files of a model directory, their tables of contents and their tensors.

Opening a file only reads its table of contents, so that a broken checkpoint is found before any expensive work.
Tensors are views of the mapped file, which is read when they are copied, or of what `direct_reader` has read.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import errno
import fnmatch
import json
import math
import mmap
import pathlib
import warnings
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import torch

from ascend_vllm.config.model import LoadConfig
from ascend_vllm.config.quantization import ADVICE
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.model_files import check_file, is_there, one_line, read_json, shown
from ascend_vllm.models.direct_reader import DirectReader

# files of trainers with the suffixes of weight files
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.bin", "scheduler.pt", "scaler.pt")

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# 8 bits: loaded as they are, for formats of quantized weights
_BYTES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
_INTEGERS = {"U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64}

# the header of a safetensors file starts with its length in 8 bytes, and may have at most this many
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000


class WeightFile(abc.ABC):
    """One file of weights, opened and checked.

    Attributes:
        path: of the file.
        shapes: shape of every tensor in it, by name, in the order of the file.
        dtypes: of those tensors whose dtype can be loaded.
        odd_dtypes: the dtype's name in the file, of those tensors that are not of a floating-point dtype.
        past_cache: whether tensors are read past the system's file cache, if the format and the file system can.
    """

    # name of the format in messages
    format_name: str

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.odd_dtypes: dict[str, str] = {}
        self.past_cache = False

    @abc.abstractmethod
    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the named tensors, on the CPU, each valid until the next one."""

    def release(self) -> None:  # noqa: B027 - a file may have nothing to give back
        """Gives the system back the memory of what was read; the last tensor is read again when it is needed."""

    def corrupt(self, why: object) -> ModelLoadError:
        """The error for a damaged file; `why` is cut to its first line."""
        return ModelLoadError(f"{self.path}: the file is damaged or incomplete: {one_line(why)}")


class SafetensorsFile(WeightFile):
    """A .safetensors file.

    Raises:
        ModelLoadError: not a safetensors file, or truncated.
    """

    format_name = "safetensors"

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__(path)
        self._places: dict[str, tuple[int, int]] = {}
        self._pages = mmap.mmap(-1, 1)
        header, data_bytes = self._read_header()
        self._data_start = path.stat().st_size - data_bytes
        metadata = header.pop("__metadata__", None)
        is_table = isinstance(metadata, dict) and all(isinstance(text, str) for text in metadata.values())
        if metadata is not None and not is_table:
            raise self.corrupt("__metadata__ in its header is no object of texts")
        self._places = {name: self._place(name, entry) for name, entry in header.items()}
        last, last_end = "", 0
        for name, (start, end) in sorted(self._places.items(), key=lambda item: item[1]):
            if start < last_end:
                raise self.corrupt(f"tensor {name} overlaps {last}")
            self.shapes[name] = self._check_entry(name, header[name], end - start)
            last, last_end = name, end
        if last_end != data_bytes:
            raise self.corrupt(f"its tensors end at byte {last_end} of the data, which has {data_bytes}")

    def _read_header(self) -> tuple[dict[str, Any], int]:
        size = check_file(self.path)
        try:
            with self.path.open("rb") as file:
                length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
                if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
                    raise self.corrupt(f"its header does not fit in its {size} bytes")
                header = json.loads(file.read(length), object_pairs_hook=self._without_repeats)
        except OSError as error:
            raise ModelLoadError(f"{self.path}: cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise self.corrupt(f"its header is no JSON ({one_line(error)})") from error
        if not isinstance(header, dict):
            raise self.corrupt("its header is no JSON object")
        return header, size - _LENGTH_BYTES - length

    def _without_repeats(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """A JSON object of the header, whose names must be unique."""
        values: dict[str, Any] = {}
        for name, value in pairs:
            if name in values:
                raise self.corrupt(f"{name} is in its header twice")
            values[name] = value
        return values

    def _place(self, name: str, entry: Any) -> tuple[int, int]:
        """Offsets of a tensor's data: start and end."""
        offsets: Any = entry.get("data_offsets") if isinstance(entry, dict) else None
        if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise self.corrupt(f"tensor {name} has no place in it: its data_offsets are {shown(offsets)}")
        return offsets[0], offsets[1]

    def _check_entry(self, name: str, entry: dict[str, Any], num_bytes: int) -> tuple[int, ...]:
        shape: Any = entry.get("shape")
        dtype_name = entry.get("dtype")
        if not _are_sizes(shape):
            raise self.corrupt(f"tensor {name} has the shape {shown(shape)}")
        if not isinstance(dtype_name, str):
            raise self.corrupt(f"tensor {name} has the dtype {shown(dtype_name)}")
        dtype = _FLOATS.get(dtype_name) or _INTEGERS.get(dtype_name) or _BYTES.get(dtype_name)
        if dtype is not None:
            self.dtypes[name] = dtype
        if dtype_name not in _FLOATS:
            self.odd_dtypes[name] = dtype_name
        elif num_bytes != math.prod(shape) * _FLOATS[dtype_name].itemsize:
            raise self.corrupt(f"tensor {name} of shape {shown(shape)} has {num_bytes} bytes")
        return tuple(shape)

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See `WeightFile.tensors`; those with a dtype that can be loaded."""
        names = list(names)
        for name in names:
            self._check_size(name)
        try:
            with contextlib.closing(self._read_directly(names) if self.past_cache else self._map(names)) as parts:
                for name in names:
                    shape, dtype = self.shapes[name], self.dtypes[name]
                    has_values = math.prod(shape) > 0
                    values = torch.frombuffer(next(parts), dtype=dtype) if has_values else torch.empty(0, dtype=dtype)
                    yield name, values.view(shape)
                    self.release()
        except OSError as error:
            raise ModelLoadError(f"{self.path}: cannot be read: {error.strerror}") from error
        except EOFError as error:
            raise self.corrupt(error) from error

    def _check_size(self, name: str) -> None:
        shape, (start, end) = self.shapes[name], self._places[name]
        if end - start != math.prod(shape) * self.dtypes[name].itemsize:
            raise self.corrupt(f"tensor {name} of shape {shown(shape)} has {end - start} bytes")

    def _parts(self, names: Iterable[str]) -> list[tuple[int, int]]:
        """Start and end in the file of those of the named tensors that have values."""
        places = [self._places[name] for name in names]
        return [(self._data_start + start, self._data_start + end) for start, end in places if start < end]

    def _map(self, names: Iterable[str]) -> Generator[memoryview]:
        """The bytes of the named tensors in the mapped file."""
        with self.path.open("rb") as file:
            # private: writing to a tensor does not change the file
            self._pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        for start, end in self._parts(names):
            if end > len(self._pages):
                raise EOFError(f"the file ends before byte {end}")
            yield memoryview(self._pages)[start:end]

    def _read_directly(self, names: Iterable[str]) -> Generator[memoryview]:
        """The bytes of the named tensors, past the file cache where the file system can."""
        try:
            reader = DirectReader(self.path, self._parts(names))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            yield from self._map(names)
            return
        with contextlib.closing(reader):
            yield from reader

    def release(self) -> None:
        """See `WeightFile.release`: pages that were read, and their neighbours, count as memory of the process."""
        self._pages.madvise(mmap.MADV_DONTNEED)


class TorchFile(WeightFile):
    """A .bin or .pt file written by torch.save: a dict of tensors. Nothing in it is executed.

    Raises:
        ModelLoadError: truncated, holds more than tensors, or needs code to be read.
    """

    format_name = "pt"

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__(path)
        self._tensors = self._open()
        for name, tensor in self._tensors.items():
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                raise ModelLoadError(f"{path}: entry {shown(name)} is a {type(tensor).__name__}, not a named tensor")
            if tensor.layout is not torch.strided or tensor.is_meta:
                raise ModelLoadError(f"{path}: tensor {name} has no values of its own, or leaves some out")
            self.dtypes[name] = tensor.dtype
            if tensor.dtype not in _FLOATS.values():
                self.odd_dtypes[name] = str(tensor.dtype)
            self.shapes[name] = tuple(tensor.shape)

    def _open(self) -> dict[str, Any]:
        check_file(self.path)
        try:
            with warnings.catch_warnings():
                # about unusual pickles; real problems raise an error
                warnings.simplefilter("ignore")
                try:
                    loaded = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
                except RuntimeError as error:
                    if "mmap can only be used" not in str(error):
                        raise
                    # files from before torch 1.6 are no zip archives and cannot be mapped
                    loaded = torch.load(self.path, map_location="cpu", weights_only=True)
        except OSError as error:
            raise ModelLoadError(f"{self.path}: cannot be read: {error.strerror}") from error
        # a broken pickle can raise anything
        except Exception as error:
            raise self.corrupt(error) from error
        if not isinstance(loaded, dict):
            raise ModelLoadError(f"{self.path}: holds a {type(loaded).__name__}, not a dict of tensors")
        return loaded

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See `WeightFile.tensors`; each tensor is released when it has been yielded."""
        for name in names:
            yield name, self._tensors.pop(name)


@dataclasses.dataclass(frozen=True)
class _Format:
    file_class: type[WeightFile]
    single: str
    index: str
    patterns: tuple[str, ...]


_SAFETENSORS = _Format(SafetensorsFile, "model.safetensors", "model.safetensors.index.json", ("*.safetensors",))
_TORCH = _Format(TorchFile, "pytorch_model.bin", "pytorch_model.bin.index.json", ("*.bin", "*.pt"))

_LOAD_FORMATS = {"auto": (_SAFETENSORS, _TORCH), "safetensors": (_SAFETENSORS,), "pt": (_TORCH,)}


def open_checkpoint(model: str, load_config: LoadConfig) -> list[WeightFile]:
    """Finds, opens and checks the weight files of a model directory.

    The files are those of the index, if there is one; otherwise a single file of the usual name (others beside it are
    the same weights in another layout); otherwise all files of the format.

    Args:
        model: the directory.
        load_config: format and globs to leave out.

    Raises:
        ModelLoadError: no directory, no weight files, a file of the index is missing, or one is damaged.
    """
    directory = pathlib.Path(model)
    if not directory.is_dir():
        raise ModelLoadError(f"{model}: no such model directory")
    formats = _LOAD_FORMATS.get(load_config.load_format)
    if formats is None:
        raise ModelLoadError(
            f"load format {load_config.load_format!r} is not supported; "
            f"supported are dummy, {', '.join(_LOAD_FORMATS)}"
        )
    for weight_format in formats:
        paths = _find(directory, weight_format, load_config.ignore_patterns)
        if paths:
            return [weight_format.file_class(path) for path in paths]
    wanted = ", ".join(pattern for weight_format in formats for pattern in weight_format.patterns)
    advice = f"; {ADVICE['gguf']}" if any(directory.glob("*.gguf")) else ""
    raise ModelLoadError(f"{model}: no weight files found (looked for {wanted}){advice}")


def _find(directory: pathlib.Path, weight_format: _Format, ignore_patterns: tuple[str, ...]) -> list[pathlib.Path]:
    def kept(path: pathlib.Path) -> bool:
        name = path.relative_to(directory).as_posix()
        return not any(fnmatch.fnmatch(name, pattern) for pattern in ignore_patterns)

    index = directory / weight_format.index
    if is_there(index) and kept(index):
        paths = [path for path in _files_of_index(index) if kept(path)]
        for path in paths:
            if not is_there(path):
                raise ModelLoadError(f"{path}: the file is named in {index.name}, but missing")
        return paths
    single = directory / weight_format.single
    if is_there(single) and kept(single):
        return [single]
    found = {path for pattern in weight_format.patterns for path in directory.glob(pattern)}
    return sorted(path for path in found if path.name not in _NOT_WEIGHTS and kept(path))


def _files_of_index(index: pathlib.Path) -> list[pathlib.Path]:
    table = read_json(index, dict).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise ModelLoadError(f"{index}: is no index of weight files: its weight_map is {shown(table)}")
    for tensor, name in table.items():
        if not isinstance(name, str) or not _is_inside(name):
            raise ModelLoadError(
                f"{index}: weight_map says that {tensor} is in {shown(name)}, which is no file beside it"
            )
    return [index.parent / name for name in sorted(set(table.values()))]


def _is_inside(name: str) -> bool:
    """Whether a name leads to a file in a directory or below it."""
    parts = pathlib.PurePosixPath(name).parts
    return bool(parts) and name.isprintable() and not {"..", "/", "//"} & set(parts) and max(map(len, parts)) < 256


def _are_sizes(values: Any) -> bool:
    """Whether this is a list of non-negative 64-bit integers."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)
