"""What the documentation says of cases: that of torch_npu, of its operators and of CANN, and docs/ascend.md."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable

from ascend_vllm.tools.doctor.kit.rows import Row, Status


@dataclasses.dataclass(frozen=True)
class Claim:
    """A sentence about cases.

    Attributes:
        pattern: of their names, with * for any text.
        text: what is said.
        holds: whether a row is as it says.
    """

    pattern: str
    text: str
    holds: Callable[[Row], bool]


def _works(row: Row) -> bool:
    return row.status == Status.OK


def _is_refused(row: Row) -> bool:
    return row.status == Status.FAILED


def _is_open(_row: Row) -> bool:
    """Nothing is said that a row could contradict."""
    return True


# the first that fits counts
CLAIMS = (
    Claim("versions: *", "", _is_open),
    Claim("memory: before and after emptying", "empty_cache gives everything back", _works),
    Claim("memory: fill at 0.9", "--gpu-memory-utilization 0.9 of the card can be allocated", _works),
    Claim(
        "operators: cache write with * slots",
        "slots are those of the cache, none twice; others are undefined",
        _is_open,
    ),
    Claim("operators: int4 order", "eight values share a word; their order is not said", _is_open),
    Claim("operators: scale of a row of zeros", "not said", _is_open),
    Claim("operators: sampling equal logits", "not said; this server expects the first", _is_open),
    Claim("operators: sampling top-k 1025", "npu_top_k_top_p takes k up to 1024: this is a sort", _works),
    Claim(
        "operators: attention * bfloat16 16/16* inner_precise 1",
        "bfloat16 with a KV head for each head has inner_precise 0 only",
        _is_refused,
    ),
    Claim(
        "operators: attention * 28/4* inner_precise 1",
        "grouped heads lose the fast kernels with inner_precise 1",
        _works,
    ),
    Claim("operators: attention * block 64 *", "blocks are multiples of 16 up to 512 since CANN 9", _works),
    Claim("operators: attention * window", "a window of W is pre_tokens W-1", _works),
    Claim(
        "operators: rope too wide*", "npu_apply_rotary_pos_emb takes what fits in 192 KiB: this is another", _works
    ),
    Claim("operators: cast to FRACTAL_NZ int8", "casts are operators of aclnn since CANN 9.1", _works),
    Claim("operators: * in FRACTAL_NZ *", "results do not depend on the format", _works),
    Claim("operators: W8A8 *", "scales are float32 or, measured in float16, int64", _works),
    Claim("operators: experts W8A8 bfloat16", "scales are bfloat16 but for weights in tiles", _works),
    Claim("operators: *", "errors up to twice those of a plain implementation", _works),
    Claim("graphs: replay, then update", "npugraph_ex of torch_npu has this order", _works),
    Claim("graphs: captures until failure", "error 207008 without streams; their number is not said", _works),
    Claim("graphs: *", "results are those of eager calls", _works),
    Claim("collectives: equal sums *", "tensor parallelism relies on the same bits", _works),
    Claim("collectives: sums in graphs *", "captured in the mode thread_local", _works),
    Claim("model: prompts in high performance", "Qwen2-7B and 57B are wrong without high precision", _works),
    Claim("model: *", "greedy tokens are the CPU's", _works),
)


def claim_of(name: str) -> Claim | None:
    """The first claim about a case; None if nothing is said."""
    return next((claim for claim in CLAIMS if fnmatch.fnmatchcase(name, claim.pattern)), None)
