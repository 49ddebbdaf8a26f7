# SPDX-License-Identifier: Apache-2.0
"""Reads the body of a request with bounds on its size, its duration and its rate."""

from __future__ import annotations

import asyncio

from aiohttp import web

from sonde.fleet.first_reads import FirstRead
from sonde.fleet.upload_slots import Slot
from sonde.fleet.wire import first_length_prefixed_bytes

BODY_S = 30
"""For the body of an upload: a slower sender would keep a slot."""
FIRST_BYTES = 64 << 10
"""What must have arrived of an upload of several reports, or all of it, before it gets a slot."""
PROGRESS_BYTES = 64 << 10
"""What an upload of several reports must bring within PROGRESS_INTERVAL_S, or it is refused; as
soon as this much has arrived, the next interval begins."""
PROGRESS_INTERVAL_S = 2.0
FIRST_REPORT_BYTES = 256 << 10
"""Where its first report is longer than FIRST_BYTES: of that, up to this much is read first."""


async def read_first(request: web.Request, read: FirstRead) -> bytes:
    """Reads the first bytes of an upload of several reports, with its first report, or all of it,
    within BODY_S.

    Beyond FIRST_BYTES the sender must keep up PROGRESS_BYTES. `read` is its entry in `FirstReads`;
    if that ends it, the request is refused.
    """
    parts, wanted_bytes = bytearray(), FIRST_BYTES
    now_s = asyncio.get_running_loop().time
    ends_s, next_bytes = now_s() + BODY_S, FIRST_BYTES  # next: with which an interval begins
    try:
        async with asyncio.timeout_at(ends_s) as read.deadline:
            while len(parts) < wanted_bytes and (part := await request.content.readany()):
                parts += part
                read.received_bytes = len(parts)
                if len(parts) >= next_bytes:
                    next_bytes = len(parts) + PROGRESS_BYTES
                    read.deadline.reschedule(min(ends_s, now_s() + PROGRESS_INTERVAL_S))
                wanted_bytes = max(
                    FIRST_BYTES, min(FIRST_REPORT_BYTES, first_length_prefixed_bytes(parts))
                )
    except TimeoutError:
        raise web.HTTPRequestTimeout from None
    return bytes(parts)


async def read_body(
    request: web.Request,
    limit_bytes: int,
    limit_s: float = BODY_S,
    *,
    first: bytes = b"",
    progress_bytes: int = 0,
    slot: Slot | None = None,
) -> bytes:
    """Reads a body of at most `limit_bytes`, whatever its header claims, within `limit_s`.

    `first`: the part that was read before, which counts. `progress_bytes`: what must arrive within
    PROGRESS_INTERVAL_S of the beginning, or of the last time that this much had arrived; 0: any.
    `slot`: the slot that it is read in; the request is refused if that is revoked.
    """
    parts, size = [first], len(first)
    if (largest := max(request.content_length or 0, size)) > limit_bytes:
        raise web.HTTPRequestEntityTooLarge(limit_bytes, largest)
    now_s = asyncio.get_running_loop().time
    ends_s, next_bytes = now_s() + limit_s, size + progress_bytes
    try:
        async with asyncio.timeout_at(
            min(ends_s, now_s() + PROGRESS_INTERVAL_S) if progress_bytes else ends_s
        ) as deadline:
            if slot is not None:
                slot.start_reading(deadline)
            async for part in request.content.iter_any():
                size += len(part)
                if slot is not None:
                    slot.received_bytes += len(part)
                    if slot.is_revoked:
                        raise TimeoutError
                if progress_bytes and size >= next_bytes:
                    next_bytes = size + progress_bytes
                    deadline.reschedule(min(ends_s, now_s() + PROGRESS_INTERVAL_S))
                if size > limit_bytes:
                    raise web.HTTPRequestEntityTooLarge(limit_bytes, size)
                parts.append(part)
    except TimeoutError:
        raise web.HTTPRequestTimeout from None
    if slot is not None:
        slot.complete()
    return b"".join(parts)
