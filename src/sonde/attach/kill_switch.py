# SPDX-License-Identifier: Apache-2.0
"""The kill switch of this machine: while the file is there, nothing is brought into any process."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from sonde.errors import TargetRefused

FILES: Final = (Path("/etc/sonde/device-time-off"), Path("/run/sonde/device-time-off"))


def set_by() -> Path | None:
    """The file that turns device time off; None where it is allowed."""
    return next((path for path in FILES if path.exists()), None)


def require_on() -> None:
    """Raises TargetRefused while device time is turned off on this machine."""
    path = set_by()
    if path is not None:
        raise TargetRefused(f"device time is turned off on this machine by {path}", f"rm {path}")
