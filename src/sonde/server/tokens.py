# SPDX-License-Identifier: Apache-2.0
"""Bearer tokens: who may do what for which tenant.

Only SHA-256 of a token is kept: it has 256 random bits, so no slow hash is needed. Each request
looks its token up, so one that was revoked is refused at once, by every server that uses this
directory.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from sonde.errors import UsageError
from sonde.store.database import Database

NAME = "tokens.sqlite"
PREFIX = "sonde_"
TENANT = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_SCHEMA = """CREATE TABLE IF NOT EXISTS token (
  hash BLOB PRIMARY KEY, id TEXT UNIQUE NOT NULL, tenant TEXT NOT NULL, scopes TEXT NOT NULL,
  made_s INTEGER NOT NULL, expires_s INTEGER NOT NULL, revoked_s INTEGER NOT NULL) WITHOUT ROWID"""


class Scope(StrEnum):
    """What a token may be used for: sending chunks, asking questions, pausing collection and
    listing tokens."""

    INGEST = "ingest"
    READ = "read"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a request."""

    id: str
    """Of the token; it is no secret."""
    tenant: str
    scopes: frozenset[Scope]


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """A token without its secret; times in seconds since 1970, 0 never."""

    id: str
    tenant: str
    scopes: str
    """Separated by commas."""
    made_s: int
    expires_s: int
    revoked_s: int


class Tokens:
    """The tokens of a store. Thread-safe; processes may share it. Each method raises
    sqlite3.Error."""

    def __init__(self, folder: Path) -> None:
        """Raises sqlite3.Error, OSError; UsageError where others could put a token in."""
        self._db = Database(folder, NAME, _SCHEMA)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def make(self, tenant: str, scopes: Iterable[Scope], lifetime_s: int = 0) -> tuple[str, str]:
        """(id, token) of a new token; the token is not kept. Raises UsageError."""
        ordered = sorted(set(scopes))
        if not TENANT.fullmatch(tenant):
            raise UsageError(
                f"{tenant!r} cannot be the name of a tenant",
                "use lower-case letters, digits, - and _, at most 63, with no - or _ first",
            )
        if not ordered:
            raise UsageError("a token without a scope", "give ingest, read or admin")
        token = PREFIX + secrets.token_urlsafe(32)
        number = secrets.token_hex(6)
        now = int(time.time())
        with self._db.held() as db:
            db.execute(
                "INSERT INTO token VALUES (?, ?, ?, ?, ?, ?, 0)",
                [
                    _hash(token),
                    number,
                    tenant,
                    ",".join(ordered),
                    now,
                    now + lifetime_s if lifetime_s else 0,
                ],
            )
        return number, token

    def revoke(self, number: str) -> bool:
        """Refuse the token with this id from now on; returns whether there was one."""
        with self._db.held() as db:
            done = db.execute(
                "UPDATE token SET revoked_s = ? WHERE id = ? AND revoked_s = 0",
                [int(time.time()), number],
            )
            return done.rowcount > 0

    def listed(self) -> list[TokenInfo]:
        """All tokens, revoked ones too."""
        with self._db.held() as db:
            rows = db.execute(
                "SELECT id, tenant, scopes, made_s, expires_s, revoked_s FROM token"
                " ORDER BY made_s, id"
            ).fetchall()
        return [TokenInfo(*row) for row in rows]

    def caller(self, token: str) -> Caller | None:
        """The caller whose token it is; None for unknown, revoked and expired ones."""
        if not token.startswith(PREFIX) or len(token) > 128:
            return None
        with self._db.held() as db:
            row = db.execute(
                "SELECT id, tenant, scopes, expires_s FROM token WHERE hash = ? AND revoked_s = 0",
                [_hash(token)],
            ).fetchone()
        if row is None or (row[3] and row[3] <= time.time()):
            return None
        return Caller(row[0], row[1], frozenset(Scope(one) for one in row[2].split(",")))


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()
