# SPDX-License-Identifier: Apache-2.0
"""A job of ranks that sum over a ring of sockets in each step, through exchange.c:

    python job.py LIBRARY RANKS [--unnumbered]

On a line `RANK WHAT` on its input, that rank stops in its next step: sleep, lock, pipe, busy,
exit, mismatch, or `pause`, `work` for a moment. It prints `RANK PID` of each, and `stalled RANK`.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import threading
import time

VALUES = 512
PAUSE_S = 2.5
WORK_S = 6.0


def main() -> None:
    library, ranks = sys.argv[1], int(sys.argv[2])
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(ranks)]
    ports = ",".join(str(server.getsockname()[1]) for server in servers)
    children = []
    for rank, server in enumerate(servers):
        numbered = {} if "--unnumbered" in sys.argv else {"RANK": str(rank)}
        children.append(
            subprocess.Popen(
                [sys.executable, __file__, library, str(ranks), "rank", str(rank), ports,
                 str(server.fileno())],
                env={**os.environ, **numbered}, stdin=subprocess.PIPE, pass_fds=[server.fileno()],
            )
        )  # fmt: skip
        print(rank, children[-1].pid, flush=True)
    for server in servers:
        server.close()
    for line in sys.stdin:
        number, _, what = line.strip().partition(" ")
        stdin = children[int(number)].stdin
        assert stdin is not None
        stdin.write(f"{what}\n".encode())
        stdin.flush()
    for child in children:
        child.kill()


class Rank:
    def __init__(self) -> None:
        self.library = ctypes.CDLL(sys.argv[1])
        self.ranks, self.rank = int(sys.argv[2]), int(sys.argv[4])
        ports = [int(port) for port in sys.argv[5].split(",")]
        server = socket.socket(fileno=int(sys.argv[6]))
        self.next = socket.create_connection(("127.0.0.1", ports[(self.rank + 1) % self.ranks]))
        self.previous, _ = server.accept()
        server.close()
        self.values = (ctypes.c_double * VALUES)()
        self.wanted = ""
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        for line in sys.stdin:
            self.wanted = line.strip()

    def step(self) -> None:
        sum(i * i for i in range(40_000))
        time.sleep(0.01)
        if self.wanted:
            print("stalled", self.rank, time.monotonic_ns(), flush=True)
            what, self.wanted = self.wanted, ""
            getattr(self, f"stall_{what}")()
        self.exchange()

    def exchange(self) -> None:
        self.library.all_reduce(
            self.next.fileno(), self.previous.fileno(), self.values, VALUES, self.ranks
        )

    def stall_sleep(self) -> None:
        time.sleep(1_000)

    def stall_lock(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    def stall_pipe(self) -> None:
        ours, _theirs = os.pipe()
        os.read(ours, 1)

    def stall_busy(self) -> None:
        while True:
            sum(i * i for i in range(60_000))

    def stall_exit(self) -> None:
        os._exit(3)

    def stall_mismatch(self) -> None:
        self.library.receive(self.next.fileno(), self.values, VALUES)

    def stall_pause(self) -> None:
        time.sleep(PAUSE_S)

    def stall_work(self) -> None:
        until_s = time.monotonic() + WORK_S
        while time.monotonic() < until_s:
            sum(i * i for i in range(60_000))


if __name__ == "__main__":
    if len(sys.argv) > 3 and sys.argv[3] == "rank":
        rank = Rank()
        while True:
            rank.step()
    main()
