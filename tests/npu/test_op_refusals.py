"""Invalid arguments that operators refuse; and every operator has a numerical test."""

from __future__ import annotations

import contextlib
import ctypes
import pathlib
import re
from collections.abc import Callable, Iterator

import pytest
import torch
import torch_npu

from tests.npu import acl, test_op_compare, test_op_elementwise, test_op_index, test_op_matmul, test_op_reduce
from tests.npu.launches import launched_by, operators

HERE = pathlib.Path(__file__).resolve().parent
CASES = [
    case
    for module in (test_op_compare, test_op_elementwise, test_op_index, test_op_matmul, test_op_reduce)
    for case in module.CASES
]
# of the tests here, those that compare what operators compute with what is right
NUMERICAL = [path for path in HERE.glob("test_op_*.py") if path.name != pathlib.Path(__file__).name]
NUMERICAL += [HERE / f"test_{name}.py" for name in ("attention_ops", "fused_ops", "runtime_format")]
# Operators that compute nothing here: torch_npu only looks whether the library has the first, and calls a later
# version; it takes the second for values apart from the keys alone, which are refused (see REFUSED).
WITHOUT_NUMBERS = {"aclnnGroupedMatmulV4", "aclnnKvRmsNormRopeCacheV2"}


def test_every_operator_has_a_numerical_test() -> None:
    # a test that names an operator in quotes asserts that it was launched
    tested = {name for path in NUMERICAL for name in re.findall(r'"(aclnn\w+)"', path.read_text())}
    tested |= {case.operator for case in CASES}
    assert operators() - tested == WITHOUT_NUMBERS


X = torch.ones(4, 6, device="npu")
HALF = torch.ones(6, 5, dtype=torch.float16, device="npu")
BRAIN = torch.ones(4, 6, dtype=torch.bfloat16, device="npu")
DOUBLE = torch.ones(4, 6, dtype=torch.float64, device="npu")


def _latent_cache_with_values() -> torch.Tensor:
    """Keys of 192 and values of 128 apart from each other."""
    key, value, angle = (torch.ones(1, 1, 2, size, dtype=torch.float16, device="npu") for size in (192, 128, 192))
    gamma, places = torch.ones(128, dtype=torch.float16, device="npu"), torch.tensor([0, 1]).npu()
    caches = [torch.zeros(1, 16, 1, size, dtype=torch.float16, device="npu") for size in (192, 128)]
    result: torch.Tensor = torch_npu.npu_kv_rmsnorm_rope_cache(
        key, gamma, angle, angle, places, *caches, v=value, cache_mode="PA"
    )[0]
    return result


REFUSED: list[tuple[str, Callable[[], torch.Tensor]]] = [
    ("aclnnMm: mat2: dtype float16 differs from bfloat16 of self", lambda: torch.mm(BRAIN, HALF)),
    (
        "aclnnMm: out: dtype float32 differs from float16 of self",
        lambda: torch.mm(HALF.t(), HALF, out_dtype=torch.float32),
    ),
    ("aclnnMm: self: dtype float64 is not supported", lambda: torch.mm(DOUBLE, DOUBLE.t())),
    ("aclnnSilu: self: dtype float64 is not supported", lambda: torch.nn.functional.silu(DOUBLE)),
    (
        "aclnnInplaceFillScalar: selfRef: elements of the tensor that is written share memory",
        lambda: torch.ones(6, device="npu").expand(4, 6).fill_(2),
    ),
    ("aclnnKvRmsNormRopeCacheV2: v: a value of its own is not simulated", _latent_cache_with_values),
]


@pytest.mark.parametrize(("text", "call"), REFUSED, ids=[text.split(":")[0][5:] for text, _ in REFUSED])
def test_what_the_documentation_rules_out_is_refused(text: str, call: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(RuntimeError, match=re.escape(text)):
        call()
    # the refusal comes before the launch and harms nothing
    result, launched = launched_by(lambda: X + 1)
    assert launched == {"aclnnAdds"}
    assert bool((result == 2).all())


def test_an_operator_that_is_not_simulated_is_named() -> None:
    # by the call itself: torch_npu's own thread would launch nothing after such an error
    with (
        pytest.raises(RuntimeError, match="aclnnClippedSwiglu or aclnnClippedSwigluGetWorkspaceSize not in libopapi"),
        torch.npu.stream(torch.npu.SyncLaunchStream()),
    ):
        torch_npu.npu_clipped_swiglu(HALF)
    assert bool((X + 1 == 2).all())


_LIBRARY = ctypes.CDLL("libopapi.so")
_LIBRARY.aclCreateTensor.restype = ctypes.c_void_p
_FLOAT, _ND = 0, 2


@contextlib.contextmanager
def _described(tensor: torch.Tensor) -> Iterator[ctypes.c_void_p]:
    """A float32 tensor as operators get it, wherever its memory is: torch_npu lets none of the host through."""
    axes = tensor.dim()
    sizes, strides = ((ctypes.c_int64 * axes)(*numbers) for numbers in (tensor.shape, tensor.stride()))
    count, offset = ctypes.c_uint64(axes), ctypes.c_int64(0)
    memory = ctypes.c_void_p(tensor.data_ptr())
    handle = _LIBRARY.aclCreateTensor(sizes, count, _FLOAT, strides, offset, _ND, sizes, count, memory)
    assert handle
    yield ctypes.c_void_p(handle)
    assert _LIBRARY.aclDestroyTensor(ctypes.c_void_p(handle)) == 0


@pytest.mark.parametrize(("devices", "argument"), [(("cpu", "npu"), "self"), (("npu", "cpu"), "out")])
def test_tensors_of_the_host_are_refused(devices: tuple[str, str], argument: str) -> None:
    size, executor = ctypes.c_uint64(), ctypes.c_void_p()
    tensors = [torch.ones(4, 6).to(device) for device in devices]
    torch.npu.synchronize()
    with _described(tensors[0]) as x, _described(tensors[1]) as out:
        answer = _LIBRARY.aclnnSiluGetWorkspaceSize(x, out, ctypes.byref(size), ctypes.byref(executor))
    assert answer == 161002
    assert acl.message() == f"aclnnSilu: {argument}: the tensor is not in device memory"
