# SPDX-License-Identifier: Apache-2.0
"""A command that another one started ends when that one does, however it ended."""

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
