# SPDX-License-Identifier: Apache-2.0
"""Checks tokens (JWT) of an OpenID Connect issuer: signature, times, claims; maps claims to a
tenant and scopes."""

from __future__ import annotations

import time
from typing import Any

import jwt

from sonde.server.oidc_config import OidcConfig
from sonde.server.oidc_keys import Keys, KeysUnavailableError
from sonde.server.service import RefusedRequestError
from sonde.server.tokens import TENANT, Caller, Scope

MAX_CHARS = 8_192
"""Of a token."""
MAX_LIFETIME_S = 31 * 24 * 3600.0
"""Until a token expires: the server cannot revoke it before."""
_MAX_SUBJECT = 255
"""Characters of the claim `sub`: the limit of OpenID Connect."""
_LOGIN = "get another token from the issuer"
_MAPPING = "have the issuer's claims and the file of --oidc agree"


class Oidc:
    """Checks tokens of one issuer."""

    def __init__(self, config: OidcConfig) -> None:
        self._config = config
        self.keys = Keys(config)

    @staticmethod
    def may_be(token: str) -> bool:
        """Whether a bearer has the form of a JWT; tokens of `sonde token` have no dots."""
        return token.count(".") == 2

    async def caller(self, token: str) -> Caller:
        """The caller whose token it is. Raises RefusedRequestError: 401 for one that is not valid,
        403 for one whose claims map to no tenant or no scope, 503 while the issuer's keys are not
        known."""
        claims = await self._claims(token)
        subject = claims.get("sub")
        if not isinstance(subject, str) or not 0 < len(subject) <= _MAX_SUBJECT:
            raise RefusedRequestError(401, "the token names no subject", _LOGIN)
        tenant = self._tenant(claims.get(self._config.tenant_claim))
        scopes = self._scopes(claims.get(self._config.scopes_claim))
        return Caller(f"oidc:{subject}", tenant, scopes)

    async def _claims(self, token: str) -> dict[str, Any]:
        if len(token) > MAX_CHARS:
            raise RefusedRequestError(401, "the token is too long", _LOGIN)
        try:
            head = jwt.get_unverified_header(token)
            algorithm, name = head.get("alg"), head.get("kid", "")
            if algorithm not in self._config.algorithms or not isinstance(name, str):
                raise RefusedRequestError(401, "the token's algorithm is not allowed", _LOGIN)
            key = await self.keys.key(name)
            if key is None or algorithm not in key.algorithms:
                raise RefusedRequestError(401, "the token's key is not the issuer's", _LOGIN)
            claims: dict[str, Any] = jwt.decode(
                token,
                key.public,
                algorithms=[algorithm],
                audience=self._config.audience,
                issuer=self._config.issuer,
                leeway=self._config.leeway_s,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except KeysUnavailableError:
            raise RefusedRequestError(
                503, "the issuer's keys cannot be fetched", "try again later"
            ) from None
        except jwt.ExpiredSignatureError:
            raise RefusedRequestError(401, "the token has expired", _LOGIN) from None
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError, OverflowError) as error:
            why = type(error).__name__.removesuffix("Error")
            raise RefusedRequestError(401, f"the token is not valid ({why})", _LOGIN) from None
        expires = claims["exp"]
        if not isinstance(expires, int | float) or expires > time.time() + MAX_LIFETIME_S:
            raise RefusedRequestError(401, "the token expires in more than 31 days", _LOGIN)
        return claims

    def _tenant(self, claimed: object) -> str:
        values = claimed if isinstance(claimed, list) else [claimed]
        if len(values) != 1 or not isinstance(values[0], str):
            raise RefusedRequestError(403, "the token names no single tenant", _MAPPING)
        value = values[0]
        tenant = self._config.tenants.get(value, "") if self._config.tenants else value
        if not TENANT.fullmatch(tenant):
            raise RefusedRequestError(403, "the token's tenant is none of this server", _MAPPING)
        return tenant

    def _scopes(self, claimed: object) -> frozenset[Scope]:
        words = claimed.split() if isinstance(claimed, str) else claimed
        if not isinstance(words, list):
            words = []
        known = self._config.scopes
        found = {known[one] for one in words if isinstance(one, str) and one in known}
        if not found:
            raise RefusedRequestError(403, "the token allows nothing here", _MAPPING)
        return frozenset(found)
