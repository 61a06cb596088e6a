"""`LLM`'s controls: caches, traces, sleeping, calls of workers, metrics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from ascend_vllm.engine.llm_engine import LLMEngine
from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.entrypoints.offline.arguments import REFUSED_METHODS, refuse
from ascend_vllm.errors import RequestError

P = ParamSpec("P")
R = TypeVar("R")


def _of_engine(method: Callable[Concatenate[LLMEngine, P], R]) -> Callable[Concatenate[EngineControls, P], R]:
    """A method of the engine as one of `LLM`."""

    @functools.wraps(method)
    def call(self: EngineControls, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(self.llm_engine, *args, **kwargs)

    return call


class EngineControls:
    """The methods of `LLM` that wrap its engine's controls.

    Attributes:
        llm_engine: the engine underneath.
    """

    llm_engine: LLMEngine

    stop_profile = _of_engine(LLMEngine.stop_profile)
    sleep = _of_engine(LLMEngine.sleep)
    wake_up = _of_engine(LLMEngine.wake_up)
    is_sleeping = _of_engine(LLMEngine.is_sleeping)
    collective_rpc = _of_engine(LLMEngine.collective_rpc)
    get_metrics = _of_engine(LLMEngine.get_metrics)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forgets the prefixes that enable_prefix_caching keeps, for example after the weights have changed.

        Args:
            reset_running_requests, reset_connector: not supported in this version.

        Returns:
            Whether it has been done.
        """
        refuse(reset_running_requests=reset_running_requests, reset_connector=reset_connector)
        return self.llm_engine.reset_prefix_cache()

    def reset_mm_cache(self) -> None:
        """Forgets images that were prepared: there are none, prompts are text only."""

    def reset_encoder_cache(self) -> None:
        """Forgets what an encoder made of images: there is nothing, prompts are text only."""

    def start_profile(
        self,
        profile_prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Begins a trace of what is computed; see `LLMEngine.start_profile`. None of the arguments is supported."""
        refuse(profile_prefix=profile_prefix, delay_iterations=delay_iterations, max_iterations=max_iterations)
        self.llm_engine.start_profile()

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Calls a function with each worker's model, a tree of `ascend_vllm.layers.base.Layer`.

        Example::

            llm.apply_model(lambda model: type(model).__name__)  # ["Qwen2ForCausalLM"]

        With several workers the function must be one that they can import: in a module, not in the program itself.
        """
        return self.llm_engine.collective_rpc("apply_model", args=(func,))

    def get_world_size(self, include_dp: bool = True) -> int:
        """How many workers there are, with all copies of the model or of one alone; in this version the same."""
        del include_dp
        return self.llm_engine.get_parallel_config().world_size

    def _need_tokenizer(self) -> Tokenizer:
        tokenizer = self.llm_engine.tokenizer
        if tokenizer is None:
            raise RequestError("there is no tokenizer: the engine was made with skip_tokenizer_init=True")
        return tokenizer

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Names what a method of vLLM's lacks here."""
            reason = f" is not supported: {REFUSED_METHODS[name]}" if name in REFUSED_METHODS else " does not exist"
            raise AttributeError(f"LLM.{name}{reason}", name=name, obj=self)
