"""Who sends a request, as far as the server tells its callers apart: by the API key that a request shows.

Nothing of a key is kept but a digest, which another process, or the next one, would not make of it.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from ascend_vllm import envs

if TYPE_CHECKING:
    from ascend_vllm.engine.args_server import FrontendArgs

# everybody, on a server without keys
EVERYBODY = b""

_SALT = secrets.token_bytes(32)


def api_keys(args: FrontendArgs) -> list[str]:
    """The keys that the server accepts; none: whoever asks is answered. An empty key is none."""
    key = envs.api_key()
    return [key] if key else [key for key in args.api_key or () if key]


def caller_of(headers: Headers) -> bytes:
    """A digest of the key that a request shows, the same for every request that shows it.

    Args:
        headers: of a request that was let in by its key: ``Authorization: Bearer KEY``, or else ``x-api-key: KEY``.
    """
    scheme, _, key = headers.get("authorization", "").partition(" ")
    shown = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return hashlib.blake2b(shown.encode("latin-1"), digest_size=16, key=_SALT).digest()
