"""Checks of a server's LoRA adapters before anything is started."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from ascend_vllm import envs
from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.args.parser import LoRAModule
from ascend_vllm.errors import ConfigError


def check_adapters(modules: Sequence[LoRAModule], engine_args: EngineArgs) -> None:
    """Checks --lora-modules and VLLM_LORA_RESOLVER_CACHE_DIR.

    Raises:
        ConfigError: a name is used twice, there are no files or no directory, or --enable-lora is missing.
    """
    if modules and not engine_args.enable_lora:
        raise ConfigError("--lora-modules needs --enable-lora.")
    served = engine_args.served_model_name or [engine_args.model]
    taken = {served} if isinstance(served, str) else set(served)
    for module in modules:
        if module.name in taken:
            raise ConfigError(f"--lora-modules: the name {module.name!r} is served already; choose another one.")
        taken.add(module.name)
        if not (pathlib.Path(module.path) / "adapter_config.json").is_file():
            raise ConfigError(
                f"--lora-modules {module.name}={module.path}: there is no adapter_config.json in this directory."
            )
    directory = envs.lora_resolver_cache_dir()
    if directory and engine_args.enable_lora and not pathlib.Path(directory).is_dir():
        raise ConfigError(f"VLLM_LORA_RESOLVER_CACHE_DIR must be set to a valid directory, got {directory!r}.")
