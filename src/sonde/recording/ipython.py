# SPDX-License-Identifier: Apache-2.0
"""The cell magic `%%sonde` of IPython and Jupyter: `%load_ext sonde`.

`%%sonde [FILE]` records the cell, and shows its verdict and flame graph.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

from sonde.errors import SondeError
from sonde.recording.block import Block
from sonde.recording.recording import Recording


class Shell(Protocol):
    """What is used of IPython's InteractiveShell."""

    def run_cell(self, raw_cell: str) -> Any: ...
    def register_magic_function(self, func: Any, magic_kind: str, magic_name: str) -> None: ...


def _usage_error(error: SondeError) -> Exception:
    """What IPython shows as one line, without a traceback."""
    try:
        usage_error: type[Exception] = importlib.import_module("IPython.core.error").UsageError
    except ModuleNotFoundError:
        return error
    return usage_error(str(error))


def register(shell: Shell) -> None:
    """Add the magic to a shell."""

    def record(line: str, cell: str) -> Recording | None:
        """Record the cell, into the file that the line names, if any."""
        block = Block(line.strip() or None)
        try:
            with block:
                result = shell.run_cell(cell)
        except SondeError as error:
            raise _usage_error(error) from error
        return block.recording if result.success else None

    shell.register_magic_function(record, "cell", "sonde")
