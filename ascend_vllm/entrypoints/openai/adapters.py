"""The LoRA adapters that the server serves by name, and the routes that load and unload them."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import pathlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastapi import Request
from fastapi.responses import PlainTextResponse, Response

from ascend_vllm.args.parser import LoRAModule
from ascend_vllm.entrypoints.http.validation import read_by, read_json
from ascend_vllm.errors import ModelNotFoundError, RequestError
from ascend_vllm.logger import init_logger
from ascend_vllm.lora.request import LoRARequest

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ascend_vllm.engine.async_llm import AsyncLLM


logger = init_logger(__name__)

_CONFIG = "adapter_config.json"


class UserInputError(RequestError):
    """A wrong body of a route for adapters; the type's name is vLLM's."""

    error_type = "InvalidUserInput"


class UnknownAdapterError(ModelNotFoundError):
    """There is no adapter of this name, or no files where it should be."""


@dataclasses.dataclass(frozen=True)
class AdapterDirectory:
    """Adapters that are found by their name: subdirectories of VLLM_LORA_RESOLVER_CACHE_DIR.

    Attributes:
        path: of the directory.
        models: names of the served model, one of which an adapter's configuration must have.
    """

    path: pathlib.Path
    models: frozenset[str]

    def find(self, name: str) -> str | None:
        """The directory of the adapter with this name, without symbolic links, or None: nothing outside is found."""
        relative = pathlib.PurePath(name)
        if relative.is_absolute() or ".." in relative.parts:
            return None
        try:
            root = self.path.resolve()
            found = (root / relative).resolve()
            if root not in found.parents:
                return None
            config = json.loads((found / _CONFIG).read_bytes())
        except (OSError, ValueError):
            return None
        if not isinstance(config, dict) or config.get("peft_type") != "LORA":
            return None
        return str(found) if config.get("base_model_name_or_path") in self.models else None


class ServedAdapters:
    """Adapters by the names that requests have in `model`.

    Args:
        model_names: of the model, which no adapter may have.
        modules: of --lora-modules.
        directory: of adapters that are loaded when a request names them; None: there is none.

    Attributes:
        by_name: the adapters.
    """

    def __init__(
        self,
        model_names: Sequence[str],
        modules: Sequence[LoRAModule] = (),
        directory: AdapterDirectory | None = None,
    ) -> None:
        self._model_names = model_names
        self._directory = directory
        self._ids = itertools.count(1)
        # one change of an adapter at a time
        self._locks: dict[str, asyncio.Lock] = {}
        self.by_name: dict[str, LoRARequest] = {}
        for module in modules:
            self.by_name[module.name] = self._request(module.name, module.path, module.base_model_name)

    async def load(self, engine: AsyncLLM, name: Any, path: Any, *, in_place: bool) -> None:
        """Loads an adapter and serves it from now on.

        Args:
            engine: that loads it.
            name: for requests.
            path: directory of its files.
            in_place: replace the one of this name; requests that run go on with the old one.

        Raises:
            RequestError: the arguments are wrong, or the adapter cannot be loaded; nothing has changed.
        """
        if not (isinstance(name, str) and isinstance(path, str) and name and path):
            raise UserInputError("Both 'lora_name' and 'lora_path' must be provided.", "lora_name")
        if name in self._model_names:
            raise UserInputError(f"The lora adapter '{name}' conflicts with a served base model.", "lora_name")
        async with self._lock(name):
            if name in self.by_name and not in_place:
                raise UserInputError(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, "
                    "set 'load_inplace' to True.",
                    "lora_name",
                )
            await self._load(engine, name, path)

    async def find(self, engine: AsyncLLM, name: str) -> bool:
        """Serves the adapter of this name from now on if the directory has one; returns whether it is served.

        Raises:
            RequestError: it cannot be loaded.
        """
        if self._directory is None:
            return name in self.by_name
        async with self._lock(name):
            if name not in self.by_name:
                path = await asyncio.to_thread(self._directory.find, name)
                if path is None:
                    self._locks.pop(name, None)
                    return False
                try:
                    await self._load(engine, name, path)
                except RequestError as error:
                    logger.warning("LoRA adapter %r of the directory: %s", name, error)
                    raise RequestError(
                        f"LoRA adapter '{name}' was found but could not be loaded.", "model"
                    ) from error
            return True

    async def unload(self, name: Any) -> None:
        """Serves an adapter no longer; requests that run end with it.

        Raises:
            RequestError: there is none of this name.
        """
        if not (isinstance(name, str) and name):
            raise UserInputError("'lora_name' needs to be provided to unload a LoRA adapter.", "lora_name")
        async with self._lock(name):
            if self.by_name.pop(name, None) is None:
                raise UnknownAdapterError(f"The lora adapter '{name}' cannot be found.", "lora_name")
        logger.info("LoRA adapter %r is served no longer", name)
        self._locks.pop(name, None)

    async def _load(self, engine: AsyncLLM, name: str, path: str) -> None:
        request, start = self._request(name, path, None), time.monotonic()
        try:
            await engine.add_lora(request)
        except RequestError as error:
            if engine.config.lora is None or await asyncio.to_thread((pathlib.Path(path) / _CONFIG).is_file):
                raise
            text = f"Loading lora {name} failed: No adapter found for {path}"
            raise UnknownAdapterError(text, "lora_path") from error
        self.by_name[name] = request
        logger.info("LoRA adapter %r loaded from %s in %.2f s", name, path, time.monotonic() - start)

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    def _request(self, name: str, path: str, base_model_name: str | None) -> LoRARequest:
        return LoRARequest(name, next(self._ids), path, base_model_name or self._model_names[0])


def add_adapter_routes(app: FastAPI, engine: AsyncLLM, adapters: ServedAdapters) -> None:
    """Adds the routes that load and unload adapters while the server runs (VLLM_ALLOW_RUNTIME_LORA_UPDATING)."""

    @app.post("/v1/load_lora_adapter")
    async def load_lora_adapter(http: Request) -> Response:
        body = await _object(http)
        name = body.get("lora_name")
        await adapters.load(engine, name, body.get("lora_path"), in_place=body.get("load_inplace") is True)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @app.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(http: Request) -> Response:
        name = (await _object(http)).get("lora_name")
        await adapters.unload(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


async def _object(http: Request) -> dict[str, Any]:
    body = await read_by(http, read_json)
    if not isinstance(body, dict):
        raise UserInputError("The body must be a JSON object.")
    return body
