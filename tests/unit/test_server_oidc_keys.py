# SPDX-License-Identifier: Apache-2.0
"""Keys of an issuer: which one a token can name."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from sonde.server import oidc_keys
from sonde.server.oidc_config import OidcConfig


def public(**more: str) -> dict[str, Any]:
    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    found: dict[str, Any] = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(key))
    return found | more


@pytest.mark.parametrize("name", ["\0000", "\0001", "0", "1", "other"])
def test_a_key_without_an_id_has_none_that_a_token_can_name(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    document = {"keys": [public(), public(), public(kid="named")]}
    monkeypatch.setattr(oidc_keys, "_document", lambda url, ends: document)
    config = OidcConfig(issuer="https://issuer", audience="sonde", jwks="https://issuer/keys")

    async def ask(name: str) -> object:
        return await oidc_keys.Keys(config).key(name)

    assert asyncio.run(ask(name)) is None
    assert asyncio.run(ask("named")) is not None
    assert asyncio.run(ask("")) is None  # which of the three is not known
