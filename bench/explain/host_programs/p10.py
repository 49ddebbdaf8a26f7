# SPDX-License-Identifier: Apache-2.0
"""Two threads put records into a queue that the main thread empties; they sleep between."""

import queue
import threading
import time

from kit import Kit, work


def feed(kit: Kit, records: queue.Queue[bytes]) -> None:
    while True:
        time.sleep(0.02 if kit.on else 0.0002)
        records.put(b"record")


def take(records: queue.Queue[bytes]) -> bytes:
    return records.get()


def main(kit: Kit) -> None:
    records: queue.Queue[bytes] = queue.Queue(64)
    for _ in range(2):
        threading.Thread(target=feed, args=(kit, records), daemon=True).start()
    kit.cause("input_pipeline", take)
    for _ in kit.steps():
        take(records)
        work(30_000)


if __name__ == "__main__":
    main(Kit())
