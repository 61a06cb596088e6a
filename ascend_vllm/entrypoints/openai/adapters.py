"""The LoRA adapters that the server serves by name, and the routes that load and unload them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastapi import Request
from fastapi.responses import PlainTextResponse, Response

from ascend_vllm.args.parser import LoRAModule
from ascend_vllm.entrypoints.http.validation import read_by, read_json
from ascend_vllm.errors import ModelNotFoundError, RequestError
from ascend_vllm.lora.request import LoRARequest

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ascend_vllm.engine.async_llm import AsyncLLM


class UserInputError(RequestError):
    """A wrong body of a route for adapters; the type's name is vLLM's."""

    error_type = "InvalidUserInput"


class UnknownAdapterError(ModelNotFoundError):
    """There is no adapter of this name, or no files where it should be."""


class ServedAdapters:
    """Adapters by the names that requests have in `model`.

    Args:
        model_names: of the model, which no adapter may have.
        modules: of --lora-modules.

    Attributes:
        by_name: the adapters.
    """

    def __init__(self, model_names: Sequence[str], modules: Sequence[LoRAModule] = ()) -> None:
        self._model_names = model_names
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
            request = self._request(name, path, None)
            await engine.add_lora(request)
            self.by_name[name] = request

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
        self._locks.pop(name, None)

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
