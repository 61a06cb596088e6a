"""Step state on simulated NPUs: eager, in captured and in compiled graphs."""

from __future__ import annotations

import logging
import pathlib

import pytest

from ascend_vllm.config.graphs import GraphMode
from ascend_vllm.models.registry import MODELS
from tests.npu.test_drafts_on_npu import make_config
from tests.worker.biased_model import NUM_BIASES, BiasedForCausalLM, Biases, make_requests
from tests.worker.drafting import generate


# the compiler, and what it is made of, have warnings of their own
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", [GraphMode.EAGER, GraphMode.CAPTURED, GraphMode.COMPILED])
def test_rows_of_a_step_get_their_own(
    mode: GraphMode, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # what makes expandable segments has tests of its own
    monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:False")
    monkeypatch.setitem(MODELS, "Qwen2ForCausalLM", BiasedForCausalLM)
    if mode == GraphMode.COMPILED:
        monkeypatch.setenv("INFER_MODE", "PTA")
        monkeypatch.setenv("TORCHAIR_CACHE_HOME", str(tmp_path))
        # it writes what tests never read, as long as anybody listens, which pytest does
        monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    requests = {name: asked for name, asked in make_requests().items() if name != "0-1"}
    eager = make_config(enforce_eager=True)
    config = make_config((1,), enforce_eager=mode == GraphMode.EAGER)
    assert config.graphs.mode == mode
    answers = generate(config, requests, [Biases()])
    found = set()
    for name, asked in requests.items():
        alone = generate(eager, {name: asked}, [Biases()])[name]
        assert answers[name].token_ids == alone.token_ids, name
        found.add(tuple(alone.token_ids[:8]))
    # the numbers make a difference
    assert len(found) >= NUM_BIASES
