# SPDX-License-Identifier: Apache-2.0
"""The trusted time of a party: the wall clock, with steps rejected.

A wall clock that is set forward by a month and back would expire uncollected batches and make an
aggregator refuse every node for a month. Within one boot the time therefore advances by
CLOCK_BOOTTIME, which cannot be set, from an anchor that is stored in the party's directory. A step
of the wall clock beyond a tolerance is detected and not followed. After a reboot the time that the
machine was off is unknown, so a difference of more than a day waits for the operator (`accept`);
until then nothing is admitted, released or expired. A node has such a clock in its directory, too.
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
from sonde.fleet.party_files import MAX_KEY_FILE_BYTES, STATE_OPEN_FLAGS, read_text

_log = logging.getLogger(__name__)

FILE = "clock.json"
SKEW_S = 300.0
"""Smaller steps are followed: the parties' clocks may differ by this much anyway."""
DRIFT = 3e-4
"""Additional seconds that are followed, per second since the anchor: 26 s a day, by which a clock
that is set once a day may have been wrong.
"""
MAX_FOLLOWED_S = 3600.0
"""Upper bound of the difference that is followed within one boot."""
MAX_REBOOT_GAP_S = 86_400.0
"""Largest difference across a reboot that is followed without the operator."""
PERSIST_INTERVAL_S = 60.0
"""How often a running party stores its anchor, and looks whether the operator accepted another."""
_LOCK_S = 5.0
"""How long to wait for another process that holds the lock, such as a command."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ClockNotTrusted(HostError):
    """The machine's clock differs too much from the stored time; the operator decides."""


def uptime_s() -> float:
    """CLOCK_BOOTTIME in seconds: continues during suspend and cannot be set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """The id of this boot; empty if the kernel does not provide it."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class ClockSources:
    """The sources of time; tests replace them."""

    wall_s: Callable[[], float] = time.time
    uptime_s: Callable[[], float] = uptime_s
    boot_id: Callable[[], str] = boot_id


@dataclass(frozen=True)
class Anchor:
    """Both clocks at one moment of a boot (`boot`: its id). `seen_s`: the trusted time when the
    anchor was stored last.
    """

    boot: str
    wall_s: float
    uptime_s: float
    seen_s: float

    @staticmethod
    def now(sources: ClockSources) -> Anchor:
        wall_s = sources.wall_s()
        return Anchor(sources.boot_id(), wall_s, sources.uptime_s(), wall_s)

    def is_same_boot(self, sources: ClockSources) -> bool:
        """Whether the anchor is from the current boot."""
        same = bool(self.boot) and self.boot == sources.boot_id()
        # An uptime in the future comes from another time namespace. One second for rounding.
        return same and self.uptime_s <= sources.uptime_s() + 1


class PartyClock:
    """Calling it returns the trusted time in seconds since the epoch. Thread-safe."""

    def __init__(
        self,
        directory: Path,
        sources: ClockSources | None = None,
        must_persist: bool = True,
        persists: bool = True,
    ) -> None:
        """Raises ClockNotTrusted if the operator has to decide, and SinkError if the anchor cannot
        be stored although `must_persist` is set.

        Without `must_persist` (a node's directory may be read-only) steps are detected within this
        process only. With `persists` False nothing is written.
        """
        self._directory, self._sources = directory, sources or ClockSources()
        self._lock = threading.Lock()
        self._followed_s = 0.0  # the wall clock's difference from the anchor that counts as correct
        self._persists, self._persisted_s = persists, -math.inf
        self.step_s = 0.0
        """How far the wall clock is off, in seconds, while that is not followed; else 0."""
        with _locked(directory, must_persist):
            stored = read(directory)
            if stored is None:
                anchor = Anchor.now(self._sources)
            elif stored.is_same_boot(self._sources):
                anchor = stored
            else:
                anchor = Anchor.now(self._sources)
                if abs(anchor.wall_s - stored.seen_s) > MAX_REBOOT_GAP_S:
                    raise _not_trusted(directory, anchor.wall_s, stored.seen_s)
            self._anchor = anchor
            self._now()
            self._write(must_persist)

    def __call__(self) -> float:
        with self._lock:
            now_s = self._now()
            if self._sources.uptime_s() - self._persisted_s >= PERSIST_INTERVAL_S:
                with _locked(self._directory, must_persist=False):
                    stored = self._stored()
                    known = self._anchor.wall_s, self._anchor.uptime_s
                    if (
                        stored
                        and stored.is_same_boot(self._sources)
                        and known != (stored.wall_s, stored.uptime_s)
                    ):
                        self._anchor, self._followed_s = stored, 0.0  # accepted by the operator
                        now_s = self._now()
                    self._write(must_persist=False)
        return now_s

    def _stored(self) -> Anchor | None:
        try:
            return read(self._directory)
        except ClockNotTrusted:
            return None

    def _now(self) -> float:
        """The trusted time; sets `_followed_s` or, where that is too far, `step_s`."""
        wall_s, elapsed_s = self._sources.wall_s(), self._sources.uptime_s() - self._anchor.uptime_s
        expected_s = self._anchor.wall_s + elapsed_s
        off_s = wall_s - expected_s
        if abs(off_s) <= min(MAX_FOLLOWED_S, SKEW_S + DRIFT * max(0.0, elapsed_s)):
            if self.step_s:
                _log.warning("the machine's clock agrees with the time since boot again")
            self._followed_s, self.step_s = off_s, 0.0
        else:
            step_s = off_s - self._followed_s
            if not self.step_s:
                _log.warning(
                    "the machine's clock was stepped by %s, which is not followed; "
                    "if it is correct now: sonde fleet clock --state %s --accept",
                    duration(step_s),
                    self._directory,
                )
            self.step_s = step_s
        return expected_s + self._followed_s

    def _write(self, must_persist: bool) -> None:
        if not self._persists:
            return
        self._persisted_s = self._sources.uptime_s()
        anchor = replace(self._anchor, seen_s=self._now())
        try:
            write(self._directory, anchor)
        except OSError as error:
            if must_persist:
                raise SinkError(
                    f"cannot store the time in {self._directory}: {error.strerror}",
                    "make the directory writable for this party",
                ) from error
            _log.debug("the time is not stored in %s: %s", self._directory, error)


