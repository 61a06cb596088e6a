"""HTTPS: ciphers and TLS versions; loads the TLS files, which are checked before the model is loaded."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from ascend_vllm.errors import ConfigError

if TYPE_CHECKING:
    from ascend_vllm.args.tables.server import HttpArgs


# of TLS 1.2: suites with forward secrecy and authenticated encryption, as all of TLS 1.3's are
DEFAULT_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"


def load_files(context: ssl.SSLContext, certfile: str, keyfile: str | None, ca_certs: str | None) -> None:
    """Load certificate, key and CA certificates into a server's TLS context.

    Args:
        context: of a server.
        certfile: its certificate.
        keyfile: its private key; None: the key is in `certfile`.
        ca_certs: certificate authorities of clients' certificates; None: none are added.

    Raises:
        OSError: a file cannot be read, or is invalid (ssl.SSLError).
        ConfigError: the key needs a pass phrase.
    """
    context.load_cert_chain(certfile, keyfile, _refuse_pass_phrase)
    if ca_certs is not None:
        context.load_verify_locations(ca_certs)


def check_files(args: HttpArgs) -> None:
    """Check the TLS files of the flags.

    Raises:
        ConfigError: HTTPS is enabled, and they cannot be used.
    """
    if args.ssl_certfile is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        load_files(context, args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs)
        if args.ssl_ciphers is not None:
            context.set_ciphers(args.ssl_ciphers)
    except (OSError, ConfigError) as error:
        if args.ssl_ciphers is not None and "cipher" in str(error).lower():
            raise ConfigError(f"--ssl-ciphers {args.ssl_ciphers} cannot be used: {error}") from error
        files = ", ".join(filter(None, (args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs)))
        raise ConfigError(f"The TLS files ({files}) cannot be used: {error}") from error


def _refuse_pass_phrase() -> str:
    """The pass phrase callback; without one OpenSSL would prompt on the terminal."""
    raise ConfigError("the private key is encrypted; give --ssl-keyfile one without a pass phrase")
