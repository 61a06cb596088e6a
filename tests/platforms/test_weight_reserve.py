"""Memory for weights that is written while torch is imported."""

from __future__ import annotations

import gc
import pathlib

import msgspec
import psutil
import pytest
import torch

from ascend_vllm.config.model import LoadConfig
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.models.loader import load_model
from ascend_vllm.platforms import weight_reserve
from ascend_vllm.platforms.host_memory import weight_memory
from ascend_vllm.platforms.weight_reserve import WeightReserve, reserve_for, take_reserved, taking_from
from tests.models.paged_driver import PagedDriver, make_model_config
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import make_config

MIB = 1 << 20


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def _put_model(directory: pathlib.Path, num_bytes: int) -> str:
    with (directory / "model.safetensors").open("wb") as file:
        file.truncate(num_bytes)
    return str(directory)


def test_pieces_are_zeros_of_their_own() -> None:
    reserve = WeightReserve(4 * MIB)
    pieces = [reserve.take(num_bytes) for num_bytes in (MIB + 1, 1, MIB)]
    tensors = [torch.frombuffer(piece, dtype=torch.uint8) for piece in pieces if piece is not None]
    assert [len(tensor) for tensor in tensors] == [MIB + 1, 1, MIB]
    assert all(tensor.data_ptr() % 4096 == 0 for tensor in tensors)
    for value, tensor in enumerate(tensors):
        assert not tensor.any()
        tensor.fill_(value + 1)
    assert [int(tensor.min()) for tensor in tensors] == [1, 2, 3]
    assert reserve.take(2 * MIB) is None
    assert reserve.take(MIB) is not None


def test_the_reserve_is_written_before_it_is_taken() -> None:
    before = _resident_bytes()
    reserve = WeightReserve(64 * MIB)
    reserve._thread.join()
    assert _resident_bytes() - before > 60 * MIB
    reserve.close()
    assert _resident_bytes() - before < 8 * MIB
    assert reserve.take(1) is None


def test_a_piece_goes_back_to_the_system_when_it_is_dropped() -> None:
    reserve = WeightReserve(64 * MIB)
    with taking_from(reserve):
        kept = weight_memory((16 * MIB,), torch.uint8).fill_(1)
        dropped = weight_memory((32 * MIB,), torch.uint8).fill_(1)
    before = _resident_bytes()
    del dropped
    gc.collect()
    assert before - _resident_bytes() > 24 * MIB
    assert int(kept.min()) == 1
    del reserve
    gc.collect()
    assert int(kept.min()) == 1


def test_weights_lie_in_the_reserve_only_while_it_is_in_use() -> None:
    reserve = WeightReserve(MIB)
    with taking_from(reserve):
        # a piece, memory of its own since it is small, and since it is larger than what is left
        assert take_reserved(MIB // 2) is not None
        assert not weight_memory((16,), torch.float32).any()
        assert not weight_memory((MIB,), torch.float32).any()
    assert take_reserved(1) is None
    with taking_from(None):
        assert take_reserved(1) is None


def test_a_model_in_a_reserve_is_the_same_model() -> None:
    config = make_model_config(tiny_model("qwen2"))
    context = BuildContext(torch.float32, torch.device("cpu"))
    reserve = WeightReserve(MIB)
    models = [load_model(config, LoadConfig(use_tqdm=False), context, room) for room in (None, reserve)]
    assert reserve.take(1) is None, "what was left is given back"
    plain, reserved = (PagedDriver(config, model=model).step({0: [1, 2, 3, 4]})[0] for model in models)
    assert torch.equal(plain, reserved)


@pytest.mark.parametrize(
    ("change", "wanted"), [({}, True), ({"load_format": "dummy"}, False), ({"load_format": "pt"}, False)]
)
def test_a_reserve_is_made_for_files_that_will_be_loaded(
    tmp_path: pathlib.Path, change: dict[str, str], wanted: bool
) -> None:
    config = make_config(tiny_model("qwen2"))
    model = msgspec.structs.replace(config.model, model=_put_model(tmp_path, 32 * MIB))
    load = msgspec.structs.replace(config.load, **{"load_format": "auto"} | change)
    reserve = reserve_for(msgspec.structs.replace(config, model=model, load=load))
    assert (reserve is not None) == wanted
    if reserve is not None:
        assert len(reserve._pages) == 32 * MIB
        reserve.close()


def test_small_models_and_several_memory_nodes_have_none(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tiny_model("qwen2"))
    assert reserve_for(config) is None
    large = msgspec.structs.replace(config.model, model=_put_model(tmp_path, 32 * MIB))
    nodes = tmp_path / "online"
    nodes.write_text("0-1\n")
    monkeypatch.setattr(weight_reserve, "_NUMA_NODES", nodes)
    assert reserve_for(msgspec.structs.replace(config, model=large)) is None
    monkeypatch.setattr(weight_reserve, "_NUMA_NODES", tmp_path / "missing")
    assert reserve_for(msgspec.structs.replace(config, model=large)) is None
