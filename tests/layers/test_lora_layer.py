"""Layers with LoRA adapters: slices, ranks of a group, quantized inputs, embeddings and heads, wrong shapes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ascend_vllm.config.lora import LoRAConfig
from ascend_vllm.distributed.parallel_context import ParallelContext
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.layers.base import Layer, WeightSlot
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.layers.embedding import LMHead, TiedLMHead, VocabParallelEmbedding
from ascend_vllm.layers.linear import Linear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from ascend_vllm.layers.lora import LoRAScheme, ModelAdapters, Ranks
from ascend_vllm.layers.quantization.base import Activation, ActivationQuant, LinearLayer, QuantMethod, QuantScheme
from ascend_vllm.layers.quantization.unquantized import UnquantizedScheme
from ascend_vllm.layers.step_state import StepState
from ascend_vllm.models.lora_adapter import LoRAMatrices
from ascend_vllm.types.step import ADAPTER_SLOT
from tests.distributed.thread_ranks import on_ranks

HIDDEN, RANK = 24, 5
# of the rows of a step: slots of their adapters, or none
SLOTS = torch.tensor([1, -1, 0, 1, 0], dtype=torch.int32)


@dataclasses.dataclass
class Case:
    """A layer with two adapters in its slots."""

    layer: Linear
    state: StepState
    adapters: ModelAdapters

    def forward(self, x: torch.Tensor, slots: torch.Tensor = SLOTS) -> torch.Tensor:
        self.state.write({ADAPTER_SLOT: slots})
        self.state.is_plain = bool((slots < 0).all())
        return self.layer.forward(x)


def make(kind: str, rank: int = 0, size: int = 1, scheme: QuantScheme | None = None) -> Case:
    context = BuildContext(torch.float32, torch.device("cpu"), ParallelContext(rank, size))
    return make_in(context, kind, LoRAConfig(2, 16, 2, "float32"), scheme)


def make_in(context: BuildContext, kind: str, config: LoRAConfig, scheme: QuantScheme | None = None) -> Case:
    state = StepState(8, 8, torch.device("cpu"))
    ranks = Ranks(context.parallel, context.collectives)
    quant = LoRAScheme(scheme or UnquantizedScheme(), config, state, ranks)
    context = dataclasses.replace(context, quant=quant, step_state=state)
    layer: Linear
    if kind == "qkv":
        layer = QKVParallelLinear(context, "attn", HIDDEN, head_size=8, num_heads=4, num_kv_heads=2, bias=True)
    elif kind == "gate_up":
        names = ("gate_proj", "up_proj")
        layer = MergedColumnParallelLinear(context, "mlp", names, HIDDEN, (48, 48), merged_name="gate_up_proj")
    else:
        layer = RowParallelLinear(context, "down_proj", HIDDEN, 10, adds_ranks=False)
    for index, slot in enumerate(layer.slots()):
        slot.fill(torch.randn(slot.shape, generator=torch.Generator().manual_seed(index)))
    layer.after_load()
    adapters = ModelAdapters(layer)
    for number in range(2):
        adapters.place(number, adapters.pack(matrices(layer, number), "somewhere"))
    return Case(layer, state, adapters)


def matrices(layer: Linear, number: int) -> dict[str, LoRAMatrices]:
    """Of all matrices of the layer; the second adapter leaves the first one as it is."""
    found = {}
    for index, output in enumerate(layer.outputs):
        generator = torch.Generator().manual_seed(10 * number + index)
        a = torch.randn(RANK + index, HIDDEN, generator=generator)
        found[output.name] = LoRAMatrices(a, torch.randn(output.total, RANK + index, generator=generator))
    if number == 1 and len(found) > 1:
        del found[layer.outputs[0].name]
    return found


def x_of_step() -> torch.Tensor:
    return torch.randn(len(SLOTS), HIDDEN, generator=torch.Generator().manual_seed(99))


def expected(case: Case, slots: torch.Tensor = SLOTS) -> torch.Tensor:
    """By plain products, from a layer that is whole."""
    x = x_of_step()
    result = case.forward(x, torch.full_like(slots, -1)).clone()
    for number in range(2):
        found, rows = matrices(case.layer, number), slots == number
        parts = [
            x @ found[output.name].a.T @ found[output.name].b.T
            if output.name in found
            else torch.zeros(len(x), output.total)
            for output in case.layer.outputs
        ]
        result[rows] += torch.cat(parts, dim=-1)[rows]
    return result


@pytest.mark.parametrize("kind", ["qkv", "gate_up", "down"])
def test_each_row_has_its_own_adapter(kind: str) -> None:
    case = make(kind)
    torch.testing.assert_close(case.forward(x_of_step()), expected(case), atol=1e-4, rtol=1e-5)


def test_an_activation_comes_behind_the_adapters() -> None:
    case = make("gate_up")
    gate, up = expected(case).chunk(2, dim=-1)
    case.forward(x_of_step())
    assert isinstance(case.layer, MergedColumnParallelLinear)
    gated = case.layer.forward_gated(x_of_step(), "silu")
    torch.testing.assert_close(gated, torch.nn.functional.silu(gate) * up, atol=1e-3, rtol=1e-4)


def test_ranks_have_their_part_of_an_adapter() -> None:
    whole = expected(make("qkv"))
    query, key, value = whole.split((32, 16, 16), dim=-1)
    down = expected(make("down"))
    parts = []
    for rank in range(2):
        found = make("qkv", rank, 2).forward(x_of_step())
        wanted = torch.cat([part.chunk(2, dim=-1)[rank] for part in (query, key, value)], dim=-1)
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-5)
        parts.append(make("down", rank, 2).forward(x_of_step().chunk(2, dim=-1)[rank].contiguous()))
    # the other ranks' results are added
    torch.testing.assert_close(parts[0] + parts[1], down, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_may_share_both_matrices(size: int) -> None:
    """Each rank's sums with A are over its inputs, of which the ranks have the same number or one more."""
    config = LoRAConfig(2, 16, 2, "float32", fully_sharded=True)

    def compute(context: BuildContext) -> dict[str, torch.Tensor]:
        found = {}
        own = x_of_step().chunk(size, dim=-1)[context.parallel.tp_rank].contiguous()
        for kind, x in {"gate_up": x_of_step(), "down": own}.items():
            case = make_in(context, kind, config)
            (site,) = case.layer.method.sites  # type: ignore[attr-defined]
            assert site.inputs.size == HIDDEN // size
            assert sum(output.shard.size for output in site.outputs) < sum(output.total for output in site.outputs)
            found[kind] = case.forward(x).clone()
        return found

    whole = {kind: expected(make(kind)) for kind in ("gate_up", "down")}
    parts = on_ranks(size, compute)
    torch.testing.assert_close(sum(part["down"] for part in parts), whole["down"], atol=1e-4, rtol=1e-5)
    gate, up = whole["gate_up"].chunk(2, dim=-1)
    for rank, part in enumerate(parts):
        wanted = torch.cat([of.tensor_split(size, dim=-1)[rank] for of in (gate, up)], dim=-1)
        torch.testing.assert_close(part["gate_up"], wanted, atol=1e-4, rtol=1e-5)


