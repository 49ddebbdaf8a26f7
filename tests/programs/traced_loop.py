# SPDX-License-Identifier: Apache-2.0
"""An HTTP server that answers all requests on one thread, an event loop. A request computes for a
while and yields to the others. Prints its port."""

from __future__ import annotations

import asyncio
import time


def spin_in_turn(seconds: float) -> None:
    """Use as much time of a CPU."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1000))


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    for _ in range(20):
        spin_in_turn(0.02)
        await asyncio.sleep(0)
    writer.write(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
    await writer.drain()
    writer.close()


async def main() -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
