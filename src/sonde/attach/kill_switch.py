# SPDX-License-Identifier: Apache-2.0
"""The kill switch of this machine: while one of its files exists, nothing is loaded into any
process. So there is no device time (`sonde record`), no `sonde attach` and no `sonde trace`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from sonde.errors import TargetRefused

FILES: Final = (Path("/etc/sonde/device-time-off"), Path("/run/sonde/device-time-off"))


def found_file() -> Path | None:
    """The file of the kill switch that exists; None where attaching is allowed."""
    return next((path for path in FILES if path.exists()), None)


def require_allowed() -> None:
    """Raises TargetRefused while the kill switch forbids to load anything into a process."""
    path = found_file()
    if path is not None:
        raise TargetRefused(
            f"device time, attach and trace are turned off on this machine by {path}", f"rm {path}"
        )
