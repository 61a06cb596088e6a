"""The engine core in the caller's own process, for offline use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.types.messages import EngineCoreOutputs, EngineCoreRequest, EngineReady

if TYPE_CHECKING:
    from ascend_vllm.core.engine_core import EngineCore


class InprocCoreClient:
    """Runs an engine core in the calling thread.

    Args:
        config: of the engine.

    Raises:
        ConfigError: flags that do not fit the model or the machine.
        ModelLoadError: the model's directory cannot be served.
    """

    def __init__(self, config: EngineConfig) -> None:
        # imported here: API servers do not need the core, torch and the models
        from ascend_vllm.core.engine_core import build

        self._core: EngineCore | None = build(config)
        self.ready = EngineReady(
            num_gpu_blocks=self._core.num_blocks,
            block_size=config.cache.block_size,
            max_model_len=config.scheduler.max_model_len,
            load_time_s=0.0,
            num_cpu_blocks=self._core.num_cpu_blocks,
        )

    @property
    def core(self) -> EngineCore:
        """The core.

        Raises:
            RuntimeError: it was shut down.
        """
        if self._core is None:
            raise RuntimeError("the engine was shut down")
        return self._core

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queues a request."""
        self.core.add_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        """Ends requests early."""
        if request_ids and self._core is not None:
            self.core.abort_requests(request_ids)

    def has_unfinished(self) -> bool:
        """Whether `step` has something to do."""
        return self._core is not None and self._core.has_unfinished()

    def step(self) -> EngineCoreOutputs:
        """Runs one step; shuts the core down if it fails.

        Raises:
            RuntimeError: the engine was shut down.
            Exception: whatever the model, or a function of the user's, raised.
        """
        try:
            return self.core.step()
        except Exception:
            self.shutdown()
            raise

    def call_utility(self, method: str, *args: Any) -> Any:
        """Calls a method of the core by name."""
        return self.core.call_utility(method, list(args))

    def shutdown(self) -> None:
        """Frees the model and the cache; may be called again."""
        if self._core is not None:
            self._core.shutdown()
            self._core = None
