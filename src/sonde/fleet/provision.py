# SPDX-License-Identifier: Apache-2.0
"""Keys, certificates and directories of the parties.

`provision` creates all of them in one place, which is for trials. In production each party creates
its own HPKE and TLS keys and shares only the public halves; leader and helper agree on the verify
key and their token, which nobody else learns.

```
DIR/leader, DIR/helper   task.json roster.json keys.json tls.crt tls.key ca.crt
DIR/collector            task.json keys.json ca.crt
DIR/nodes/0000           task.json node.key ca.crt
```

Later each party writes its `clock.json` there, an aggregator its `state.sqlite`, a collector its
`releases.json`.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import secrets
import ssl
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from sonde.errors import UsageError
from sonde.fleet import hpke
from sonde.fleet.party_files import MAX_TASK_FILE_BYTES, open_secret, read_secret, read_text
from sonde.fleet.roster import Identity, Roster
from sonde.fleet.task import Task
from sonde.fleet.verification import AggregatorKeys
from sonde.private_files import Folder, secret_folder

Role = Literal["leader", "helper", "collector"]


@dataclass(frozen=True)
class Credentials:
    """A party's secrets (keys.json) and the directory of its certificates. Keys and tokens are
    hexadecimal.

    verify_key       of both aggregators: what proofs are checked with
    token            the leader's and the collector's: what the collector sends to the leader; the
                     helper's: what the leader sends to it, of which it has a copy, `helper_token`
    operator_token   gives access to an aggregator's exact counts; the collector has none
    """

    directory: Path
    role: Role
    hpke_private: str = field(repr=False)
    verify_key: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    helper_token: str = field(default="", repr=False)
    operator_token: str = field(default="", repr=False)

    @property
    def keys(self) -> AggregatorKeys:
        return AggregatorKeys(self.hpke_private, bytes.fromhex(self.verify_key))

    def server_tls(self) -> ssl.SSLContext:
        """TLS 1.3 with this party's certificate. Raises UsageError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            with (
                open_secret(self.directory / "tls.crt") as certificate,
                open_secret(self.directory / "tls.key") as key,
            ):
                context.load_cert_chain(
                    f"/proc/self/fd/{certificate.fileno()}",
                    f"/proc/self/fd/{key.fileno()}",
                    password="",  # otherwise an encrypted key prompts on the terminal
                )
        except OSError as error:
            raise UsageError(
                f"no certificate and key at {self.directory}: {error.strerror or error}",
                "put tls.crt and tls.key there, PEM, of one pair",
            ) from error
        return context

    def client_tls(self) -> ssl.SSLContext:
        return client_tls(self.directory)

    def save(self, into: Folder) -> None:
        fields = {k: v for k, v in asdict(self).items() if k != "directory"}
        into.write("keys.json", json.dumps(fields).encode())

    @staticmethod
    def load(directory: Path) -> Credentials:
        try:
            credentials = Credentials(directory, **json.loads(read_secret(directory / "keys.json")))
            for key in (credentials.hpke_private, credentials.verify_key):
                if key and len(bytes.fromhex(key)) != 32:
                    raise ValueError("a key of another length than 32 bytes")
            return credentials
        except OSError as error:
            raise UsageError(
                f"no fleet party at {directory}: {error.strerror}",
                "make one with 'sonde fleet aggregate --new DIR'",
            ) from error
        except (ValueError, TypeError, RecursionError) as error:
            raise UsageError(
                f"not a fleet party: {directory}: {error}", "put its keys.json back as it was made"
            ) from error