class _Doubled(ActivationQuant):
    def quantize(self, x: torch.Tensor) -> Activation:
        return {"doubled": 2 * x}


class _Halves(QuantMethod):
    """Reads what norms doubled."""

    def __init__(self) -> None:
        self._inner = UnquantizedScheme()

    def create_weights(self, layer: LinearLayer) -> list[WeightSlot]:
        self.activation_quant = _Doubled()
        self._method = self._inner.method_for(layer)
        return self._method.create_weights(layer)

    def after_load(self, layer: LinearLayer) -> None:
        self._method.after_load(layer)

    def apply(self, layer: LinearLayer, x: Activation) -> torch.Tensor:
        return self._method.apply(layer, x["doubled"] / 2 if isinstance(x, dict) else x)


class _HalvesScheme(QuantScheme):
    def method_for(self, layer: LinearLayer) -> QuantMethod:  # noqa: ARG002
        return _Halves()


def test_adapters_read_what_norms_have_not_quantized() -> None:
    case = make("qkv", scheme=_HalvesScheme())
    wanted = expected(case)
    quant = case.layer.activation_quant
    assert quant is not None
    # of a norm, and as layers behind others get it
    for x in (quant.quantize(x_of_step()), x_of_step()):
        torch.testing.assert_close(case.forward(x), wanted, atol=1e-4, rtol=1e-5)


# of a step: tokens, of which the last two have logits
TOKENS, LOGITS_TOKENS = torch.tensor([3, 0, 36, 3, 18]), torch.tensor([3, 4])
VOCABULARY = 37


class _Vocabulary(Layer):
    """An embedding and a head, tied or not."""

    def __init__(self, context: BuildContext, *, is_tied: bool) -> None:
        self.embedding = VocabParallelEmbedding(context, "model.embed_tokens", VOCABULARY, HIDDEN)
        self.head: LMHead | TiedLMHead = (
            TiedLMHead(self.embedding) if is_tied else LMHead(context, "lm_head", HIDDEN, VOCABULARY)
        )


def _vocabulary_matrices(number: int) -> dict[str, LoRAMatrices]:
    generator = torch.Generator().manual_seed(number)
    rank = RANK + number

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    table = LoRAMatrices(draw(rank, VOCABULARY), draw(HIDDEN, rank))
    head = LoRAMatrices(draw(rank, HIDDEN), draw(VOCABULARY, rank))
    # the second adapter has no head
    return {"model.embed_tokens": table} | ({"lm_head": head} if number == 0 else {})


