"""Malformed model directories end the start at once, with a one-line error that names the file."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.engine.input_processor import InputProcessor
from ascend_vllm.engine.tokenizer_extension import tokenizer_of
from ascend_vllm.errors import ConfigError, ModelLoadError
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.models.loader import load_model
from tests.models.malformed_models import NAN, NORM, WEIGHTS, Case, cases, weights
from tests.server import OPENAI_SERVER, Server
from tests.tiny_models import tiny_model

CASES = cases()
# far more than any of them takes; reading a pipe would never end
LIMIT_S = 30


@contextlib.contextmanager
def limited_time() -> Iterator[None]:
    """Fails tests that would wait forever."""

    def stop(*_: object) -> None:
        raise TimeoutError("the model's files are still read")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def start(directory: pathlib.Path, **flags: Any) -> None:
    """Reads a model's files as both processes of a server do, in this one."""
    defaults = {"model": str(directory), "device": "cpu", "dtype": "float32", "use_tqdm_on_load": False}
    config = EngineArgs(**defaults | flags).create_engine_config()
    InputProcessor(config, tokenizer_of(config.model))
    load_model(config.model, config.load, BuildContext(torch.float32, torch.device("cpu")))


def copy_of(model: str, tmp_path: pathlib.Path) -> pathlib.Path:
    directory = tmp_path / "model"
    shutil.copytree(tiny_model(model), directory)
    return directory


@pytest.mark.parametrize("model", sorted({case.model for case in CASES}))
def test_the_models_that_are_broken_are_good_ones(model: str, tmp_path: pathlib.Path) -> None:
    start(copy_of(model, tmp_path))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_line_says_what_is_wrong(case: Case, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many of these were raw tracebacks, some were not detected, some took all memory, and some never ended."""
    monkeypatch.chdir(tmp_path)
    directory = copy_of(case.model, tmp_path)
    case.breaks(directory)
    with pytest.raises((ConfigError, ModelLoadError)) as caught, limited_time():
        start(directory, **case.flags)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1000
    for part in case.parts:
        assert part in message
    # code in a file is not run
    assert not list(tmp_path.rglob("touched"))
    assert not list(tmp_path.rglob("outside"))


def test_a_row_of_the_table_of_tokens_is_warned_of(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """Checkpoints have rows without a token, which are never used."""
    directory = copy_of("llama", tmp_path)
    weights(lambda tensors: tensors["model.embed_tokens.weight"][3].fill_(NAN))(directory)
    with caplog.at_level("WARNING", logger="ascend_vllm.models.loader"):
        start(directory)
    assert f"{directory}/{WEIGHTS}: tensor model.embed_tokens.weight has values that are not finite" in caplog.text


# test_server_lifecycle.py ends a server with weights that are cut
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    [f"nan in {NORM}", "llama num_hidden_layers 1000000000", "header deep", "tokenizer.json a pipe"],
)
def test_a_server_ends_with_one_line(name: str, tmp_path: pathlib.Path) -> None:
    (case,) = [case for case in CASES if case.name == name]
    directory = copy_of(case.model, tmp_path)
    case.breaks(directory)
    server = Server(OPENAI_SERVER, ["--model", str(directory), "--dtype", "float32"])
    try:
        assert server.wait_exit() == 1
        errors = [line for line in server.log.splitlines() if "ERROR" in line]
        assert len(errors) == 1, server.log
        assert all(part in errors[0] for part in case.parts)
        assert "Traceback" not in server.log
    finally:
        server.close()
