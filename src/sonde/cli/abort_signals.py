# SPDX-License-Identifier: Apache-2.0
"""A second SIGINT or SIGTERM aborts a command, even where it is blocked.

Python runs signal handlers in the main thread, between two bytecode instructions. While that thread
is blocked in the kernel, no handler runs, and the kernel merges a second signal of the same kind.
So a separate thread waits for both signals. It passes the first one to the command's handler in the
main thread. At the second one it exits the process with code 128 + signal. Where something is being
written that would be lost, it waits for that first (`patience_s`), as people press Ctrl-C twice; a
third signal ends that wait. A capture consists of whole chunks, so what was written until then can
be read.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Final, Self

SIGNALS: Final = frozenset({signal.SIGINT, signal.SIGTERM})
_WAKE: Final = signal.SIGURG
"""Interrupts a blocking call of the main thread. Ignored by default, so it is harmless."""


class AbortOnSecondSignal:
    """A context manager that does this while its block runs in the main thread; in another thread
    it does nothing."""

    def __init__(self) -> None:
        self.abort_message = ""
        """Appended to the message of an abort."""
        self.patience_s: Callable[[], float] = lambda: 0.0
        """How long a second signal waits at most; 0 as soon as an abort loses nothing. Called by
        the separate thread."""
        self.clean_up: Callable[[], object] = lambda: None
        """Called by the separate thread before it exits the process."""
        self._pending: list[int] = []
        """Signals that the main thread has yet to handle."""
        self._has_exited = False
        self._main = threading.main_thread()
        self._thread = threading.Thread(target=self._watch, name="sonde-signals", daemon=True)

    def __enter__(self) -> Self:
        self._is_active = threading.current_thread() is self._main
        if self._is_active:
            self._previous = signal.signal(_WAKE, self._on_first)
            # Threads and children started from now on inherit the mask. Children reset it
            # (start_module.py, cli/child.py).
            self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_active:
            return
        self._has_exited = True
        assert self._thread.ident is not None
        signal.pthread_kill(self._thread.ident, _WAKE)
        self._thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        signal.signal(_WAKE, self._previous)

    def _on_first(self, _: int, frame: FrameType | None) -> None:
        """Call the command's handlers, in the main thread."""
        while self._pending:
            number = self._pending.pop(0)
            handler = signal.getsignal(number)
            if callable(handler):
                handler(number, frame)

    def _watch(self) -> None:
        """In the separate thread: wait for signals until the block is left."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {*SIGNALS, _WAKE})
        count = 0
        while True:
            number = signal.sigwait({*SIGNALS, _WAKE})
            if self._has_exited:
                return
            handler = signal.getsignal(number)
            if number == _WAKE or handler == signal.SIG_IGN:
                continue
            if handler == signal.SIG_DFL:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
                os.kill(os.getpid(), number)
            count += 1
            if count > 1:
                self._wait_until_saved()
                if self._has_exited:
                    return
                self.clean_up()
                os.write(2, f"sonde: aborted{self.abort_message}\n".encode())
                os._exit(128 + number)
            self._pending.append(number)
            assert self._main.ident is not None
            signal.pthread_kill(self._main.ident, _WAKE)

    def _wait_until_saved(self) -> None:
        began_s = time.monotonic()
        if self.patience_s():
            os.write(2, b"sonde: writing what is left; once more aborts that, too\n")
        while not self._has_exited and time.monotonic() < began_s + self.patience_s():
            found = signal.sigtimedwait({*SIGNALS, _WAKE}, 0.02)
            if found is not None and found.si_signo in SIGNALS:
                return
