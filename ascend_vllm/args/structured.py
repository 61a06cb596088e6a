"""--guided-decoding-backend and --structured-outputs-config: two spellings of one section."""

from __future__ import annotations

from typing import Any

import msgspec

from ascend_vllm.config.structured import StructuredOutputsConfig
from ascend_vllm.errors import ConfigError
from ascend_vllm.structured_outputs import BACKENDS

# option in the backend's name ("name:option", as in vLLM 0.7 and later) → field of the section
_OPTIONS = {
    "no-fallback": "disable_fallback",
    "disable-any-whitespace": "disable_any_whitespace",
    "no-additional-properties": "disable_additional_properties",
}
# keys of vLLM for which there is a separate flag here
_OTHER_KEYS = ("reasoning_parser",)


def structured_outputs_config(backend: str, settings: dict[str, Any] | None) -> StructuredOutputsConfig:
    """The configuration's section.

    Args:
        backend: a name, with options after a colon.
        settings: fields of the section by name; they take precedence over `backend`.

    Raises:
        ConfigError: an unknown backend, option or setting, or a value of the wrong type.
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
