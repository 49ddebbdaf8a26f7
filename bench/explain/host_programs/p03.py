# SPDX-License-Identifier: Apache-2.0
"""The main thread needs a table that another thread compresses under a lock."""

import random
import threading
import time
import zlib

from kit import Kit, work


class Table:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.rows = {number: number for number in range(100)}
        self.image = random.Random(1).randbytes(400_000)

    def lookup(self, key: int) -> int:
        with self.lock:
            return self.rows[key % 100]

    def archive(self) -> None:
        with self.lock:
            zlib.compress(self.image, 6)


def keep(kit: Kit, table: Table) -> None:
    while True:
        if kit.on:
            table.archive()
        time.sleep(0.008)


def main(kit: Kit) -> None:
    table = Table()
    kit.cause("lock", Table.lookup)
    threading.Thread(target=keep, args=(kit, table), daemon=True).start()
    for number in kit.steps():
        table.lookup(number)
        work(10_000)


if __name__ == "__main__":
    main(Kit())
