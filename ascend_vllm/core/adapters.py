"""Which LoRA adapters are loaded and which of them have slots: requests wait here for a slot with their adapter.

An adapter keeps its slot as long as a request with it has not ended, so the requests of a step never use more than
--max-loras adapters. When all slots are in use, requests wait in the order of their arrival: those of an adapter that
has a slot, too, once another adapter's request has waited for `_PATIENCE_S`. So no adapter waits for ever.

Workers load adapters beside their steps and keep --max-cpu-loras of them, the least recently used one goes first.
"""

from __future__ import annotations

import collections
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ascend_vllm.config.lora import LoRAConfig
from ascend_vllm.core.connectors import Connector
from ascend_vllm.core.request import Request, RequestStatus
from ascend_vllm.errors import RequestError
from ascend_vllm.logger import init_logger
from ascend_vllm.lora.request import LoRARequest
from ascend_vllm.types.step import ADAPTER_SLOT

logger = init_logger(__name__)

_PATIENCE_S = 0.5
# how often workers are asked whether they have loaded an adapter
_POLL_S = 0.005

_Key = tuple[str, int, str]


class Workers(Protocol):
    """The executor, as far as it is needed here."""

    def collective_rpc(self, method: str, args: Sequence[Any] = ()) -> list[Any]:
        """See `Executor.collective_rpc`."""


