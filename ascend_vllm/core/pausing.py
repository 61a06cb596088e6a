"""Pausing an engine core, and sleep mode, which also frees its memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ascend_vllm.core.scheduler import Scheduler
from ascend_vllm.errors import RequestError
from ascend_vllm.executor.base import Executor
from ascend_vllm.types.messages import EngineCoreRequest

# tags of wake_up for memory that sleep frees
SLEEPERS = ("weights", "kv_cache")
# vLLM's other tag of wake_up: make steps again
SCHEDULING = "scheduling"
MAX_LEVEL = 2


class Pausing:
    """Whether requests run, and which memory of the engine is allocated.

    Requests that arrive while the engine is paused are held back from the scheduler until `resume`. Earlier ones stay
    in the scheduler; sleep preempts them, and they are recomputed afterwards.

    Args:
        scheduler: of the requests.
        executor: of the workers.
        enable_sleep_mode: whether `sleep` is allowed.

    Attributes:
        is_paused: new requests wait until `resume`.
        makes_steps: the requests in the scheduler are computed; also while they finish before a pause.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, *, enable_sleep_mode: bool) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._enable_sleep_mode = enable_sleep_mode
        self.is_paused = False
        self.makes_steps = True
        self._asleep: set[str] = set()
        # by id, in the order of their arrival
        self._held: dict[str, EngineCoreRequest] = {}

    @property
    def is_sleeping(self) -> bool:
        """Whether memory that steps need is freed."""
        return bool(self._asleep)

    def hold(self, request: EngineCoreRequest) -> None:
        """Holds a request that arrives while the engine is paused."""
        self._held[request.request_id] = request

    def drop(self, request_ids: Iterable[str]) -> None:
        """Drops requests that are held; unknown ids are ignored."""
        for request_id in request_ids:
            self._held.pop(request_id, None)

    def pause(self, mode: str, clear_cache: bool) -> None:
        """Pauses the engine.

        Args:
            mode: "wait": requests in the scheduler run to their end; "keep": they stay as they are.
            clear_cache: empty the prefix cache.

        Raises:
            RequestError: there is no such mode.
        """
        if mode not in ("wait", "keep"):
            raise RequestError(f"mode must be 'wait' or 'keep', got {mode!r}", "mode")
        self.is_paused = True
        if mode == "keep":
            self.makes_steps = False
        if clear_cache:
            self._scheduler.kv_cache.reset_prefix_cache()

    def resume(self) -> None:
        """Makes steps again, also of the requests that were held.

        Raises:
            RequestError: the engine is asleep.
        """
        if self._asleep:
            raise RequestError("The engine sleeps: it goes on when it is woken up.")
        self.is_paused, self.makes_steps = False, True
        self.release()

    def release(self) -> None:
        """Adds the held requests to the scheduler."""
        held, self._held = self._held, {}
        for request in held.values():
            self._scheduler.add_request(request)

    def sleep(self, level: int) -> None:
        """Pauses the engine and frees memory. No step may be under way.

        Args:
            level: 0: only pauses; 1: frees the KV cache; 2: frees the weights, too.

        Raises:
            RequestError: there is no such level, or sleep mode is not enabled.
        """
        self.check_sleep(level)
        self.is_paused, self.makes_steps = True, False
        if level:
            self._scheduler.free_kv_cache()
            self._executor.collective_rpc("sleep", (level,))
            self._asleep.update(SLEEPERS)

    def check_sleep(self, level: int) -> None:
        """Raises what `sleep` raises."""
        if not self._enable_sleep_mode:
            raise RequestError("Sleep mode is not enabled. Please use --enable-sleep-mode to enable it.")
        if type(level) is not int or not 0 <= level <= MAX_LEVEL:
            raise RequestError(f"level must be 0, 1 or 2, got {level!r}", "level")

    def wake_up(self, tags: Sequence[str] | None) -> None:
        """Allocates memory again, and resumes once there is all of it.

        Args:
            tags: of "weights" and "kv_cache"; "scheduling" changes nothing, since it follows anyway. None: all.

        Raises:
            RequestError: a tag is unknown, or the KV cache would wake up before the weights.
        """
        wanted = [*SLEEPERS, SCHEDULING] if tags is None else list(tags)
        unknown = [tag for tag in wanted if tag not in (*SLEEPERS, SCHEDULING)]
        if unknown:
            raise RequestError(f"tags must be among 'weights', 'kv_cache' and 'scheduling', got {unknown}", "tags")
        if "kv_cache" in wanted and "weights" in self._asleep and "weights" not in wanted:
            raise RequestError("the weights must wake up before the kv_cache", "tags")
        waking = [tag for tag in SLEEPERS if tag in wanted and tag in self._asleep]
        if waking:
            self._executor.collective_rpc("wake_up", (waking,))
            self._asleep.difference_update(waking)
        if not self._asleep:
            self.resume()
