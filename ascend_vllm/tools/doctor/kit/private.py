"""Removes from texts what belongs to the machine's owner and helps nobody else.

Every text of a report goes through one `Redactor`. It knows this machine's names by asking for them, and addresses,
paths and tokens by their form; of the environment only variables of a list are told.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import pathlib
import re
import socket
from collections.abc import Iterable, Mapping

# variables whose values a report may have, after redaction: switches and sizes, of this server and what is below it
KNOWN_VARIABLES = frozenset(
    {
        "ACL_OP_INIT_MODE",
        "ASCEND_GLOBAL_LOG_LEVEL",
        "ASCEND_LAUNCH_BLOCKING",
        "ASCEND_RT_VISIBLE_DEVICES",
        "ASCEND_SIM_CANN",
        "ASCEND_SIM_DEVICES",
        "ASCEND_SIM_MEMORY",
        "ASCEND_SIM_SOC",
        "ASCEND_VLLM_ATTENTION_OPS",
        "ASCEND_VLLM_CUSTOM_OPS",
        "CPU_AFFINITY_CONF",
        "HCCL_BUFFSIZE",
        "HCCL_CONNECT_TIMEOUT",
        "HCCL_DETERMINISTIC",
        "HCCL_EXEC_TIMEOUT",
        "HCCL_OP_EXPANSION_MODE",
        "INFER_MODE",
        "OMP_NUM_THREADS",
        "PTA_TORCHAIR_DECODE_GEAR_ENABLE",
        "PTA_TORCHAIR_DECODE_GEAR_LIST",
        "PYTORCH_NPU_ALLOC_CONF",
        "TASK_QUEUE_ENABLE",
        "TORCH_DEVICE_BACKEND_AUTOLOAD",
        "USE_IFA_HIGH_PRECISION_MODE",
        "USE_PFA_HIGH_PRECISION_MODE",
        "USE_PREFIX_HIGH_PRECISION_MODE",
        "VLLM_ASCEND_ENABLE_NZ",
    }
)
# variables whose values name a person, a machine or a directory of theirs
_NAMING_VARIABLES = ("HOME", "USER", "LOGNAME", "USERNAME", "SUDO_USER", "HOSTNAME", "HOST", "MAIL")
# other values of the environment are removed wherever they occur, if they are long enough to be nothing else; those
# of variables that are named like secrets even if they may be words
_SHORTEST_VALUE = 8
_SHORTEST_SECRET = 4
_SECRET_NAMES = re.compile("KEY|TOKEN|SECRET|PASS|AUTH|CRED", re.IGNORECASE)
# directories of packages and of CANN, from which on a path tells nothing about its owner
_PUBLIC_ROOTS = ("site-packages/", "dist-packages/", "ascend_vllm/", "torch_npu/", "opp/", "lib64/")
_PUBLIC_STARTS = ("/usr/local/Ascend", "/usr/lib", "/dev/davinci", "/proc/")
_PATH = re.compile(r"(?<![\w.:/<])~?/[\w.@+%=~-]+(?:/[\w.@+%=~-]*)*")
_HEX = "[0-9a-fA-F]{1,4}"
_SECRET_WORDS = r"bearer\s+|(?:token|secret|password|passwd|api[_-]?key)\s*[=:]\s*"
# each with its replacement
_FORMS = (
    (re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b"), "<mail>"),
    (re.compile(r"\b(?:[0-9a-fA-F]{2}[:-]){5}[0-9a-fA-F]{2}\b"), "<address>"),
    # versions have fewer dots, or letters
    (re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])"), "<address>"),
    (re.compile(rf"(?<![\w:])(?:{_HEX}:){{7}}{_HEX}\b"), "<address>"),
    (re.compile(rf"(?<![\w:])(?:{_HEX}:){{1,6}}:(?:{_HEX}(?::{_HEX})*)?(?!\w)"), "<address>"),
    (re.compile(r"\b(?:hf|sk|pk|gh[a-z]|glpat|xox[a-z])[_-][\w-]{8,}"), "<token>"),
    (re.compile(rf"(?i)\b({_SECRET_WORDS})\S+"), r"\1<token>"),
    (re.compile(r"\b[0-9a-fA-F]{32,}\b"), "<token>"),
    # operators' names have letters of both cases, too, but hardly a digit
    (re.compile(r"\b(?=(?:\w*\d){2})(?=\w*[a-z])(?=\w*[A-Z])\w{24,}\b"), "<token>"),
)


class Redactor:
    """Redacts texts of one machine.

    Args:
        variables: its environment.
        names: of its users and of the machine itself.
    """

    def __init__(self, variables: Mapping[str, str], names: Iterable[str]) -> None:
        words: dict[str, str] = {}
        for name, value in variables.items():
            if name not in KNOWN_VARIABLES and _is_private(name, value):
                words[value] = "<value>"
        named = [*names, *(variables.get(name, "") for name in _NAMING_VARIABLES)]
        named += [pathlib.PurePath(value).name for value in named]
        # such as those of processes without a name, or of containers
        words |= {name: "<name>" for name in named if len(name) > 1 and name not in ("root", "localhost")}
        ordered = sorted(words, key=len, reverse=True)
        self._words = words
        self._pattern = re.compile("|".join(rf"(?<!\w){re.escape(word)}(?!\w)" for word in ordered) or "(?!)")

    @classmethod
    def of_this_machine(cls, variables: Mapping[str, str]) -> Redactor:
        """Knows this machine's names."""
        names = [socket.gethostname(), socket.gethostname().partition(".")[0], str(pathlib.Path.home())]
        # a user may have no entry, and a process no terminal
        with contextlib.suppress(OSError, KeyError):
            names += [getpass.getuser(), os.getlogin()]
        return cls(variables, names)

    def text(self, text: str) -> str:
        """A text without anything private."""
        text = self._pattern.sub(lambda found: self._words[found[0]], text)
        text = _PATH.sub(lambda found: _public_path(found[0]), text)
        for pattern, replacement in _FORMS:
            text = pattern.sub(replacement, text)
        return text

    def variables(self, variables: Mapping[str, str]) -> dict[str, str]:
        """The known variables of an environment, sorted, with redacted values."""
        return {name: self.text(variables[name]) for name in sorted(KNOWN_VARIABLES & variables.keys())}


def _is_private(name: str, value: str) -> bool:
    """Whether a value is removed: not a plain number or word, which any text may have, unless it is secret."""
    if _SECRET_NAMES.search(name):
        return len(value) >= _SHORTEST_SECRET
    is_plain = value.isalpha() or value.replace(".", "").isdecimal() or value.startswith(_PUBLIC_STARTS)
    return len(value) >= _SHORTEST_VALUE and not is_plain


def _public_path(path: str) -> str:
    """The part of a path that packages and CANN have on every machine; for others that there was one."""
    if path.startswith(_PUBLIC_STARTS):
        return path
    starts = [path.rfind(root) for root in _PUBLIC_ROOTS if root in path]
    return f".../{path[max(starts) :]}" if starts else "<path>"
