# SPDX-License-Identifier: Apache-2.0
"""A server that writes and syncs each order on its event loop: `ledger.py PORT FILE`."""

import asyncio
import os
import sys


class Ledger:
    """Keeps the last order in a file of one block."""

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def commit(self, line: bytes) -> None:
        """The order is on disk when this returns."""
        os.pwrite(self.fd, line * 8000, 0)
        os.fsync(self.fd)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one client, order by order."""
        while line := await reader.readline():
            self.commit(line)
            writer.write(b"ok\n")
            await writer.drain()
        writer.close()


async def main() -> None:
    """Serve until the process is ended."""
    ledger = Ledger(sys.argv[2])
    server = await asyncio.start_server(ledger.serve, "127.0.0.1", int(sys.argv[1]))
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


asyncio.run(main())
