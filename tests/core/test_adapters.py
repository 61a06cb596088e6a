"""Which requests get slots for their adapters, and when: `AdapterManager` with workers that load on command."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from ascend_vllm.config.lora import LoRAConfig
from ascend_vllm.core.adapters import AdapterManager
from ascend_vllm.core.request import Request, RequestStatus
from ascend_vllm.errors import RequestError
from ascend_vllm.lora.request import LoRARequest
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.messages import EngineCoreRequest
from ascend_vllm.types.step import ADAPTER_SLOT


@dataclasses.dataclass
class Workers:
    """Two workers. `is_ready` decides whether adapters are loaded; paths that begin with "bad" never are.

    Attributes:
        loaded: number → path.
        slots: slot → path.
        loads: paths, in order.
        num_calls: that the manager has made.
    """

    is_ready: bool = True
    loaded: dict[int, str] = dataclasses.field(default_factory=dict)
    slots: dict[int, str] = dataclasses.field(default_factory=dict)
    loads: list[str] = dataclasses.field(default_factory=list)
    num_calls: int = 0

    def collective_rpc(self, method: str, args: Sequence[Any] = ()) -> list[Any]:
        self.num_calls += 1
        result = getattr(self, method)(*args)
        return [None if method == "adapter_state" and not self.is_ready else result, result]

    def load_adapter(self, number: int, path: str) -> None:
        assert number not in self.loaded
        self.loaded[number] = path
        self.loads.append(path)

    def adapter_state(self, number: int) -> str:
        return f"{self.loaded[number]}: no file" if self.loaded[number].startswith("bad") else ""

    def place_adapter(self, slot: int, number: int) -> None:
        self.slots[slot] = self.loaded[number]

    def drop_adapter(self, number: int) -> None:
        del self.loaded[number]


class Clock:
    """Seconds that pass when told to; polls are always due."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.01
        return self.now


class Case:
    """A manager with its workers, and the requests that it was given."""

    def __init__(self, max_loras: int, max_cpu_loras: int) -> None:
        self.workers, self.clock = Workers(), Clock()
        self.manager = AdapterManager(LoRAConfig(max_loras, 16, max_cpu_loras), self.workers, self.clock)
        self.count = 0

    def begin(self, path: str) -> tuple[Request, bool]:
        self.count += 1
        lora = LoRARequest(path, 1, path)
        message = EngineCoreRequest(f"{path}-{self.count}", [1], SamplingParams(max_tokens=1), None, 0.0, lora=lora)
        request = Request(message, 100, 0)
        return request, self.manager.begin(request)

    def ready(self) -> list[str]:
        return [request.request_id for request, _ in self.manager.take_ready()]


def end(request: Request) -> None:
    request.transition(RequestStatus.FINISHED_ABORTED)


def test_adapters_of_running_requests_keep_their_slots() -> None:
    case = Case(max_loras=2, max_cpu_loras=3)
    first, is_ready = case.begin("a")
    assert is_ready
    second, is_ready = case.begin("b")
    assert is_ready
    assert case.workers.slots == {first.row_state[ADAPTER_SLOT]: "a", second.row_state[ADAPTER_SLOT]: "b"}
    third, is_ready = case.begin("c")
    assert not is_ready
    # another request of an adapter with a slot passes those that wait for one
    again, is_ready = case.begin("a")
    assert is_ready
    assert again.row_state == first.row_state
    assert case.ready() == []
    end(second)
    assert case.ready() == ["c-3"]
    assert third.row_state == second.row_state
    assert case.workers.slots[third.row_state[ADAPTER_SLOT]] == "c"


def test_requests_wait_while_workers_load() -> None:
    case = Case(max_loras=1, max_cpu_loras=1)
    case.workers.is_ready = False
    _, is_ready = case.begin("a")
    assert not is_ready
    case.begin("a")
    assert case.ready() == []
    assert case.workers.slots == {}
    case.workers.is_ready = True
    assert case.ready() == ["a-1", "a-2"]
    assert case.workers.loads == ["a"]


def test_no_adapter_starves() -> None:
    case = Case(max_loras=1, max_cpu_loras=2)
    first, _ = case.begin("a")
    case.begin("b")
    case.clock.now += 0.6
    # requests for the adapter in the slot have passed long enough
    _, is_ready = case.begin("a")
    assert not is_ready
    assert case.ready() == []
    end(first)
    assert case.ready() == ["b-2"]


