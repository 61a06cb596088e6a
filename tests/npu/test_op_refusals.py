"""What operators refuse, and that every operator has a numerical test."""

from __future__ import annotations

import pathlib
import re

import torch

from tests.npu.launches import operators

HERE = pathlib.Path(__file__).resolve().parent


def test_every_operator_has_a_test_that_names_it() -> None:
    # a test that names an operator in quotes also asserts that the operator was launched
    named = {name for path in HERE.glob("*.py") for name in re.findall(r'"(aclnn\w+)"', path.read_text())}
    named |= {case.operator for case in _cases()}
    assert operators() - named == set()


def _cases() -> list[object]:
    from tests.npu import test_op_compare, test_op_elementwise, test_op_index, test_op_matmul, test_op_reduce

    modules = (test_op_compare, test_op_elementwise, test_op_index, test_op_matmul, test_op_reduce)
    return [case for module in modules for case in module.CASES]
