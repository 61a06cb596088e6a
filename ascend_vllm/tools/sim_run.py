"""`ascend-vllm sim-run -- COMMAND`: runs a command on simulated Ascend devices.

The command uses the torch_npu wheel and, instead of CANN's libraries, those of csrc_ascend/sim. See
docs/simulator.md for the limits of such tests.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys

import ascend_vllm
from ascend_vllm import envs
from ascend_vllm.args.parser import FlexibleArgumentParser
from ascend_vllm.errors import ConfigError

LIBRARIES = pathlib.Path(ascend_vllm.__file__).parent / "_sim"
# outside of site-packages: only processes started by this command may import it
TORCH_NPU = pathlib.Path(sys.prefix) / "npu"


def add_arguments(parser: FlexibleArgumentParser) -> None:
    parser.description = (
        "Runs a command on simulated Ascend devices, for tests on machines without one. It shows that the calls to"
        " the device are right, and nothing about its kernels, its speed or its numbers."
    )
    parser.usage = "%(prog)s [flags] -- COMMAND"
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="number of devices; default: %(default)s")
    parser.add_argument("--memory", type=int, metavar="BYTES", help="memory of each device; default: 8 GiB")
    parser.add_argument("--soc", metavar="NAME", help="chip, such as Ascend310P3; default: Ascend910B3")
    parser.add_argument("--cann", choices=("8.5", "9.0", "9.1"), help="version of CANN; default: 9.1")
    parser.add_argument("--trace", metavar="FILE", help="file that gets one JSON line for each operator launched")
    parser.add_argument(
        "--sync-timeout", type=float, metavar="SECONDS", help="wait for an event that nobody records; default: 30"
    )
    parser.add_argument(
        "--torch-npu", type=pathlib.Path, default=TORCH_NPU, metavar="DIR", help="default: %(default)s"
    )
    parser.add_argument("command_line", nargs="+", metavar="COMMAND", help="what to run, after two dashes")


def run(namespace: argparse.Namespace) -> int:
    """Replaces this process by the command.

    Raises:
        ConfigError: the libraries, torch_npu or the command cannot be found.
    """
    if not (LIBRARIES / "libascendcl.so").exists():
        raise ConfigError(f"There is no simulator in {LIBRARIES}; build it: python csrc_ascend/sim/build.py")
    torch_npu = namespace.torch_npu.resolve()
    if not (torch_npu / "torch_npu").is_dir():
        raise ConfigError(f"--torch-npu {torch_npu} has no torch_npu in it; make npu installs it.")
    options = {
        "ASCEND_SIM_DEVICES": namespace.devices,
        "ASCEND_SIM_MEMORY": namespace.memory,
        "ASCEND_SIM_SOC": namespace.soc,
        "ASCEND_SIM_CANN": namespace.cann,
        "ASCEND_SIM_TRACE": namespace.trace and pathlib.Path(namespace.trace).resolve(),
        "ASCEND_SIM_SYNC_TIMEOUT": namespace.sync_timeout,
    }
    variables = {name: str(value) for name, value in options.items() if value is not None}
    # operators of the graph engine are errors, as on cards that have none of its compiler's packages
    variables.setdefault("ACL_OP_INIT_MODE", envs.everything().get("ACL_OP_INIT_MODE", "2"))
    envs.export(variables, {"LD_LIBRARY_PATH": LIBRARIES, "PYTHONPATH": torch_npu})
    words = namespace.command_line
    try:
        os.execvp(words[0], words)
    except OSError as err:
        raise ConfigError(f"Cannot run {words[0]}: {err.strerror}.") from err
