# SPDX-License-Identifier: Apache-2.0
"""A server that goes on: its certificate is exchanged, its manager is notified, SIGTERM ends it."""

from __future__ import annotations

import datetime
import hashlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def write_certificate(certificate: Path, key: Path) -> str:
    """A new key and certificate; its SHA-256."""
    secret = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(secret.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(secret, hashes.SHA256())
    )
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key.write_bytes(
        secret.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return hashlib.sha256(made.public_bytes(serialization.Encoding.DER)).hexdigest()


def connect(port: int) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    plain = socket.create_connection(("127.0.0.1", port), timeout=20)
    return context.wrap_socket(plain)


def shown(port: int) -> str:
    """SHA-256 of the certificate that a new connection sees."""
    with connect(port) as one:
        return hashlib.sha256(one.getpeercert(binary_form=True) or b"").hexdigest()


def until(done: Callable[[], object]) -> None:
    ends = time.monotonic() + 30
    while not done():
        assert time.monotonic() < ends
        time.sleep(0.05)


def test_a_certificate_is_exchanged_while_connections_go_on(tmp_path: Path) -> None:
    store, certificate, key = (tmp_path / name for name in ("store", "c.pem", "k.pem"))
    first = write_certificate(certificate, key)
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(tmp_path / "notify"))
    manager.settimeout(30)
    log = tmp_path / "serve.log"
    command = [sys.executable, "-m", "sonde", "serve", "--store", str(store)]
    command += ["--listen", "127.0.0.1:0", "--certificate", str(certificate), "--key", str(key)]
    environ = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "400000"}
    with log.open("w") as err:
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=err, text=True, env=os.environ | environ
        )
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline().rsplit(":", 1)[1])
        assert manager.recv(64) == b"READY=1"
        assert manager.recv(64) == b"WATCHDOG=1"
        before = connect(port)
        assert shown(port) == first

        second = write_certificate(certificate, key)
        server.send_signal(signal.SIGHUP)
        until(lambda: shown(port) == second)
        before.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in before.recv(200)
        before.close()

        key.write_text("no key")
        server.send_signal(signal.SIGHUP)
        until(lambda: "the former one stays in use" in log.read_text())
        assert shown(port) == second
    finally:
        server.terminate()
        assert server.stdout is not None
        server.stdout.close()
        assert server.wait(30) == 0, log.read_text()
    reported = b""
    manager.setblocking(False)
    while b"STOPPING=1" not in reported:
        reported = manager.recv(64)
    manager.close()


def test_a_certificate_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    write_certificate(certificate, key)
    key.write_text("no key")
    command = [sys.executable, "-m", "sonde", "serve", "--store", str(tmp_path / "store")]
    command += ["--listen", "127.0.0.1:0", "--certificate", str(certificate), "--key", str(key)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert done.returncode == 2
    assert "the certificate cannot be used" in done.stderr
    assert "Traceback" not in done.stderr
