# SPDX-License-Identifier: Apache-2.0
"""Whole stacks of launches that the library in a process times: taken by a uprobe on an empty
function that the library calls, and identified by the launch's correlation id."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from sonde import _native, procfs
from sonde.collect.collector import ProcessKey
from sonde.collect.inject_memory import LIBRARY
from sonde.collect.kernel import BpfObject, Kernel, by_cpus, expect_fields, losses_of
from sonde.collect.mapped_files import FileKey, mapped_by, open_mapped
from sonde.collect.probe_removal import Removal
from sonde.collect.waiting_files import FileBudget, Unlimited
from sonde.procfs import START_UNIT_NS

FIELDS: Final = ("tgid", "start_ns", "correlation", "stack_id")
FRAMES_OF: Final = re.compile(r"sonde-inject-[0-9a-f]+\.so$|^\[memfd:sonde-library\]$")
"""LIBRARY, as frames name their binary."""
SITE: Final = "sonde_inject_site"
"""The empty function."""
ROWS: Final = 32_768
"""Of a second, on a machine with many CPUs: eight ranks of one user have room for 1,024 launches
each."""
PROCESS_DIVISOR: Final = 8
PARTY_DIVISOR: Final = 4
"""One process may have an eighth of the rows of a second, and one user or container a quarter
(bpf/share.h): any process may call the site."""
CHEAP: Final = "emulated"
"""Cost class of _native.probe_sites; of another one some kernel would single-step the site, so that
it is refused."""
LOOK_CPU_S: Final = 0.1
"""CPU time for one file: anybody may map one that defines the site thousands of times."""
PUT_OFF_S: Final = 10.0
"""To the next attempt, where a process would keep the kernel waiting (procfs.map_locks)."""
INODE: Final = 2
"""Of a file's key."""


@dataclass(slots=True)
class _Probed:
    """The probe on one file of the library, which several processes may map."""

    link: int
    fd: int
    pids: set[int]


class LaunchSites:
    """One probe on each file of the library, while a process that is timed maps it."""

    @staticmethod
    def bpf_object() -> BpfObject:
        """What is loaded into the kernel for it."""
        rows = by_cpus(ROWS)
        shares = {
            "most_of_one_process": rows // PROCESS_DIVISOR,
            "most_of_one_party": rows // PARTY_DIVISOR,
        }
        return BpfObject("launch_sites", shares, max_entries={"launch_sites": rows})

    def __init__(self, kernel: Kernel, budget: FileBudget | None = None) -> None:
        """`budget`: CPU time that looking at libraries may take; None for no limit.
        Raises HostError where the kernel does not take the program."""
        self._budget = budget or Unlimited()
        self._bpf = kernel.load(self.bpf_object())
        self._files: dict[FileKey, _Probed] = {}
        self._locks = procfs.MapLocks()
        self._put_off: set[int] = set()
        """Processes whose library could not be probed."""
        self._kept_on = False
        """A file has its probe still, though no process needs it."""
        self._again_s = 0.0
        """When (monotonic s) both are tried again."""
        self._count = 0
        """Of processes that had to wait."""
        expect_fields(self._bpf, "launch_sites", FIELDS)

    def add(self, pid: int) -> bool:
        """Probe the library that a process has mapped. False: it cannot be probed, or not cheaply,
        or not now; where not now, `due` returns the process later."""
        party = procfs.party_of(pid)
        if self._budget.is_over(party):
            self._wait(pid)
            return False
        with self._budget.charged(party):
            return self._add(pid)

    def _add(self, pid: int) -> bool:
        for file in mapped_by(pid):
            if not LIBRARY.search(file.path):
                continue
            known = self._files.get(file.key)
            if known is None:
                if self._locks.holder(file.key[INODE]):
                    self._wait(pid)
                    return False
                try:
                    known = self._probe(open_mapped(file))
                except OSError:
                    return False
                if known is None:
                    return False
                self._files[file.key] = known
            known.pids.add(pid)
            self._put_off.discard(pid)
            return True
        self._put_off.discard(pid)
        return False

    def _wait(self, pid: int) -> None:
        self._count += pid not in self._put_off
        self._put_off.add(pid)
        self._again_s = time.monotonic() + PUT_OFF_S

    def due(self) -> list[int]:
        """Processes to be added again, as they could not be before."""
        if not (self._put_off or self._kept_on) or time.monotonic() < self._again_s:
            return []
        self._again_s = time.monotonic() + PUT_OFF_S
        if self._kept_on:
            self._remove_unused()
        return list(self._put_off)

    def _probe(self, fd: int) -> _Probed | None:
        """The probe on an open library; its descriptor is kept, or closed. Raises OSError."""
        path = f"/proc/self/fd/{fd}"
        try:
            found = _native.find_functions(path, [SITE])
            asked = [(site.offset, site.size, False) for site in found]
            for offset, cost_class, *_ in _native.probe_sites(path, asked, LOOK_CPU_S):
                if cost_class == CHEAP:
                    places = [(offset, 0)]  # and a number for the program, which needs none here
                    link = self._bpf.attach_uprobes(path, places, "on_launch_site", None, False)
                    return _Probed(link, fd, set())
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def drop(self, pid: int) -> None:
        """Forget a process that is timed no longer; a file that no other one maps loses its
        probe."""
        self._put_off.discard(pid)
        for probed in self._files.values():
            probed.pids.discard(pid)
        self._remove_unused()

    def _remove_unused(self) -> None:
        self._kept_on = False
        for key, probed in list(self._files.items()):
            if probed.pids:
                continue
            if self._locks.holder(key[INODE]):
                self._kept_on = True
                self._again_s = time.monotonic() + PUT_OFF_S
                continue
            self._bpf.detach(probed.link)
            os.close(probed.fd)
            del self._files[key]

    def close(self) -> list[str]:
        """Take all probes off; messages about those that stay on for a while."""
        removal = Removal(self._bpf, self._locks)
        for key, probed in self._files.items():
            removal.add(key[INODE], "the library in profiled processes", [probed.link])
        messages = removal.finish()
        for probed in self._files.values():
            os.close(probed.fd)
        self._files = {}
        return messages

    def drain(self) -> Iterator[tuple[ProcessKey, int, int]]:
        """(process, correlation, stack id) of each launch since the last call."""
        for pid, start, correlation, stack_id in self._bpf.drain("launch_sites"):
            yield (pid, start - start % START_UNIT_NS), correlation, stack_id

    def losses(self) -> Mapping[str, int]:
        """Losses so far by name."""
        put_off = {"probes_put_off": self._count} if self._count else {}
        return {**losses_of(self._bpf), **put_off}

    def memory_bytes(self) -> int:
        """Kernel memory held."""
        return self._bpf.map_bytes()
