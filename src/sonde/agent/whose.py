# SPDX-License-Identifier: Apache-2.0
"""Whose a process is, as attributes of series: few, and the same for all that belong together."""

from __future__ import annotations

from collections.abc import Mapping

from sonde.model.process import Process
from sonde.sinks.series import PROGRAM


def attributes(process: Process) -> Mapping[str, str]:
    """The program's name; a pid would make a series of every process."""
    return {PROGRAM: process.exe or process.comm or "unknown"}
