# SPDX-License-Identifier: Apache-2.0
"""A file that records from run to run which files define no function of a device API.

Without it each recorder reads the symbols of every library of a program: 0.2 s of CPU for one of
three hundred. Files are identified as in `table_index`, and for as long.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Final

from sonde import private_files, procfs
from sonde.errors import SinkError
from sonde.unwind.cache_folder import default_folder
from sonde.unwind.table_index import boot_id

NAME: Final = "plain.json"
MAX_BYTES: Final = 8 << 20
MAX_ENTRIES: Final = 32_768
"""Files that are kept: those that were added last."""


class PlainIndex:
    """Keys of files (`table_cache.key_of`), with what was looked for in them, in a folder that
    nobody else can change. It is read when it is asked first."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: None for that of the unwind tables; where that is not private, nothing is
        kept."""
        folder = folder or default_folder()
        self._path = folder / NAME if folder is not None else None
        self._known: dict[str, str] | None = None
        self._new: dict[str, str] = {}

    def has(self, key: str, wanted: str) -> bool:
        """Whether a file was found to define none of what is wanted."""
        if self._known is None:
            self._known = self._read()
        return self._known.get(key) == wanted

    def add(self, key: str, device: int, wanted: str) -> None:
        """Note that a file on a device defines none of what is wanted."""
        if len(self._new) < MAX_ENTRIES and procfs.keeps_identity(device):
            self._new[key] = wanted

    def write(self) -> None:
        """Add what is new to what other recorders have written meanwhile. Of two that write at the
        same moment one may lose its entries. Nothing is kept where the folder cannot be written."""
        if self._path is None or not self._new:
            return
        known = self._read()
        for key in self._new:
            known.pop(key, None)  # the newest last
        known |= self._new
        while len(known) > MAX_ENTRIES:
            del known[next(iter(known))]
        self._new = {}
        kept = {"boot": boot_id(), "plain": known}
        with suppress(SinkError, OSError), private_files.replacing(self._path) as file:
            file.write(json.dumps(kept, separators=(",", ":")).encode())

    def _read(self) -> dict[str, str]:
        """As kept since the boot; nothing where the file is damaged."""
        with suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
            if self._path is not None:
                with self._path.open("rb") as file:
                    kept = json.loads(file.read(MAX_BYTES))
                if kept["boot"] == boot_id():
                    return {str(key): str(wanted) for key, wanted in kept["plain"].items()}
        return {}