def client_tls(directory: Path) -> ssl.SSLContext:
    """A TLS client context that trusts only the authority in `directory`. Raises UsageError."""
    try:
        authority = read_text(directory / "ca.crt", MAX_TASK_FILE_BYTES)
        if (
            not authority or not authority.isascii()
        ):  # an empty file would mean the system's authorities
            raise ValueError("no certificate")
        context = ssl.create_default_context(cadata=authority)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"no certificate authority at {directory / 'ca.crt'}",
            "put the certificate there that the aggregators' are signed by",
        ) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def provision(directory: Path, task: Task, tenants: Sequence[str]) -> Task:
    """Creates all parties of a trial; `tenants[i]` is the tag of node i. Returns the final task.
    Raises UsageError, SinkError.
    """
    if (directory / "leader").exists():
        raise UsageError(f"{directory} already holds a fleet", "name an empty directory")
    pairs = {role: hpke.generate_key_pair() for role in ("leader", "helper", "collector")}
    task = replace(
        task,
        leader_key=pairs["leader"][1],
        helper_key=pairs["helper"][1],
        collector_key=pairs["collector"][1],
    )
    verify_key = secrets.token_hex(32)
    collector_token, helper_token = secrets.token_hex(32), secrets.token_hex(32)
    parties = (
        Credentials(
            directory / "leader",
            "leader",
            pairs["leader"][0],
            verify_key,
            token=collector_token,
            helper_token=helper_token,
            operator_token=secrets.token_hex(32),
        ),
        Credentials(
            directory / "helper",
            "helper",
            pairs["helper"][0],
            verify_key,
            token=helper_token,
            operator_token=secrets.token_hex(32),
        ),
        Credentials(
            directory / "collector", "collector", pairs["collector"][0], token=collector_token
        ),
    )
    nodes = [Identity() for _ in tenants]
    roster = Roster({node.public: tag for node, tag in zip(nodes, tenants, strict=True)})
    authority = _Authority()
    with secret_folder(directory) as fleet:
        for credentials in parties:
            with fleet.make(credentials.role) as folder:
                credentials.save(folder)
                folder.write("task.json", task.to_json().encode())
                folder.write("ca.crt", authority.certificate)
                if credentials.role != "collector":
                    folder.write("roster.json", roster.to_json().encode())
                    certificate, key = authority.issue(credentials.role)
                    folder.write("tls.crt", certificate)
                    folder.write("tls.key", key)
        with fleet.make("nodes") as folders:
            for number, node in enumerate(nodes):
                with folders.make(f"{number:04}") as folder:
                    folder.write("node.key", node.private().hex().encode())
                    folder.write("task.json", task.to_json().encode())
                    folder.write("ca.crt", authority.certificate)
    return task


def load_node(directory: Path) -> Identity:
    """The identity that a directory of a node holds. Raises UsageError."""
    try:
        return Identity(bytes.fromhex(read_secret(directory / "node.key").strip()))
    except OSError as error:
        raise UsageError(
            f"no node at {directory}: {error.strerror}",
            "name one of the directories under nodes/ that 'sonde fleet aggregate --new' has made",
        ) from error
    except ValueError as error:
        raise UsageError(
            f"not a node's key: {directory / 'node.key'}", "put its 32 bytes there, hexadecimal"
        ) from error


class _Authority:
    """A certificate authority of a trial: for localhost, for a year; its key is stored nowhere."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "sonde fleet")])
        extension = x509.BasicConstraints(ca=True, path_length=0)
        signed = self._builder(self._name, self._key.public_key()).add_extension(extension, True)
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        made = signed.add_extension(usage, True).sign(self._key, hashes.SHA256())
        self.certificate = made.public_bytes(serialization.Encoding.PEM)

    def _builder(
        self, name: x509.Name, public: ec.EllipticCurvePublicKey
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=365))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), False
            )
        )

    def issue(self, name: str) -> tuple[bytes, bytes]:
        """(certificate, private key), PEM, for localhost."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        names = x509.SubjectAlternativeName(
            [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        )
        builder = self._builder(subject, key.public_key()).add_extension(names, False)
        certificate = builder.sign(self._key, hashes.SHA256())
        return (
            certificate.public_bytes(serialization.Encoding.PEM),
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
        )