class _Adapter:
    """An adapter that workers have loaded or are loading.

    Attributes:
        number: the workers' name of it.
        is_loaded: all workers have it.
        is_pinned: it is not dropped for another one.
        is_forgotten: it is dropped before all others, and not listed.
        slot: where it is placed, or None.
        requests: those that use its slot and have not ended.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_loaded = self.is_pinned = self.is_forgotten = False
        self.slot: int | None = None
        self.requests: list[Request] = []

    def is_used(self) -> bool:
        """Whether a request uses the slot; forgets those that have ended."""
        self.requests = [request for request in self.requests if not request.is_finished]
        return bool(self.requests)


class AdapterManager(Connector):
    """Gives requests slots with their adapters.

    Args:
        config: limits.
        workers: that load adapters.
        clock: seconds.
    """

    field = "lora"

    def __init__(self, config: LoRAConfig, workers: Workers, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._workers = workers
        self._clock = clock
        self._numbers = itertools.count()
        # least recently used first
        self._adapters: collections.OrderedDict[_Key, _Adapter] = collections.OrderedDict()
        # slot → the adapter that was placed there last
        self._slots: list[_Adapter | None] = [None] * config.max_loras
        # adapter → its waiting requests → when each came; both in order of arrival
        self._waiting: dict[_Key, dict[Request, float]] = {}
        self._next_poll = 0.0

    def attach(self, wake: threading.Event) -> None:
        """Nothing wakes the core: it asks the workers."""

    def load(self, name: str, number: int, path: str) -> str | None:
        """Loads an adapter before a request asks for it.

        Returns:
            "" if it is loaded, or will be when a request asks for it, as requests need all that are loaded now; the
            reason if it cannot be loaded; None as long as it is being loaded.
        """
        lora = LoRARequest(name, number, path)
        try:
            adapter = self._loading(lora)
        except RequestError as error:
            return str(error)
        return "" if adapter is None or adapter.is_loaded else None

    def forget(self, number: int) -> bool:
        """Drops the adapters with a number, or has them dropped first when requests that use them have ended.

        Returns:
            Whether there was one.
        """
        found = [(key, adapter) for key, adapter in self._listed() if key[1] == number]
        for key, adapter in found:
            adapter.is_pinned = False
            if key in self._waiting or adapter.is_used():
                adapter.is_forgotten = True
                self._adapters.move_to_end(key, last=False)
            else:
                self._drop(key)
        return bool(found)

    def pin(self, number: int) -> bool:
        """Keeps the adapters with a number loaded until they are forgotten. Returns True.

        Raises:
            RequestError: there is none, or others could not be loaded any more.
        """
        found = [adapter for key, adapter in self._listed() if key[1] == number]
        if not found:
            raise RequestError(f"Pinning failed. LoRA {number} is not registered.", "lora_id")
        others = sum(adapter.is_pinned for adapter in self._adapters.values() if adapter not in found)
        if others + len(found) >= self._config.max_cpu_loras:
            raise RequestError(
                f"Pinning failed. One of --max-cpu-loras {self._config.max_cpu_loras} has to stay free for others.",
                "lora_id",
            )
        for adapter in found:
            adapter.is_pinned = True
        return True

    def numbers(self) -> list[int]:
        """Of the loaded adapters, as requests have them."""
        return sorted({number for (_, number, _), adapter in self._listed() if adapter.is_loaded})

    def stats(self) -> dict[str, Any]:
        """Names of the adapters of requests that run, and of those that wait for whatever."""
        running: dict[str, None] = {}
        waiting = dict.fromkeys(name for name, *_ in self._waiting)
        for (name, *_), adapter in self._adapters.items():
            for request in adapter.requests:
                if request.status == RequestStatus.RUNNING:
                    running[name] = None
                elif not request.is_finished:
                    waiting[name] = None
        return {"running_adapters": list(running), "waiting_adapters": list(waiting)}

    def _listed(self) -> list[tuple[_Key, _Adapter]]:
        return [(key, adapter) for key, adapter in self._adapters.items() if not adapter.is_forgotten]

    def begin(self, request: Request) -> bool:
        """See `Connector.begin`."""
        lora, now = _lora_of(request), self._clock()
        if not self._is_blocked(now) and self._has_slot(lora):
            self._give_slot(request)
            return True
        self._waiting.setdefault(lora.key, {})[request] = now
        return False

    def take_ready(self) -> list[tuple[Request, RequestError | None]]:
        now = self._clock()
        if now < self._next_poll:
            return []
        self._next_poll = now + _POLL_S
        ready: list[tuple[Request, RequestError | None]] = []
        for key, requests in list(self._waiting.items()):
            first, since = next(iter(requests.items()))
            error: RequestError | None = None
            try:
                if not self._has_slot(_lora_of(first)):
                    if now - since > _PATIENCE_S:
                        break
                    continue
            except RequestError as reason:
                error = reason
            del self._waiting[key]
            for request in requests:
                if error is None:
                    self._give_slot(request)
                ready.append((request, error))
        return ready

    def remove(self, request: Request) -> None:
        key = _lora_of(request).key
        requests = self._waiting[key]
        del requests[request]
        if not requests:
            del self._waiting[key]

    def close(self) -> None:
        self._waiting.clear()

    def _is_blocked(self, now: float) -> bool:
        """Whether a new request has to wait behind others, of any adapter."""
        requests = next(iter(self._waiting.values()), None)
        return requests is not None and now - next(iter(requests.values())) > _PATIENCE_S

    def _give_slot(self, request: Request) -> None:
        """Gives a request the slot of its adapter."""
        adapter = self._adapters[_lora_of(request).key]
        adapter.requests.append(request)
        request.row_state = {**request.row_state, ADAPTER_SLOT: adapter.slot}

    def _has_slot(self, lora: LoRARequest) -> bool:
        """Loads and places an adapter as far as that is possible now; returns whether it is in a slot.

        Raises:
            RequestError: it cannot be loaded.
        """
        adapter = self._loading(lora)
        if adapter is None or not adapter.is_loaded:
            return False
        return adapter.slot is not None or self._place(adapter)

    def _loading(self, lora: LoRARequest) -> _Adapter | None:
        """An adapter that workers have loaded or now begin to load; None: there is no room for it.

        Raises:
            RequestError: it cannot be loaded.
        """
        adapter = self._adapters.get(lora.key)
        if adapter is None:
            if len(self._adapters) >= self._config.max_cpu_loras and not self._drop_one():
                return None
            adapter = self._adapters[lora.key] = _Adapter(next(self._numbers))
            self._workers.collective_rpc("load_adapter", (adapter.number, lora.lora_path))
        adapter.is_forgotten = False
        self._adapters.move_to_end(lora.key)
        if not adapter.is_loaded:
            states = self._workers.collective_rpc("adapter_state", (adapter.number,))
            if (reason := next((state for state in states if state), None)) is not None:
                self._drop(lora.key)
                raise RequestError(f"Loading lora {lora.lora_name} failed: {reason}", "model")
            adapter.is_loaded = None not in states
        return adapter

    def _drop_one(self) -> bool:
        """Drops the adapter that was used least recently, of those that no request needs."""
        for key, adapter in self._adapters.items():
            if key not in self._waiting and not adapter.is_pinned and not adapter.is_used():
                self._drop(key)
                return True
        return False

    def _drop(self, key: _Key) -> None:
        adapter = self._adapters.pop(key)
        if adapter.slot is not None:
            self._slots[adapter.slot] = None
        self._workers.collective_rpc("drop_adapter", (adapter.number,))

    def _place(self, adapter: _Adapter) -> bool:
        """Copies an adapter into a slot whose adapter no request uses, if there is one."""
        slot = next((slot for slot, other in enumerate(self._slots) if other is None or not other.is_used()), None)
        if slot is None:
            return False
        if (other := self._slots[slot]) is not None:
            other.slot = None
        self._slots[slot], adapter.slot = adapter, slot
        self._workers.collective_rpc("place_adapter", (slot, adapter.number))
        return True


def _lora_of(request: Request) -> LoRARequest:
    if request.lora is None:
        raise ValueError(f"request {request.request_id} has no adapter")
    return request.lora
