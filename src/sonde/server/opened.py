# SPDX-License-Identifier: Apache-2.0
"""Files that somebody gives to the page: on the disk while a child reads them, then removed."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from sonde.export.packed import MEDIA_TYPE
from sonde.server.answers import Answer
from sonde.server.children import BusyError, Children, memory_bytes
from sonde.server.open_recording import BAD, ERROR_BYTES, GOOD
from sonde.server.service import RefusedRequestError
from sonde.server.turns import FIRST_PLACES, Turns

MAX_BYTES = 256 << 20
"""Of a file."""
ANSWER_BYTES = 256 << 20
"""Of the child's answer, where the tenant has room for as much that is not sent."""
BODY_S = 120.0
"""For the whole file to arrive."""
BEGIN_S, LEAST_BYTES_A_SECOND = 10.0, 64 << 10
"""After the first seconds a file must have arrived at this rate on average."""
FILES, FILES_OF_TENANT = 8, 2
"""Files on the disk, which arrive, wait or are read: of all tenants, and of one."""
READ_S = 60.0
"""CPU time, and elapsed time, of the child."""
SHARED_READ_S = 10.0
"""Elapsed time of the child where somebody else waits for one."""
WAIT_S = 60.0
"""For a child, while others compute the answers to questions."""
FILES_KEY = "\0files"
"""Of `Children`, for files where there is one tenant: no name of a tenant."""
_REMEDY = "`sonde explain FILE` and `sonde report FILE` on your machine read larger ones"


class Opener:
    """Receives several files at a time and reads one at a time, of the tenants in turn."""

    def __init__(self, folder: Path, children: Children | None = None, files_key: str = "") -> None:
        """`folder`: for files while they are received and read; `children`: which share the budget
        of memory; `files_key`: has a child for a file besides the tenant's other one, else ''."""
        self._folder, self._children = folder, children or Children()
        self._files_key = files_key
        # Each waits for its child: a tenant whose other child runs must hold up nobody else.
        self._threads = ThreadPoolExecutor(FILES + FIRST_PLACES, "sonde-open")
        self._turns = Turns(1, FILES, FILES_OF_TENANT)

    async def open(
        self,
        tenant: str,
        declared_bytes: int,
        parts: AsyncIterator[bytes],
        room_bytes: Callable[[], int] = lambda: ANSWER_BYTES,
    ) -> Answer:
        """The packed document of a file (open_recording.py). `room_bytes`: what it may have, asked
        in a thread once it is to be made. Raises RefusedRequestError."""
        if declared_bytes > MAX_BYTES:
            raise _too_large()
        try:
            with (
                self._turns.place(tenant),
                tempfile.TemporaryFile(dir=self._folder) as file,
            ):
                await self._receive(parts, file)
                async with self._turns.turn(tenant):
                    loop = asyncio.get_running_loop()
                    key = self._files_key or tenant
                    content, gave_way = await loop.run_in_executor(
                        self._threads, _read, self._children, key, file.fileno(), room_bytes
                    )
        except BusyError as error:
            raise RefusedRequestError(503, error.cause, error.remedy) from None
        except OSError as error:
            raise RefusedRequestError(
                503, f"the file cannot be kept: {error.strerror}", "free space on the server"
            ) from None
        if content[:1] == GOOD:
            return Answer(content[1:], MEDIA_TYPE)
        if content[:1] == BAD:
            answer = json.loads(content[1:])
            raise RefusedRequestError(422, answer["error"], answer["remedy"])
        if gave_way:
            raise RefusedRequestError(
                503, f"others wait, and the file took more than {SHARED_READ_S:.0f} s", _REMEDY
            )
        raise RefusedRequestError(422, "the file could not be read in its limits", _REMEDY)

    async def _receive(self, parts: AsyncIterator[bytes], file: IO[bytes]) -> None:
        size = 0
        try:
            begun = asyncio.get_running_loop().time()
            async with asyncio.timeout(BEGIN_S) as limit:
                async for part in parts:
                    size += len(part)
                    limit.reschedule(begun + min(BODY_S, BEGIN_S + size / LEAST_BYTES_A_SECOND))
                    if size > MAX_BYTES:
                        raise _too_large()
                    file.write(part)
        except TimeoutError:
            raise RefusedRequestError(408, "the file came too slowly", "send it again") from None
        file.flush()


def _too_large() -> RefusedRequestError:
    return RefusedRequestError(413, f"the file has more than {MAX_BYTES >> 20} MiB", _REMEDY)


def _read(
    children: Children, key: str, descriptor: int, room_bytes: Callable[[], int]
) -> tuple[bytes, bool]:
    """(the child's answer, b'' where it died or was killed; whether that was for others who wait).
    Raises OSError, BusyError."""
    gave_way = False
    with children.place(key, WAIT_S, is_file=True):
        shared_until_s = time.monotonic() + SHARED_READ_S

        def is_over() -> bool:
            nonlocal gave_way
            gave_way = time.monotonic() >= shared_until_s and children.others_wait(key)
            return gave_way

        most_bytes = min(ANSWER_BYTES, room_bytes())
        content, _ = children.output_of(
            "sonde.server.open_recording",
            [str(memory_bytes()), str(round(READ_S)), str(most_bytes)],
            READ_S,
            most_bytes + ERROR_BYTES,
            stdin=descriptor,
            is_over=is_over,
        )
    return content, gave_way
