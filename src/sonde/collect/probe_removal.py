# SPDX-License-Identifier: Apache-2.0
"""Removes probes at the end of a recording, though some process may keep its memory map locked, or
map the file so often that the kernel takes that lock too many times.

To close such a probe would stop every fork on the machine for as long as that process likes
(`procfs.map_locks`), and the end of a recorder closes what it has open. So a child gets the
descriptors of such probes, outlives the recorder, and closes them once no process does that.
"""

from __future__ import annotations

import time
from typing import Final

from sonde import _native, procfs

WAIT_S: Final = 1.0
"""For processes to release their locks, for all files together."""
LOOK_S: Final = 0.2
"""Between two looks at a lock."""


class Removal:
    """Takes probes off files, or leaves them to a child."""

    def __init__(self, bpf: _native.Bpf, locks: procfs.MapLocks) -> None:
        self._bpf = bpf
        self._locks = locks
        self._files: list[tuple[int, str, list[int]]] = []

    def add(self, inode: int, name: str, links: list[int]) -> None:
        """Add a file whose probes, by these links, are to be removed."""
        if links:
            self._files.append((inode, name, links))

    def finish(self) -> list[str]:
        """Take off what can be; a line for people of each file whose probes stay on for a while."""
        until_s = time.monotonic() + WAIT_S
        held: list[tuple[int, str, list[int], procfs.Holder]] = []
        free: list[int] = []
        for inode, name, links in self._files:
            while (holder := self._locks.holder(inode)) and time.monotonic() < until_s:
                time.sleep(LOOK_S)
            if holder is None:
                free += links
            else:
                held.append((inode, name, links, holder))
        self._bpf.detach_all(free)
        return self._leave(held) if held else []

    def _leave(self, held: list[tuple[int, str, list[int], procfs.Holder]]) -> list[str]:
        keeper = procfs.Broker()
        messages = []
        try:
            for inode, name, links, holder in held:
                for fd in [fd for link in links for fd in self._bpf.link_fds(link)]:
                    pid = keeper.keep(fd, inode)
                messages.append(
                    f"the probes on {name} stay until they can be taken off without stopping every"
                    f" fork of the machine: {holder}; process {pid} waits for that"
                )
        except OSError:  # no child: they are closed when this process ends
            keeper.close()
            return messages
        for _, _, links, _ in held:
            self._bpf.detach_all(links)
        keeper.outlive()
        return messages
