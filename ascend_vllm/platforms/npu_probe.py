"""Asks CANN's runtime what devices there are, in a process of its own; prints one line of JSON.

`facts.probe_npus` runs this file. The runtime starts threads and keeps the driver open, which neither the
API-server process nor one that is about to choose the CPU should have; and a driver that hangs can be given up.
The functions are those of acl/acl_rt.h. This file imports nothing but the standard library.

    python npu_probe.py             count and SoC
    python npu_probe.py --memory    the first device's memory too, which takes a second on hardware
"""

from __future__ import annotations

import ctypes
import json
import sys

_LIBRARY = "libascendcl.so"
# aclrtMemAttr: all of the device's memory, of whatever kind it is on this SoC
_ACL_HBM_MEM = 1


class _CallError(Exception):
    """A call of the runtime failed."""


def _load() -> ctypes.CDLL:
    try:
        runtime = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise _CallError(f"{_LIBRARY} of CANN cannot be loaded ({error})") from error
    runtime.aclrtGetSocName.restype = ctypes.c_char_p
    runtime.aclGetRecentErrMsg.restype = ctypes.c_char_p
    return runtime


def _check(runtime: ctypes.CDLL, call: str, code: int) -> None:
    if code != 0:
        message = (runtime.aclGetRecentErrMsg() or b"").decode(errors="replace").strip()
        raise _CallError(f"{call} of CANN failed with {code}" + (f": {message}" if message else ""))


class _PackageVersion(ctypes.Structure):
    """aclCANNPackageVersion."""

    _fields_ = (("version", ctypes.c_char * 128), ("rest", ctypes.c_char * (4 * 64 + 128)))


def _cann_version(runtime: ctypes.CDLL) -> str:
    """Such as "9.1.0"; empty if the runtime does not tell."""
    version = _PackageVersion()
    try:
        # ACL_PKG_NAME_CANN
        code = runtime.aclsysGetCANNVersion(0, ctypes.byref(version))
    except AttributeError:
        return ""
    return bytes(version.version).decode(errors="replace") if code == 0 else ""


def probe(*, with_memory: bool) -> dict[str, object]:
    """What the runtime reports about the devices.

    Args:
        with_memory: bind to the first device and ask for its memory.

    Returns:
        "count", "soc", "cann"; with memory "free_bytes" and "total_bytes"; or "error" alone, as a clause.
    """
    try:
        runtime = _load()
        _check(runtime, "aclInit", runtime.aclInit(None))
        count = ctypes.c_uint32()
        _check(runtime, "aclrtGetDeviceCount", runtime.aclrtGetDeviceCount(ctypes.byref(count)))
        found: dict[str, object] = {"count": count.value, "soc": (runtime.aclrtGetSocName() or b"").decode()}
        found["cann"] = _cann_version(runtime)
        if with_memory and count.value:
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            _check(runtime, "aclrtSetDevice", runtime.aclrtSetDevice(0))
            code = runtime.aclrtGetMemInfo(_ACL_HBM_MEM, ctypes.byref(free), ctypes.byref(total))
            _check(runtime, "aclrtGetMemInfo", code)
            found |= {"free_bytes": free.value, "total_bytes": total.value}
    except _CallError as refusal:
        return {"error": str(refusal)}
    return found


if __name__ == "__main__":
    print(json.dumps(probe(with_memory="--memory" in sys.argv[1:])))