def examine(directory: Path, sources: ClockSources | None = None) -> tuple[float, float]:
    """(trusted time of the party, offset of the wall clock), in seconds. Changes nothing. Raises
    ClockNotTrusted if the party waits for the operator.
    """
    clock = PartyClock(directory, sources, must_persist=False, persists=False)
    return clock(), clock.step_s


def accept(directory: Path, sources: ClockSources | None = None) -> float:
    """Accepts the wall clock as correct, by the operator's decision. A running party follows within
    a minute. Returns the new time. Raises SinkError.
    """
    anchor = Anchor.now(sources or ClockSources())
    with _locked(directory, must_persist=True):
        try:
            write(directory, anchor)
        except OSError as error:
            raise SinkError(
                f"cannot store the time in {directory}: {error.strerror}",
                "run it as the user that the party runs as",
            ) from error
    return anchor.wall_s


def read(directory: Path) -> Anchor | None:
    """The stored anchor; None if there is none yet. Raises ClockNotTrusted if it cannot be read."""
    try:
        fields = json.loads(read_text(directory / FILE, MAX_KEY_FILE_BYTES))
        anchor = Anchor(
            str(fields["boot"]), *(float(fields[n]) for n in ("wall_s", "uptime_s", "seen_s"))
        )
        if not all(map(math.isfinite, (anchor.wall_s, anchor.uptime_s, anchor.seen_s))):
            raise ValueError("no time")
    except FileNotFoundError:
        return None
    except (OSError, UsageError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ClockNotTrusted(
            f"{directory / FILE} cannot be read, so the last trusted time is unknown",
            f"check that this machine's clock is correct, then: "
            f"sonde fleet clock --state {directory} --accept",
        ) from error
    return anchor


def write(directory: Path, anchor: Anchor) -> None:
    """Stores the anchor atomically, also across a power failure. Raises OSError."""
    new = f"{FILE}.new"
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(FileNotFoundError):  # where others may write, never into a file of theirs
            os.unlink(new, dir_fd=folder)
        file = os.open(
            new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | STATE_OPEN_FLAGS, 0o600, dir_fd=folder
        )
        try:
            if os.geteuid() == 0:  # the party must be able to read what the operator accepted
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
def _locked(directory: Path, must_persist: bool) -> Iterator[None]:
    """Holds the lock on the directory: the operator may accept a clock while the party runs.
    Without `must_persist` the block runs also if the lock cannot be had.
    """
    try:
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        if must_persist:
            raise SinkError(f"no directory of a party: {directory}: {error.strerror}") from error
        yield
        return
    try:
        if not _lock(folder) and must_persist:
            raise SinkError(
                f"another process holds {directory}", "end it, or give the directory to its party"
            )
        yield
    finally:
        os.close(folder)


def _lock(folder: int) -> bool:
    """Takes the lock, or returns False after `_LOCK_S`: whatever process can read a directory can
    hold its lock.
    """
    end_s = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end_s:
                return False
            time.sleep(0.02)
        else:
            return True


def _not_trusted(directory: Path, wall_s: float, seen_s: float) -> ClockNotTrusted:
    off_s = wall_s - seen_s
    return ClockNotTrusted(
        f"this machine was restarted, and its clock shows {utc(wall_s)}, {duration(off_s)} "
        f"{'after' if off_s > 0 else 'before'} {directory} was last used: nothing is admitted, "
        "released or expired",
        f"if it is correct: sonde fleet clock --state {directory} --accept",
    )


def utc(time_s: float) -> str:
    """A time as text, in UTC."""
    try:
        return f"{datetime.fromtimestamp(time_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return f"{time_s:.0f} s"


def duration(seconds: float) -> str:
    """The absolute value of a duration as text."""
    for unit, name in ((86_400, "days"), (3600, "h"), (60, "min")):
        if abs(seconds) >= unit:
            return f"{abs(seconds) / unit:.1f} {name}"
    return f"{abs(seconds):.0f} s"
