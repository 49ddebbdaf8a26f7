# SPDX-License-Identifier: Apache-2.0
"""The child that explains: reads windows, one a line, and answers each with a line.

Its memory and CPU time are bounded, and its priority is low (nice).
"""

from __future__ import annotations

import os
import resource
import sys
import traceback
from contextlib import suppress

import msgspec

from sonde.diagnose.explain import explain
from sonde.diagnose.incident import Verdict
from sonde.diagnose.moments import Window

MEMORY_BYTES = 1 << 30
CPU_S = 600
"""At most, until it ends; then its parent starts another one."""
NICE = 5
LAST_LOOK, FIRST_LOOK = b"L", b"F"
"""First byte of a line: whether the window is explained for the last time, or may come again."""


class Answer(msgspec.Struct):
    """The answer to one window; no verdict: a later look will show it."""

    verdict: Verdict | None = None
    failed: str = ""
    """What went wrong; '' nothing did."""


def main() -> None:
    """Serve until the input ends."""
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
    decoder = msgspec.json.Decoder(Window)
    encoder = msgspec.json.Encoder()
    for line in sys.stdin.buffer:
        try:
            verdict = explain(decoder.decode(line[1:]), is_last_look=line[:1] == LAST_LOOK)
            raw = encoder.encode(Answer(verdict))
        except Exception as error:  # the next window may be explained
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{where.filename.rpartition('/')[2]}:{where.lineno}"
            raw = encoder.encode(Answer(failed=f"{type(error).__name__}: {error} ({place})"))
        sys.stdout.buffer.write(raw + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
