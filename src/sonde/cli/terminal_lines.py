# SPDX-License-Identifier: Apache-2.0
"""Texts for people, wrapped at the width of the terminal; in pipes and files lines stay whole, for
programs that read them."""

from __future__ import annotations

import shutil
import sys

from sonde.export.layout import wrapped

LEAST_WIDTH = 40
"""Of a terminal, in cells, for wrapping; narrower ones wrap by themselves."""


def for_terminal(text: str) -> str:
    """The text as standard output takes it."""
    if not sys.stdout.isatty():
        return text
    width = shutil.get_terminal_size((100, 24)).columns
    return wrapped(text, width) if width >= LEAST_WIDTH else text
