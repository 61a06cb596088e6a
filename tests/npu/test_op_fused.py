"""Fused operators of torch_npu on the device against formulas of torch's own operators on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor
from torch.nn import functional

from tests.npu.attention_reference import Sequences, attention, causal
from tests.npu.launches import Case, Values, ids

_values = Values(7)
X = _values.normal(5, 64, dtype=torch.float16)
RESIDUAL = _values.normal(5, 64, dtype=torch.float16)
GAMMA = _values.normal(64, dtype=torch.float16)
EPSILON = 1e-5
