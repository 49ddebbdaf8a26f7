# SPDX-License-Identifier: Apache-2.0
"""HPKE (RFC 9180: X25519, HKDF-SHA256, AES-128-GCM): each share is readable by one party only."""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_128_GCM)

LEADER, HELPER = b"\x00", b"\x01"
"""The role of an aggregator, as bindings have it."""


class DecryptionError(Exception):
    """A ciphertext that does not open: for another key, with another binding, or changed."""


def generate_key_pair() -> tuple[str, str]:
    """(private, public), hexadecimal."""
    key = X25519PrivateKey.generate()
    return key.private_bytes_raw().hex(), key.public_key().public_bytes_raw().hex()


def seal(plaintext: bytes, public_key: str, binding: bytes) -> bytes:
    """Encrypts for the holder of the private key. `binding` (`info` in the RFC) must be the same
    when opening.
    """
    key = X25519PublicKey.from_public_bytes(bytes.fromhex(public_key))
    return _SUITE.encrypt(plaintext, key, binding)


class Opener:
    """Decrypts what was sealed for one private key."""

    def __init__(self, private_key: str) -> None:
        self._key = X25519PrivateKey.from_private_bytes(bytes.fromhex(private_key))

    def open(self, ciphertext: bytes, binding: bytes) -> bytes:
        """Raises DecryptionError."""
        try:
            return _SUITE.decrypt(ciphertext, self._key, binding)
        except (InvalidTag, ValueError) as error:
            raise DecryptionError from error
