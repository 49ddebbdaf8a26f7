# SPDX-License-Identifier: Apache-2.0
"""Takes chunks over HTTP. Much metadata is decoded beside the event loop, when it is the tenant's
turn, so that others' requests go on meanwhile."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor

from sonde.server import chunk_bodies
from sonde.server.service import Service
from sonde.server.tokens import Caller
from sonde.server.turns import Turns


class ChunkIntake:
    """Takes requests with chunks. For use in one event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        connections = service.limits.connections
        self._turns = Turns(1, 3 * connections // 4, connections // 2)
        self._thread = ThreadPoolExecutor(1, "sonde-metadata")

    async def take(self, caller: Caller, node: str, body: bytes) -> list[tuple[Future[None], bool]]:
        """As `Service.take`."""
        service = self._service
        chunks = service.framed(caller, node, body)
        if chunk_bodies.is_quick(chunks):
            unpacked_bytes = service.unpacked_bytes(chunks)
        else:
            loop = asyncio.get_running_loop()
            with self._turns.place(caller.tenant):
                async with self._turns.turn(caller.tenant):
                    unpacked_bytes = await loop.run_in_executor(
                        self._thread, service.unpacked_bytes, chunks
                    )
        return service.put(caller, node, chunks, unpacked_bytes)
