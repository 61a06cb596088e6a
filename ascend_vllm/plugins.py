"""Entry points of other packages, limited to those that VLLM_PLUGINS names if it is set."""

from __future__ import annotations

import importlib
from typing import Any

from ascend_vllm import envs


def entry_points(group: str) -> dict[str, str]:
    """Name → "module:object" of a group. Installed packages are searched, which takes tens of milliseconds."""
    # most models need none, and importing this takes time as well
    import importlib.metadata

    allowed = envs.plugins()
    found = importlib.metadata.entry_points(group=group)
    return {entry.name: entry.value for entry in found if allowed is None or entry.name in allowed}


def import_object(target: str) -> Any:
    """The object that "module:object" names.

    Raises:
        ImportError, AttributeError: there is none.
    """
    module_name, _, name = target.partition(":")
    return getattr(importlib.import_module(module_name), name)
