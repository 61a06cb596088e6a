"""A step of the hardware kit that tells everything it knows: by facts, messages and output."""

from __future__ import annotations

import pathlib
import socket
import traceback

from ascend_vllm import envs
from ascend_vllm.tools.doctor.kit.session import Case, Result, Session


def cases(session: Session) -> list[Case]:
    """Two that tell everything."""
    text = "\n".join(f"{name}={value}" for name, value in envs.everything().items())
    text += f"\n{socket.gethostname()} {pathlib.Path.home()} {pathlib.Path.home() / 'models' / 'x.bin'} {__file__}"

    def shout() -> Result:
        print(text)
        traceback.print_stack()
        raise RuntimeError(text.replace("\n", " "))

    return [Case("tells", lambda: Result(facts={"everything": text}, message=text)), Case("raises", shout)]
