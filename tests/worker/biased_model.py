"""A model with a layer that adds to each token what its row's number says: a toy for step state."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ascend_vllm.config.model import ModelConfig
from ascend_vllm.core.request import Request
from ascend_vllm.layers.base import Layer
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.layers.linear import RowParallelLinear
from ascend_vllm.layers.step_state import StepStateSpec
from ascend_vllm.models.qwen2 import Qwen2ForCausalLM
from ascend_vllm.ops.elementwise import fused_add_rms_norm
from ascend_vllm.ops.embedding import gather_rows
from ascend_vllm.sampling_params import RequestOutputKind, SamplingParams
from tests.worker.drafting import Asked, Drafts, make_prompts

NUM_BIASES = 4
BIAS_ID = StepStateSpec("bias_id", torch.int64)


class Biased(Layer):
    """A linear layer with a vector added to its output, as adapters do it: it sees tokens, and no batch."""

    def __init__(self, inner: RowParallelLinear, context: BuildContext, width: int) -> None:
        self.inner = inner
        self._bias_ids = context.step_state.declare(BIAS_ID)
        table = torch.randn(NUM_BIASES, width, generator=torch.Generator().manual_seed(1))
        table[0] = 0
        self._table = table.to(context.dtype).to(context.device)
        self._ones = torch.ones(width, dtype=context.dtype, device=context.device)
        self._look_up = gather_rows if context.device.type == "cpu" else torch.embedding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.inner.forward(x)
        # an addition that tapes can hold
        fused_add_rms_norm(self._look_up(self._table, self._bias_ids[: x.shape[0]]), output, self._ones, 1e-6)
        return output


class BiasedForCausalLM(Qwen2ForCausalLM):
    """Qwen2 with biases in all layers."""

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        for layer in self.decoder_layers:
            layer.mlp.down_proj = Biased(layer.mlp.down_proj, context, config.hidden_size)  # type: ignore[assignment]


class Biases(Drafts):
    """Gives rows their numbers: those that requests' names end with."""

    def __init__(self, texts: Mapping[str, list[int]] | None = None, num_drafts: int = 0) -> None:
        super().__init__(texts or {}, num_drafts, is_steady=True)

    def begin(self, request: Request) -> bool:
        number = int(request.request_id[-1])
        if number:
            request.row_state = {BIAS_ID.name: number}
        return super().begin(request)


def make_requests() -> dict[str, Asked]:
    """Of each number, the same prompts."""
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    prompts = make_prompts(2)
    return {
        f"{prompt}-{number}": Asked(prompts[prompt], params.clone(max_tokens=10 + 3 * number))
        for number in range(NUM_BIASES)
        for prompt in range(2)
    }
