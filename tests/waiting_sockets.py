# SPDX-License-Identifier: Apache-2.0
"""Processes that wait on real sockets, and looks at them (`sonde.collect.peers`)."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sonde import procfs
from sonde.collect import peers
from sonde.collect.peers import PeerLooks
from sonde.model.rows import ActivityTuple

CONNECTS = """
import asyncio, select, socket, sys
family, addresses, more, call = sys.argv[1], eval(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
links = [socket.socket(getattr(socket, family)) for _ in addresses]
for link, address in zip(links, addresses):
    link.connect(address)
many = [socket.socket(type=socket.SOCK_DGRAM) for _ in range(more)]

def there():
    print("there", flush=True)

def wait_poll():
    them = select.poll()
    for one in (*links, *many):
        them.register(one.fileno(), select.POLLIN)
    there()
    them.poll()

def wait_select():
    there()
    select.select([*links, *many], [], [])

def wait_epoll():
    them = select.epoll()
    for one in (*links, *many):
        them.register(one.fileno(), select.EPOLLIN)
    there()
    them.poll()

def wait_listening():  # as a server that waits for requests
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    accepted = server.accept()[0]
    them = select.epoll()
    for one in (server, accepted, *links):
        them.register(one.fileno(), select.EPOLLIN)
    there()
    them.poll()

def wait_accepted():
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    accepted = server.accept()[0]
    there()
    accepted.recv(1)

def wait_timeout():
    links[0].settimeout(60)
    there()
    links[0].recv(1)

def wait_asyncio():
    async def ask():
        reader, _ = await asyncio.open_connection(sock=links[0])
        asyncio.get_running_loop().call_soon(there)
        await reader.read(1)
    asyncio.run(ask())

def wait_recv():
    there()
    links[0].recv(1)

globals()["wait_" + call]()
"""


@contextmanager
def waiting(family: str, *addresses: Any, more: int = 0, call: str = "recv") -> Iterator[int]:
    """A process that is connected and waits for data in one way; its pid."""
    command = [sys.executable, "-c", CONNECTS, family, repr(addresses), str(more), call]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"there\n"
            path = f"/proc/{child.pid}/syscall"
            until_s = time.monotonic() + 10
            while not (procfs.read_file(path) or b"r")[:1].isdigit():
                assert time.monotonic() < until_s
            yield child.pid
        finally:
            child.kill()


def blocked(pid: int, call: str = "recvfrom", ns: int = 500_000_000) -> ActivityTuple:
    """A row on a thread that waited."""
    return (0, "blocked", "socket", "", call, "", 0, pid, 7, pid, 1, ns, 0, ns, 0, 0)


def rows_found(looks: PeerLooks, *rows: ActivityTuple, tries: int = 40) -> list[ActivityTuple]:
    """Rows that looks give; a machine that is busy cuts a look short, and another one goes on."""
    found: list[ActivityTuple] = []
    for _ in range(tries):
        looks._left_s = peers.BURST_S
        found = looks.rows(0, rows)
        if found and all(row[14] for row in found):
            break
    return found


def found(
    looks: PeerLooks, *rows: ActivityTuple, tries: int = 40
) -> set[tuple[str, str, str, int, int]]:
    """(address, protocol, program, thread, process) that looks find."""
    seen = rows_found(looks, *rows, tries=tries)
    return {(row[2], row[3], row[4], row[9], row[14]) for row in seen}
