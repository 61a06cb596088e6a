"""Loads the compiled kernels when the first module of ops is imported.

The library registers its kernels with torch's dispatcher under ``torch.ops.ascend_vllm``. Without it (no compiler
was found at install) every op runs on its reference: correct, and many times slower.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import pathlib
import pkgutil

import torch

from ascend_vllm import envs
from ascend_vllm.errors import ConfigError
from ascend_vllm.logger import init_logger

logger = init_logger(__name__)

LIBRARY_PATH = pathlib.Path(__file__).resolve().parent.parent / "_C.so"

# Products with quantized weights: codes of 4 or 8 bits or fp8 by inputs as they are, whole codes by inputs that are
# rounded to 8 bits in blocks, and int8 by int8. Order as in csrc_ascend/cpu/dispatch.h.
QUANTIZED_PRODUCTS = ("uint4", "uint8", "float8_e4m3", "uint4_rounded", "uint8_rounded", "int8")
MOST_FEW_ROWS = 16


def product_classes(product: str | None = None) -> tuple[str, ...]:
    """Classes of one of QUANTIZED_PRODUCTS, or else of plain products: one row, at most MOST_FEW_ROWS, and more."""
    prefix = "" if product is None else f"{product}."
    return f"{prefix}one_row", f"{prefix}few_rows", f"{prefix}many_rows"


# Classes of calls of kernels whose instruction set is chosen separately in each dtype: plain products, attention, and
# quantized products. Order as in csrc_ascend/cpu/dispatch.h.
KERNEL_CLASSES = (
    *product_classes(),
    "attention",
    *(name for product in QUANTIZED_PRODUCTS for name in product_classes(product)),
)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# prefixes of modules with kernels for one kind of device
_DEVICE_PREFIXES = ("ascend",)


@functools.cache
def load_native_library() -> bool:
    """Loads the library if it exists; cached.

    Returns:
        Whether compiled kernels are available.

    Raises:
        ConfigError: ``ASCEND_VLLM_CPU_ISA`` names an instruction set that this machine cannot run.
    """
    try:
        torch.ops.load_library(str(LIBRARY_PATH))  # type: ignore[no-untyped-call]
    except OSError as error:
        reason = "was not built" if not LIBRARY_PATH.exists() else f"cannot be loaded ({error.__cause__ or error})"
        logger.warning(
            "THE CPU KERNELS ARE MISSING: %s %s. Every op runs on its plain torch reference, many times slower. "
            "Install g++ and run: python csrc_ascend/build.py",
            LIBRARY_PATH,
            reason,
        )
        return False
    if (isa := envs.cpu_isa()) is not None:
        set_cpu_isa(isa)
    return True


@functools.cache
def native_library() -> ctypes.CDLL:
    """The library, for calls that are not torch ops; it must exist, see `load_native_library`."""
    library = ctypes.CDLL(str(LIBRARY_PATH))  # the same handle that torch loaded
    library.ascend_vllm_cpu_isas.restype = ctypes.c_char_p
    library.ascend_vllm_cpu_isa.restype = ctypes.c_char_p
    library.ascend_vllm_cpu_isa.argtypes = [ctypes.c_int]
    library.ascend_vllm_set_cpu_isa.argtypes = [ctypes.c_int, ctypes.c_char_p]
    return library


def release_memory() -> None:
    """Returns the kernels' scratch memory and malloc's free memory to the system."""
    if load_native_library():
        native_library().ascend_vllm_release_memory()


def available_cpu_isas() -> list[str]:
    """Instruction sets that the kernels can use on this machine, best first; empty without the library."""
    if not load_native_library():
        return []
    names: bytes = native_library().ascend_vllm_cpu_isas()
    return names.decode().split(",")


def _choice(kernel_class: str, dtype: torch.dtype) -> int:
    """Index of a choice in the library."""
    return _DTYPES.index(dtype) * len(KERNEL_CLASSES) + KERNEL_CLASSES.index(kernel_class)


_OTHER_KERNELS = len(_DTYPES) * len(KERNEL_CLASSES)


def cpu_isa(kernel_class: str | None = None, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """The instruction set that is used now, such as ``avx512_bf16`` or ``scalar``; None without kernels.

    Args:
        kernel_class: one of KERNEL_CLASSES; None: the kernels that belong to none of them.
        dtype: of the calls in that class.
    """
    if not load_native_library():
        return None
    choice = _OTHER_KERNELS if kernel_class is None else _choice(kernel_class, dtype)
    name: bytes = native_library().ascend_vllm_cpu_isa(choice)
    return name.decode()


def set_cpu_isa(name: str, kernel_class: str | None = None, dtype: torch.dtype = torch.bfloat16) -> None:
    """Selects the instruction set of kernels, in all threads.

    Args:
        name: of the set.
        kernel_class: one of KERNEL_CLASSES; None: all kernels in all dtypes.
        dtype: of the calls in that class.

    Raises:
        ConfigError: the name is unknown or this machine lacks the set.
    """
    choice = -1 if kernel_class is None else _choice(kernel_class, dtype)
    if native_library().ascend_vllm_set_cpu_isa(choice, name.encode()) != 0:
        available = native_library().ascend_vllm_cpu_isas().decode()
        raise ConfigError(f"ASCEND_VLLM_CPU_ISA={name!r} is not possible on this machine; it has {available}")


def import_op_modules(device_prefix: str | None = None) -> None:
    """Imports the modules of ops that run on any machine, so that `registry.OPS` holds all their ops.

    Args:
        device_prefix: import the modules with this prefix instead, which hold kernels for one kind of device and need
            its software (``ascend``: torch_npu).
    """
    package = importlib.import_module("ascend_vllm.ops")
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.startswith(device_prefix or _DEVICE_PREFIXES) == (device_prefix is not None):
            importlib.import_module(f"ascend_vllm.ops.{module.name}")
