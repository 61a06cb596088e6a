"""An engine core that computes nothing for a while: it pauses, or sleeps and gives its memory back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ascend_vllm.core.scheduler import Scheduler
from ascend_vllm.errors import RequestError
from ascend_vllm.executor.base import Executor
from ascend_vllm.types.messages import EngineCoreRequest

# what sleeps, as wake_up names it
SLEEPERS = ("weights", "kv_cache")
# also a tag of vLLM's wake_up: let steps be made again
SCHEDULING = "scheduling"
MAX_LEVEL = 2


class Pausing:
    """Which requests may run, and what of the engine's memory is there.

    Requests that come while it pauses are held, unknown to the scheduler, until it goes on. Those that were there
    before stay where they are; a core that sleeps takes their blocks, and computes them again afterwards.

    Args:
        scheduler: of the requests.
        executor: of the workers.
        enable_sleep_mode: whether it may sleep.

    Attributes:
        is_paused: new requests wait until `resume`.
        makes_steps: requests that the scheduler knows are computed; also while those drain before a pause.
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
        """Whether memory that steps need is not there."""
        return bool(self._asleep)

    def hold(self, request: EngineCoreRequest) -> None:
        """Takes a request that comes while it pauses."""
        self._held[request.request_id] = request

    def forget(self, request_ids: Iterable[str]) -> None:
        """Lets go of requests that are held; unknown ids are ignored."""
        for request_id in request_ids:
            self._held.pop(request_id, None)

    def pause(self, mode: str, clear_cache: bool) -> None:
        """Stops.

        Args:
            mode: "wait": requests that are here run to their end; "keep": they stay as they are.
            clear_cache: forget cached prefixes.

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
        """Goes on, also with the requests that were held.

        Raises:
            RequestError: it sleeps.
        """
        if self._asleep:
            raise RequestError("The engine sleeps: it goes on when it is woken up.")
        self.is_paused, self.makes_steps = False, True
        self.release()

    def release(self) -> None:
        """Gives the scheduler the requests that were held."""
        held, self._held = self._held, {}
        for request in held.values():
            self._scheduler.add_request(request)

    def sleep(self, level: int) -> None:
        """Gives memory back. No step may be under way.

        Args:
            level: 0: none, only pauses; 1: that of the KV cache; 2: that of the weights, too.

        Raises:
            RequestError: there is no such level, or it may not sleep.
        """
        self.check_sleep(level)
        self.is_paused, self.makes_steps = True, False
        if level:
            self._scheduler.free_kv_cache()
            self._executor.collective_rpc("sleep", (level,))
            self._asleep.update(SLEEPERS)

    def check_sleep(self, level: int) -> None:
        """See `sleep`."""
        if not self._enable_sleep_mode:
            raise RequestError("Sleep mode is not enabled. Please use --enable-sleep-mode to enable it.")
        if type(level) is not int or not 0 <= level <= MAX_LEVEL:
            raise RequestError(f"level must be 0, 1 or 2, got {level!r}", "level")

    def wake_up(self, tags: Sequence[str] | None) -> None:
        """Takes memory again, and goes on once all of it is there.

        Args:
            tags: which: "weights", "kv_cache"; "scheduling" is what happens at the end anyway. None: all.

        Raises:
            RequestError: a tag is unknown, or the KV cache is to wake up before the weights.
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
