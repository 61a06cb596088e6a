"""The file that a run of the kit leaves: a compressed archive, safe to read whoever has written it.

Reading unpacks a bounded number of bytes in memory and takes plain files of known names from it; nothing is written,
and nothing is executed or unpickled.
"""

from __future__ import annotations

import io
import pathlib
import re
import tarfile
import zlib
from collections.abc import Mapping

from ascend_vllm.tools.doctor.kit.rows import ReportError

REPORT, TABLE = "report.json", "report.txt"
LOGS = "logs"

# of an archive that is read, in bytes: as it is, and unpacked
_MOST_PACKED = 8 << 20
_MOST_UNPACKED = 32 << 20
_NAMES = re.compile(rf"{REPORT}|{TABLE}|{LOGS}/[a-z0-9_]{{1,40}}\.txt")


def write_archive(path: pathlib.Path, files: Mapping[str, str]) -> None:
    """Writes texts by name, with nothing about who wrote them and when.

    Raises:
        OSError: the file cannot be written.
    """
    with tarfile.open(path, "w:gz", format=tarfile.USTAR_FORMAT) as archive:
        for name, text in files.items():
            content = text.encode()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def read_archive(path: pathlib.Path) -> dict[str, str]:
    """The texts of an archive by name.

    Raises:
        OSError: the file cannot be read.
        ReportError: it is no archive of the kit, or larger than any.
    """
    content = _unpacked(path)
    files: dict[str, str] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            for member in archive:
                stream = archive.extractfile(member) if member.isreg() else None
                if stream is None or not _NAMES.fullmatch(member.name) or member.name in files:
                    raise ReportError(f"it has something else in it than {REPORT}, {TABLE} and {LOGS}")
                files[member.name] = stream.read().decode()
    except (tarfile.TarError, UnicodeDecodeError, ValueError, EOFError) as error:
        raise ReportError("it is no archive of texts") from error
    if REPORT not in files:
        raise ReportError(f"there is no {REPORT} in it")
    return files


def _unpacked(path: pathlib.Path) -> bytes:
    with path.open("rb") as file:
        packed = file.read(_MOST_PACKED + 1)
    if len(packed) > _MOST_PACKED:
        raise ReportError(f"it is larger than {_MOST_PACKED >> 20} MiB")
    # 16: the form of gzip
    inflater = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        content = inflater.decompress(packed, _MOST_UNPACKED)
    except zlib.error as error:
        raise ReportError("it is not compressed by gzip") from error
    if not inflater.eof:
        raise ReportError(f"it is cut off, or more than {_MOST_UNPACKED >> 20} MiB when it is unpacked")
    return content
