# SPDX-License-Identifier: Apache-2.0
"""A client that sends each request in two small writes, so that the second one waits for a delayed
acknowledgement; with an argument both sides set TCP_NODELAY. Prints how long each answer took, in
ns, as JSON."""

import json
import os
import socket
import sys
import time

ASKED = 60
SIZE = 64


def connected(connection: socket.socket) -> socket.socket:
    if len(sys.argv) > 1:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def receive(connection: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        block = connection.recv(size - len(got))
        if not block:
            return got
        got += block
    return got


def serve(listener: socket.socket) -> None:
    connection = connected(listener.accept()[0])
    while receive(connection, 2 * SIZE):
        connection.send(b"a" * SIZE)


def ask(connection: socket.socket) -> int:
    connection.send(b"h" * SIZE)
    connection.send(b"b" * SIZE)
    began = time.monotonic_ns()
    receive(connection, SIZE)
    return time.monotonic_ns() - began


listener = socket.create_server(("127.0.0.1", 0))
pid = os.fork()
if not pid:
    serve(listener)
    os._exit(0)
client = connected(socket.create_connection(listener.getsockname()))
times = []
for _ in range(ASKED):
    times.append(ask(client))
    sum(range(20_000))
client.close()
os.waitpid(pid, 0)
print(json.dumps(times))
