"""The simulator's own tests, which need not run again while nothing that they depend on has changed.

They call the simulated operators, memory, streams and collectives through torch_npu and use nothing of `ascend_vllm`.
What they depend on is the simulator, the versions of torch and torch_npu, and the tests themselves. Its digest is
kept in `sim_operators.digest` once they have all passed: `make test-all` writes it, and an ordinary run compares.

    python tests/npu/simulator.py    write the digest of what there is now
"""

from __future__ import annotations

import functools
import hashlib
import pathlib
import re

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DIGEST = HERE / "sim_operators.digest"
OWN_TESTS = (
    *sorted(path.name for path in HERE.glob("test_op_*.py")),
    "test_attention_ops.py",
    "test_fused_ops.py",
    "test_generations.py",
    "test_hccl.py",
    "test_refusals.py",
    "test_runtime_cards.py",
    "test_runtime_format.py",
    "test_runtime_graphs.py",
    "test_runtime_memory.py",
    "test_runtime_starts.py",
    "test_runtime_streams.py",
)
# modules of this directory that the own tests import or run
HELPERS = (
    "acl.py",
    "attention_reference.py",
    "conftest.py",
    "generation_calls.py",
    "hccl_ranks.py",
    "launches.py",
    "processes.py",
)


def digest() -> str:
    """SHA-256 of the simulator's sources, of its tests, and of the versions of torch and torch_npu."""
    simulator = ROOT / "csrc_ascend" / "sim"
    sources = [path for path in simulator.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    found = hashlib.sha256()
    for path in sorted([*sources, *(HERE / name for name in (*OWN_TESTS, *HELPERS))]):
        found.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    for pin in re.findall(r'"torch(?:_npu)?==[\d.]+"', (ROOT / "pyproject.toml").read_text()):
        found.update(pin.encode())
    return found.hexdigest()


@functools.cache
def has_changed() -> bool:
    """Whether the own tests have not passed yet with what there is now."""
    return not DIGEST.exists() or DIGEST.read_text().strip() != digest()


if __name__ == "__main__":
    DIGEST.write_text(digest() + "\n")
    print(f"wrote {DIGEST.relative_to(ROOT)}")