def _compute(context: BuildContext, is_tied: bool, is_sharded: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors of `TOKENS` and logits of `LOGITS_TOKENS`."""
    state = StepState(8, 8, torch.device("cpu"))
    config = LoRAConfig(2, 16, 2, "float32", fully_sharded=is_sharded)
    quant = LoRAScheme(UnquantizedScheme(), config, state, Ranks(context.parallel, context.collectives))
    model = _Vocabulary(dataclasses.replace(context, quant=quant, step_state=state), is_tied=is_tied)
    for layer in model.layers():
        for slot in layer.slots():
            slot.fill(torch.randn(slot.shape, generator=torch.Generator().manual_seed(7 + len(slot.name))))
        layer.after_load()
    adapters = ModelAdapters(model)
    for number in range(2):
        adapters.place(number, adapters.pack(_vocabulary_matrices(number), "somewhere"))
    state.write({ADAPTER_SLOT: SLOTS})
    state.is_plain = False
    state.logits_tokens = LOGITS_TOKENS
    hidden = x_of_step()[LOGITS_TOKENS]
    return model.embedding.forward(TOKENS), model.head.forward(hidden)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(("size", "is_sharded"), [(1, False), (2, False), (2, True)])
def test_embeddings_and_heads(size: int, is_sharded: bool, is_tied: bool) -> None:
    """An adapter of a tied embedding leaves the head as it is, and the reverse."""
    names = ("model.embed_tokens.weight", "model.embed_tokens.weight" if is_tied else "lm_head.weight")
    table, head = (
        torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(7 + len(name))) for name in names
    )
    vectors, logits = table[TOKENS], x_of_step()[LOGITS_TOKENS] @ head.T
    for row, (token, number) in enumerate(zip(TOKENS.tolist(), SLOTS.tolist(), strict=True)):
        if number >= 0:
            of_table = _vocabulary_matrices(number)["model.embed_tokens"]
            vectors[row] += of_table.b @ of_table.a[:, token]
        of_head = _vocabulary_matrices(number).get("lm_head")
        if row in LOGITS_TOKENS.tolist() and of_head is not None:
            place = LOGITS_TOKENS.tolist().index(row)
            logits[place] += of_head.b @ of_head.a @ x_of_step()[row]
    for found in on_ranks(size, lambda context: _compute(context, is_tied, is_sharded)):
        torch.testing.assert_close(found[0], vectors, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(found[1], logits, atol=1e-4, rtol=1e-5)


def test_a_slot_may_get_another_adapter() -> None:
    case = make("down")
    before = case.forward(x_of_step()).clone()
    case.adapters.place(1, case.adapters.pack(matrices(case.layer, 0), "somewhere"))
    after = case.forward(x_of_step())
    assert before[SLOTS != 1].equal(after[SLOTS != 1])
    torch.testing.assert_close(after, expected(case, torch.where(SLOTS == 1, 0, SLOTS).int()), atol=1e-4, rtol=1e-5)
    case.adapters.place(1, [None])
    assert case.forward(x_of_step())[SLOTS == 1].equal(
        case.forward(x_of_step(), torch.full_like(SLOTS, -1))[SLOTS == 1]
    )


def test_wrong_adapters_are_refused_by_name() -> None:
    case = make("down")
    with pytest.raises(ModelLoadError, match=r"While loading sql, expected target modules in \['down_proj'\]"):
        list(case.adapters.pack({"up_proj": LoRAMatrices(torch.zeros(2, 3), torch.zeros(3, 2))}, "sql"))
    for a, b, name in (((2, 7), (10, 2), "A"), ((2, HIDDEN), (9, 2), "B"), ((2, HIDDEN), (10, 3), "B")):
        with pytest.raises(ModelLoadError, match=f"sql: down_proj.lora_{name}.weight has shape"):
            list(case.adapters.pack({"down_proj": LoRAMatrices(torch.zeros(*a), torch.zeros(*b))}, "sql"))


def test_tokens_that_the_model_does_not_have_are_refused() -> None:
    state = StepState(8, 8, torch.device("cpu"))
    quant = LoRAScheme(UnquantizedScheme(), LoRAConfig(2, 16, 2, "float32"), state)
    context = BuildContext(torch.float32, torch.device("cpu"), quant=quant, step_state=state)
    adapters = ModelAdapters(_Vocabulary(context, is_tied=True))
    table = LoRAMatrices(torch.zeros(2, VOCABULARY + 1), torch.zeros(HIDDEN, 2))
    with pytest.raises(ModelLoadError, match=r"sql: model.embed_tokens.lora_embedding_A has shape \[2, 38\]"):
        list(adapters.pack({"model.embed_tokens": table}, "sql"))
    head = LoRAMatrices(torch.zeros(2, HIDDEN), torch.zeros(VOCABULARY + 1, 2))
    with pytest.raises(ModelLoadError, match=r"sql: lm_head.lora_B.weight has shape \[38, 2\]"):
        list(adapters.pack({"lm_head": head}, "sql"))


def test_layers_of_other_workers_are_left_to_them() -> None:
    adapters = ModelAdapters(make("down").layer, [r"layers\.1\..*"])
    nothing = LoRAMatrices(torch.zeros(2, 3), torch.zeros(3, 2))
    assert list(adapters.pack({"layers.1.up_proj": nothing}, "sql")) == [None]
    with pytest.raises(ModelLoadError, match=r"received \['layers.2.up_proj'\]"):
        list(adapters.pack({"layers.2.up_proj": nothing}, "sql"))


def test_models_without_adapters_have_no_layers_for_them() -> None:
    assert list(ModelAdapters(Layer()).pack({}, "none")) == []
