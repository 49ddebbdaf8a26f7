# SPDX-License-Identifier: Apache-2.0
"""The public keys of an OpenID Connect issuer, fetched when they are needed, within bounds.

What clients send decides when keys are looked for, but not how often: one fetch runs at a time, and
the next begins COOLDOWN_S later at the earliest.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from sonde import http_client
from sonde.errors import UsageError
from sonde.server.oidc_config import OidcConfig, check_url

LOG = logging.getLogger("sonde.server")
DEADLINE_S = 5.0
"""For all requests of a fetch together."""
DOCUMENT_BYTES = 256 << 10
MAX_KEYS = 64
COOLDOWN_S = 10.0
"""Between the starts of two fetches."""
FRESH_S = 300.0
"""Older keys are fetched again, and are used meanwhile."""
USABLE_S = 3_600.0
"""Older keys are not used any more: the issuer may have withdrawn them."""
LEAST_RSA_BITS = 2_048
"""Shorter RSA keys are ignored as weak."""


class KeysUnavailableError(Exception):
    """The issuer's keys are not known, and cannot be fetched now."""


@dataclass(frozen=True, slots=True)
class Key:
    """A public key and the algorithms it may check."""

    public: Any
    algorithms: frozenset[str]


class Keys:
    """The keys of an issuer. For use in one event loop."""

    def __init__(self, config: OidcConfig) -> None:
        self._config = config
        self._keys: Mapping[str | int, Key] = {}
        self._fetched_s = self._tried_s = float("-inf")
        self._fetching: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "sonde-oidc")
        self.failures = 0

    async def key(self, name: str) -> Key | None:
        """The key with this id ('': the only one); None: the issuer had no such key when its keys
        were fetched last.

        Raises KeysUnavailableError.
        """
        age_s = time.monotonic() - self._fetched_s
        found = self._find(name) if age_s < USABLE_S else None
        if found is None or age_s > FRESH_S:
            self._begin()
        if found is None and self._fetching is not None:
            await asyncio.shield(self._fetching)
            found = self._find(name)
        if time.monotonic() - self._fetched_s >= USABLE_S:
            raise KeysUnavailableError
        return found

    def _find(self, name: str) -> Key | None:
        if name:
            return self._keys.get(name)
        return next(iter(self._keys.values())) if len(self._keys) == 1 else None

    def _begin(self) -> None:
        """Start a fetch, unless one runs or the last one was too recent."""
        if self._fetching is None and time.monotonic() - self._tried_s >= COOLDOWN_S:
            self._tried_s = time.monotonic()
            self._fetching = asyncio.create_task(self._renew())

    async def _renew(self) -> None:
        try:
            loop = asyncio.get_running_loop()
            self._keys = await loop.run_in_executor(self._thread, _fetched, self._config)
            self._fetched_s = time.monotonic()
        except Exception as error:
            self.failures += 1
            LOG.error("the issuer's keys cannot be fetched: %s", str(error)[:300])
        finally:
            self._fetching = None


def _fetched(config: OidcConfig) -> Mapping[str | int, Key]:
    """The keys by id; those without one by their place in the list, which no token can name: its id
    is a text. Raises OSError, ValueError, UsageError."""
    ends = time.monotonic() + DEADLINE_S
    url = config.jwks
    if not url:
        where = config.issuer.rstrip("/") + "/.well-known/openid-configuration"
        found = _document(where, ends)
        if found.get("issuer") != config.issuer:
            raise ValueError("the discovery document is of another issuer")
        url = found.get("jwks_uri", "")
        if not isinstance(url, str):
            raise ValueError("the discovery document names no jwks_uri")
        check_url("jwks_uri", url)
    listed = _document(url, ends).get("keys")
    if not isinstance(listed, list) or len(listed) > MAX_KEYS:
        raise ValueError(f"no list of at most {MAX_KEYS} keys")
    keys: dict[str | int, Key] = {}
    for at, one in enumerate(listed):
        key = _key(one) if isinstance(one, dict) else None
        if key is not None:
            name = one.get("kid")
            keys[name if isinstance(name, str) and name else at] = key
    return keys


def _document(url: str, ends: float) -> dict[str, Any]:
    """A JSON object from the issuer, until `ends` (monotonic). Raises OSError, ValueError."""
    left_s = max(0.01, ends - time.monotonic())
    answer = http_client.request(
        "GET", url, deadline_s=left_s, max_bytes=DOCUMENT_BYTES, headers={"Accept": "*/*"}
    )
    if answer.status != 200:
        raise ValueError(f"{http_client.shown(url)} answers {answer.status}")
    try:
        found = json.loads(answer.body)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError(f"{http_client.shown(url)} is no JSON object")
    return found


def _key(described: dict[str, Any]) -> Key | None:
    """A key (JWK) that may check signatures; None: it is for something else, invalid or weak."""
    if described.get("kty") not in ("RSA", "EC", "OKP") or described.get("use", "sig") != "sig":
        return None
    public = {name: value for name, value in described.items() if name != "d"}
    try:
        known = jwt.PyJWK(public)
    except (jwt.PyJWTError, ValueError, TypeError, UsageError):
        return None
    if not isinstance(known.key, RSAPublicKey):
        return Key(known.key, frozenset({known.algorithm_name}))
    if known.key.key_size < LEAST_RSA_BITS:
        return None
    stated = described.get("alg")
    every = {f"{kind}{bits}" for kind in ("RS", "PS") for bits in (256, 384, 512)}
    return Key(known.key, frozenset({stated} if isinstance(stated, str) else every))
