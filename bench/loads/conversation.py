# SPDX-License-Identifier: Apache-2.0
"""The protocol between a loop and the benchmark that runs it.

The loop prints "ready", and reads lines on standard input: "until N" ends it after N steps, "end"
at once, "time S" answers with the mean µs a step of the next S seconds, in blocks. At its end it
prints one line of JSON: steps, and a hash of the state after every block of them.

Loops are run as scripts, so this lies beside them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import select
import sys
import time
from collections.abc import Callable


def converse(
    step: Callable[[], object], state: Callable[[], bytes], every: int, wait_s: float = 0.0
) -> None:
    """Step until the command to end.

    `state` waits for the device and answers with what `every` steps have come to. `wait_s`: sleep
    so long for each line, as programs do that read their input.
    """
    count, until, hashes = 0, 1 << 60, []
    timing_until = 0.0
    blocks: list[float] = []
    print("ready", flush=True)
    while count < until:
        for _ in range(every):
            step()
        count += every
        hashes.append(hashlib.sha256(state()).hexdigest()[:12])
        now = time.perf_counter()
        if timing_until:
            blocks.append(now)
            if now >= timing_until:
                pairs = itertools.pairwise(blocks)
                print(json.dumps([1e6 * (b - a) / every for a, b in pairs]), flush=True)
                timing_until, blocks = 0.0, []
        if select.select([0], [], [], wait_s)[0]:
            match sys.stdin.readline().split():
                case ["until", number]:
                    until = int(number)
                case ["time", seconds]:
                    blocks = [time.perf_counter()]
                    timing_until = blocks[0] + float(seconds)
                case _:
                    break
    print(json.dumps({"steps": count, "hashes": hashes}), flush=True)
