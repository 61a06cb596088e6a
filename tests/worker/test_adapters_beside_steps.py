"""Adapters that a worker reads while it computes steps."""

from __future__ import annotations

import contextlib
import pathlib
import time
import types

import pytest

from ascend_vllm.worker import adapters
from ascend_vllm.worker.worker import Worker
from tests.lora_adapters import Adapter, write_adapter
from tests.tiny_models import tiny_model
from tests.worker.test_drafts import make_config


@pytest.mark.parametrize("is_computing", [False, True])
def test_the_reader_rests_while_a_step_is_computed(
    tmp_path: pathlib.Path, is_computing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the step has the cores."""
    path = write_adapter(
        tmp_path / "sql", tiny_model("qwen2"), Adapter("sql", rank=8, modules=("q_proj", "down_proj"))
    )
    worker = Worker(make_config(enable_lora=True))
    worker.load_model()
    rests: list[float] = []
    loaded = worker._adapters
    assert loaded is not None
    monkeypatch.setattr(adapters, "time", types.SimpleNamespace(sleep=rests.append, thread_time=time.thread_time))
    with loaded.computing() if is_computing else contextlib.nullcontext():
        worker.load_adapter(1, path)
        deadline = time.monotonic() + 60
        while worker.adapter_state(1) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert worker.adapter_state(1) == ""
    # at least after each tensor that is read, and after each layer that is packed
    assert (len(rests) > 8) if is_computing else not rests
    assert all(seconds >= 0 for seconds in rests)
    worker.place_adapter(0, 1)
    worker.shutdown()
