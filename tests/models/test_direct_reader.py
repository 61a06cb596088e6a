"""Reading files past the system's file cache: every byte is the file's, whatever the order and size of the parts."""

import contextlib
import os
import pathlib
import random
import threading

import pytest
import torch
from safetensors.torch import save_file

from ascend_vllm.errors import ModelLoadError
from ascend_vllm.models import checkpoint
from ascend_vllm.models.checkpoint import SafetensorsFile
from ascend_vllm.models.direct_reader import DirectReader


@pytest.fixture(scope="module")
def big_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("direct") / "bytes"
    path.write_bytes(random.Random(0).randbytes((9 << 20) + 123))
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("the file system of the temporary directory has no direct reads")
    return path


def _read(path, parts, **options):
    with contextlib.closing(DirectReader(path, parts, **options)) as reader:
        return [bytes(part) for part in reader]


@pytest.mark.parametrize("ahead_bytes", [8 << 10, 64 << 10, 1 << 20, 64 << 20])
def test_parts_of_any_place_and_size_are_read_in_order(big_file, ahead_bytes):
    content = big_file.read_bytes()
    draw = random.Random(ahead_bytes)
    starts = [draw.randrange(len(content)) for _ in range(300)]
    parts = [(start, min(len(content), start + draw.choice([1, 17, 4096, 50_000]))) for start in starts]
    parts += [(0, len(content)), (len(content) - 1, len(content)), (4096, 8192), (0, 5 << 20)]
    assert _read(big_file, parts, ahead_bytes=ahead_bytes) == [content[start:end] for start, end in parts]


def test_a_file_that_ends_early_is_an_error(big_file):
    size = big_file.stat().st_size
    with pytest.raises(EOFError, match=f"the file ends before byte {size + 1}"):
        _read(big_file, [(0, 10), (size - 5, size + 1)])
    with pytest.raises(EOFError, match="the file ends before byte"):
        _read(big_file, [(0, 64 << 20)])


def _is_open(path):
    return str(path) in [os.path.realpath(link) for link in pathlib.Path("/proc/self/fd").iterdir()]


def test_a_reader_that_is_closed_early_leaves_no_thread_and_no_file(big_file):
    reader = DirectReader(big_file, [(0, 4 << 20)] * 50)
    assert len(next(iter(reader))) == 4 << 20
    assert _is_open(big_file)
    reader.close()
    assert not _is_open(big_file)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("direct-reader")]


def _tensors():
    values = torch.arange(3 << 18, dtype=torch.float32)
    return {
        "a": values.view(3, 512, 512),
        "none": torch.empty(0, 4, dtype=torch.bfloat16),
        "one": torch.tensor(2.5, dtype=torch.float16),
        "odd": torch.arange(77, dtype=torch.int8),
        "z": values.to(torch.bfloat16)[5:],
    }


def test_tensors_are_the_same_past_the_cache(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(_tensors(), path)
    file = SafetensorsFile(path)
    file.past_cache = True
    names = ["z", "none", "one", "a", "odd", "one"]
    found = [(name, tensor.clone()) for name, tensor in file.tensors(names)]
    assert [name for name, _ in found] == names
    for name, tensor in found:
        torch.testing.assert_close(tensor, _tensors()[name], rtol=0, atol=0)


@pytest.mark.parametrize("past_cache", [False, True])
def test_a_file_cut_while_it_is_read_is_an_error(tmp_path, past_cache):
    path = tmp_path / "model.safetensors"
    save_file(_tensors(), path)
    file = SafetensorsFile(path)
    file.past_cache = past_cache
    os.truncate(path, 1000)
    with pytest.raises(ModelLoadError, match=r"damaged or incomplete: the file ends before byte"):
        list(file.tensors(["a"]))


def test_file_systems_without_direct_reads_are_mapped(tmp_path, monkeypatch):
    with pytest.raises(OSError, match="Invalid argument") as refusal:
        DirectReader(pathlib.Path("/proc/self/maps"), [(0, 1)])

    def refuse(*_):
        raise refusal.value

    path = tmp_path / "model.safetensors"
    save_file(_tensors(), path)
    file = SafetensorsFile(path)
    file.past_cache = True
    monkeypatch.setattr(checkpoint, "DirectReader", refuse)
    assert all(torch.equal(tensor, _tensors()[name]) for name, tensor in file.tensors(list(_tensors())))
