# SPDX-License-Identifier: Apache-2.0
"""A file that records from run to run which table on disk belongs to which file, and which pages of
it walks needed.

Without it each run compares every file with its table again: a second of CPU for a program of a
hundred libraries. A file is identified by device, inode, size, mtime and ctime (its key); ctime
changes with the content, and nobody can set it. That holds until the next boot, and on devices that
`procfs.keeps_identity`. Files on others are compared each time.

Pages are kept by the name of a table, which has a digest of its content. Without them the first
walks of a run are cut, once for each page that they request.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from sonde import private_files, procfs
from sonde.errors import SinkError

NAME: Final = "index.json"
MAX_BYTES: Final = 16 << 20
MAX_ENTRIES: Final = 32_768
"""Files whose tables are kept: those that were added last."""
MAX_PAGES: Final = 512
"""Of one table."""
MAX_PAGED: Final = 1024
"""Tables whose pages are kept: those that were added last."""
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """The kernel's name of this boot. Raises OSError."""
    return _BOOT.read_text("ascii").strip()


class TableIndex:
    """Names of tables by the keys of files (`TableCache` makes them), in a folder that nobody else
    can change. A recorder is any process that records: several may use the folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._boot = boot_id()
        self._new: dict[str, str] = {}
        self._new_pages: dict[str, list[int]] = {}
        self.pages: dict[str, list[int]] = {}
        """Needed pages by the names of tables, as `read` found them."""

    def read(self) -> dict[str, str]:
        """Names of tables by keys of files, as kept since the boot; none where the file is damaged.
        Sets `pages`."""
        self.pages = {}
        with suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
            with self._path.open("rb") as file:
                kept = json.loads(file.read(MAX_BYTES))
            if kept["boot"] == self._boot:
                names = {str(key): str(name) for key, name in kept["names"].items()}
                self.pages = {
                    str(name): [int(page) for page in pages[:MAX_PAGES] if 0 <= page < 1 << 31]
                    for name, pages in kept.get("pages", {}).items()
                }
                return names
        return {}

    def add_pages(self, name: str, pages: Sequence[int]) -> None:
        """Keep which pages of a table were needed."""
        self._new_pages[name] = list(pages[:MAX_PAGES])

    def add(self, key: str, device: int, name: str) -> None:
        """Keep the name of a file's table, where its device keeps identities."""
        if procfs.keeps_identity(device):
            self._new[key] = name

    def write(self) -> None:
        """Add what is new to what other recorders have written meanwhile, which sets `pages`, too.
        Of two that write at the same moment one may lose its entries. Nothing is kept where the
        folder cannot be written."""
        if not self._new and all(
            self.pages.get(name) == pages for name, pages in self._new_pages.items()
        ):
            return
        names = self.read()
        for key in self._new:
            names.pop(key, None)  # the newest last
        names |= self._new
        while len(names) > MAX_ENTRIES:
            del names[next(iter(names))]
        for name in self._new_pages:
            self.pages.pop(name, None)  # the newest last
        self.pages |= self._new_pages
        while len(self.pages) > MAX_PAGED:
            del self.pages[next(iter(self.pages))]
        self._new, self._new_pages = {}, {}
        kept = {"boot": self._boot, "names": names, "pages": self.pages}
        with suppress(SinkError, OSError), private_files.replacing(self._path) as file:
            file.write(json.dumps(kept, separators=(",", ":")).encode())
