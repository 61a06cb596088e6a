"""The kernels' thread pool: with any callers and numbers of threads, each part is computed once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import torch

from ascend_vllm.ops.elementwise import silu_and_mul
from ascend_vllm.ops.gemm import PackedLinear
from tests.server import ROOT


def test_many_jobs_of_changing_size_and_width() -> None:
    generator = torch.Generator().manual_seed(0)
    layer = PackedLinear.of(torch.randn(700, 300, generator=generator))
    inputs = [torch.randn(rows, 300, generator=generator) for rows in (1, 3, 40)]
    torch.set_num_threads(1)
    expected = [layer(x, None) for x in inputs]
    for round_number in range(600):
        torch.set_num_threads(1 + round_number % 7)
        index = round_number % 3
        assert torch.equal(layer(inputs[index], None), expected[index])


def test_callers_do_not_wait_for_each_other() -> None:
    """One caller has the pool, the others compute in their own threads, with the same results."""
    torch.set_num_threads(3)
    x = torch.randn(400, 2048)
    expected = silu_and_mul(x)
    wrong = []

    def call() -> None:
        torch.set_num_threads(3)
        wrong.extend(number for number in range(200) if not torch.equal(silu_and_mul(x), expected))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


def test_a_fork_has_threads_of_its_own() -> None:
    program = """
import os, torch
from ascend_vllm.ops.elementwise import silu_and_mul
torch.set_num_threads(3)
x = torch.randn(400, 2048)
expected = silu_and_mul(x)
child = os.fork()
if child == 0:
    os._exit(0 if all(torch.equal(silu_and_mul(x), expected) for _ in range(50)) else 1)
assert torch.equal(silu_and_mul(x), expected)
assert os.waitpid(child, 0)[1] == 0
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)
