# SPDX-License-Identifier: Apache-2.0
"""A finding of `sonde doctor`: one thing that this machine supports or not."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass


class Status(enum.StrEnum):
    """What a finding means for `sonde record`."""

    PASS = "pass"
    WARN = "warn"  # record works, with less data
    FAIL = "fail"  # record cannot work
    ABSENT = "n/a"  # not present, or not known without more privileges; not an error


@dataclass(frozen=True, slots=True)
class Finding:
    """What was checked, what was found, what needs it, and how to fix it."""

    name: str
    status: Status
    detail: str
    needed_for: str = ""
    remedy: str = ""

    def as_json(self) -> dict[str, str]:
        """The record as `sonde doctor --json` prints it."""
        return asdict(self)
