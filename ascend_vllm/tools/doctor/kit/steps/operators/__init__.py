"""The matrix of operators, called by the code that models call, against float32 on the host."""

from __future__ import annotations

from ascend_vllm.tools.doctor.kit.session import Case, Session
from ascend_vllm.tools.doctor.kit.steps.operators import attention, cache, registered, weights

_PARTS = (registered, cache, weights, attention)


def cases(session: Session) -> list[Case]:
    """See `steps`."""
    return [case for part in _PARTS for case in part.cases(session)]
