"""Rows that draft tokens, on simulated NPUs: eager, in captured and in compiled graphs."""

from __future__ import annotations

import logging
import pathlib
from typing import Any

import msgspec
import pytest

from ascend_vllm import SamplingParams
from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.attention.backend import ForwardBatch
from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.config.graphs import GraphMode
from ascend_vllm.sampling_params import RequestOutputKind
from ascend_vllm.worker.compiled_runner import CompiledRunner
from ascend_vllm.worker.graph_runner import GraphRunner
from tests.tiny_models import tiny_model
from tests.worker.drafting import Asked, Drafts, generate, make_prompts, texts_of

NUM_DRAFTS = 3


def make_config(
    query_lens: tuple[int, ...] | None = (1, 1 + NUM_DRAFTS), model: str = "qwen2-64-shallow", **options: Any
) -> EngineConfig:
    """A configuration; query_lens: of its graphs, None: as flags make them."""
    settings: dict[str, Any] = {
        "device": "npu",
        "max_num_seqs": 5,
        "max_model_len": 256,
        "num_gpu_blocks_override": 20,
        "swap_space": 0,
        "disable_log_stats": True,
    }
    config = EngineArgs(model=tiny_model(model, "float16"), **(settings | options)).create_engine_config()
    if query_lens is None:
        return config
    graphs = msgspec.structs.replace(config.graphs, query_lens=query_lens)
    if graphs.mode == GraphMode.COMPILED:
        # compiling is what costs time
        graphs = msgspec.structs.replace(graphs, capture_sizes=(4,))
    return msgspec.structs.replace(config, graphs=graphs)


def make_requests() -> dict[str, Asked]:
    common: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True, "output_kind": RequestOutputKind.DELTA}
    changes: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "repetition_penalty": 1.2},
        {"seed": 5, "top_k": 10, "logprobs": 2},
    ]
    prompts = make_prompts(len(changes))
    return {
        str(number): Asked(prompt, SamplingParams(**(common | change)))
        for number, (change, prompt) in enumerate(zip(changes, prompts, strict=True))
    }


# the compiler, and what it is made of, have warnings of their own
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", [GraphMode.EAGER, GraphMode.CAPTURED, GraphMode.COMPILED])
def test_answers_are_those_of_ordinary_decoding(
    mode: GraphMode, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # what makes expandable segments has tests of its own
    monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:False")
    if mode == GraphMode.COMPILED:
        monkeypatch.setenv("INFER_MODE", "PTA")
        monkeypatch.setenv("TORCHAIR_CACHE_HOME", str(tmp_path))
        # it writes what tests never read, as long as anybody listens, which pytest does
        monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    shapes: set[tuple[int, int]] = set()
    for runner in (GraphRunner, CompiledRunner):

        def noting(self: Any, batch: ForwardBatch, run: Any = runner.run) -> Any:
            hidden = run(self, batch)
            if hidden is not None:
                shapes.add((len(batch.seq_lens), batch.max_query_len))
            return hidden

        monkeypatch.setattr(runner, "run", noting)
    requests = make_requests()
    plain = generate(make_config(enforce_eager=True), requests)
    config = make_config(enforce_eager=mode == GraphMode.EAGER)
    assert config.graphs.mode == mode
    drafted = generate(config, requests, [Drafts(texts_of(requests, plain), NUM_DRAFTS, is_steady=True)])
    for name, answer in plain.items():
        assert drafted[name].token_ids == answer.token_ids, name
        assert drafted[name].num_outputs < answer.num_outputs
    # full or padded, all rows with drafts
    assert ((3, 1 + NUM_DRAFTS) in shapes) == (mode != GraphMode.EAGER)
