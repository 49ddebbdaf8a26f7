# SPDX-License-Identifier: Apache-2.0
"""Sonde: always-on, zero-code profiler and telemetry for Linux machines with GPUs.

import sonde

recording = sonde.open("run.sonde")
print(recording.verdict)

with sonde.record() as block:
    step()
block.recording.functions()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from os import PathLike

    from sonde.recording.block import Block
    from sonde.recording.recording import Recording

__version__ = "0.1.0"


# Imported where they are needed: `import sonde` alone, as the recorder does, loads none of it.


def open(path: str | PathLike[str]) -> Recording:
    """Read a capture file. Raises CaptureError where it cannot be read."""
    from sonde.recording.recording import Recording

    return Recording(path)


def record(
    path: str | PathLike[str] | None = None,
    *,
    hz: int | None = None,
    device_time: bool = False,
    memory: bool = False,
) -> Block:
    """A context manager that records this process while its block runs, into `path` if given.

    Needs the rights that `sonde record -p` needs. Raises HostError with the reason on entry.
    """
    from sonde.recording.block import Block

    return Block(path, hz=hz, device_time=device_time, memory=memory)


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext sonde`: adds the cell magic `%%sonde`."""
    from sonde.recording.ipython import register

    register(shell)
