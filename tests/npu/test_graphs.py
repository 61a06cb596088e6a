"""Decoding by graphs, through whole engines: the same tokens as operator by operator, and replays that happen."""

from __future__ import annotations

import json
import logging
import pathlib
import signal
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch

from ascend_vllm import SamplingParams
from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.config.arch import ArchConfig
from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.config.graphs import GraphConfig, GraphMode
from ascend_vllm.config.model import ModelConfig
from ascend_vllm.engine.llm_engine import LLMEngine
from ascend_vllm.errors import ConfigError
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.models.qwen2 import Qwen2ForCausalLM
from ascend_vllm.models.registry import MODELS
from ascend_vllm.worker.graph_cache import GraphCache
from ascend_vllm.worker.worker import Worker
from tests.npu.launches import Cost, costs_of, launched_by
from tests.npu.processes import last_line, run
from tests.npu.recorder import traced
from tests.tiny_models import tiny_model

# with heads of 64, as of models that are served: rotary embedding and attention have kernels for them alone
MODEL = "qwen2-64"

PROMPTS = [
    "The quick brown fox",
    "Hello!",
    "Blocks of the cache hold keys and values; a request gets more",
    "1 2 3 4 5",
    "Serving a model means answering many requests",
]
# tokens of steps with prompts that are captured
PIECE_SIZES = (16, 32, 64, 128, 256)
# store keys or latents in eager steps, and are part of a graph otherwise
STORES = {"aclnnScatterPaKvCache", "aclnnKvRmsNormRopeCache"}
ROTATES, ROTATES_OTHERS = "aclnnApplyRotaryPosEmbV2", "aclnnRotaryPositionEmbedding"
ATTENDS = "aclnnFusedInferAttentionScoreV3"
# what decodes heads of 64: query and key rotated by one call, attention without a mask (its sparse_mode)
FAST_KERNELS = {(ROTATES, None), (ATTENDS, 0)}


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables as users have them who set none."""
    for name in ("INFER_MODE", "PTA_TORCHAIR_DECODE_GEAR_ENABLE", "PTA_TORCHAIR_DECODE_GEAR_LIST"):
        monkeypatch.delenv(name, raising=False)
    # what makes expandable segments has tests of its own
    monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:False")


def make_config(model: str = MODEL, **changes: Any) -> EngineConfig:
    # one step at a time, so that what is launched is the step's
    options: dict[str, Any] = {
        "async_scheduling": False,
        "max_num_seqs": 5,
        "max_model_len": 256,
        "num_gpu_blocks_override": 20,
    } | changes
    return EngineArgs(
        model=tiny_model(model, "float16"), device="npu", swap_space=0, disable_log_stats=True, **options
    ).create_engine_config()


def make_engine(model: str = MODEL, capture_sizes: tuple[int, ...] | None = None, **changes: Any) -> LLMEngine:
    config = make_config(model, **changes)
    if capture_sizes is not None:
        config = msgspec.structs.replace(
            config, graphs=msgspec.structs.replace(config.graphs, capture_sizes=capture_sizes)
        )
    return LLMEngine(config)


def generate(engine: LLMEngine, prompts: Sequence[str] = PROMPTS, **params: Any) -> list[tuple[int, ...]]:
    """Ids of the answers, in the order of the prompts."""
    for number, prompt in enumerate(prompts):
        engine.add_request(
            str(number), prompt, SamplingParams(**({"temperature": 0, "max_tokens": 10, "ignore_eos": True} | params))
        )
    answers: dict[str, tuple[int, ...]] = {}
    while engine.has_unfinished_requests():
        answers |= {
            output.request_id: tuple(output.outputs[0].token_ids) for output in engine.step() if output.finished
        }
    return [answers[str(number)] for number in range(len(prompts))]


def layer_kernels(calls: Sequence[dict[str, Any]]) -> set[tuple[str, Any]]:
    """Of a trace: the operators that heads of 64 have kernels of their own for, with the mask that is asked for."""
    chosen = [call for call in calls if call["op"] in (ROTATES, ROTATES_OTHERS, ATTENDS)]
    # the faster kernels of grouped heads need it
    assert {call["args"]["inner_precise"] for call in chosen if call["op"] == ATTENDS} <= {0}
    return {(call["op"], call["args"].get("sparse_mode")) for call in chosen}


@pytest.fixture(scope="module")
def eager_answers() -> list[tuple[int, ...]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:False")
        engine = make_engine(enforce_eager=True)
        with traced() as calls:
            answers = generate(engine)
        # prompts have a mask
        assert layer_kernels(calls) == FAST_KERNELS | {(ATTENDS, 3)}
        # the model does not say the same whatever it is asked
        assert len(set(answers)) == len(PROMPTS)
        return answers


@pytest.mark.parametrize("num_scheduler_steps", [1, 4])
def test_tokens_are_those_of_eager_steps(eager_answers: list[tuple[int, ...]], num_scheduler_steps: int) -> None:
    with traced() as calls:
        engine = make_engine(num_scheduler_steps=num_scheduler_steps, async_scheduling=True)
    # of what is captured, among others
    assert layer_kernels(calls) >= FAST_KERNELS
    # batches of capture sizes, then rows end one after the other, so that batches are padded
    assert generate(engine) == eager_answers
    assert generate(engine, PROMPTS[:1]) == eager_answers[:1]
    assert generate(engine, PROMPTS[1:4]) == eager_answers[1:4]


@pytest.mark.parametrize("model", ["llama-dynamic", "mistral", "qwen2-tied"])
def test_positions_and_windows_move_in_graphs(model: str) -> None:
    """Longer than the window and than the trained length, over a block's end."""
    # all of them are more than pieces take, the last two not
    prompts = [PROMPTS[2] * 5, PROMPTS[4] * 2, PROMPTS[2]]
    by_graph, eager = (make_engine(model, enforce_eager=enforce_eager) for enforce_eager in (False, True))
    for some in (prompts, prompts[1:]):
        assert generate(by_graph, some, max_tokens=20) == generate(eager, some, max_tokens=20)


