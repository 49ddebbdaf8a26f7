# SPDX-License-Identifier: Apache-2.0
"""How long forks of a neighbour take: prints each that took longer than the limit, in seconds.

usage: fork_watch.py LIMIT_S
"""

from __future__ import annotations

import os
import sys
import time


def main(limit_s: float) -> None:
    print("ready", flush=True)
    while True:
        began_s = time.monotonic()
        pid = os.fork()
        took_s = time.monotonic() - began_s
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        if took_s > limit_s:
            print(f"{took_s:.3f}", flush=True)
        time.sleep(0.01)


if __name__ == "__main__":
    main(float(sys.argv[1]))
