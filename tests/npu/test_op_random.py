"""Random numbers of the device: their distribution, and that a seed repeats them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch_npu

from tests.npu.launches import launched_by

N = 20000


def _empty() -> torch.Tensor:
    return torch.empty(N, device="npu")


def _uniform(x: torch.Tensor) -> bool:
    quarter = (x < 0.25).float().mean()
    return bool(((x >= 0) & (x < 1)).all()) and abs(float(quarter) - 0.25) < 0.02


def _normal(x: torch.Tensor) -> bool:
    return abs(float(x.mean()) - 1) < 0.1 and abs(float(x.std()) - 2) < 0.1


def _exponential(x: torch.Tensor) -> bool:
    return bool((x > 0).all()) and abs(float(x.mean()) - 0.5) < 0.03


def _integers(x: torch.Tensor) -> bool:
    return set(x.tolist()) == {3, 4, 5}


def _coins(x: torch.Tensor) -> bool:
    return abs(float(x.mean()) - 0.3) < 0.03


def _drawn(x: torch.Tensor) -> bool:
    shares = torch.bincount(x.flatten(), minlength=3).float() / x.numel()
    return bool(((shares - torch.tensor([0.2, 0.0, 0.8])).abs() < 0.03).all())


def _weights() -> torch.Tensor:
    return torch.tensor([[1.0, 0.0, 4.0]], device="npu").expand(4, 3).contiguous()


DRAWS: list[tuple[str, Callable[[], torch.Tensor], Callable[[torch.Tensor], bool]]] = [
    ("aclnnInplaceUniform", lambda: _empty().uniform_(), _uniform),
    ("aclnnInplaceUniform", lambda: torch.rand(N, device="npu"), _uniform),
    ("aclnnInplaceNormal", lambda: _empty().normal_(1, 2), _normal),
    ("aclnnInplaceUniform", lambda: _empty().exponential_(2), _exponential),
    ("aclnnSimThreadExponential", lambda: torch_npu.npu_sim_exponential_(_empty(), 2.0), _exponential),
    ("aclnnInplaceRandom", lambda: torch.randint(3, 6, (N,), device="npu"), _integers),
    ("aclnnInplaceBernoulli", lambda: _empty().bernoulli_(0.3), _coins),
    ("aclnnInplaceBernoulliTensor", lambda: torch.bernoulli(_empty().fill_(0.3)), _coins),
    ("aclnnMultinomial", lambda: torch.multinomial(_weights(), N // 4, replacement=True), _drawn),
    ("aclnnRandperm", lambda: torch.randperm(N, device="npu"), lambda x: torch.equal(x.sort()[0], torch.arange(N))),
]


@pytest.mark.parametrize(("operator", "draw", "fits"), DRAWS, ids=[f"{d[0]}-{i}" for i, d in enumerate(DRAWS)])
def test_numbers_follow_their_distribution_and_their_seed(
    operator: str, draw: Callable[[], torch.Tensor], fits: Callable[[torch.Tensor], bool]
) -> None:
    torch.npu.manual_seed(7)
    first, launched = launched_by(draw)
    assert operator in launched
    assert fits(first.cpu())
    assert not torch.equal(first, draw())
    torch.npu.manual_seed(7)
    assert torch.equal(first, draw())


GRAPHED: list[tuple[str, Callable[[], torch.Tensor], Callable[[torch.Tensor], bool]]] = [
    ("aclnnInplaceUniformTensor", lambda: _empty().uniform_(), _uniform),
    ("aclnnInplaceNormalTensor", lambda: _empty().normal_(1, 2), _normal),
    ("aclnnInplaceRandomTensor", lambda: torch.empty(N, device="npu").random_(3, 6), _integers),
]


@pytest.mark.parametrize(("operator", "draw", "fits"), GRAPHED, ids=[d[0] for d in GRAPHED])
def test_replays_of_a_graph_draw_new_numbers(
    operator: str, draw: Callable[[], torch.Tensor], fits: Callable[[torch.Tensor], bool]
) -> None:
    draw()
    graph = torch.npu.NPUGraph()

    def record() -> torch.Tensor:
        with torch.npu.graph(graph, capture_error_mode="relaxed"):
            return draw()

    numbers, launched = launched_by(record)
    assert operator in launched
    graph.replay()
    first = numbers.cpu()
    graph.replay()
    assert fits(first.long() if operator == "aclnnInplaceRandomTensor" else first)
    assert not torch.equal(first, numbers.cpu())