@pytest.mark.parametrize(("model", "num_scheduler_steps"), [("qwen2-moe", 4), ("deepseek-v3-512", 1)])
def test_mixtures_of_experts_by_graphs(
    model: str, num_scheduler_steps: int, package_log: pytest.LogCaptureFixture
) -> None:
    """Each replay chooses experts anew."""
    options: dict[str, Any] = {"model": model, "max_num_seqs": 3, "num_scheduler_steps": num_scheduler_steps}
    engine = make_engine(**options)
    # latent attention has no pieces
    assert ("pieces of steps with prompts" in package_log.text) == (model == "qwen2-moe")
    assert decode_step_launches(engine, PROMPTS[:2]) == [False]
    assert generate(engine, PROMPTS[:3]) == generate(make_engine(**options, enforce_eager=True), PROMPTS[:3])


def decode_step_launches(engine: LLMEngine, prompts: Sequence[str], num_steps: int = 1) -> list[bool]:
    """Whether each of some decoding steps launched the operators of layers by themselves."""
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    engine.step()
    eager = [bool(STORES & launched_by(engine.step)[1]) for _ in range(num_steps)]
    engine.abort_request([str(number) for number in range(len(prompts))])
    engine.step()
    return eager


def test_decoding_replays() -> None:
    assert decode_step_launches(make_engine(), PROMPTS[:3]) == [False]
    assert decode_step_launches(make_engine(enforce_eager=True), PROMPTS[:3]) == [True]


