# SPDX-License-Identifier: Apache-2.0
"""How much history a store keeps, as people write it: types for argparse."""

from __future__ import annotations

import argparse
import math
from typing import Final

LEAST_DAYS: Final = 0.001
"""86 s. Less would be rounded to 0, which keeps everything."""
LEAST_GB: Final = 0.001
_MOST: Final = 1e6


def days(text: str) -> float:
    """Days of history; 0: all."""
    return _kept(text, LEAST_DAYS, "days")


def gigabytes(text: str) -> float:
    """GB of history; 0: all."""
    return _kept(text, LEAST_GB, "GB")


def _kept(text: str, least: float, unit: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if number == 0 or least <= number <= _MOST:
        return number
    raise argparse.ArgumentTypeError(
        f"{text!r} is no number of {unit} to keep: 0 keeps all, {least:g} is the least"
    )
