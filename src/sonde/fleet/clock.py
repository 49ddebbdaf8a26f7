# SPDX-License-Identifier: Apache-2.0
"""The time that a party goes by: the wall clock, as far as it can be trusted.

A wall clock that is set forward by a month and back would expire what nobody has collected, and
refuse every node until the month is over. So within one boot time goes on by CLOCK_BOOTTIME, which
nobody can set, from an anchor that is kept in the party's directory: a step of the wall clock is
noticed and not followed. Across boots nothing says how long the machine was off, so more than a
day's difference waits for the operator (`accept`); until then nothing is taken, released or
expired.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from sonde.errors import HostError, SinkError, UsageError
from sonde.fleet.party_files import KEY_BYTES, STATE_FLAGS, read_text

_log = logging.getLogger(__name__)

FILE = "clock.json"
SKEW_S = 300.0
"""Small steps that are followed: as far as the parties' clocks may differ anyway."""
DRIFT = 3e-4
"""What is allowed besides, of the time since the anchor: a clock that is set right once a day."""
MOST_S = 3600.0
"""All that is ever followed within one boot."""
GAP_S = 86_400.0
"""Between two boots, what is followed without asking."""
KEEP_S = 60.0
_LOCK_S = 5.0
"""For who else is at the file: a command, for a moment."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ClockNotTrusted(HostError):
    """The machine's clock differs too much from what this party knows; the operator decides."""


