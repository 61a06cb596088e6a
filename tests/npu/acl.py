"""Direct calls of libascendcl, for functions and errors that cannot be tested through torch_npu."""

from __future__ import annotations

import ctypes
import ctypes.util

LIBRARY = ctypes.CDLL("libascendcl.so")
LIBRARY.aclGetRecentErrMsg.restype = ctypes.c_char_p

Handle = ctypes.c_void_p

HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3
EVENT_TIME_LINE, EVENT_EXTERNAL = 0x8, 0x20
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2

PARAM_INVALID = 107000
INVALID_DEVICE = 107001
UNKNOWN_STREAM = 107003
TIMESTAMP_INVALID = 107006
INVALID_HANDLE = 107017
CAPTURE_DEPENDENCY = 107024
STREAM_UNJOINED = 107025
STREAM_CAPTURED = 107027
EVENT_CAPTURED = 107028
NOT_ALLOWED_WHILE_CAPTURING = 107030
DEFAULT_STREAM_CAPTURED = 107031
TASK_GROUP_STATUS = 107033
CAPTURE_UNMATCHED = 107036
MODEL_RUNNING = 107037
PAGEABLE_COPY_IN_CAPTURE = 107041
OUT_OF_MEMORY = 207001
STREAM_NOT_COMPLETE = 507004
TASK_TYPE_NOT_SUPPORTED = 507009
SYNC_TIMEOUT = 507046
CAPTURE_INVALIDATED = 507903


def code(name: str, *arguments: object) -> int:
    """A call's return code; integers are passed as size_t, which nearly all parameters are."""
    words = [ctypes.c_size_t(word) if isinstance(word, int) else word for word in arguments]
    return int(getattr(LIBRARY, name)(*words))


def message() -> str:
    """The text of this thread's last failure."""
    return str(LIBRARY.aclGetRecentErrMsg().decode())


def call(name: str, *arguments: object) -> None:
    """A call that must succeed."""
    answer = code(name, *arguments)
    assert answer == 0, f"{name} answered {answer}: {message()}"


def made(name: str, *arguments: object) -> Handle:
    """A call that makes a handle or a pointer, its first argument."""
    handle = Handle()
    call(name, ctypes.byref(handle), *arguments)
    return handle


def malloc(size: int) -> Handle:
    """Device memory of that many bytes."""
    return made("aclrtMalloc", size, 0)


def stream() -> Handle:
    """A new stream."""
    return made("aclrtCreateStream")


def event(flags: int = 0) -> Handle:
    """A new event."""
    return made("aclrtCreateEventExWithFlag", flags)


def write(pointer: Handle, content: bytes) -> None:
    """Copies bytes to the device."""
    call("aclrtMemcpy", pointer, len(content), content, len(content), HOST_TO_DEVICE)


def read(pointer: Handle, size: int) -> bytes:
    """Copies bytes from the device."""
    content = ctypes.create_string_buffer(size)
    call("aclrtMemcpy", content, size, pointer, size, DEVICE_TO_HOST)
    return content.raw


def fill(pointer: Handle, value: int, size: int, on: Handle | None) -> int:
    """Fills device memory in a stream; the call's code."""
    return code("aclrtMemsetAsync", pointer, size, value, size, on)
