"""The operators that a forward pass of a whole model launches, counted per layer."""

from __future__ import annotations

import collections

import numpy as np
import torch

from ascend_vllm.attention.ascend import AscendAttention
from ascend_vllm.attention.backend import ForwardBatch
from ascend_vllm.config.model import LoadConfig
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.models.loader import load_model
from ascend_vllm.ops import ascend as _ascend_ops  # noqa: F401 - registers the operators
from tests.models.paged_driver import make_model_config
from tests.npu.recorder import Recorder, traced
from tests.tiny_models import tiny_model

NPU = torch.device("npu:0")
BLOCK_SIZE = 64


def decode(num_layers: int) -> tuple[collections.Counter[str], Recorder]:
    """Operators on the device, and torch's, of a step in which three rows of a model decode."""
    sizes = {"num_hidden_layers": num_layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    overrides = sizes | {"layer_types": None}
    config = make_model_config(tiny_model("qwen2"), dtype="float16", **overrides)
    model = load_model(config, LoadConfig(load_format="dummy", use_tqdm=False), BuildContext(torch.float16, NPU))
    backend = AscendAttention(BLOCK_SIZE)
    num_blocks = 4
    kv_caches = [
        torch.zeros(
            backend.kv_cache_shape(num_blocks + 1, layer.kv_cache_spec(BLOCK_SIZE)), dtype=torch.float16, device=NPU
        )
        for layer in model.attention_layers
    ]
    backend.bind([layer.spec for layer in model.attention_layers], kv_caches, num_blocks)
    seq_lens = np.array([3, 60, 64], np.int32)
    places = torch.from_numpy(seq_lens).long().to(NPU) - 1
    batch = ForwardBatch(
        input_ids=torch.arange(3, device=NPU),
        positions=places,
        slot_mapping=torch.arange(3, device=NPU) * BLOCK_SIZE + places,
        query_start=torch.arange(4, dtype=torch.int32, device=NPU),
        seq_lens=torch.from_numpy(seq_lens).to(NPU),
        block_table=torch.arange(3, dtype=torch.int32, device=NPU)[:, None],
        logits_indices=torch.arange(3, device=NPU),
        query_start_np=np.arange(4, dtype=np.int32),
        seq_lens_np=seq_lens,
        max_query_len=1,
        max_seq_len=64,
    )
    step = backend.prepare(batch)
    with Recorder() as recorder, traced() as calls:
        hidden = model.forward(batch, kv_caches, backend, step)
    assert hidden.isfinite().all()
    return collections.Counter(call["op"] for call in calls), recorder


def test_a_layer_launches_fused_operators_and_nothing_for_the_host() -> None:
    two, _ = decode(2)
    four, recorder = decode(4)
    more = collections.Counter({name: count - two[name] for name, count in four.items() if count != two[name]})
    products = sum(more.pop(name) for name in list(more) if "Mm" in name or "Matmul" in name or "mm" in name)
    # gate and up, and down; query, key and value, and the output
    assert products == 2 * 4
    assert more == {
        "aclnnInplaceAddRmsNorm": 2 * 2,
        "aclnnApplyRotaryPosEmbV2": 2,
        # query, key and value leave the fused projection
        "aclnnInplaceCopy": 2 * 3,
        "aclnnScatterPaKvCache": 2,
        "aclnnFusedInferAttentionScoreV3": 2,
        "aclnnSwiGlu": 2,
    }
    names = {name for name, _ in recorder.calls}
    assert names.isdisjoint({"aten::_local_scalar_dense", "aten::_to_copy", "aten::copy_", "aten::nonzero"})
    tensors = [
        value for _, arguments in recorder.calls for value in arguments.values() if isinstance(value, torch.Tensor)
    ]
    assert {tensor.device for tensor in tensors} == {NPU}
