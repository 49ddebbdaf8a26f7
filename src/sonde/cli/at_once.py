# SPDX-License-Identifier: Apache-2.0
"""A second Ctrl-C or SIGTERM ends a command at once, whatever it is doing.

Python runs a signal's handler in the main thread, once that comes back from what it does; where
that waits in the kernel, nothing happens, and the kernel drops a second signal of the same kind. So
the two are taken by a thread that does nothing else. The first one is handed to the handler that
the command has, in the main thread; with the second the process is over: exit code 128 + signal.
A capture holds whole chunks, so that what was written until then can be read.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Final, Self

ENDING: Final = frozenset({signal.SIGINT, signal.SIGTERM})
_WAKE: Final = signal.SIGURG
"""Interrupts what the main thread waits for; ignored by default, so it can do no harm."""


class EndsAtOnce:
    """A context for the main thread; in another one it does nothing."""

    def __init__(self) -> None:
        self.last_words = ""
        """Said where it is ended so."""
        self._came: list[int] = []
        self._is_over = False
        self._main = threading.main_thread()
        self._thread = threading.Thread(target=self._watch, name="sonde-signals", daemon=True)

    def __enter__(self) -> Self:
        self._is_used = threading.current_thread() is self._main
        if self._is_used:
            self._former = signal.signal(_WAKE, self._on_first)
            # Threads and children that are started from now on have them blocked, too; children of
            # ours undo that (start_module.py, cli/child.py).
            self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_used:
            return
        self._is_over = True
        assert self._thread.ident is not None
        signal.pthread_kill(self._thread.ident, _WAKE)
        self._thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        signal.signal(_WAKE, self._former)

    def _on_first(self, _: int, frame: FrameType | None) -> None:
        """In the main thread."""
        while self._came:
            number = self._came.pop(0)
            handler = signal.getsignal(number)
            if callable(handler):
                handler(number, frame)

    def _watch(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {*ENDING, _WAKE})
        count = 0
        while True:
            number = signal.sigwait({*ENDING, _WAKE})
            if self._is_over:
                return
            handler = signal.getsignal(number)
            if number == _WAKE or handler == signal.SIG_IGN:
                continue
            if handler == signal.SIG_DFL:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
                os.kill(os.getpid(), number)
            count += 1
            if count > 1:
                os.write(2, f"sonde: ended at once{self.last_words}\n".encode())
                os._exit(128 + number)
            self._came.append(number)
            assert self._main.ident is not None
            signal.pthread_kill(self._main.ident, _WAKE)
