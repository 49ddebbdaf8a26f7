# SPDX-License-Identifier: Apache-2.0
"""The child that explains: a window a line in, a verdict a line out. Bounded, and niced."""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress

import msgspec

from sonde.diagnose.explain import explain
from sonde.diagnose.moments import Window

MEMORY_BYTES = 1 << 30
CPU_S = 600
"""In its whole life; its parent starts another one."""
NICE = 5
LAST_LOOK, FIRST_LOOK = b"L", b"F"


def main() -> None:
    """Serve until the input ends."""
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
    decoder = msgspec.json.Decoder(Window)
    encoder = msgspec.json.Encoder()
    for line in sys.stdin.buffer:
        verdict = explain(decoder.decode(line[1:]), is_last_look=line[:1] == LAST_LOOK)
        sys.stdout.buffer.write(encoder.encode(verdict) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
