"""Arguments and methods of vLLM 0.32's `LLM` whose features do not exist here: refused by name, not as unknown.

Arguments that equal vLLM's defaults are accepted.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from ascend_vllm.errors import RequestError, UnsupportedFlagError
from ascend_vllm.lora.request import LoRARequest
from ascend_vllm.refusals import Refusal, first_refused

_DATA = json.loads(pathlib.Path(__file__).with_name("refused.json").read_text(encoding="utf-8"))
# what is missing, or an alternative → keyword of the constructor → accepted value: the default, and for hf_token the
# value that means the stored token, which the hub's client uses anyway
REFUSED: Mapping[str, Mapping[str, Any]] = _DATA["arguments"]
# unsupported methods → reason
REFUSED_METHODS: Mapping[str, str] = _DATA["methods"]

# values that never enable a feature; numbers and False may
_EMPTY: tuple[Any, ...] = (None, "", [], {}, (), set())
_REFUSALS = {
    name: Refusal(reason, (*_EMPTY, default)) for reason, names in REFUSED.items() for name, default in names.items()
}


def without_defaults(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Further keywords of the constructor, without unsupported ones that enable nothing.

    Raises:
        UnsupportedFlagError: one needs a feature that does not exist; the text names it.
    """
    refusals = {name: _REFUSALS[name] for name in arguments if name in _REFUSALS}
    if (found := first_refused(refusals, arguments)) is not None:
        raise UnsupportedFlagError(found.name, found.reason)
    return {name: value for name, value in arguments.items() if name not in refusals}


def refuse(**arguments: Any) -> None:
    """Refuses arguments of unsupported features, passed by name.

    Raises:
        RequestError: one of them enables a feature.
    """
    refusals = {name: Refusal(f"{name} is not supported in this version.", (*_EMPTY, False)) for name in arguments}
    if (found := first_refused(refusals, arguments)) is not None:
        raise RequestError(found.reason, found.name)


def adapters_of(lora_request: Any, num_prompts: int) -> list[LoRARequest | None]:
    """The adapter of each prompt: one is given for all of them, or a list with one, or None, for each.

    Raises:
        RequestError: the list is of another length, or something else than a `LoRARequest` is given.
    """
    each = list(lora_request) if isinstance(lora_request, list | tuple) else [lora_request] * num_prompts
    if len(each) != num_prompts:
        raise RequestError("The lengths of prompts and lora_request must be the same.", "lora_request")
    if any(one is not None and not isinstance(one, LoRARequest) for one in each):
        raise RequestError(
            "lora_request must be a LoRARequest, or a list with one or None per prompt.", "lora_request"
        )
    return each
