# SPDX-License-Identifier: Apache-2.0
"""Each step asks a service that answers late."""

import os
import socket
import time

from kit import Kit, work


def serve(mine: socket.socket) -> None:
    while mine.recv(64):
        time.sleep(0.012)
        mine.sendall(b"answer")


def ask(service: socket.socket) -> bytes:
    service.sendall(b"question")
    return service.recv(64)


def main(kit: Kit) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    child = os.fork()
    if child == 0:
        serve(socket.create_connection(listening.getsockname()))
        os._exit(0)
    kit.child(child)
    service, _ = listening.accept()
    kit.cause("sleep_or_remote_wait", ask)
    for _ in kit.steps():
        work(60_000)
        if kit.on:
            ask(service)


if __name__ == "__main__":
    main(Kit())
