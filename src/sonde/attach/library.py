# SPDX-License-Identifier: Apache-2.0
"""Where the library lies that is brought into processes."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from sonde.errors import MissingDependency

NAME: Final = "libsonde_inject.so"


def path() -> Path:
    """The library of this installation. Raises MissingDependency where it was not built."""
    found = Path(__file__).parents[1] / NAME
    if not found.is_file():
        raise MissingDependency(
            f"this installation has no {NAME}", "Build it with: make setup, or install the wheel."
        )
    return found.resolve()
