# SPDX-License-Identifier: Apache-2.0
"""Records the calling program while a block of its code runs.

The recorder is `sonde record -p PID`, a separate process: what it does costs no time of the
block's own thread. The wall and CPU time of the block are measured here, by the kernel's clocks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import signal
import subprocess
import tempfile
import time
from os import PathLike
from pathlib import Path
from typing import Self

from sonde import interpreter
from sonde.errors import HostError, SondeError
from sonde.model.program_run import ProgramRun
from sonde.recording.recording import Recording

READY_S = 60.0
"""Deadline for a recorder to attach its probes."""
END_S = 120.0
"""Deadline for a recorder to finish its file."""
LOOK_S = 0.01
"""Between two looks whether it is ready."""
_MAX_PRINTED_BYTES = 1 << 20


class Block:
    """A context manager: records this process, its threads and children, while it is entered.

    After it, `recording` is what was recorded, and `run` the time that the block took.
    """

    def __init__(
        self,
        path: str | PathLike[str] | None = None,
        *,
        hz: int | None = None,
        device_time: bool = False,
        memory: bool = False,
    ) -> None:
        """`path`: the capture to write (overwritten); None: a temporary file, deleted once read.

        `hz`: samples per second on each CPU; `device_time`: load the device-time library into this
        process; `memory`: host memory by stack, too.
        """
        self._path = Path(path).absolute() if path is not None else None
        options = ["-p", str(os.getpid()), "--force"]
        options += ["--hz", str(hz)] if hz is not None else []
        options += ["--device-time"] if device_time else []
        options += ["--memory"] if memory else []
        self._options = options
        self._recording: Recording | None = None
        self.run: ProgramRun | None = None

    @property
    def recording(self) -> Recording:
        """What was recorded. Raises RuntimeError before the block has ended."""
        if self._recording is None:
            raise RuntimeError("nothing was recorded yet: the block has not ended")
        return self._recording

    def __enter__(self) -> Self:
        """Start the recorder, and wait until it observes. Raises HostError with its reason."""
        self._folder = tempfile.TemporaryDirectory(prefix="sonde-block-")
        self._file = self._path or Path(self._folder.name) / "block.sonde"
        # No pipe: nobody reads while the block runs, and a recorder that prints much would wait.
        self._printed = tempfile.TemporaryFile()
        command = interpreter.command("sonde", "record", *self._options, "-o", str(self._file))
        self._recorder = interpreter.start(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._printed,
            # A Ctrl-C is for the program; the recorder ends with the block.
            own_session=True,
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self._abandon()
            raise
        self._began = _used()
        return self

    def __exit__(self, *_: object) -> None:
        ended = _used()
        self.run = ProgramRun(
            wall_ns=ended.wall_ns - self._began.wall_ns,
            user_ns=ended.user_ns - self._began.user_ns,
            system_ns=ended.system_ns - self._began.system_ns,
            peak_rss_bytes=ended.peak_rss_bytes,
            status=0,
        )
        try:
            self._recorder.send_signal(signal.SIGINT)
            self._recorder.wait(timeout=END_S)
            if self._recorder.returncode:
                raise _failure(self._what_it_printed(self._ready_at))
            self._recording = Recording(self._file)
            info = dataclasses.replace(self._recording.info, program=self.run)
            self._recording.capture = dataclasses.replace(self._recording.capture, info=info)
        finally:
            self._abandon()

    def _wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + READY_S
        while b"sonde: recording" not in (printed := self._what_it_printed()):
            if self._recorder.poll() is not None:
                raise _failure(self._what_it_printed())
            if time.monotonic() > deadline_s:
                raise HostError(
                    f"the recorder was not ready after {READY_S:g} s", "look with `sonde doctor`"
                )
            time.sleep(LOOK_S)
        self._ready_at = len(printed)

    def _what_it_printed(self, begin: int = 0) -> bytes:
        """What the recorder printed from `begin` on; of much, the end."""
        size = os.fstat(self._printed.fileno()).st_size
        begin = max(begin, size - _MAX_PRINTED_BYTES)
        return os.pread(self._printed.fileno(), _MAX_PRINTED_BYTES, begin)

    def _abandon(self) -> None:
        """End the recorder if it still runs, and delete the temporary folder."""
        if self._recorder.poll() is None:
            self._recorder.kill()
            self._recorder.wait()
        self._printed.close()
        with contextlib.suppress(OSError):
            self._folder.cleanup()


def _used() -> ProgramRun:
    """What this process and its ended children used so far."""
    parts = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return ProgramRun(
        wall_ns=time.monotonic_ns(),
        user_ns=round(1e9 * sum(part.ru_utime for part in parts)),
        system_ns=round(1e9 * sum(part.ru_stime for part in parts)),
        peak_rss_bytes=1024 * max(part.ru_maxrss for part in parts),
        status=0,
    )


def _failure(printed: bytes) -> SondeError:
    """The error that the recorder printed before it ended."""
    lines = [
        line.strip() for line in printed.decode("utf-8", "replace").splitlines() if line.strip()
    ]
    cause = next((line for line in lines if line.startswith("sonde: ")), "it printed nothing")
    remedy = next((line for line in lines if line.startswith("remedy: ")), "")
    return HostError(
        f"the recorder failed: {cause.removeprefix('sonde: ')}", remedy.removeprefix("remedy: ")
    )
