# SPDX-License-Identifier: Apache-2.0
"""One thing that this machine can or cannot do."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass


class Status(enum.StrEnum):
    """How a finding bears on `sonde record`."""

    PASS = "pass"
    WARN = "warn"  # record works, but sees less
    FAIL = "fail"  # record cannot work
    ABSENT = "n/a"  # not here, or not to be known without more privileges; nothing is wrong


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, what was found, who needs it, and the command that mends it."""

    name: str
    status: Status
    detail: str
    needed_for: str = ""
    remedy: str = ""

    def as_json(self) -> dict[str, str]:
        """The record as `sonde doctor --json` prints it."""
        return asdict(self)
