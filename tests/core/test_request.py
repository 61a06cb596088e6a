"""A request's states and its end."""

from __future__ import annotations

from typing import Any

import pytest

from ascend_vllm.core.request import (
    FINISH_REASONS,
    LEGAL_TRANSITIONS,
    IllegalTransitionError,
    Request,
    RequestStatus,
)
from ascend_vllm.types.messages import FinishReason
from tests.core.memory_executor import make_request

EOS = 2


def make(prompt: int = 3, max_model_len: int = 100, **params: object) -> Request:
    message = make_request("r", prompt, eos=EOS, **{"ignore_eos": False, **params})
    return Request(message, max_model_len, drawn_seed=99)


def test_every_status_is_in_the_table_and_only_ends_are_final() -> None:
    assert set(LEGAL_TRANSITIONS) == set(RequestStatus)
    assert {status for status, targets in LEGAL_TRANSITIONS.items() if not targets} == set(FINISH_REASONS)


@pytest.mark.parametrize("status", RequestStatus)
def test_transitions_outside_the_table_raise(status: RequestStatus) -> None:
    for target in RequestStatus:
        request = make()
        request.status = status
        if target in LEGAL_TRANSITIONS[status]:
            request.transition(target)
            assert request.status is target
            assert request.is_finished == (target in FINISH_REASONS)
        else:
            with pytest.raises(IllegalTransitionError, match=f"{status.name} to {target.name}"):
                request.transition(target)


@pytest.mark.parametrize(
    ("params", "tokens", "expected"),
    [
        ({}, [5, EOS, 6], (2, FinishReason.STOP, None)),
        ({"ignore_eos": True}, [5, EOS, 6], (3, None, None)),
        # among the stop ids it ends though it is ignored
        ({"ignore_eos": True, "stop_token_ids": [EOS]}, [5, EOS, 6], (2, FinishReason.STOP, EOS)),
        # a stop id is the stop reason, and EOS is not
        ({"stop_token_ids": [9, 8]}, [5, 8, 6], (2, FinishReason.STOP, 8)),
        ({"stop_token_ids": [EOS]}, [EOS], (1, FinishReason.STOP, None)),
        # a stop at the limit is a stop
        ({"max_tokens": 2}, [5, EOS], (2, FinishReason.STOP, None)),
        ({"max_tokens": 2}, [5, 6, 7], (2, FinishReason.LENGTH, None)),
        ({"min_tokens": 3, "stop_token_ids": [9]}, [EOS, 9, 5, EOS], (4, FinishReason.STOP, None)),
        ({"min_tokens": 3, "stop_token_ids": [9]}, [EOS, 9, 9], (3, FinishReason.STOP, 9)),
        # a sequence of 5 tokens, the most with KV, samples one more
        ({"max_model_len": 5}, [5, 6, 7, 8], (3, FinishReason.LENGTH, None)),
        ({"max_model_len": 5, "min_tokens": 6}, [EOS, EOS, EOS], (3, FinishReason.LENGTH, None)),
    ],
    ids=str,
)
def test_ends(
    params: dict[str, Any], tokens: list[int], expected: tuple[int, FinishReason | None, int | None]
) -> None:
    request = make(**params)
    request.transition(RequestStatus.RUNNING)
    taken = request.append_output(tokens)
    assert (taken, request.finish_reason, request.stop_reason) == expected
    assert request.token_ids[request.num_prompt_tokens :] == tokens[:taken]
    assert (request.num_output_tokens, request.num_tokens) == (taken, 3 + taken)


def test_seed_is_the_requests_own_or_the_drawn_one() -> None:
    assert make(seed=5).seed == 5
    assert make(seed=0).seed == 0
    assert make(seed=None).seed == 99
    assert 0 <= make(seed=-5).seed < 2**63


def test_end_token_ids_are_what_min_tokens_forbids() -> None:
    assert make(stop_token_ids=[9, 1]).end_token_ids == [1, EOS, 9]
    assert make(ignore_eos=True).end_token_ids == []