def costs_of_mixed_step(engine: LLMEngine) -> dict[str, Cost]:
    """Of a step in which two rows decode and a prompt begins."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for number, prompt in enumerate(PROMPTS[:3]):
        if number == 2:
            engine.step()
        engine.add_request(str(number), prompt, params)
    costs: dict[str, Cost] = costs_of(engine.step)[1]
    engine.abort_request(["0", "1", "2"])
    engine.step()
    return costs


def test_steps_with_prompts_replay_the_pieces_between_attention_calls(
    eager_answers: list[tuple[int, ...]], package_log: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()
    layers = 3
    assert "Captured 20 pieces of steps with prompts of up to 16, 32, 64, 128, 256 tokens" in package_log.text
    replayed, eager = costs_of_mixed_step(engine), costs_of_mixed_step(make_engine(enforce_eager=True))
    assert {name: cost.launches for name, cost in replayed.items() if name in (ROTATES, ATTENDS, *STORES)} == {
        ROTATES: 0,
        ATTENDS: layers,
        "aclnnScatterPaKvCache": 0,
    }
    assert {name: cost.runs for name, cost in replayed.items() if name in (ATTENDS, "aclnnScatterPaKvCache")} == {
        ATTENDS: layers,
        "aclnnScatterPaKvCache": layers,
    }
    # attention reads no padding
    assert replayed[ATTENDS].read == eager[ATTENDS].read
    # of layers: attention and the copy of its result
    more = sum(cost.launches for cost in eager.values()) - sum(cost.launches for cost in replayed.values())
    assert more > 6 * layers
    assert generate(engine) == eager_answers
    # more tokens than the largest size
    prompts = [PROMPTS[2] * 4] * 3
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, SamplingParams(temperature=0, max_tokens=2))
    assert launched_by(engine.step)[1] >= {"aclnnScatterPaKvCache"}
    engine.abort_request(["0", "1", "2"])
    engine.step()
    # chunks of such prompts, beside rows that decode
    chunks: dict[str, Any] = {"enable_chunked_prefill": True, "max_num_batched_tokens": 64}
    answers = [
        generate(make_engine(**chunks, **mode), [*PROMPTS, *prompts]) for mode in ({}, {"enforce_eager": True})
    ]
    assert answers[0] == answers[1]


_FEW_STREAMS = """
import json, os
os.environ["PYTORCH_NPU_ALLOC_CONF"] = "expandable_segments:False"
from tests.npu.test_graphs import PROMPTS, decode_step_launches, generate, make_engine
engine = make_engine()
print(json.dumps([decode_step_launches(engine, PROMPTS[:3]), generate(engine)]))
"""


def test_where_pieces_cannot_be_captured_prompts_run_eager(eager_answers: list[tuple[int, ...]]) -> None:
    """The device has streams for the decoding graphs alone, which are captured first."""
    done = run(sys.executable, "-W", "ignore", "-c", _FEW_STREAMS, ASCEND_SIM_STREAMS="50")
    assert json.loads(last_line(done)) == [[False], [list(answer) for answer in eager_answers]]
    assert "Steps with prompts run operator by operator: graphs of" in done.stderr
    assert "207008" in done.stderr


def test_more_rows_than_the_largest_size_run_eager(eager_answers: list[tuple[int, ...]]) -> None:
    engine = make_engine(capture_sizes=(2, 3))
    assert decode_step_launches(engine, PROMPTS[:4]) == [True]
    assert decode_step_launches(engine, PROMPTS[:3]) == [False]
    assert generate(engine) == eager_answers


def test_long_sequences_run_eager(eager_answers: list[tuple[int, ...]]) -> None:
    engine = make_engine(max_seq_len_to_capture=10)
    eager = decode_step_launches(engine, ["Hello!"], 12)
    assert set(eager) == {False, True}
    assert eager == sorted(eager)
    assert generate(engine) == eager_answers


def test_graphs_are_in_the_account_of_memory() -> None:
    """The cache that is sized by what is left is smaller by what a graph keeps."""
    sizes = []
    for enforce_eager in (True, False):
        engine = make_engine(
            enforce_eager=enforce_eager,
            num_gpu_blocks_override=None,
            enable_prefix_caching=True,
            gpu_memory_utilization=0.3,
        )
        sizes.append(engine.core.num_blocks)
    assert sizes[1] < sizes[0]


def test_operators_that_cannot_be_replayed_run_eager(
    monkeypatch: pytest.MonkeyPatch, package_log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ASCEND_VLLM_ATTENTION_OPS", "flash")
    engine = make_engine()
    reason = "the attention operators of ASCEND_VLLM_ATTENTION_OPS=flash cannot be replayed"
    assert f"Decoding runs without graphs: {reason}" in package_log.text
    assert decode_step_launches(engine, PROMPTS[:1]) == [True]
    monkeypatch.setenv("INFER_MODE", "PTA")
    with pytest.raises(ConfigError, match="INFER_MODE=PTA does not go with ASCEND_VLLM_ATTENTION_OPS=flash"):
        make_engine()


# config.json of a published model, whose weights are not needed
QWEN2_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 152064,
}


class _SmallModel(Qwen2ForCausalLM):
    """In the place of a model that is too large for a test, whatever its config.json says."""

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        small = {"hidden_size": 64, "intermediate_size": 112, "num_attention_heads": 4, "num_key_value_heads": 2}
        small |= {"num_hidden_layers": 1, "vocab_size": 384, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6}
        arch = ArchConfig.from_hf({"architectures": ["Qwen2ForCausalLM"]} | small)
        super().__init__(msgspec.structs.replace(config, arch=arch), context)


def test_models_that_need_high_precision_are_named_before_graphs_are_made(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, package_log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("INFER_MODE", "PTA")
    monkeypatch.setenv("USE_PFA_HIGH_PRECISION_MODE", "0")
    monkeypatch.setitem(MODELS, "Qwen2ForCausalLM", _SmallModel)
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_7B))
    args = EngineArgs(model=str(tmp_path), device="npu", load_format="dummy", max_model_len=4096)
    config = args.create_engine_config()
    assert config.graphs.mode == GraphMode.COMPILED
    # the cache is made afterwards, and then the graphs
    Worker(config).load_model()
    advice = "Models like Qwen2-7B give wrong results with USE_PFA_HIGH_PRECISION_MODE=0: set it to 1."
    assert advice in package_log.text
    assert not [record for record in package_log.records if record.name.startswith("ascend_vllm.worker.graph")]


def test_progress_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    expected = GraphConfig(GraphMode.CAPTURED, (2, 4, 5), 256, piece_sizes=PIECE_SIZES)
    assert make_engine().config.graphs == expected
    told = capfd.readouterr().err
    assert "Capturing graphs: 100%" in told and "Capturing pieces: 100%" in told


@pytest.fixture
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Where compiled graphs are kept, with the mode switched on that makes them."""
    monkeypatch.setenv("INFER_MODE", "PTA")
    monkeypatch.setenv("PTA_TORCHAIR_DECODE_GEAR_ENABLE", "1")
    monkeypatch.setenv("PTA_TORCHAIR_DECODE_GEAR_LIST", "1,2,16")
    # it writes what tests never read, as long as anybody listens, which pytest does
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    monkeypatch.setenv("TORCHAIR_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def modules_in(cache: pathlib.Path) -> dict[str, int]:
    """Compiled files, and when they were written."""
    return {str(path): path.stat().st_mtime_ns for path in cache.rglob("compiled_module")}


# the compiler, and what it is made of, have warnings of their own
@pytest.mark.filterwarnings("ignore")
def test_compiled_graphs_are_kept(
    cache: pathlib.Path, eager_answers: list[tuple[int, ...]], package_log: pytest.LogCaptureFixture
) -> None:
    """With one capture size, since compiling is slow."""
    options: dict[str, Any] = {"capture_sizes": (2,), "max_seq_len_to_capture": 24}
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with traced() as calls:
        engine = make_engine(**options)
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert engine.config.graphs == GraphConfig(GraphMode.COMPILED, (2,), 24, piece_sizes=PIECE_SIZES)
    assert layer_kernels(calls) >= FAST_KERNELS
    assert (ROTATES_OTHERS, None) not in layer_kernels(calls)
    first = modules_in(cache)
    assert len(first) == 1
    # a full batch, a padded one, and sequences that outgrow the graph
    for rows in (slice(2), slice(3, 4), slice(2, 5, 2)):
        assert generate(engine, PROMPTS[rows]) == eager_answers[rows]
    # of lengths that there were not before: nothing is captured again
    assert decode_step_launches(engine, [PROMPTS[4], PROMPTS[1]]) == [False]
    # more rows than the capture size
    assert decode_step_launches(engine, PROMPTS[:3]) == [True]
    eager = decode_step_launches(engine, PROMPTS[4:], 10)
    assert set(eager) == {False, True}
    assert eager == sorted(eager)
    # no cache is copied: what is compiled writes in place
    compiled = pathlib.Path(next(iter(first))).read_bytes().decode("latin1")
    assert "ascend_store_and_take.default" in compiled
    assert "_functional.default" not in compiled
    assert "aten.copy_" not in compiled
    # the second start writes nothing, and reads what there is; the number of blocks may be another one
    engine = make_engine(**options, num_scheduler_steps=4, num_gpu_blocks_override=9)
    assert modules_in(cache) == first
    assert "Loaded 1 graphs" in package_log.text
    assert generate(engine) == eager_answers
    assert_another_chip_compiles_anew(cache, package_log)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_mixtures_of_experts_are_compiled(cache: pathlib.Path) -> None:
    prompts = PROMPTS[1:3]
    engine = make_engine("qwen2-moe-64", (2,))
    assert engine.config.graphs.mode == GraphMode.COMPILED
    (compiled,) = modules_in(cache)
    text = pathlib.Path(compiled).read_bytes().decode("latin1")
    assert "ascend_vllm.route_tokens.default" in text
    assert "ascend_vllm.grouped_experts_mlp.default" in text
    assert decode_step_launches(engine, prompts) == [False]
    assert generate(engine, prompts) == generate(make_engine("qwen2-moe-64", enforce_eager=True), prompts)


def assert_another_chip_compiles_anew(cache: pathlib.Path, package_log: pytest.LogCaptureFixture) -> None:
    (kept,) = cache.rglob("fingerprint.json")
    made_for = json.loads(kept.read_text())
    assert made_for["SoC"] == torch.npu.get_device_name()
    assert not GraphCache(kept.parent, made_for | {"SoC": "Ascend910B1"}).prepare()
    assert f"made anew: SoC was {made_for['SoC']}, is Ascend910B1" in package_log.text
    assert modules_in(cache) == {}
