"""HTTPS: what it encrypts with, and its files, looked at before a model is loaded and read again when they change."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from ascend_vllm.errors import ConfigError

if TYPE_CHECKING:
    from ascend_vllm.args.tables.server import HttpArgs


# up to TLS 1.2: forward secrecy, and encryption that authenticates; the suites of 1.3 are all like that
DEFAULT_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"


def refuse_old_versions(context: ssl.SSLContext) -> None:
    """Let nobody speak less than TLS 1.2, whatever the system's default is."""
    context.minimum_version = ssl.TLSVersion.TLSv1_2


def load_files(context: ssl.SSLContext, certfile: str, keyfile: str | None, ca_certs: str | None) -> None:
    """Make a server's TLS context use files.

    Args:
        context: of a server.
        certfile: its certificate.
        keyfile: its private key; None: the key is in `certfile`.
        ca_certs: whose certificates clients may show; None: no more than it knows already.

    Raises:
        OSError: a file cannot be read, or holds something else (ssl.SSLError).
        ConfigError: the key needs a pass phrase.
    """
    context.load_cert_chain(certfile, keyfile, _refuse_pass_phrase)
    if ca_certs is not None:
        context.load_verify_locations(ca_certs)


def check_files(args: HttpArgs) -> None:
    """Read the files of the flags once.

    Raises:
        ConfigError: HTTPS is asked for and cannot be had with them.
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
    """Answers OpenSSL, which would ask the terminal and wait."""
    raise ConfigError("the private key is encrypted; give --ssl-keyfile one without a pass phrase")
