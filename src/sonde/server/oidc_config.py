# SPDX-License-Identifier: Apache-2.0
"""The file of `sonde serve --oidc`: whose tokens are accepted, and what their claims allow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from sonde import http_client
from sonde.errors import CaptureError, UsageError
from sonde.input_files import read_checked
from sonde.ownership import only_ours
from sonde.server.tokens import TENANT, Scope

ALGORITHMS = frozenset(
    {f"{kind}{bits}" for kind in ("RS", "PS", "ES") for bits in (256, 384, 512)} | {"EdDSA"}
)
"""Asymmetric ones alone: the key that checks must not be one that signs."""
_MAX_BYTES = 64 << 10
_MAX_LEEWAY_S = 300


class OidcConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An issuer and the meaning of its claims."""

    issuer: str
    """URL, exactly as the claim `iss` has it."""
    audience: str
    """One of `aud` of every token."""
    jwks: str = ""
    """URL of the issuer's keys; '': the issuer's discovery document names it."""
    algorithms: tuple[str, ...] = ("RS256", "ES256")
    leeway_s: float = 30.0
    """By which the clocks of issuer and server may differ."""
    tenant_claim: str = "tenant"
    tenants: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Tenant by value of the claim; empty: the value is the tenant's name."""
    scopes_claim: str = "scope"
    """The claim with scopes: words separated by blanks, or a list of texts."""
    scopes: Mapping[str, Scope] = msgspec.field(
        default_factory=lambda: {f"sonde:{scope}": scope for scope in Scope}
    )
    """What each word allows; other words allow nothing."""


def load(path: Path) -> OidcConfig:
    """Read the file. Raises UsageError."""

    def check(path: Path) -> None:
        if not only_ours(path):
            raise UsageError(
                f"other users can change {path}, which decides who is let in",
                "take their right to write: chmod go-w",
            )

    try:
        content = read_checked(path, _MAX_BYTES, check)
        found = msgspec.toml.decode(content, type=OidcConfig)
    except CaptureError as error:
        raise UsageError(f"--oidc {error.cause}", "name a file") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"--oidc {path} cannot be used: {error}", "see docs/guide/server.md"
        ) from error
    _check(found)
    return found


def _check(config: OidcConfig) -> None:
    """Raises UsageError for values that cannot be right."""
    check_url("issuer", config.issuer)
    if config.jwks:
        check_url("jwks", config.jwks)
    if not config.audience:
        raise UsageError("audience is empty", "name what the issuer writes into `aud`")
    if not config.tenant_claim or not config.scopes_claim:
        raise UsageError("tenant_claim or scopes_claim is empty", "name a claim")
    wrong = sorted(set(config.algorithms) - ALGORITHMS)
    if wrong or not config.algorithms:
        raise UsageError(
            f"algorithms has {wrong[0]!r}" if wrong else "algorithms is empty",
            f"choose among {', '.join(sorted(ALGORITHMS))}",
        )
    if not 0 <= config.leeway_s <= _MAX_LEEWAY_S:
        raise UsageError(
            f"leeway_s is {config.leeway_s:g}", f"choose a value from 0 to {_MAX_LEEWAY_S}"
        )
    for tenant in config.tenants.values():
        if not TENANT.fullmatch(tenant):
            raise UsageError(
                f"tenants has {tenant!r}, which no tenant can be called",
                "use small letters, digits, - and _",
            )
    if not config.scopes:
        raise UsageError("scopes is empty: no token would be let in", "name one, or leave it out")


def check_url(name: str, url: str) -> None:
    """Raises UsageError for a URL that keys must not be fetched from."""
    try:
        parts = http_client.split_url(url)
    except ValueError as error:
        raise UsageError(f"{name} is no URL: {error}", "write https://HOST/PATH") from error
    if parts.scheme != "https" and not http_client.is_loopback(parts.hostname or ""):
        raise UsageError(
            f"{name} is {http_client.shown(url)}: anybody on the way could send other keys",
            "use https",
        )