def uptime_s() -> float:
    """CLOCK_BOOTTIME: it goes on in suspend, and no one can set it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Of this boot; empty where the kernel does not tell."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class Sources:
    """Where a clock reads: for tests to set."""

    wall_s: Callable[[], float] = time.time
    uptime_s: Callable[[], float] = uptime_s
    boot_id: Callable[[], str] = boot_id


@dataclass(frozen=True)
class Anchor:
    """What both clocks said at one moment of a boot; `seen_s`: the last time that was trusted."""

    boot: str
    wall_s: float
    uptime_s: float
    seen_s: float

    @staticmethod
    def now(sources: Sources) -> Anchor:
        wall_s = sources.wall_s()
        return Anchor(sources.boot_id(), wall_s, sources.uptime_s(), wall_s)

    def is_of(self, sources: Sources) -> bool:
        """Whether the machine still runs since then."""
        same = bool(self.boot) and self.boot == sources.boot_id()
        return same and self.uptime_s <= sources.uptime_s() + 1  # else of another time namespace


class PartyClock:
    """Call it for the time, in seconds since the epoch. Threads may share it."""

    def __init__(
        self,
        directory: Path,
        sources: Sources | None = None,
        must_keep: bool = True,
        keeps: bool = True,
    ) -> None:
        """Raises ClockNotTrusted where the operator has to decide; SinkError where the anchor
        cannot be kept and `must_keep`. Without it (a node's directory may be read-only) steps are
        noticed within this process only. `keeps` False: only look.
        """
        self._directory, self._sources = directory, sources or Sources()
        self._lock = threading.Lock()
        self._followed_s = 0.0
        self._keeps, self._kept_s = keeps, -math.inf
        self.step_s = 0.0
        """By how much the wall clock is off, as long as that is not followed."""
        with _owned(directory, must_keep):
            held = read(directory)
            if held is None:
                anchor = Anchor.now(self._sources)
            elif held.is_of(self._sources):
                anchor = held
            else:
                anchor = Anchor.now(self._sources)
                if abs(anchor.wall_s - held.seen_s) > GAP_S:
                    raise _not_trusted(directory, anchor.wall_s, held.seen_s)
            self._anchor = anchor
            self._now()
            self._write(must_keep)

    def __call__(self) -> float:
        with self._lock:
            now_s = self._now()
            if self._sources.uptime_s() - self._kept_s >= KEEP_S:
                with _owned(self._directory, False):
                    held = self._held()
                    known = self._anchor.wall_s, self._anchor.uptime_s
                    if held and held.is_of(self._sources) and known != (held.wall_s, held.uptime_s):
                        self._anchor, self._followed_s = held, 0.0  # accepted by the operator
                        now_s = self._now()
                    self._write(False)
        return now_s

    def _held(self) -> Anchor | None:
        try:
            return read(self._directory)
        except ClockNotTrusted:
            return None

    def _now(self) -> float:
        wall_s, elapsed_s = self._sources.wall_s(), self._sources.uptime_s() - self._anchor.uptime_s
        expected_s = self._anchor.wall_s + elapsed_s
        off_s = wall_s - expected_s
        if abs(off_s) <= min(MOST_S, SKEW_S + DRIFT * max(0.0, elapsed_s)):
            if self.step_s:
                _log.warning("the machine's clock agrees again with the time since boot")
            self._followed_s, self.step_s = off_s, 0.0
        else:
            step_s = off_s - self._followed_s
            if not self.step_s:
                _log.warning(
                    "the machine's clock was set by %s, which is not followed; if it is right now: "
                    "sonde fleet clock --state %s --accept",
                    duration(step_s),
                    self._directory,
                )
            self.step_s = step_s
        return expected_s + self._followed_s

    def _write(self, must_keep: bool) -> None:
        if not self._keeps:
            return
        self._kept_s = self._sources.uptime_s()
        anchor = replace(self._anchor, seen_s=self._now())
        try:
            write(self._directory, anchor)
        except OSError as error:
            if must_keep:
                raise SinkError(
                    f"cannot keep the time in {self._directory}: {error.strerror}",
                    "make the directory writable for this party",
                ) from error
            _log.debug("the time is not kept in %s: %s", self._directory, error)


def examine(directory: Path, sources: Sources | None = None) -> tuple[float, float]:
    """(the time that the party goes by, by how much the wall clock is off); nothing is changed.

    Raises ClockNotTrusted where the party waits for the operator.
    """
    clock = PartyClock(directory, sources, must_keep=False, keeps=False)
    return clock(), clock.step_s


def accept(directory: Path, sources: Sources | None = None) -> float:
    """The operator's word that the wall clock is right; a running party follows in a minute."""
    anchor = Anchor.now(sources or Sources())
    with _owned(directory, True):
        try:
            write(directory, anchor)
        except OSError as error:
            raise SinkError(
                f"cannot keep the time in {directory}: {error.strerror}",
                "run it as the user that the party runs as",
            ) from error
    return anchor.wall_s


def read(directory: Path) -> Anchor | None:
    """What is kept; None: nothing yet. Raises ClockNotTrusted for what cannot be read."""
    try:
        fields = json.loads(read_text(directory / FILE, KEY_BYTES))
        anchor = Anchor(
            str(fields["boot"]), *(float(fields[n]) for n in ("wall_s", "uptime_s", "seen_s"))
        )
        if not all(map(math.isfinite, (anchor.wall_s, anchor.uptime_s, anchor.seen_s))):
            raise ValueError("no time")
    except FileNotFoundError:
        return None
    except (OSError, UsageError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ClockNotTrusted(
            f"{directory / FILE} cannot be read, so nothing says what the time was",
            f"see that this machine's clock is right, then: "
            f"sonde fleet clock --state {directory} --accept",
        ) from error
    return anchor


def write(directory: Path, anchor: Anchor) -> None:
    """Whole or not at all, whenever the power fails. Raises OSError."""
    new = f"{FILE}.new"
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(FileNotFoundError):  # the directory may be another user's than ours
            os.unlink(new, dir_fd=folder)
        file = os.open(
            new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | STATE_FLAGS, 0o600, dir_fd=folder
        )
        try:
            if os.geteuid() == 0:  # the operator's word must be readable by the party
                owner = os.fstat(folder)
                os.fchown(file, owner.st_uid, owner.st_gid)
            os.write(file, json.dumps(asdict(anchor)).encode())
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(new, FILE, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.close(folder)


@contextmanager
def _owned(directory: Path, must_keep: bool) -> Iterator[None]:
    """Alone with the file: the operator may accept a clock while the party runs."""
    try:
        held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        if must_keep:
            raise SinkError(f"no directory of a party: {directory}: {error.strerror}") from error
        yield
        return
    try:
        if not _lock(held) and must_keep:
            raise SinkError(
                f"another process holds {directory}", "end it, or give the directory to its party"
            )
        yield
    finally:
        os.close(held)


def _lock(held: int) -> bool:
    """Every reader of a directory may lock it: nobody is waited for without end."""
    end_s = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end_s:
                return False
            time.sleep(0.02)
        else:
            return True


def _not_trusted(directory: Path, wall_s: float, seen_s: float) -> ClockNotTrusted:
    off_s = wall_s - seen_s
    return ClockNotTrusted(
        f"this machine was restarted, and its clock says {utc(wall_s)}, {duration(off_s)} "
        f"{'after' if off_s > 0 else 'before'} {directory} was last used: nothing is taken, "
        "released or expired by it",
        f"if it is right: sonde fleet clock --state {directory} --accept",
    )


def utc(time_s: float) -> str:
    """For people."""
    try:
        return f"{datetime.fromtimestamp(time_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return f"{time_s:.0f} s"


def duration(seconds: float) -> str:
    """Its length, without its sign."""
    for unit, name in ((86_400, "days"), (3600, "h"), (60, "min")):
        if abs(seconds) >= unit:
            return f"{abs(seconds) / unit:.1f} {name}"
    return f"{abs(seconds):.0f} s"
