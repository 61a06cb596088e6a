"""What is known about the devices without touching them, or torch: the API-server process never loads torch."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import pathlib
import re
import subprocess
import sys

from ascend_vllm import envs

_PROBE = pathlib.Path(__file__).with_name("npu_probe.py")
# a driver whose card is being reset answers late, a broken one never
_PROBE_TIMEOUT_S = 60.0


@dataclasses.dataclass(frozen=True)
class DeviceFacts:
    """Facts that decide the configuration.

    Attributes:
        name: as in --device.
        dtypes: names of the dtypes a model can run in; the first is what --dtype auto makes of float32 checkpoints.
        block_sizes: allowed --block-size values.
        default_block_size: the fastest of them.
        kv_byte_dtypes: names of the dtypes of one byte per number that its attention reads keys and values in.
        kv_scale_dtype: of scales that each head of each token has there.
        has_latent_bytes: latent attention reads such dtypes, too.
        mixes_steps: whether prompts and decoding rows are best computed in one step: no row's result depends on the
            others, and decoding steps have no graphs that would be lost.
        max_num_seqs: sequences that one call of attention takes.
        iteration_timeout_s: seconds of a step beyond which the engine counts as hung, unless the environment says
            otherwise.
        model: what kind of the device it is; empty if that is not known or there is only one.
        missing: operators that every model needs and the device does not have; empty if models run on it.
    """

    name: str
    dtypes: tuple[str, ...]
    block_sizes: tuple[int, ...]
    default_block_size: int
    kv_byte_dtypes: tuple[str, ...]
    kv_scale_dtype: str
    iteration_timeout_s: float
    mixes_steps: bool = False
    has_latent_bytes: bool = False
    max_num_seqs: int | None = None
    model: str = ""
    missing: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The device for the text of an error: "cpu", or "npu (Ascend310P3)"."""
        return f"{self.name} ({self.model})" if self.model else self.name

    @property
    def refusal(self) -> str | None:
        """Why no model runs on the device, as a sentence that says what to do; None if models do."""
        if not self.missing:
            return None
        return (
            f"--device npu: attention on {self.model} is not possible: the operators that it is made of "
            f"({', '.join(self.missing)}) do not exist there. Use --device cpu, or another chip: {_NPU_FAMILIES}."
        )


# bfloat16 first on CPU: its instructions (AVX-512 BF16, AMX) are common, float16 ones are not. 60 s are vLLM's limit
# of a step; on CPU one with a prompt of some thousand tokens rightly takes minutes.
CPU = DeviceFacts(
    "cpu",
    ("bfloat16", "float16", "float32"),
    (16, 32, 64, 128),
    32,
    ("int8", "float8_e4m3fn", "float8_e5m2"),
    "bfloat16",
    600.0,
    mixes_steps=True,
    has_latent_bytes=True,
)
# no 8-bit floats on A2 and A3
NPU = DeviceFacts("npu", ("bfloat16", "float16"), (64, 128), 128, ("int8",), "float32", 60.0, max_num_seqs=4096)
FACTS = {facts.name: facts for facts in (CPU, NPU)}

# Kinds of NPU by the runtime's names for them. Ascend910B1 to B4 are the A2 generation and Ascend910_93xx the A3;
# Ascend910A, Ascend910B without a number and their like are the first generation, which the operators that this
# server is made of do not run on. Atlas 300I Duo and its like (310P) have no bfloat16 and none of the operators that
# are named here, by torch_npu's and CANN's documentation; what attends there, npu_prompt_flash_attention and
# npu_incre_flash_attention, takes no KV heads that several query heads share.
_NOT_ON_310P = ("npu_fused_infer_attention_score", "npu_scatter_pa_kv_cache")
_NPU_MODELS = (
    (re.compile(r"Ascend910B\d"), NPU),
    (re.compile(r"Ascend910_93"), NPU),
    (re.compile(r"Ascend310P\d"), dataclasses.replace(NPU, dtypes=("float16",), missing=_NOT_ON_310P)),
)
_NPU_FAMILIES = "Ascend910B1 to B4 (A2) and Ascend910_93 (A3)"


def npu_facts(soc: str) -> DeviceFacts | None:
    """Facts of a kind of NPU by the runtime's name for it; None if it is not known.

    Example::

        npu_facts("Ascend910B3").dtypes     # ("bfloat16", "float16")
    """
    for pattern, facts in _NPU_MODELS:
        if pattern.match(soc):
            return dataclasses.replace(facts, model=soc)
    return None


# What releases of CANN before a version lack of what this server calls, the newest first; whether models run all the
# same. Sources: the history of CANN's ops-transformer and ops-nn, and torch_npu's cast of formats.
_CANN_GAPS = (
    (
        (9, 1),
        True,
        "weights are cast to FRACTAL_NZ by the graph engine, which needs the Python packages of its compiler",
    ),
    ((9, 0), False, "attention over blocks has no sliding window, and blocks of 128 tokens only"),
    ((8, 5), False, "attention over blocks takes bfloat16 only, and rotary embedding heads of 128 only"),
)
# of torch_npu 2.13, the release that the package is built for, and of the driver
CANN_WANTED = "9.1.0"
DRIVER_WANTED = "25.5.1"


