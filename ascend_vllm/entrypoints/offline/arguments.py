"""Arguments and methods of vLLM 0.32's `LLM` whose features do not exist here: refused by name, not as unknown.

A program that writes out a default of vLLM's asks for nothing, and runs.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from ascend_vllm.errors import RequestError, UnsupportedFlagError
from ascend_vllm.refusals import Refusal, first_refused

_DATA = json.loads(pathlib.Path(__file__).with_name("refused.json").read_text(encoding="utf-8"))
# what is missing or to be done instead → keyword of the constructor → its default. Of hf_token, which has none, it is
# the value that means the stored token: the hub's client uses that without being told.
REFUSED: Mapping[str, Mapping[str, Any]] = _DATA["arguments"]
# methods whose features do not exist → why
REFUSED_METHODS: Mapping[str, str] = _DATA["methods"]

# what asks for nothing whatever the default is; numbers and False may ask for something
_EMPTY: tuple[Any, ...] = (None, "", [], {}, (), set())
_REFUSALS = {
    name: Refusal(reason, (*_EMPTY, default)) for reason, names in REFUSED.items() for name, default in names.items()
}


def without_defaults(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Further keywords of the constructor, without those that ask for nothing.

    Raises:
        UnsupportedFlagError: one asks for a feature that does not exist; the text names it.
    """
    refusals = {name: _REFUSALS[name] for name in arguments if name in _REFUSALS}
    if (found := first_refused(refusals, arguments)) is not None:
        raise UnsupportedFlagError(found.name, found.reason)
    return {name: value for name, value in arguments.items() if name not in refusals}


def refuse(**arguments: Any) -> None:
    """Refuses arguments of a call whose features do not exist, given by their names.

    Raises:
        RequestError: one of them asks for something.
    """
    refusals = {name: Refusal(f"{name} is not supported in this version.", (*_EMPTY, False)) for name in arguments}
    if (found := first_refused(refusals, arguments)) is not None:
        raise RequestError(found.reason, found.name)


def refuse_lora(lora_request: Any, num_prompts: int) -> None:
    """Refuses adapters: one for all prompts, or a list with one, or none, for each.

    Raises:
        RequestError: the list is of another length, or an adapter is in it.
    """
    if isinstance(lora_request, Sequence):
        if len(lora_request) != num_prompts:
            raise RequestError("The lengths of prompts and lora_request must be the same.", "lora_request")
        lora_request = next((one for one in lora_request if one is not None), None)
    refuse(lora_request=lora_request)
