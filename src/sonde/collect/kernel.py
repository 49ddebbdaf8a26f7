# SPDX-License-Identifier: Apache-2.0
"""The kernel side of the collectors: BPF objects that share their stacks and the set of watched
processes (`targets`)."""

from __future__ import annotations

import errno
import functools
import ipaddress
import mmap
import os
import struct
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final

from sonde import _native, procfs
from sonde.errors import HostError, InternalError, KernelUnsupported, PermissionDenied

LOSSES = (
    "stack_map_full",
    "count_map_full",
    "task_storage",
    "ring_full",
    "user_stack",
    "nested_call",
    "targets_full",
    "notes_full",
    "requests",
    "mappings",
    "by_process",
    "together",
    "share",
    "over_budget",
    "several_requests",
    "socket_storage",
    "traced",
    "unseen_switch",
)
"""Names of `enum sonde_loss`, in its order."""


UNWIND_MAPS = (
    *("unwind_chunks", "unwind_processes", "unwind_wanted", "unwind_pages"),
    *("unwind_stops", "unwind_memo", "unwind_cost"),
)
"""What all programs walk stacks by; owned by unwind.bpf.c."""


FEW_CPUS: Final = 4
"""A machine with no more of them has smaller maps (`by_cpus`)."""
STACKS: Final = 8192
"""Stacks and pieces of long ones that the kernel keeps on a large machine (bpf/stack.h)."""


MAX_CHOSEN: Final = 512
"""Processes that are counted or sampled, where only chosen ones are (`Kernel.choose`)."""
WITHOUT_STACKS, WITH_STACKS = b"\x01", b"\x02"
"""Values of the map `chosen`: enum closeness of bpf/chosen.h."""
TRACING: Final = frozenset(("cpu", "waits"))
"""Objects that note samples of traced requests."""
CHOOSING: Final = frozenset(("cpu", "waits"))
"""Objects that look up whether a process is chosen."""
BY_PARTY: Final = frozenset(
    (
        *("blocks", "device_calls", "flows", "launch_sites", "memory"),
        *("syscalls", "tasks", "traces", "waits"),
    )
)
"""Objects that divide something between users and containers (bpf/party.h)."""
SHARED_MAPS: Final = ("stacks", "chosen", "traced", "trace_contexts", "traced_shares")
"""Shared by all that take stacks; owned by unwind.bpf.c, too."""
WITHOUT_TRACES: Final = {"traced": mmap.PAGESIZE, "trace_contexts": 1, "traced_shares": 1}
"""Sizes of the maps of traced requests (bpf/trace_context.h) where none are followed."""

MAX_TYPE_BYTES: Final = 64 << 20
"""Of the kernel's BTF, that are searched."""
PASSES: Final = 8
"""Over all processes, for descendants that a program has already."""
NEWLY_MET: Final = 512
"""Processes that a walk met for the first time, kept until the agent reads them (every 0.25 s); one
for which there is no room is reported by its next walk."""


def by_cpus(entries: int) -> int:
    """Entries of a map that is to hold `entries` on a large machine: half of them on one with at
    most FEW_CPUS, where less can happen in a second."""
    return entries if (os.cpu_count() or 1) > FEW_CPUS else entries // 2


@dataclass(frozen=True, slots=True)
class BpfObject:
    """A BPF object (bpf/NAME.bpf.c), and how it is to be loaded."""

    name: str
    constants: Mapping[str, int] = field(default_factory=dict)
    """Of its `const volatile` globals."""
    skip: Sequence[str] = ()
    """Programs that are not to be loaded."""
    max_entries: Mapping[str, int] = field(default_factory=dict)
    """Of its maps, where they differ from the source's."""
    takes_stacks: bool = True