def test_the_least_recently_used_adapter_is_dropped() -> None:
    case = Case(max_loras=1, max_cpu_loras=2)
    for path in ("a", "b", "a", "c", "a", "b"):
        request, is_ready = case.begin(path)
        assert is_ready
        end(request)
    assert case.workers.loads == ["a", "b", "c", "b"]
    assert sorted(case.workers.loaded.values()) == ["a", "b"]


def test_an_adapter_that_cannot_be_loaded_ends_its_requests() -> None:
    case = Case(max_loras=1, max_cpu_loras=1)
    with pytest.raises(RequestError, match="Loading lora bad failed: bad: no file"):
        case.begin("bad")
    case.workers.is_ready = False
    good, _ = case.begin("a")
    assert case.workers.loaded == {1: "a"}
    case.manager.remove(good)
    case.workers.is_ready = True
    _, is_ready = case.begin("b")
    assert is_ready
    assert list(case.workers.loaded.values()) == ["b"]


def test_adapters_are_loaded_before_requests_ask_for_them() -> None:
    case = Case(max_loras=1, max_cpu_loras=1)
    case.workers.is_ready = False
    assert case.manager.load("a", 1, "a") is None
    case.workers.is_ready = True
    assert case.manager.load("a", 1, "a") == ""
    assert case.manager.load("bad", 1, "bad") == "Loading lora bad failed: bad: no file"
    request, is_ready = case.begin("a")
    assert is_ready
    # no room: it is loaded when a request asks for it
    assert case.manager.load("b", 1, "b") == ""
    assert list(case.workers.loaded.values()) == ["a"]
    end(request)


def test_many_requests_ask_the_workers_once() -> None:
    case = Case(max_loras=1, max_cpu_loras=1)
    case.workers.is_ready = False
    requests = [case.begin("a")[0] for _ in range(50)]
    case.workers.num_calls = 0
    assert case.ready() == []
    assert case.workers.num_calls == 1
    for request in requests:
        case.manager.remove(request)
    assert case.ready() == []


def test_adapters_are_counted_by_what_their_requests_do() -> None:
    case = Case(max_loras=2, max_cpu_loras=3)
    assert case.manager.stats() == {"running_adapters": [], "waiting_adapters": []}
    first, _ = case.begin("a")
    case.begin("b")
    case.begin("c")
    first.transition(RequestStatus.RUNNING)
    assert case.manager.stats() == {"running_adapters": ["a"], "waiting_adapters": ["c", "b"]}
    # a request of it runs, another one waits
    case.begin("a")
    assert case.manager.stats() == {"running_adapters": ["a"], "waiting_adapters": ["c", "b", "a"]}
    end(first)
    assert case.manager.stats()["running_adapters"] == []


def test_adapters_are_listed_pinned_and_forgotten() -> None:
    case = Case(max_loras=1, max_cpu_loras=2)
    for number, path in enumerate(("a", "b")):
        assert case.manager.load(path, number + 1, path) == ""
    assert case.manager.numbers() == [1, 2]
    assert case.manager.pin(1)
    for number, why in ((2, "One of --max-cpu-loras 2 has to stay free"), (7, "LoRA 7 is not registered")):
        with pytest.raises(RequestError, match=f"Pinning failed. {why}"):
            case.manager.pin(number)
    assert case.manager.load("c", 3, "c") == ""
    # though it was used least recently
    assert case.manager.numbers() == [1, 3]
    assert case.manager.forget(1)
    assert not case.manager.forget(1)
    assert sorted(case.workers.loaded.values()) == ["c"]
    request, is_ready = case.begin("c")
    assert is_ready
    # its number is 1, as of all requests here
    assert case.manager.forget(1)
    assert case.manager.numbers() == [3]
    assert list(case.workers.loaded.values()) == ["c", "c"]
    end(request)
    assert case.manager.load("d", 4, "d") == ""
    assert case.manager.numbers() == [3, 4]


def test_a_forgotten_adapter_that_is_used_again_stays() -> None:
    case = Case(max_loras=2, max_cpu_loras=2)
    request, _ = case.begin("a")
    assert case.manager.forget(1)
    assert case.manager.numbers() == []
    case.begin("a")
    assert case.manager.numbers() == [1]
    assert case.workers.loads == ["a"]
    end(request)
