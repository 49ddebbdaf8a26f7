# SPDX-License-Identifier: Apache-2.0
"""Ends a command when the one that started it ends, however that happens: its standard input is a
pipe from there."""

from __future__ import annotations

import os
import signal
import threading

FLAG = "--end-with-input"
HELP = "end when standard input does, for programs that start this command"


def watch() -> None:
    """Send this process SIGTERM once its standard input ends."""

    def wait() -> None:
        while os.read(0, 4_096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="sonde-input", daemon=True).start()