class Kernel:
    """Loads BPF objects for one agent.

    All share one map of stacks, so that a stack is kept once, the maps that stacks are walked by,
    and one set of watched processes.
    """

    def __init__(
        self,
        pids: Iterable[int] | None,
        skip_self: bool = False,
        chooses: bool = False,
        traces: bool = False,
    ) -> None:
        """`pids`: the watched processes, with their descendants; None for all. `chooses`: stacks
        are taken and waits counted only of the processes of `choose`. `traces`: samples and waits
        of traced requests are noted."""
        self._chooses = chooses
        self._traces = traces
        self._chosen: dict[int, bool] = {}
        self.max_stacks = by_cpus(STACKS)
        self._stack_seed = int.from_bytes(os.urandom(8), "little")
        self._shared: dict[str, _native.Bpf] = {}
        self._constants: dict[str, int] = {}
        self._ahead: dict[str, tuple[BpfObject, _native.LoadAhead]] = {}
        self._subordinate: Sequence[tuple[int, int, int]] = ()
        """What the map `subordinate_ids` holds."""
        if skip_self:
            self._constants["self_tgid"] = os.getpid()
        self._unwind: _native.Bpf | None = None
        self._unwatched = 0
        """Descendants that found no room among the watched processes."""
        if pids is not None:
            targets = self.load(BpfObject("targets", takes_stacks=False))
            self._shared["targets"] = targets
            self._constants["filter_targets"] = 1
            targets.attach("on_fork")
            targets.attach("on_exit")
            self._watch_with_children(frozenset(pids))

    @property
    def unwind(self) -> _native.Bpf:
        """Owner of the maps that stacks are walked by and kept in. Raises HostError."""
        if self._unwind is None:
            max_entries = {
                "unwind_wanted": NEWLY_MET,
                "stacks": self.max_stacks,
                "chosen": MAX_CHOSEN if self._chooses else 1,
                **({} if self._traces else WITHOUT_TRACES),
            }
            with _refusals():
                self._unwind = _native.Bpf("unwind", {}, self._shared, (), max_entries)
            self._shared |= dict.fromkeys((*UNWIND_MAPS, *SHARED_MAPS), self._unwind)
        return self._unwind

    def _watch_with_children(self, pids: frozenset[int]) -> None:
        """Watch processes and the descendants that they have already, pass by pass until there is
        no new one, or `PASSES`. Children of those that are watched are added in the kernel, so a
        pass finds only what was forked while the one before it went on; a program that forks
        without end always has some."""
        for pid in pids:
            self.watch(pid)
        known = set(pids)
        for _ in range(PASSES):
            new = procfs.family(pids, is_patient=True) - known
            if not new:
                break
            known |= new
            for pid in new:
                try:
                    self._watch_child(pid, known)
                except OSError:
                    self._unwatched += 1

    def _watch_child(self, pid: int, family: Container[int]) -> None:
        """Watch a child of these processes, unless it has ended: its number may be used again, by
        another program."""
        before = procfs.read_stat(pid)
        if before is None or before.ppid not in family:
            return
        self.watch(pid)
        now = procfs.read_stat(pid)
        if now is None or not now.goes_on or now.start_ns != before.start_ns:
            # It ended before it was watched, so its end did not take it out.
            with suppress(OSError):
                self._shared["targets"].delete_hash("targets", struct.pack("=I", pid))

    def read_subordinate_ids(self) -> None:
        """Let the kernel's programs know whose subordinate ids are (bpf/party.h); cheap where
        /etc/subuid has not changed."""
        owner = self._shared.get("subordinate_ids")
        ranges = procfs.subordinate_ids()
        if owner is None or ranges is self._subordinate:
            return
        # Root's are those of containers that it starts: each counts by itself, not as root.
        # Of two that have the same the first counts, as in `procfs.parties`.
        before, now = (
            {
                network: who
                for first, n, who in reversed(some)
                if who
                for network in _networks(first, n)
            }
            for some in (self._subordinate, ranges)
        )
        for network in before.keys() - now.keys():
            owner.delete_hash("subordinate_ids", network)
        for network, who in now.items() - before.items():
            with suppress(OSError):  # more than the map holds
                owner.set_hash("subordinate_ids", network, struct.pack("=I", who))
        self._subordinate = ranges

    def watch(self, pid: int) -> None:
        """Add a process to the watched ones."""
        self._shared["targets"].set_hash("targets", struct.pack("=I", pid), b"\x01")

    def choose(self, pids: Mapping[int, bool]) -> None:
        """From now on count waits of these processes alone, at most `MAX_CHOSEN`, and take stacks
        of those that are True."""
        wanted = dict(islice(pids.items(), MAX_CHOSEN))
        if wanted == self._chosen or (owner := self._shared.get("chosen")) is None:
            return
        for pid in self._chosen.keys() - wanted.keys():
            with suppress(OSError):
                owner.delete_hash("chosen", struct.pack("=I", pid))
        for pid, has_stacks in wanted.items() - self._chosen.items():
            how = WITH_STACKS if has_stacks else WITHOUT_STACKS
            owner.set_hash("chosen", struct.pack("=I", pid), how)
        self._chosen = wanted

    @property
    def has_chosen(self) -> bool:
        """Whether any process is chosen."""
        return bool(self._chosen)

    def load_ahead(self, objects: Iterable[BpfObject]) -> None:
        """Start to load objects, each in a thread; `load` waits for one, and raises what went
        wrong.

        Raises HostError where not even their common maps can be made.
        """
        for wanted in objects:
            arguments = self._arguments(wanted)
            with _refusals():
                self._ahead[wanted.name] = wanted, _native.LoadAhead(*arguments)

    def load(self, wanted: BpfObject) -> _native.Bpf:
        """Load an object with the common constants and maps, or take the one that was loaded ahead
        with the same constants and programs. Sizes of maps are not compared: they depend on what
        the machine ran at that moment.

        Raises HostError with the remedy.
        """
        expected, ahead = self._ahead.pop(wanted.name, (None, None))
        with _refusals():
            if (
                expected is not None
                and ahead is not None
                and (expected.constants, expected.skip) == (wanted.constants, wanted.skip)
            ):
                return ahead.take()
            return _native.Bpf(*self._arguments(wanted))

    def _arguments(
        self, wanted: BpfObject
    ) -> tuple[str, Mapping[str, int], Mapping[str, _native.Bpf], Sequence[str], Mapping[str, int]]:
        """As `_native.Bpf` takes them. Raises HostError."""
        constants = {**self._constants, **wanted.constants}
        max_entries = {"stacks": 1, **wanted.max_entries}
        if wanted.takes_stacks:
            _ = self.unwind
            constants["stack_seed"] = self._stack_seed
        if wanted.name in BY_PARTY and "subordinate_ids" not in self._shared:
            self._shared["subordinate_ids"] = _native.Bpf("parties", {}, {}, (), {})
            self.read_subordinate_ids()
        if "filter_targets" not in self._constants and wanted.name != "targets":
            max_entries["targets"] = 1  # no program looks into it
        if wanted.name in TRACING:
            constants["trace_requests"] = int(self._traces)
        if wanted.name in CHOOSING:
            constants["chosen_only"] = int(self._chooses)
        return wanted.name, constants, self._shared, wanted.skip, max_entries

    def walks(self, ids: Sequence[int]) -> list[_native.RawStack]:
        """The stacks of these ids that the kernel still has."""
        return self._unwind.walks(ids) if ids and self._unwind else []

    def clear_stacks(self) -> None:
        """Drop all stacks, those that no row refers to, too."""
        if self._unwind:
            self._unwind.clear_stacks()

    def forget_stacks(self, ids: Sequence[int], short: Sequence[int] = ()) -> None:
        """Make room for new stacks by dropping some that were read; `short`: others that are known
        to be of one piece (bpf/stack.h), which is cheaper."""
        if self._unwind:
            self._unwind.forget_stacks(ids, short)

    def memory_bytes(self) -> int:
        """Kernel memory of the maps that no collector owns."""
        targets = self._shared.get("targets")
        unwind = self._unwind.map_bytes() if self._unwind else 0
        return unwind + (targets.map_bytes() if targets else 0)

    def losses(self) -> Mapping[str, int]:
        """What the upkeep of the watched processes lost so far, by name."""
        losses = dict(losses_of(self._shared.get("targets")))
        if self._unwatched:
            losses["targets_full"] = losses.get("targets_full", 0) + self._unwatched
        return losses


