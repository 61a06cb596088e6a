"""--guided-decoding-backend and --structured-outputs-config: two spellings of one section."""

from __future__ import annotations

from typing import Any

import msgspec

from ascend_vllm.config.structured import StructuredOutputsConfig
from ascend_vllm.errors import ConfigError
from ascend_vllm.structured_outputs import BACKENDS

# options behind the name of a backend, as vLLM 0.7 and later write them → field of the section
_OPTIONS = {
    "no-fallback": "disable_fallback",
    "disable-any-whitespace": "disable_any_whitespace",
    "no-additional-properties": "disable_additional_properties",
}
# the section's own, and vLLM's for what has a flag of its own here
_OTHER_KEYS = ("reasoning_parser",)


def structured_outputs_config(backend: str, settings: dict[str, Any] | None) -> StructuredOutputsConfig:
    """The section.

    Args:
        backend: a name, with options after a colon.
        settings: fields of the section by name; they come before what `backend` says.

    Raises:
        ConfigError: there is no backend, option or setting of that name, or a value is of the wrong type.
    """
    name, _, options = str(backend).partition(":")
    if name not in BACKENDS:
        raise ConfigError(f"Invalid guided_decoding_backend '{name},must be one of {list(BACKENDS)}")
    fields: dict[str, Any] = {"backend": name}
    for option in filter(None, options.split(",")):
        if option not in _OPTIONS:
            raise ConfigError(
                f"Invalid option {option!r} of guided_decoding_backend {name!r}; there are {', '.join(_OPTIONS)}."
            )
        fields[_OPTIONS[option]] = True
    fields |= settings or {}
    for key in _OTHER_KEYS:
        fields.pop(key, None)
    known = StructuredOutputsConfig.__struct_fields__
    unknown = sorted(set(fields) - set(known))
    if unknown:
        raise ConfigError(
            f"--structured-outputs-config has unknown key(s) {', '.join(unknown)}; there are "
            f"{', '.join([*known, *_OTHER_KEYS])}."
        )
    try:
        config = msgspec.convert(fields, StructuredOutputsConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--structured-outputs-config: {error}") from None
    if config.backend not in BACKENDS:
        raise ConfigError(
            f"--structured-outputs-config: unknown backend {config.backend!r}; there are {', '.join(BACKENDS)}."
        )
    return config
