# SPDX-License-Identifier: Apache-2.0
"""The default folder for what has to outlive a process: history, tokens, spools."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from sonde.errors import UsageError

SYSTEM = Path("/var/lib/sonde")


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """/var/lib/sonde of root, else $XDG_STATE_HOME/sonde; systemd's StateDirectory= wins.

    Raises UsageError where a user has no home.
    """
    given = environ.get("STATE_DIRECTORY", "").split(":")[0]
    if given.startswith("/"):
        return Path(given)
    if os.geteuid() == 0:
        return SYSTEM
    own = environ.get("XDG_STATE_HOME", "")
    if own.startswith("/"):
        return Path(own, "sonde")
    try:
        return Path.home() / ".local" / "state" / "sonde"
    except RuntimeError as error:
        raise UsageError("this user has no home directory", "set XDG_STATE_HOME") from error