def _networks(first: int, count: int) -> Iterator[bytes]:
    """A range of ids as prefixes: keys of the map `subordinate_ids`."""
    last = min(first + count, 1 << 32) - 1
    if 0 <= first <= last:
        ends = ipaddress.IPv4Address(first), ipaddress.IPv4Address(last)
        for network in ipaddress.summarize_address_range(*ends):
            yield struct.pack("=I", network.prefixlen) + network.network_address.packed


@functools.cache
def has_uprobe_multi(types: Path = Path("/sys/kernel/btf/vmlinux")) -> bool:
    """Whether one link may hold probes at many places (Linux 6.6), as the kernel's BTF shows."""
    try:
        with types.open("rb") as file:
            return b"\0bpf_uprobe_multi_link\0" in file.read(MAX_TYPE_BYTES)
    except OSError:
        return False


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise refusal(error) from error


def refusal(error: OSError) -> HostError:
    """The kernel's refusal as an error with its remedy."""
    text = error.strerror or str(error)
    if error.errno in (errno.EPERM, errno.EACCES):
        return PermissionDenied(
            "the kernel does not let this user load BPF programs",
            "run as root, or grant what `sonde doctor` lists as missing",
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return HostError("no file descriptor is left", "raise the limit: ulimit -n 65536")
    if error.errno in (errno.ENOMEM, errno.ENOSPC):
        return HostError(
            f"the kernel has no memory for it: {text}", "free memory, or lower the rate"
        )
    return KernelUnsupported(f"the kernel refuses: {text}", "`sonde doctor` lists what it lacks")


def expect_fields(bpf: _native.Bpf, rows: str, expected: Sequence[str]) -> None:
    """Check that the fields that Python unpacks are those that programs write. Raises
    InternalError."""
    found = bpf.fields(rows)
    if found != list(expected):
        raise InternalError(f"{rows} has the fields {found}, not {list(expected)}", "rebuild Sonde")


_SKIPS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
"""EAGAIN: it had not come to its end after a second (`native/src/bpf.rs`)."""


class Iterators:
    """Runs an object's iterator programs between ticks.

    A run takes a file descriptor and kernel memory. Where there is none left, it is skipped and
    counted: what it would have summed up comes with the next one.
    """

    def __init__(self, bpf: _native.Bpf) -> None:
        self._bpf = bpf
        self.skipped = 0

    def run(self, link: int) -> bool:
        """Run a program to its end; False: it was skipped, or given up on its way. Raises OSError
        for other reasons."""
        try:
            self._bpf.walk(link)
        except OSError as error:
            if error.errno not in _SKIPS:
                raise
            self.skipped += 1
            return False
        return True

    def losses(self) -> dict[str, int]:
        """Losses of the object, and runs that were skipped."""
        skipped = {"walks_skipped": self.skipped} if self.skipped else {}
        return losses_of(self._bpf) | skipped


def losses_of(bpf: _native.Bpf | None) -> dict[str, int]:
    """Losses of an object by name, those that happened only."""
    counts = bpf.losses() if bpf else []
    return {name: count for name, count in zip(LOSSES, counts, strict=False) if count}
