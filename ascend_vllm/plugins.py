"""Entry points of other packages, filtered by VLLM_PLUGINS if it is set."""

from __future__ import annotations

import importlib
from typing import Any

from ascend_vllm import envs


def entry_points(group: str) -> dict[str, str]:
    """Name → "module:object" of a group. Searching the installed packages takes tens of milliseconds."""
    # imported late since it is slow, and most models need no entry points
    import importlib.metadata

    allowed = envs.plugins()
    found = importlib.metadata.entry_points(group=group)
    return {entry.name: entry.value for entry in found if allowed is None or entry.name in allowed}


def import_object(target: str) -> Any:
    """Imports the object named "module:object".

    Raises:
        ImportError, AttributeError: there is none.
    """
    module_name, _, name = target.partition(":")
    return getattr(importlib.import_module(module_name), name)
