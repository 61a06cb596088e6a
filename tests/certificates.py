"""Keys and certificates for servers with TLS."""

from __future__ import annotations

import pathlib
import subprocess


def make_certificates(directory: pathlib.Path) -> None:
    """An authority, and a key and certificate for a server and a client, by openssl."""
    script = """
    openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -days 2 -subj /CN=ca
    for name in server client; do
      openssl req -newkey rsa:2048 -nodes -keyout $name.key -out $name.csr -subj /CN=$name
      printf 'subjectAltName=IP:127.0.0.1\n' > ext
      openssl x509 -req -in $name.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out $name.pem -days 2 -extfile ext
    done
    """
    subprocess.run(["sh", "-ec", script], cwd=directory, check=True, capture_output=True, timeout=60)
