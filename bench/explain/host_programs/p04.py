# SPDX-License-Identifier: Apache-2.0
"""A journal that is synced to disk for each record."""

import os
import tempfile
from typing import IO

from kit import Kit, work


def append(file: IO[bytes], record: bytes) -> None:
    file.write(record)
    file.flush()
    os.fsync(file.fileno())


def main(kit: Kit) -> None:
    kit.cause("io", append)
    with tempfile.TemporaryFile(dir="/var/tmp") as file:
        for _ in kit.steps():
            work(20_000)
            if kit.on:
                append(file, b"x" * 4096)


if __name__ == "__main__":
    main(Kit())