@dataclasses.dataclass(frozen=True)
class CannFacts:
    """What a version of CANN means for this server.

    Attributes:
        refusal: why models do not run with it, as a sentence that says what to do; None if they do.
        warning: what is missing although models run, likewise.
    """

    refusal: str | None = None
    warning: str | None = None

    @classmethod
    def of(cls, version: str) -> CannFacts:
        """Facts of a version such as "9.1.0" or "8.1.RC1"; without any if it is not known.

        Example::

            CannFacts.of("9.1.RC1")     # CannFacts(refusal=None, warning=None)
        """
        numbers = version_numbers(version)
        gaps = [(works, gap) for least, works, gap in _CANN_GAPS if numbers and numbers[:2] < least]
        if not gaps:
            return cls()
        missing = "; ".join(gap for _, gap in gaps)
        sentence = f"CANN {version} is older than {CANN_WANTED}, which torch_npu 2.13 needs: {missing}. Install it."
        return cls(warning=sentence) if all(works for works, _ in gaps) else cls(refusal=sentence)


def version_numbers(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: "8.1.RC1" → (8, 1); () if there are none."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


@dataclasses.dataclass(frozen=True)
class NpuProbe:
    """What CANN's runtime says of the NPUs.

    Attributes:
        count: NPUs that may be used, after ASCEND_RT_VISIBLE_DEVICES.
        soc: their kind, such as "Ascend910B3".
        cann: version of CANN, such as "9.1.0"; empty if it is not known.
        error: why it cannot be asked, as a clause; empty if it answered.
        free_bytes: of the first NPU's memory; 0 unless asked for.
        total_bytes: likewise.
    """

    count: int = 0
    soc: str = ""
    error: str = ""
    cann: str = ""
    free_bytes: int = 0
    total_bytes: int = 0


@functools.cache
def probe_npus(*, with_memory: bool = False) -> NpuProbe:
    """Asks the runtime in a process of its own; later calls have the same answer.

    Args:
        with_memory: ask for the first device's memory too.
    """
    command = [sys.executable, "-I", str(_PROBE), *(["--memory"] if with_memory else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return NpuProbe(error=f"the runtime of CANN has not answered for {_PROBE_TIMEOUT_S:.0f} s")
    # the runtime may write lines of its own to stdout
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return NpuProbe(error=f"the runtime of CANN ended with exit code {done.returncode} ({last})")
    return NpuProbe(**json.loads(lines[-1]))


def npu_unusable_reason() -> str | None:
    """Why no NPU can be used here, as a sentence that says what to do; None if one can.

    That models do not run on one of its kind is another matter: see `DeviceFacts.refusal`.
    """
    if importlib.util.find_spec("torch_npu") is None:
        return (
            "--device npu needs torch_npu, which is not installed: "
            "pip install 'ascend-vllm[npu]' on a machine with CANN, or use --device cpu."
        )
    found = probe_npus()
    if found.error:
        return (
            f"--device npu: {found.error}. Install CANN and its driver, source CANN's set_env.sh in this shell, and "
            "see `ascend-vllm doctor`; or use --device cpu."
        )
    if found.count == 0:
        visible = envs.ascend_rt_visible_devices()
        chosen = f"ASCEND_RT_VISIBLE_DEVICES={visible} leaves none" if visible else "none is in this container"
        return (
            f"--device npu: there is no NPU to use, {chosen}. Give the container its /dev/davinci devices, count "
            "ASCEND_RT_VISIBLE_DEVICES from 0 within it, and see `ascend-vllm doctor`; or use --device cpu."
        )
    if (cann := CannFacts.of(found.cann)).refusal:
        return f"--device npu: {cann.refusal} Use --device cpu until then."
    if npu_facts(found.soc) is None:
        return f"--device npu: models run on {_NPU_FAMILIES}, and this is an {found.soc}. Use --device cpu."
    return None


def too_few_npus(wanted: int, found: int, flags: str = "--tensor-parallel-size") -> str:
    """That there are fewer NPUs than workers, as a sentence that names both numbers and says what to do.

    Args:
        wanted: workers.
        found: NPUs.
        flags: that say how many workers there are.
    """
    visible = envs.ascend_rt_visible_devices()
    cause = f"ASCEND_RT_VISIBLE_DEVICES={visible} leaves {found}" if visible else f"this container has {found}"
    return (
        f"{flags}: {wanted} NPUs are needed and {cause}. Lower it, or make more NPUs visible; "
        "ASCEND_RT_VISIBLE_DEVICES counts from 0 within the container."
        if wanted > 1
        else f"--device npu: there is no NPU to use, {cause}. See `ascend-vllm doctor` for what is wrong with the "
        "installation, or use --device cpu."
    )


def device_facts(name: str) -> DeviceFacts:
    """Facts of the device that models are to run on: of its kind, as far as this machine tells.

    Args:
        name: "cpu" or "npu".
    """
    if name != NPU.name:
        return FACTS[name]
    return npu_facts(probe_npus().soc) or NPU
