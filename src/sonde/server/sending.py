# SPDX-License-Identifier: Apache-2.0
"""Sending answers: compressed where that pays off, no faster than they are read."""

from __future__ import annotations

import contextlib
import gzip
import ipaddress
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sonde.server.answers import Answer
from sonde.server.left_out import FILES, ROWS
from sonde.server.unsent import Unsent

_WORTH_PACKING = 64 << 10
"""Answers with more bytes are compressed."""
_PIECE_BYTES = 256 << 10
"""Bytes that are given to the connection at a time."""


@dataclass(frozen=True, slots=True)
class Packed:
    """An answer as it is sent, maybe compressed."""

    content: bytes
    media_type: str
    headers: dict[str, str]


def packed(request: Request, answer: Answer) -> Packed:
    """The answer, compressed where the client accepts that. May take long: call it in a thread."""
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    if answer.left_out:
        headers[FILES] = str(answer.left_out)
    if answer.rows_left_out:
        headers[ROWS] = str(answer.rows_left_out)
    content = answer.content
    takes_gzip = "gzip" in request.headers.get("accept-encoding", "") and not _is_near(request)
    if len(content) > _WORTH_PACKING and takes_gzip:
        content = gzip.compress(content, 1)
        headers |= {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
    return Packed(content, answer.media_type, headers)


def _is_near(request: Request) -> bool:
    """Whether the client is on this machine: compressing would take longer than sending."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(request.client.host if request.client else "").is_loopback
    return False


class PacedResponse(Response):
    """An answer that a connection gets piece by piece, and that counts as unsent meanwhile."""

    def __init__(self, packed: Packed, unsent: Unsent, tenant: str) -> None:
        """`unsent`: which this answer adds to. Raises RefusedRequestError where it has no room."""
        unsent.check(tenant, len(packed.content))
        super().__init__(packed.content, media_type=packed.media_type, headers=packed.headers)
        self._unsent, self._tenant = unsent, tenant

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Send it; returns once the connection has taken all of it or is gone."""
        size = len(self.body)
        with self._unsent.held(self._tenant, size):
            headers = self.raw_headers
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": headers}
            )
            for at in range(0, size, _PIECE_BYTES):
                piece = self.body[at : at + _PIECE_BYTES]
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
